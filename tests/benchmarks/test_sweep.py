"""The file of the sweep's results, and the tables made from it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sweep import row
from benchmarks.sweep_results import SERIES, Case, keep, of_series, read
from benchmarks.table import markdown

FOUND = {
    "clients": 10, "params": 10_000, "algorithm": "fedavg", "tls": False, "round_s_median": 0.1, "over_grpc": 1.5,
    "floor_grpc_s": 0.05, "over_tcp": 2.0, "floor_tcp_s": 0.025, "server_cpu_s_per_round": 0.2, "server_rss_mb": 300.0,
    "server_rss_models": 1.25, "client_rss_mb": {"median": 250.0}, "start_to_first_round_s": 9.0,
}  # fmt: skip


def test_a_new_result_replaces_the_earlier_one_of_its_case(tmp_path: Path) -> None:
    """The results of other cases stay."""
    file = tmp_path / "deep" / "results.json"
    for change in ({}, {"clients": 2}, {"round_s_median": 0.2}):
        keep(file, FOUND | change)
    assert [(each["clients"], each["round_s_median"]) for each in read(file)] == [(2, 0.1), (10, 0.2)]


def test_a_series_comes_in_its_own_order() -> None:
    """The order in the file does not matter; cases without a result are left out."""
    found = [FOUND | {"clients": clients, "params": SERIES["clients"][0].params} for clients in (40, 2, 10)]
    assert [each["clients"] for each in of_series("clients", found)] == [2, 10, 40]


def test_a_case_as_options_of_the_command_line() -> None:
    """--tls is present only if it is set."""
    assert Case(2, 5, "fedcm", tls=True).arguments() == ["--clients=2", "--params=5", "--algorithm=fedcm", "--tls"]
    assert "--tls" not in Case(2, 5).arguments()


def test_rows_are_markdown() -> None:
    """A heading, a rule that aligns numbers to the right, and a line for each case."""
    heading, rule, first, second = markdown([row(FOUND), row(FOUND | {"tls": True})])
    assert heading.startswith("| clients | parameters | algorithm | round, median |")
    assert rule.startswith("| --: | --: | --- | --: |")
    assert first.startswith("| 10 | 10,000 | FedAvg | 0.10 s | 1.50 (0.050 s) |")
    assert "| FedAvg, mTLS |" in second
