"""The devices of a run's clients, from distributions and from files."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from fl_ops.simulate.system.devices import Devices
from fl_ops.simulate.system.section import SystemSection
from fl_server.errors import InvalidInput

MANY = [f"client-{index}" for index in range(2000)]
FEW = ["a", "b", "c"]


def devices(clients: list[str], seed: int = 0, **section: Any) -> Devices:
    """Devices under a section."""
    return Devices(SystemSection.model_validate({"speed": 10, **section}), clients, seed)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, to which the names of trace files are relative."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_lognormal_distribution() -> None:
    """Of 2000 clients the median and the deviation of the logarithms are those of the distribution, to 5 %."""
    fleet = devices(MANY, speed={"distribution": "lognormal", "median": 100, "sigma": 0.5})
    speeds = [fleet[client].speed for client in MANY]
    assert median(speeds) == pytest.approx(100, rel=0.05)
    assert stdev(map(math.log, speeds)) == pytest.approx(0.5, rel=0.05)


def test_a_uniform_distribution() -> None:
    """Of 2000 clients all are within the limits, and the mean is in the middle, to 2 %."""
    fleet = devices(MANY, up={"distribution": "uniform", "low": 10, "high": 30})
    values = [fleet[client].up for client in MANY]
    assert 10 <= min(values) < 11
    assert 29 < max(values) <= 30
    assert fmean(values) == pytest.approx(20, rel=0.02)


def test_a_device_depends_on_seed_and_id_only() -> None:
    """A client among others has the device that it has alone; another seed gives it another one."""
    lognormal = {"distribution": "lognormal", "median": 1, "sigma": 1}
    every: dict[str, Any] = {"speed": lognormal, "down": lognormal, "up": lognormal, "latency_s": lognormal}
    alone = devices(["b"], **every)["b"]
    assert alone == devices(FEW, **every)["b"]
    assert alone != devices(["b"], seed=1, **every)["b"]
    assert len({alone.speed, alone.down, alone.up, alone.latency_s}) == 4


def test_transfers_take_no_time_by_default() -> None:
    """Without `down` and `up`, the bandwidth is not limited."""
    device = devices(FEW)["a"]
    assert (device.down, device.up, device.latency_s, device.drop_out) == (math.inf, math.inf, 0.0, 0.0)


def test_a_file_with_the_clients_ids(in_folder: Path) -> None:
    """Each client has the numbers of its row, in any order of the rows."""
    (in_folder / "devices.csv").write_text("client,speed,up\nc,3,30\na,1,10\nb,2,20\nother,9,9\n")
    column = {"file": "devices.csv", "column": "speed"}
    fleet = devices(FEW, speed=column, up={**column, "column": "up"})
    assert [(fleet[client].speed, fleet[client].up) for client in FEW] == [(1, 10), (2, 20), (3, 30)]


def test_a_file_of_other_devices(in_folder: Path) -> None:
    """Each client draws a row, the same one for all columns; all rows are drawn about as often."""
    (in_folder / "devices.csv").write_text("speed,up\n1,10\n2,20\n3,30\n4,40\n")
    column = {"file": "devices.csv", "column": "speed"}
    fleet = devices(MANY, speed=column, up={**column, "column": "up"})
    assert all(fleet[client].up == 10 * fleet[client].speed for client in MANY)
    counts = [sum(fleet[client].speed == speed for client in MANY) for speed in (1, 2, 3, 4)]
    assert all(400 < count < 600 for count in counts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(None, "speed: expected a CSV file that can be read at t.csv, got .*No such file", id="absent"),
        pytest.param("speed\n", "speed: expected a header and at least one row in t.csv", id="empty"),
        pytest.param("sped\n1\n", "speed: expected the column speed in t.csv, got the columns sped", id="column"),
        pytest.param("speed\n1\nslow\n", "greater than 0 in the column speed of t.csv, line 3, got 'slow'", id="text"),
        pytest.param("speed\n0\n", "a number greater than 0 in the column speed of t.csv, line 2, got '0'", id="zero"),
        pytest.param("x,speed\n1\n", "the column speed of t.csv, line 2, got None", id="short-row"),
        pytest.param(
            "client,speed\na,1\n", "a row for every client in t.csv.*got none for b, the first of 2", id="no-row"
        ),
    ],
)
def test_a_file_that_does_not_fit(in_folder: Path, text: str | None, expected: str) -> None:
    """The message names the setting, the file and the line."""
    if text is not None:
        (in_folder / "t.csv").write_text(text)
    with pytest.raises(InvalidInput, match=expected):
        devices(FEW, speed={"file": "t.csv", "column": "speed"})


def test_a_duty_cycle() -> None:
    """At any time the share on_s / (on_s + off_s) of the clients is there, to 5 %; each time on has the mean on_s."""
    fleet = devices(MANY, availability={"on_s": 300, "off_s": 100})
    for now in (0.0, 250.0, 5000.0):
        assert len(fleet.present(MANY, now)) == pytest.approx(1500, rel=0.05)
    left = [leaves - 5000 for client in MANY if (leaves := fleet.leaves(client, 5000)) is not None]
    assert fmean(left) == pytest.approx(300, rel=0.1)


def test_intervals_of_a_file(in_folder: Path) -> None:
    """A client is there in its intervals: from their begin on, up to their end."""
    (in_folder / "t.csv").write_text("client,begin_s,end_s\na,50,60\na,10,20\nb,0,100\nc,15,16\n")
    fleet = devices(FEW, availability={"file": "t.csv"})
    assert [fleet.present(FEW, now) for now in (0.0, 10.0, 15.5, 16.0, 20.0)] == [
        ("b",), ("a", "b"), ("a", "b", "c"), ("a", "b"), ("b",),
    ]  # fmt: skip
    assert (fleet.next_arrival(FEW, 20.0), fleet.leaves("b", 20.0), fleet.leaves("c", 20.0)) == (50.0, 100.0, None)
    assert (fleet.present(FEW, 100.0), fleet.next_arrival(FEW, 100.0)) == ((), None)


def test_intervals_that_repeat(in_folder: Path) -> None:
    """After repeat_s they begin again; one over the end of a period is one interval, one over all of it never ends."""
    (in_folder / "t.csv").write_text("client,begin_s,end_s\na,0,10\na,90,100\nb,20,30\nc,0,100\n")
    fleet = devices(FEW, availability={"file": "t.csv", "repeat_s": 100})
    assert (fleet.leaves("a", 5), fleet.leaves("a", 95), fleet.leaves("a", 1200)) == (10, 110, 1210)
    assert (fleet.next_arrival(["b"], 31), fleet.leaves("b", 125)) == (120, 130)
    assert fleet.leaves("c", 5) == math.inf


def test_intervals_of_other_devices(in_folder: Path) -> None:
    """With the column `device`, each client draws a device."""
    (in_folder / "t.csv").write_text("device,begin_s,end_s\nx,0,10\ny,20,30\n")
    fleet = devices(MANY, availability={"file": "t.csv"})
    first, second = fleet.present(MANY, 5), fleet.present(MANY, 25)
    assert (len({*first} & {*second}), len(first) + len(second)) == (0, len(MANY))
    assert 900 < len(first) < 1100


@pytest.mark.parametrize(
    ("text", "repeat", "expected"),
    [
        pytest.param("a,0,10\nb,0,1\nc,5,5\n", {}, "end_s over begin_s .5. in line 4 of t.csv, got 5", id="empty"),
        pytest.param("a,0,10\na,5,20\n", {}, "intervals of a that are apart in t.csv, got 0 to 10 and 5", id="overlap"),
        pytest.param("a,0,10\n", {}, "a row for every client in t.csv", id="absent-client"),
        pytest.param(
            "a,0,10\nb,0,1\nc,2,3\n", {"repeat_s": 9}, "end within repeat_s = 9, got an end at 10", id="period"
        ),
        pytest.param("a,-1,10\n", {}, "a number of seconds, 0 or more in the column begin_s of t.csv", id="negative"),
    ],
)
def test_intervals_that_do_not_fit(in_folder: Path, text: str, repeat: dict[str, float], expected: str) -> None:
    """The message names the setting, the file and what is wrong."""
    (in_folder / "t.csv").write_text(f"client,begin_s,end_s\n{text}")
    with pytest.raises(InvalidInput, match=rf"simulation\.system\.availability: expected .*{expected}"):
        devices(FEW, availability={"file": "t.csv", **repeat})
