"""FedRobust in numbers worked by hand, and what its map of the inputs is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms.conformance.federation import Federation, Round, everyone, flat, half_squares, parabolas, path


def test_two_rounds_by_hand() -> None:
    """((L + q) y - 4)^2 / 2 from y = 2, eta_l = 0.5, eta_2 = 0.25, lam = 1; the input is 1.

    Round 0: error -2; y = 2 + 0.5 * 2 = 3.  dL = dq = -2 * 2, so L = 1 - 1 = 0 and q = -1.
    Round 1: input seen 0 - 1 = -1, error -7; y = 3 - 0.5 * 7 = -0.5.
             dL = dq = -7 * 3 = -21; L = 0.25 * (-21 + 2), q = -1 + 0.25 * (-21 + 2).
    """
    one = parabolas(x=2.0, a=(4.0, 1))
    fedrobust = fl.build("fedrobust", eta_2=0.25, lam=1)
    assert path(one, fedrobust, everyone(one, 2)) == [(3.0,), (-0.5,)]
    kept = [standing.clients["a"]["A_i"] for standing in one.run(fedrobust, everyone(one, 2))]
    assert [(state["L"][0].item(), state["q"][0].item()) for state in kept] == [(0.0, -1.0), (-4.75, -5.75)]


def test_absent_clients_keep_their_map(federation: Federation) -> None:
    """Who sits out has L_i and q_i as they were, and no other client's."""
    first, second = federation.run(fl.build("fedrobust", eta_2=0.2), [Round(0), Round(1, [1])])
    assert first.clients["ada"] is second.clients["ada"]
    assert not torch.equal(first.clients["bob"]["A_i"]["L"], second.clients["bob"]["A_i"]["L"])
    assert not torch.equal(first.clients["ada"]["A_i"]["L"], first.clients["cyd"]["A_i"]["L"])


def test_images_have_one_entry_for_each_channel() -> None:
    """Three channels of 4 x 4 pixels: L and q have three entries each."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    rule = fl.build("fedrobust").client_rule(fl.ClientContext())
    batches = [(torch.randn(5, 3, 4, 4), torch.randn(5, 2))]
    result = fl.train_locally(model, batches, nn.functional.mse_loss, rule, fl.LocalSettings(0.1))
    assert {name: list(tensor.shape) for name, tensor in result.ascent.items()} == {"L": [3], "q": [3]}


def test_the_map_never_leaves_the_client() -> None:
    """The client sends one delta, gets no direction, and keeps a state."""
    fedrobust = fl.build("fedrobust")
    assert (fedrobust.exchanges[0].payloads, fedrobust.keeps_client_state) == (("delta",), True)
    assert not fedrobust.needs_population


def test_inputs_without_channels_are_refused() -> None:
    """Token numbers cannot be stretched."""
    rule = fl.build("fedrobust").client_rule(fl.ClientContext())
    batches = [(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 1))]
    with pytest.raises(fl.AlgorithmError, match="expected floating inputs .* got torch.int64"):
        fl.train_locally(nn.Embedding(4, 1), batches, nn.functional.mse_loss, rule, fl.LocalSettings(0.1))


def test_it_goes_with_sam(federation: Federation) -> None:
    """The second pass sees the inputs of the first one: finite, and another model than without."""
    plain, sam = (
        federation.play(fl.build("fedrobust", eta_2=0.2, gradient=gradient), 2)[-1] for gradient in ("plain", "sam")
    )
    assert torch.isfinite(flat(sam.x)).all()
    assert not torch.equal(flat(plain.x), flat(sam.x))


FORMS = ("diagonal", "channel_matrix", "matrix")
NEARLY_FIXED = 1e-300
"""A local learning rate that changes no bit of a model: only the map moves."""


def ascended(form: str, inputs: Tensor, steps: int, model: nn.Module | None = None, **settings: float) -> fl.Tensors:
    """L and q after some steps on one batch with targets of 4, the model (by default all ones) being fixed."""
    if model is None:
        model = nn.Linear(inputs.shape[1], 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
    rule = fl.build("fedrobust", L=form, **settings).client_rule(fl.ClientContext())
    batch = (inputs, torch.full((len(inputs), 1), 4.0, dtype=inputs.dtype))
    return fl.train_locally(model, [batch] * steps, half_squares, rule, fl.LocalSettings(NEARLY_FIXED)).ascent


def test_matrix_by_hand() -> None:
    """One input (1, 2), a model of ones, eta_2 = 0.25, lam = 1: error 3 - 4 = -1, and dL = -1 * (1, 1)^T (1, 2).

    Step 1: L = I - 0.25 * ((1, 2), (1, 2)) = ((0.75, -0.5), (-0.25, 0.5)), q = (-0.25, -0.25).
    Step 2: the input seen is (0.75 - 1 - 0.25, -0.25 + 1 - 0.25) = (-0.5, 0.5), error -4, dL = -4 * ((1, 2), (1, 2)).
            L - 0.25 * (4 * ((1, 2), (1, 2)) + 2 (L - I)) = ((-0.125, -2.25), (-1.125, -1.25)).
            q = -0.25 - 0.25 * (4 - 0.5) = -1.125.
    """
    inputs = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    once, twice = (ascended("matrix", inputs, steps, eta_2=0.25, lam=1.0) for steps in (1, 2))
    assert once["L"].tolist() == [[0.75, -0.5], [-0.25, 0.5]]
    assert once["q"].tolist() == [-0.25, -0.25]
    assert twice["L"].tolist() == [[-0.125, -2.25], [-1.125, -1.25]]
    assert twice["q"].tolist() == [-1.125, -1.125]


def test_matrix_converges_to_the_worst_map() -> None:
    """For one input z and a fixed model w the worst map is known: L = I + e w z^T / (2 lam) and q = e w / (2 lam),

    with the error e = (w z - b) / (1 - |w|^2 (|z|^2 + 1) / (2 lam)), as both slopes are zero there.
    """
    z, w, lam = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.5, 0.25, -1.0]).double(), 10.0
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    model.weight.data.copy_(w)
    found = ascended("matrix", z[None], 400, model, eta_2=0.04, lam=lam)
    error = (w @ z - 4.0) / (1.0 - w @ w * (z @ z + 1.0) / (2.0 * lam))
    worst = {"L": torch.eye(3).double() + error * torch.outer(w, z) / (2 * lam), "q": error * w / (2 * lam)}
    torch.testing.assert_close(found, worst, rtol=0, atol=1e-12)


def test_maps_and_model_converge_to_a_saddle_point(conditioned: Federation) -> None:
    """With all clients and K = 1: the mean slope of the model is zero, and so is each client's slope of L and of q."""
    lam = 20.0
    fedrobust = fl.build("fedrobust", eta_2=0.02, lam=lam, L="matrix")
    federation = replace(conditioned.with_steps(1), settings=fl.LocalSettings(0.4))
    end = federation.run(fedrobust, everyone(federation, 300))[-1]
    w, slope = flat(end.server.x), torch.zeros(3, dtype=torch.float64)
    for client in federation.clients:
        L, q = end.clients[client.name]["A_i"]["L"], end.clients[client.name]["A_i"]["q"]
        seen = client.A @ L.T + q
        error = (seen @ w - client.b) / len(client.A)
        slope += seen.T @ error
        torch.testing.assert_close(torch.outer(w, client.A.T @ error), 2 * lam * (L - torch.eye(3)), rtol=0, atol=1e-9)
        torch.testing.assert_close(w * error.sum(), 2 * lam * q, rtol=0, atol=1e-9)
        assert (L - torch.diag(L.diagonal())).norm() > 1e-3
    assert slope.norm() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4, 4)], ids=["vectors", "images"])
