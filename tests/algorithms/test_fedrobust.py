"""FedRobust in numbers worked by hand, and what its map of the inputs is."""

import pytest
import torch
from torch import nn

import algorithms as fl
from tests.algorithms.federation import Round, everyone, flat, parabolas, path


def test_two_rounds_by_hand():
    """((L + q) y - 4)^2 / 2 from y = 2, eta_l = 0.5, eta_2 = 0.25, lam = 1; the input is 1.

    Round 0: error -2; y = 2 + 0.5 * 2 = 3.  dL = dq = -2 * 2, so L = 1 - 1 = 0 and q = -1.
    Round 1: input seen 0 - 1 = -1, error -7; y = 3 - 0.5 * 7 = -0.5.
             dL = dq = -7 * 3 = -21; L = 0.25 * (-21 + 2), q = -1 + 0.25 * (-21 + 2).
    """
    one = parabolas(x=2.0, a=(4.0, 1))
    fedrobust = fl.build("fedrobust", eta_2=0.25, lam=1)
    assert path(one, fedrobust, everyone(one, 2)) == [(3.0,), (-0.5,)]
    kept = [standing.clients["a"]["A_i"] for standing in one.run(fedrobust, everyone(one, 2))]
    assert [(each["L"][0].item(), each["q"][0].item()) for each in kept] == [(0.0, -1.0), (-4.75, -5.75)]


def test_absent_clients_keep_their_map(federation):
    """Who sits out has L_i and q_i as they were, and no other client's."""
    first, second = federation.run(fl.build("fedrobust", eta_2=0.2), [Round(0), Round(1, [1])])
    assert first.clients["ada"] is second.clients["ada"]
    assert not torch.equal(first.clients["bob"]["A_i"]["L"], second.clients["bob"]["A_i"]["L"])
    assert not torch.equal(first.clients["ada"]["A_i"]["L"], first.clients["cyd"]["A_i"]["L"])


def test_images_have_one_entry_for_each_channel():
    """Three channels of 4 x 4 pixels: L and q have three entries each."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    rule = fl.build("fedrobust").client_rule(fl.ClientContext())
    batches = [(torch.randn(5, 3, 4, 4), torch.randn(5, 2))]
    result = fl.train_locally(model, batches, nn.functional.mse_loss, rule, fl.LocalSettings(0.1))
    assert {name: list(tensor.shape) for name, tensor in result.ascent.items()} == {"L": [3], "q": [3]}


def test_the_map_never_leaves_the_client():
    """One delta up, nothing beside the model down, and the client keeps a state."""
    fedrobust = fl.build("fedrobust")
    assert (fedrobust.exchanges[0].payloads, fedrobust.keeps_client_state) == (("delta",), True)
    assert not fedrobust.needs_population


def test_inputs_without_channels_are_refused():
    """Token numbers cannot be stretched."""
    rule = fl.build("fedrobust").client_rule(fl.ClientContext())
    batches = [(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 1))]
    with pytest.raises(fl.AlgorithmError, match="expected floating inputs .* got torch.int64"):
        fl.train_locally(nn.Embedding(4, 1), batches, nn.functional.mse_loss, rule, fl.LocalSettings(0.1))


def test_it_goes_with_sam(federation):
    """The second pass sees the inputs of the first one: finite, and another model than without."""
    plain, sam = (
        federation.play(fl.build("fedrobust", eta_2=0.2, gradient=gradient), 2)[-1] for gradient in ("plain", "sam")
    )
    assert torch.isfinite(flat(sam.x)).all()
    assert not torch.equal(flat(plain.x), flat(sam.x))
