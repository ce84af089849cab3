"""Decisions about one release: its stages, its way back, and which version a device should use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_server.rounds.releases import (
    Changed,
    Device,
    DeviceCame,
    DevicesChanged,
    DeviceState,
    Event,
    Forgotten,
    Kind,
    Release,
    Reported,
    Returned,
    RollBack,
    Rules,
    StageDue,
    StageOpened,
    Tell,
    Ticked,
    Work,
    WorkCounted,
    advance,
    members,
    wanted,
)

FLEET = tuple(f"edge-{number}" for number in range(20))
RULES = Rules(stages=(0.1, 0.5, 1.0), most_failed=0.1, metric="accuracy", most_drop=0.05)


def release(*events: Event, rules: Rules = RULES, version: int = 1) -> Release:
    """A release after these events."""
    made = Release("digits", version, rules)
    for event in events:
        made, _ = advance(made, event)
    return made


def opened(share: float, now: float = 0.0) -> StageOpened:
    """A stage of the whole fleet."""
    return StageOpened(share, FLEET, now)


def evaluated(before: float, now: float) -> Device:
    """A device that has measured both versions."""
    return Device(DeviceState.EVALUATED, "", 10, {"accuracy": now}, {"accuracy": before}, 1.0)


def test_a_stage_has_its_share_of_the_devices_and_each_later_one_those_before_it() -> None:
    """10% of 20 are 2, 50% are 10, and the last stage has all."""
    counts, before = [], set[str]()
    for share in RULES.stages:
        devices = set(release(*(opened(each) for each in RULES.stages if each <= share)).devices)
        assert before <= devices
        counts.append(len(devices))
        before = devices
    assert counts == [2, 10, 20]


def test_the_members_of_a_stage_depend_on_the_names_alone() -> None:
    """Any order of the same devices gives the same stage, and another version another one."""
    first = release()
    assert members(first, 0.5, FLEET) == members(first, 0.5, tuple(reversed(FLEET)))
    assert members(first, 0.5, FLEET) != members(release(version=2), 0.5, FLEET)


def test_who_got_a_release_stays_in_it_when_others_come() -> None:
    """New devices may have smaller hashes than those of the stage."""
    before = release(opened(0.1))
    after, _ = advance(before, StageOpened(0.5, [*FLEET, *(f"new-{number}" for number in range(20))], 1.0))
    assert set(before.devices) <= set(after.devices)


def test_a_stage_is_written_before_its_devices_are_told() -> None:
    """The effects are in the order in which a driver carries them out."""
    _, effects = advance(release(), opened(0.1))
    assert [type(effect) for effect in effects] == [Changed, DevicesChanged, Tell]


@pytest.mark.parametrize(
    ("bad", "rolled_back"), [(0, False), (1, False), (2, False), (3, True)], ids=["none", "one", "the most", "more"]
)
def test_more_failures_than_the_share_roll_back(bad: int, rolled_back: bool) -> None:
    """10% of 20 devices are 2: the third one takes the release back, whatever the others will say."""
    failed = (Reported(client, Device(DeviceState.REFUSED, "signature")) for client in FLEET[:bad])
    made = release(opened(1.0), *failed)
    assert made.rolled_back is rolled_back
    assert ("3 of 20 devices failed or fell, more than 10%" in made.reason) is rolled_back


def test_a_rolled_back_release_tells_all_of_its_devices() -> None:
    """Also those that have it and are well."""
    made = release(opened(0.1))
    _, effects = advance(made, Reported(next(iter(made.devices)), Device(DeviceState.FAILED)))
    told = [effect for effect in effects if isinstance(effect, Tell)]
    assert [set(effect.clients) for effect in told] == [set(made.devices)]


@pytest.mark.parametrize(
    ("device", "fell"),
    [
        (evaluated(0.9, 0.86), False),
        (evaluated(0.9, 0.84), True),
        (evaluated(0.9, 0.99), False),
        (replace(evaluated(0.9, 0.1), before={}), False),
        (replace(evaluated(0.9, 0.9), metrics={}), True),
        (replace(evaluated(0.9, 0.1), state=DeviceState.INSTALLED), False),
    ],
    ids=["a little", "too much", "better", "nothing before", "no value now", "not evaluated yet"],
)
def test_a_metric_falls_against_the_version_before_on_the_same_device(device: Device, fell: bool) -> None:
    """The limit is 0.05."""
    assert RULES.fell(device) is fell


def test_a_metric_of_which_less_is_better_falls_when_it_rises() -> None:
    """As a loss does."""
    rules = Rules(metric="loss", most_drop=0.1, lower_is_better=True)
    device = Device(DeviceState.EVALUATED, metrics={"loss": 0.5}, before={"loss": 0.3})
    assert rules.fell(device)
    assert not rules.fell(replace(device, metrics=device.before, before=device.metrics))


def test_a_stage_begins_by_itself_after_its_time_and_enough_reports() -> None:
    """Half of the stage must have reported: here one of two."""
    rules = replace(RULES, advance_after_s=60.0, most_failed=1.0)
    made = release(opened(0.1), rules=rules)
    one = next(iter(made.devices))
    assert advance(made, Ticked(100.0))[1] == ()
    made, _ = advance(made, Reported(one, evaluated(0.9, 0.9)))
    assert advance(made, Ticked(59.0))[1] == ()
    assert advance(made, Ticked(60.0))[1] == (StageDue(0.5),)
    assert advance(replace(made, rules=RULES), Ticked(1e9))[1] == ()


def test_a_late_device_gets_a_release_that_goes_to_all_and_no_staged_one() -> None:
    """A device that registers for the first time after the last stage began."""
    assert "late" not in release(opened(0.5), DeviceCame("late")).devices
    assert "late" in release(opened(1.0), DeviceCame("late")).devices
    assert "late" not in release(opened(1.0), RollBack("bad"), DeviceCame("late")).devices


def test_a_device_goes_back_to_the_version_before() -> None:
    """To the newest one that is for it and is not rolled back."""
    first, second = release(opened(1.0)), release(opened(0.1), version=2)
    inside, outside = next(iter(second.devices)), next(client for client in FLEET if client not in second.devices)
    fits = {1: True, 2: True}
    assert (wanted([first, second], inside, fits), wanted([first, second], outside, fits)) == (2, 1)
    second, _ = advance(second, RollBack("by hand"))
    assert wanted([first, second], inside, fits) == 1
    assert wanted([second], inside, fits) == 0
    assert wanted([first, second], inside, {1: False, 2: True}) == 0


def test_a_device_that_came_back_is_noted_once() -> None:
    """And only after a roll back."""
    made = release(opened(1.0))
    assert advance(made, Returned(FLEET[0])) == (made, ())
    back, _ = advance(made, RollBack("by hand"))
    back, effects = advance(back, Returned(FLEET[0]))
    assert (back.devices[FLEET[0]].state, effects) == (DeviceState.RETURNED, (DevicesChanged((FLEET[0],)),))
    assert advance(back, Returned(FLEET[0])) == (back, ())


def test_a_repeated_report_changes_nothing() -> None:
    """A device reports again after a lost response; the time of arrival is no difference."""
    made = release(opened(1.0), Reported(FLEET[0], evaluated(0.9, 0.9)))
    assert advance(made, Reported(FLEET[0], replace(evaluated(0.9, 0.9), reported_at=99.0))) == (made, ())
    assert advance(made, Reported("a stranger", evaluated(0.9, 0.1))) == (made, ())


@pytest.mark.parametrize(
    "rules",
    [
        Rules(stages=()),
        Rules(stages=(0.5,)),
        Rules(stages=(0.5, 0.5, 1.0)),
        Rules(stages=(0.0, 1.0)),
        Rules(most_failed=1.5),
        Rules(advance_after_s=-1),
        Rules(most_drop=0.1),
        Rules(metric="accuracy", most_drop=float("nan")),
    ],
)
def test_unusable_rules_are_named(rules: Rules) -> None:
    """With what was expected."""
    assert "expected" in rules.problem()
    assert not RULES.problem()


@pytest.mark.parametrize(
    ("work", "before", "halted"),
    [
        (Work(10, 1, 2), Work(100, 0, 20), False),
        (Work(20, 4, 2), Work(100, 10, 20), False),
        (Work(20, 5, 2), Work(100, 10, 20), True),
        (Work(2, 2, 2), Work(0, 0, 0), True),
        (Work(20, 5, 2), Work(100, 30, 20), False),
        (Work(20, 20, 2), None, False),
        (Work(0, 0, 0), Work(100, 0, 20), False),
    ],
    ids=["one failure", "the most", "more", "no work before", "fewer than before", "no version before", "no work yet"],
)
def test_a_package_is_taken_back_when_more_of_its_work_fails(work: Work, before: Work | None, halted: bool) -> None:
    """The limit is a rise of 10%: 20% of the work against 10% is not more."""
    made, _ = advance(replace(release(opened(0.1)), kind=Kind.PACKAGE), WorkCounted(work, before))
    assert made.rolled_back is halted
    if halted and before is not None:
        counts = f"{work.failed} of {work.ended}, with the version before {before.failed} of {before.ended}"
        assert made.reason == f"failed work rose by more than 10%: {counts}"


def test_a_package_that_is_taken_back_names_itself_and_tells_its_devices_once() -> None:
    """Whatever is counted afterwards: also when the share has fallen again."""
    made = replace(release(opened(0.1)), kind=Kind.PACKAGE)
    bad = WorkCounted(Work(2, 2, 2), Work(50, 1, 10))
    back, (changed, told) = advance(made, bad)
    assert isinstance(changed, Changed)
    assert (changed.event, told) == ("package_rolled_back", Tell(tuple(made.devices)))
    assert advance(back, bad) == (back, ())
    assert advance(back, WorkCounted(Work(100, 2, 2), Work(50, 1, 10)))[0].rolled_back


def test_the_next_stage_of_a_package_waits_for_work_with_it() -> None:
    """To run it is not enough: one of the two devices must have ended work, or have refused it."""
    rules = replace(RULES, advance_after_s=60.0, most_failed=1.0, metric="", most_drop=0.0)
    made = replace(release(opened(0.1), rules=rules), kind=Kind.PACKAGE)
    for client in made.devices:
        made, _ = advance(made, Reported(client, Device(DeviceState.INSTALLED)))
    assert advance(made, Ticked(100.0))[1] == ()
    worked, _ = advance(made, WorkCounted(Work(3, 0, 1), Work(9, 0, 5)))
    assert advance(worked, Ticked(59.0))[1] == ()
    assert advance(worked, Ticked(60.0))[1] == (StageDue(0.5),)


REPORTS = st.sampled_from([*DeviceState])
WORKS = st.builds(lambda ended, failed: Work(ended, min(ended, failed), 1), st.integers(0, 99), st.integers(0, 99))
EVENTS = st.one_of(
    st.builds(StageOpened, st.floats(0.01, 1.0), st.sets(st.sampled_from(FLEET)), st.floats(0, 1e9)),
    st.builds(DeviceCame, st.sampled_from(FLEET)),
    st.builds(Reported, st.sampled_from(FLEET), st.builds(Device, REPORTS)),
    st.builds(Returned, st.sampled_from(FLEET)),
    st.builds(Forgotten, st.sampled_from(FLEET)),
    st.builds(RollBack, st.just("by hand")),
    st.builds(Ticked, st.floats(0, 1e9)),
    st.builds(WorkCounted, WORKS, st.none() | WORKS),
)


@given(st.lists(EVENTS, max_size=30))
def test_any_events_keep_the_rules(events: list[Event]) -> None:
    """The share never falls, nothing ends a roll back, and each change of a device is written."""
    made = Release("digits", 1, RULES)
    for event in events:
        after, effects = advance(made, event)
        assert after.share >= made.share
        assert after.rolled_back >= made.rolled_back
        written = {client for effect in effects if isinstance(effect, DevicesChanged) for client in effect.clients}
        changed = {client for client in after.devices if after.devices[client] != made.devices.get(client)}
        assert changed == written
        if isinstance(event, Reported) and after != made:
            assert after.rolled_back or after.bad() <= RULES.most_failed * len(after.devices)
        made = after