def test_a_matrix_with_a_diagonal_maps_as_the_diagonal_form(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The same map of the inputs bit for bit, over channels and over whole inputs."""
    random = torch.Generator().manual_seed(3)
    inputs, L, q = (torch.randn(*size, generator=random, dtype=dtype) for size in (shape, (3,), (3,)))
    pixels = inputs[0, 0].numel()
    form = {
        "diagonal": {"L": L, "q": q},
        "channel_matrix": {"L": torch.diag(L), "q": q},
        "matrix": {"L": torch.diag(L.repeat_interleave(pixels)), "q": q.repeat_interleave(pixels)},
    }
    rules = {name: fl.build("fedrobust", L=name).client_rule(fl.ClientContext()).ascent for name in FORMS}
    mapped = [rule.apply(inputs, form[name]) for name, rule in rules.items() if rule is not None]
    assert len(mapped) == len(FORMS)
    assert all(torch.equal(mapped[0], image) for image in mapped[1:])


def test_one_step_has_the_diagonal_forms_diagonal() -> None:
    """From L = I, on one example: the matrix's diagonal and q are those of the diagonal form bit for bit."""
    inputs = torch.randn(1, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(4, 1, bias=False)
    diagonal, *others = (ascended(form, inputs, 1, model, eta_2=0.1, lam=0.7) for form in FORMS)
    for matrix in others:
        assert torch.equal(diagonal["L"], matrix["L"].diagonal())
        assert torch.equal(diagonal["q"], matrix["q"])


def test_inputs_of_one_number_have_one_form() -> None:
    """A matrix of one entry is its diagonal: the same model, L and q bit for bit after three rounds."""

    def after(form: str) -> list[float]:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        fedrobust = fl.build("fedrobust", L=form, eta_2=0.2)
        batch = torch.tensor([[0.3]]).double(), torch.tensor([[1.7]]).double()
        client = fl.Participant("a", 1, lambda exchange: fl.LocalData([batch] * 2, [batch], half_squares))
        state = fl.start_run(fedrobust, model)
        for t in range(3):
            state = fl.run_round(fedrobust, state, model, [client], fl.LocalSettings(0.1), fl.RoundInfo(t, 0.1)).state
        A = state.clients["a"]["A_i"]
        return [A["L"].item(), A["q"].item(), state.server.x["weight"].item()]

    assert after("diagonal") == after("channel_matrix") == after("matrix")


def test_images_have_a_matrix_over_pixels_or_channels() -> None:
    """Three channels of 4 x 4 pixels: 48 x 48 for the paper's map, 3 x 3 over the channels."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    batches = [(torch.randn(5, 3, 4, 4), torch.randn(5, 2))] * 2
    shapes = {}
    for form in ("matrix", "channel_matrix"):
        rule = fl.build("fedrobust", L=form).client_rule(fl.ClientContext())
        ascent = fl.train_locally(model, batches, nn.functional.mse_loss, rule, fl.LocalSettings(0.1)).ascent
        shapes[form] = {name: list(tensor.shape) for name, tensor in ascent.items()}
    assert shapes == {"matrix": {"L": [48, 48], "q": [48]}, "channel_matrix": {"L": [3, 3], "q": [3]}}


def test_a_matrix_over_large_images_is_refused() -> None:
    """150,528 numbers would need a matrix of 91 GB. The message names the forms that fit."""
    rule = fl.build("fedrobust", L="matrix").client_rule(fl.ClientContext())
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    batches = [(torch.zeros(1, 3, 224, 224), torch.zeros(1, 2))]
    with pytest.raises(fl.AlgorithmError, match="got 150,528 x 150,528 for inputs .*set L = channel_matrix"):
        fl.train_locally(model, batches, nn.functional.mse_loss, rule, fl.LocalSettings(0.1))
