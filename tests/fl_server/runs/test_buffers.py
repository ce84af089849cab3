"""Buffers: variances, distances and counts, from a file."""

from __future__ import annotations

import pytest
import torch

from fl_server.norms import RelativeNorm
from fl_server.runs import buffers
from fl_server.runs.buffers import BadBuffer, BufferRules, most_counted
from protos.codec import Layout, pack

SENT = {
    "w": torch.zeros(2),
    "norm.running_mean": torch.tensor([1.0, 2.0]),
    "norm.running_var": torch.tensor([1.0, 1.0]),
    "norm.num_batches_tracked": torch.tensor(7),
    "queue": torch.tensor([5, 0], dtype=torch.int32),
}
LAYOUT = Layout.of(SENT, trainable=("w",))
BOUNDED = BufferRules(SENT, bounded=True, most=10)


def check(tmp_path, rules=BOUNDED, **changes):
    """The distance of these buffers."""
    changed = {name.replace("_of_", "."): value for name, value in changes.items()}
    (tmp_path / "x").write_bytes(pack({**SENT, **changed}, LAYOUT))
    return rules.check(tmp_path / "x", LAYOUT.entries)


@pytest.mark.parametrize("block", [1, 1 << 16])
def test_the_distance_is_from_what_was_sent(tmp_path, monkeypatch, block):
    """|(3, 4)| = 5, whatever is trained, and however the file is cut; 0 for buffers that came back as they were."""
    monkeypatch.setattr(buffers, "_BLOCK", block)
    assert check(tmp_path, norm_of_running_mean=torch.tensor([4.0, 6.0]), w=torch.ones(2)) == 5.0
    assert check(tmp_path) == 0.0


def test_a_model_without_floating_buffers_has_no_distance(tmp_path):
    """None is no 0: nothing is kept of it."""
    (tmp_path / "x").touch()
    assert BufferRules({}, bounded=True).check(tmp_path / "x", ()) is None


def test_a_variance_is_not_negative(tmp_path):
    """Also where a run asks for no limits; 0 is one."""
    assert check(tmp_path, norm_of_running_var=torch.zeros(2)) > 0
    for rules in (BOUNDED, BufferRules(SENT)):
        with pytest.raises(BadBuffer, match=r"'norm.running_var': expected a variance of 0 or more, got -0.5"):
            check(tmp_path, rules, norm_of_running_var=torch.tensor([1.0, -0.5]))


def test_a_distance_beside_those_of_committed_rounds(tmp_path):
    """100 times their median, and no more; without limits any."""
    far = {"norm_of_running_mean": torch.tensor([1.0, 103.0])}
    limited = BufferRules(SENT, bounded=True, limit=RelativeNorm(100.0, 1.0))
    with pytest.raises(BadBuffer, match=r"distance of 100 at most \(100 times the median .*, got 101"):
        check(tmp_path, limited, **far)
    assert check(tmp_path, BOUNDED, **far) == 101.0


def test_nothing_moves_so_far(tmp_path):
    """Before anything is known from committed rounds."""
    far = {"norm_of_running_mean": torch.tensor([1.0, 1e30])}
    with pytest.raises(BadBuffer, match=r"1e\+15 times 1 \+ the norm of those sent"):
        check(tmp_path, **far)
    assert check(tmp_path, BufferRules(SENT), **far) == pytest.approx(1e30)


@pytest.mark.parametrize("count", [18, 2**62, -1, -(2**62)])
def test_a_count_grows_by_what_was_done(tmp_path, count):
    """From 7 by 10 at most, and not below 0; one that ends where its type ends too."""
    with pytest.raises(BadBuffer, match=r"'norm.num_batches_tracked': expected whole numbers of 17 at most"):
        check(tmp_path, norm_of_num_batches_tracked=torch.tensor(count))
    assert check(tmp_path, norm_of_num_batches_tracked=torch.tensor(17)) == 0.0
    assert check(tmp_path, queue=torch.tensor([0, 9], dtype=torch.int32)) == 0.0
    assert check(tmp_path, BufferRules(SENT), norm_of_num_batches_tracked=torch.tensor(count)) == 0.0


def test_what_a_client_sees_in_its_steps():
    """Each example of each batch, at two points, and all of them once more before."""
    assert most_counted(steps=10, examples=50, batch_size=16) == 4 * (160 + 50 + 16)
