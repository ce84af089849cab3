"""Sums in clients' reports: what is refused, and how they are stored."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.errors import InvalidInput
from fl_server.run.evaluations import check_sums, plain_sums
from fl_tasks.summed_metrics import MAX_SUM_VALUES
from protos.fl.v1.coordinator_pb2 import MetricSum, ReportEvaluationRequest


def report(*sums: dict[str, Any], without: Any = ()) -> ReportEvaluationRequest:
    """A report with these sums."""
    made = ReportEvaluationRequest(num_examples=1)
    made.sums.extend(MetricSum(**{"metric": "f1", "name": "counts", **each}) for each in sums)
    made.sums_without_personal.extend(MetricSum(**{"metric": "f1", "name": "counts", **each}) for each in without)
    return made


@pytest.mark.parametrize(
    ("sums", "why"),
    [
        ([{"values": [1.0, 2.0]}], "as many values as the shape has"),
        ([{"shape": [2, 2], "values": [1.0]}], "as many values as the shape has"),
        ([{"shape": [1] * 9, "values": [1.0]}], "at most 8 dimensions"),
        ([{"values": [float("nan")]}], "finite values"),
        ([{"values": [float("inf")]}], "finite values"),
        ([{"values": [1e200]}], "finite values"),
        ([{"metric": "", "values": [1.0]}], "names of 1 to 64"),
        ([{"name": "a\x1b", "values": [1.0]}], "names of 1 to 64"),
        ([{"values": [1.0]}, {"values": [1.0]}], "each sum once"),
        ([{"shape": [MAX_SUM_VALUES + 1], "values": [0.0] * (MAX_SUM_VALUES + 1)}], "at most 16,384 numbers"),
    ],
)
def test_sums_that_no_device_sends_are_refused(sums: list[dict[str, Any]], why: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidInput, match=f"sums.*{why}"):
        check_sums(report(*sums), personal=False)


def test_sums_without_personal_parameters_are_those_of_the_others() -> None:
    """Both are there with personal parameters, and only one of them without."""
    one = {"values": [1.0]}
    check_sums(report(one, without=[one]), personal=True)
    check_sums(report(one), personal=False)
    for wrong, personal in ((report(one), True), (report(one, without=[one]), False)):
        with pytest.raises(InvalidInput, match="sums_without_personal"):
            check_sums(wrong, personal=personal)
    assert [each[0] for each in plain_sums(report(one, without=[one]))] == ["f1", "f1_without_personal"]
