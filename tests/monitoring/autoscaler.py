"""The workers' HorizontalPodAutoscaler as a script: the manifests' metric, asked of a Prometheus, and the next number.

The algorithm is that of the Kubernetes documentation ("Horizontal Pod Autoscaling", algorithm details):
desired = ceil(current * value / target), and no change while value / target is within a tenth of 1. A decision changes
the number by what one period of the manifest's policies allows. The periods themselves, and the window of
scaleDown, are not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.monitoring.alert_files import ROOT
from tests.monitoring.prometheus import Prometheus

WORKERS = ROOT / "k8s/components/workers"
NAMESPACE = "impetus"
TOLERANCE = 0.1
"""Of the autoscaler, by default."""


@dataclass(frozen=True)
class Autoscaler:
    """What autoscaler.yaml says."""

    metric: str
    target: float
    fewest: int
    most: int
    behavior: Mapping[str, Any]

    def desired(self, current: int, values: Sequence[float]) -> int:
        """The next number of pods. values: of the metric, one for each pod that runs."""
        ratio = sum(values) / len(values) / self.target
        wanted = current if abs(ratio - 1.0) <= TOLERANCE else math.ceil(current * ratio)
        up, down = (self._step(how, current) for how in ("scaleUp", "scaleDown"))
        return min(max(wanted, self.fewest, current - down), self.most, current + up)

    def _step(self, how: str, current: int) -> int:
        """The largest change that one period allows."""
        of = {"Pods": lambda value: value, "Percent": lambda value: math.ceil(current * value / 100)}
        return max(int(of[policy["type"]](policy["value"])) for policy in self.behavior[how]["policies"])


@cache
def of_the_manifest() -> Autoscaler:
    """The workers' autoscaler."""
    spec = yaml.safe_load((WORKERS / "autoscaler.yaml").read_text())["spec"]
    ((pods,),) = ([metric["pods"] for metric in spec["metrics"]],)
    target = float(pods["target"]["averageValue"])
    return Autoscaler(pods["metric"]["name"], target, spec["minReplicas"], spec["maxReplicas"], spec["behavior"])


def values(prometheus: Prometheus, metric: str, pods: Sequence[str]) -> dict[str, float]:
    """The metric of each of these pods as the adapter answers it, by the query of prometheus-adapter.yaml."""
    (rule,) = yaml.safe_load((WORKERS / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == metric, f"the autoscaler asks for {metric}, the adapter has {rule['name']['as']}"
    placeholders = {
        "<<.GroupBy>>": "pod",
        "<<.Series>>": rule["seriesQuery"].partition("{")[0],
        "<<.LabelMatchers>>": f'namespace="{NAMESPACE}",pod=~"{"|".join(pods)}"',
    }
    query = rule["metricsQuery"]
    for placeholder, value in placeholders.items():
        query = query.replace(placeholder, value)
    return {sample.labels["pod"]: sample.value for sample in prometheus.query(query)}
