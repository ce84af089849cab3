"""Submits the job. Arguments: the administrator's startup kit, clients, rounds, parameters, tensors."""

from __future__ import annotations

import sys

from model import Constant
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import ProdEnv


def main() -> None:
    """Submit, without waiting for the job's end."""
    kit, *numbers = sys.argv[1:]
    clients, rounds, parameters, tensors = map(int, numbers)
    recipe = FedAvgRecipe(
        name="rivals",
        model=Constant(parameters, tensors),
        min_clients=clients,
        num_rounds=rounds,
        train_script="client.py",
    )
    print(recipe.execute(ProdEnv(kit, login_timeout=60.0, username="admin@rivals.org")))


if __name__ == "__main__":
    main()
