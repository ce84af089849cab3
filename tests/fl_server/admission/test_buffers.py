"""The rules for buffers of an update: variances, distances and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algorithms.base import Tensors
from fl_ops.simulate.engines.held import Rows
from fl_server.admission import buffer_rules
from fl_server.admission.buffer_rules import BufferRules, buffer_facts, most_counted
from fl_server.admission.client_rules import UpdateRefused
from fl_server.admission.norms import RelativeNorm
from protos.codec import Layout, pack
from protos.fl.v1.training_pb2 import RefusalReason

SENT = {
    "w": torch.zeros(2),
    "norm.running_mean": torch.tensor([1.0, 2.0]),
    "norm.running_var": torch.tensor([1.0, 1.0]),
    "norm.num_batches_tracked": torch.tensor(7),
    "queue": torch.tensor([5, 0], dtype=torch.int32),
}
LAYOUT = Layout.of(SENT, trainable=("w",))
BOUNDED = BufferRules(SENT, bounded=True, most=10)


def check(tmp_path: Path, rules: BufferRules = BOUNDED, **changes: torch.Tensor) -> float | None:
    """The distance of an update with these buffers."""
    changed = {name.replace("_of_", "."): value for name, value in changes.items()}
    (tmp_path / "x").write_bytes(pack({**SENT, **changed}, LAYOUT))
    return rules.check(tmp_path / "x", LAYOUT.entries)


@pytest.mark.parametrize("block", [1, 1 << 16])
def test_the_distance_is_from_the_buffers_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """|(3, 4)| = 5 for any trained values and any block size; 0 for unchanged buffers."""
    monkeypatch.setattr(buffer_rules, "_BLOCK", block)
    assert check(tmp_path, norm_of_running_mean=torch.tensor([4.0, 6.0]), w=torch.ones(2)) == 5.0
    assert check(tmp_path) == 0.0


def test_a_model_without_floating_buffers_has_no_distance(tmp_path: Path) -> None:
    """None and not 0: there is nothing to record."""
    (tmp_path / "x").touch()
    assert BufferRules({}, bounded=True).check(tmp_path / "x", ()) is None


def test_a_variance_is_not_negative(tmp_path: Path) -> None:
    """Also in a run without limits. 0 is a valid variance."""
    distance = check(tmp_path, norm_of_running_var=torch.zeros(2))
    assert distance is not None
    assert distance > 0
    for rules in (BOUNDED, BufferRules(SENT)):
        with pytest.raises(UpdateRefused, match=r"'norm.running_var': expected a variance of 0 or more, got -0.5"):
            check(tmp_path, rules, norm_of_running_var=torch.tensor([1.0, -0.5]))


def test_a_mask_of_minus_infinity_must_come_back_as_it_was_sent(tmp_path: Path) -> None:
    """It counts 0 in the distance. One that is changed, even to finite values, is refused by name."""
    mask = torch.tensor([0.0, -torch.inf])
    sent, odd = {**SENT, "norm.running_mean": mask}, {"norm.running_mean"}
    rules = BufferRules(sent, bounded=True, most=10)
    path = tmp_path / "x"
    path.write_bytes(pack(sent, LAYOUT))
    assert rules.check(path, LAYOUT.entries, odd) == 0.0
    for values in (mask - 1, torch.zeros(2), torch.tensor([0.0, torch.nan])):
        path.write_bytes(pack({**sent, "norm.running_mean": values}, LAYOUT))
        with pytest.raises(
            UpdateRefused, match=r"buffer 'norm.running_mean': expected the values that were sent"
        ) as no:
            rules.check(path, LAYOUT.entries, odd)
        assert no.value.reason == RefusalReason.REFUSAL_REASON_NOT_FINITE


def test_a_distance_is_limited_by_committed_rounds(tmp_path: Path) -> None:
    """At most 100 times their median; without limits any distance passes."""
    far = torch.tensor([1.0, 103.0])
    limited = BufferRules(SENT, bounded=True, limit=RelativeNorm(100.0, 1.0))
    with pytest.raises(UpdateRefused, match=r"distance of 100 at most \(100 times the largest median .*, got 101"):
        check(tmp_path, limited, norm_of_running_mean=far)
    assert check(tmp_path, BOUNDED, norm_of_running_mean=far) == 101.0


def test_a_distance_is_limited_before_rounds_are_committed(tmp_path: Path) -> None:
    """No training moves buffers by 1e15 times their norm."""
    far = torch.tensor([1.0, 1e30])
    with pytest.raises(UpdateRefused, match=r"1e\+15 times 1 \+ the norm of those sent"):
        check(tmp_path, norm_of_running_mean=far)
    assert check(tmp_path, BufferRules(SENT), norm_of_running_mean=far) == pytest.approx(1e30)


@pytest.mark.parametrize("count", [18, 2**62, -1, -(2**62)])
def test_a_count_grows_at_most_by_the_work_done(tmp_path: Path, count: int) -> None:
    """From 7 by 10 at most, and not below 0. Values near the limits of the type are refused too."""
    with pytest.raises(UpdateRefused, match=r"'norm.num_batches_tracked': expected whole numbers of 17 at most"):
        check(tmp_path, norm_of_num_batches_tracked=torch.tensor(count))
    assert check(tmp_path, norm_of_num_batches_tracked=torch.tensor(17)) == 0.0
    assert check(tmp_path, queue=torch.tensor([0, 9], dtype=torch.int32)) == 0.0
    assert check(tmp_path, BufferRules(SENT), norm_of_num_batches_tracked=torch.tensor(count)) == 0.0


ODD: list[dict[str, torch.Tensor]] = [
    {},
    {"norm.running_mean": torch.tensor([4.0, 6.0])},
    {"norm.running_mean": torch.tensor([1.0, 103.0])},
    {"norm.running_mean": torch.tensor([1.0, 1e30])},
    {"norm.running_mean": torch.tensor([1.0, torch.nan])},
    {"norm.running_mean": torch.tensor([1.0, -torch.inf])},
    {"norm.running_var": torch.tensor([1.0, -0.5])},
    {"norm.running_var": torch.tensor([0.0, 0.3])},
    *({"norm.num_batches_tracked": torch.tensor(count)} for count in (17, 18, -1, 2**62, -(2**63))),
    {"queue": torch.tensor([0, 9], dtype=torch.int32)},
]
MASK = {**SENT, "norm.running_mean": torch.tensor([1.0, -torch.inf])}


@pytest.mark.parametrize("block", [1, 1 << 16])
@pytest.mark.parametrize("sent", [SENT, MASK], ids=["finite", "mask"])
@pytest.mark.parametrize(
    "rules", [BOUNDED, BufferRules(), BufferRules(bounded=True, limit=RelativeNorm(100.0, 1.0), most=1)]
)
def test_a_cohort_is_checked_as_one_update_is(
    monkeypatch: pytest.MonkeyPatch, rules: BufferRules, sent: Tensors, block: int
) -> None:
    """An update has the distance that it has alone, or a rule refuses it alone, for every rule."""
    monkeypatch.setattr(buffer_rules, "_BLOCK", block)
    rules = replace(rules, sent=sent)
    changed = [{**sent, **values} for values in ODD]
    data = torch.stack([torch.frombuffer(bytearray(pack(values, LAYOUT)), dtype=torch.uint8) for values in changed])
    rows = Rows(data, [])
    facts = buffer_facts([rows.update(number) for number in range(len(ODD))], LAYOUT.entries, sent)
    assert facts is not None
    refused = 0
    for number, (values, of_update) in enumerate(zip(changed, facts, strict=True)):
        usual, distance = rules.usual(of_update)
        odd = {name for name, value in values.items() if not torch.isfinite(value).all()}
        if usual:
            assert rules.check(rows.update(number), LAYOUT.entries, odd) == distance
        else:
            refused += 1
            with pytest.raises(UpdateRefused):
                rules.check(rows.update(number), LAYOUT.entries, odd)
    assert 0 < refused < len(ODD)


def test_the_largest_growth_of_a_count() -> None:
    """Four times the examples of all batches, the client's examples and one batch."""
    assert most_counted(steps=10, examples=50, batch_size=16) == 4 * (160 + 50 + 16)
