"""Building by name: what is filled in, what is converted, what is refused and how."""

from typing import Annotated

import pytest

import algorithms as fl
from algorithms.parameters import Range, read_parameters


def test_every_method_builds_with_its_defaults():
    """All names build, and say every parameter with its value."""
    built = {name: dict(fl.build(name).parameters) for name in fl.names()}
    assert built == {
        "fedavg": {"eta_g": 1.0, "weights": "examples"},
        "fedcm": {"alpha": 0.1, "eta_g": 1.0, "weights": "uniform"},
    }


def test_parameters_of_a_built_method_build_it_again():
    """What is sent to clients is enough to make the same method there."""
    first = fl.build("fedcm", alpha=1, eta_g=0.5)
    again = fl.build(first.name, **first.parameters)
    assert (again.name, again.parameters) == ("fedcm", {"alpha": 1.0, "eta_g": 0.5, "weights": "uniform"})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("fedcn", {}, "unknown algorithm: 'fedcn'. Did you mean 'fedcm'? Available: fedavg, fedcm."),
        ("quux", {}, "unknown algorithm: 'quux'. Available: fedavg, fedcm."),
        (
            "fedcm",
            {"alhpa": 0.1},
            "unknown parameter of fedcm: 'alhpa'. Did you mean 'alpha'? Available: alpha, eta_g, weights.",
        ),
        ("fedcm", {"alpha": 0}, "fedcm, parameter 'alpha': expected a number over 0 and at most 1; got 0"),
        ("fedcm", {"alpha": 1.5}, "fedcm, parameter 'alpha': expected a number over 0 and at most 1; got 1.5"),
        ("fedavg", {"eta_g": "1"}, "fedavg, parameter 'eta_g': expected a number over 0; got '1'"),
        ("fedavg", {"eta_g": True}, "fedavg, parameter 'eta_g': expected a number over 0; got True"),
        ("fedavg", {"eta_g": float("inf")}, "fedavg, parameter 'eta_g': expected a number over 0; got inf"),
        ("fedavg", {"eta_g": float("nan")}, "fedavg, parameter 'eta_g': expected a number over 0; got nan"),
        ("fedavg", {"weights": "size"}, "fedavg, parameter 'weights': expected one of uniform, examples; got 'size'"),
    ],
)
def test_what_does_not_fit_is_named(name, parameters, message):
    """The error says what was expected, what came and what there is."""
    with pytest.raises(fl.AlgorithmError) as caught:
        fl.build(name, **parameters)
    assert str(caught.value) == message


def test_whole_numbers_may_come_as_floats():
    """A wire format without integers sends 5.0 for 5; 5.5 is not a whole number."""

    def method(rounds: Annotated[int, Range(over=0)] = 1) -> None:
        """Never called."""

    assert repr(read_parameters(method, {"rounds": 5.0})) == "{'rounds': 5}"
    with pytest.raises(fl.AlgorithmError, match=r"expected a whole number over 0; got 5.5"):
        read_parameters(method, {"rounds": 5.5})


def test_no_number_is_too_large_to_be_refused():
    """An integer beyond every float is out of range, not an overflow."""
    with pytest.raises(fl.AlgorithmError, match="expected a number over 0"):
        fl.build("fedavg", eta_g=10**400)
