"""The client: it adds STEP to every parameter, and refuses a wrong model."""

from __future__ import annotations

import numpy as np
import nvflare.client as flare

STEP = 2.0**-10


def main() -> None:
    """Answer every task of the server."""
    flare.init()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        expected = received.current_round * STEP
        if not all(np.allclose(values, expected) for values in received.params.values()):
            raise ValueError(f"expected {expected} everywhere in round {received.current_round}")
        params = {name: values + np.float32(STEP) for name, values in received.params.items()}
        flare.send(flare.FLModel(params=params))


if __name__ == "__main__":
    main()
