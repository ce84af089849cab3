"""Every method satisfies every law. A new method is a new row of ROWS."""

from __future__ import annotations

from typing import Any

import pytest

import algorithms as fl
from algorithms.conformance.cases import Law, MethodCase
from algorithms.conformance.federation import Federation
from algorithms.conformance.plugin import device, played
from algorithms.conformance.suite import MethodLaws

__all__ = ["device", "played"]

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg-uniform-half": ("fedavg", {"eta_g": 0.5, "weights": "uniform"}),
    "fedavgm-nesterov": ("fedavgm", {"beta": 0.7}),
    "fedavgm-heavy-ball": ("fedavgm", {"beta": 0.7, "variant": "heavy_ball", "momentum_units": "gradient"}),
    "fedadagrad": ("fedadagrad", {}),
    "fedyogi": ("fedyogi", {}),
    "fedadam": ("fedadam", {}),
    "fedadam-corrected": ("fedadam", {"bias_correction": True, "v_from": "m", "momentum_units": "gradient"}),
    "feddemon": ("feddemon", {}),
    "feddemonadam": ("feddemonadam", {}),
    "feddemonadam-outside": ("feddemonadam", {"eps_inside": False}),
    "slowmo": ("slowmo", {}),
    "diloco": ("diloco", {}),
    "fedprox": ("fedprox", {"mu": 0.3}),
    "fednova": ("fednova", {}),
    "scaffold-II": ("scaffold", {}),
    "scaffold-I": ("scaffold", {"option": "I"}),
    "scaffold-examples": ("scaffold", {"objective": "examples"}),
    "proxskip": ("proxskip", {"p": 0.3}),
    "feddyn": ("feddyn", {"alpha": 1.0}),
    "feddyn-examples": ("feddyn", {"alpha": 1.0, "objective": "examples"}),
    "feddyn-feddyn_code": ("feddyn", {"alpha": 0.5, "order": "feddyn_code"}),
    "fedcm-0.1": ("fedcm", {"alpha": 0.1}),
    "fedcm-0.5-examples": ("fedcm", {"alpha": 0.5, "weights": "examples"}),
    "fedcm-1": ("fedcm", {"alpha": 1.0}),
    "fedcm-feddyn_code": ("fedcm", {"order": "feddyn_code"}),
    "mimelite": ("mimelite", {"beta": 0.6}),
    "mime": ("mime", {"beta": 0.6}),
    "mime-undamped": ("mime", {"beta": 0.3, "damp": False}),
    "fedsam": ("fedsam", {}),
    "fedsam-tensor": ("fedsam", {"sam_scope": "tensor"}),
    "fedsam-p": ("fedsam", {"sam_p": 4.0}),
    "mofedsam": ("mofedsam", {}),
    "fedrobust": ("fedrobust", {"eta_2": 0.1}),
    "fedrobust-matrix": ("fedrobust", {"eta_2": 0.1, "L": "matrix"}),
    "qg": ("qg", {"beta": 0.5, "mu": 0.5}),
    "mfl": ("mfl", {"gamma": 0.5}),
    "fedcm-adam": ("fedcm", {"server_optimizer": "adam"}),
    "mimelite-demon_adam-sam": ("mimelite", {"server_optimizer": "demon_adam", "gradient": "sam"}),
    "scaffold-momentum-fednova": (
        "scaffold",
        {"server_optimizer": "momentum", "server_beta": 0.5, "normaliser": "fednova"},
    ),
    "feddyn-nesterov": ("feddyn", {"alpha": 1.0, "server_optimizer": "nesterov", "server_beta": 0.3}),
    "mfl-slowmo": ("mfl", {"gamma": 0.3, "server_optimizer": "slowmo"}),
}
"""Method and parameters by the row's name."""
NO_SINGLE_STEP_OPTIMUM = {
    "its steps keep their size near the optimum": (
        "fedadagrad",
        "fedyogi",
        "fedadam",
        "fedadam-corrected",
        "feddemonadam",
        "feddemonadam-outside",
        "fedcm-adam",
        "mimelite-demon_adam-sam",
    ),
    "gradients are taken at a distance rho, also near the optimum": ("fedsam", "fedsam-tensor", "fedsam-p", "mofedsam"),
    "it wants local problems solved": ("feddyn", "feddyn-examples", "feddyn-feddyn_code", "feddyn-nesterov"),
    "it minimises another objective": ("fedrobust", "fedrobust-matrix"),
}
"""Why a row cannot end where sum p_i grad f_i = 0."""


def case(label: str) -> MethodCase:
    """A row as a case."""
    name, parameters = ROWS[label]
    exempt: dict[Law, str] = {}
    for why, rows in NO_SINGLE_STEP_OPTIMUM.items():
        if label in rows:
            exempt["optimum"] = why
    if name == "fedrobust":
        exempt["translation"] = "its ascent stretches the inputs, and so the shift"
    # Its momentum of 0.9 is slow.
    slow = name == "fedcm" and parameters.get("alpha", 0.1) == 0.1
    return MethodCase(label, name, parameters, exempt, rounds=400 if slow else 160)


class TestMethods(MethodLaws):
    """All methods of the package."""

    cases = tuple(case(label) for label in ROWS)
    neutral = (
        MethodCase("fedcm", "fedcm", {"alpha": 1}),
        MethodCase("fedavgm-nesterov", "fedavgm", {"beta": 0}),
        MethodCase("fedavgm-heavy-ball", "fedavgm", {"beta": 0, "variant": "heavy_ball"}),
        MethodCase("feddemon", "feddemon", {"beta0": 0}),
        MethodCase("fedprox", "fedprox", {"mu": 0}),
        MethodCase("mimelite", "mimelite", {"beta": 0}),
        MethodCase("fedsam", "fedsam", {"rho": 0}),
        MethodCase("mofedsam", "mofedsam", {"rho": 0, "beta": 1}),
        MethodCase("fedrobust", "fedrobust", {"eta_2": 0}),
        MethodCase("fedrobust-matrix", "fedrobust", {"eta_2": 0, "L": "matrix"}),
        MethodCase("qg", "qg", {"beta": 0}),
        MethodCase("mfl", "mfl", {"gamma": 0}),
    )

    @pytest.mark.slow
    def test_single_full_steps_reach_the_optimum(self, conditioned: Federation, case: MethodCase) -> None:
        """The law with the most rounds asserts it. test_rounds.py and test_identities.py have faster ones."""
        super().test_single_full_steps_reach_the_optimum(conditioned, case)


def test_every_method_has_a_row() -> None:
    """Every method that can be built is tested here."""
    assert {name for name, _ in ROWS.values()} == set(fl.names())
