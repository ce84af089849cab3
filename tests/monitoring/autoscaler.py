"""The workers' HorizontalPodAutoscaler as a script: the manifests' metric, asked of a Prometheus, and the next number.

The algorithm is that of the Kubernetes documentation ("Horizontal Pod Autoscaling", algorithm details and configurable
scaling behavior): desired = ceil(current * value / target), and no change while value / target is within a tenth of 1.
The number falls to the highest, and rises to the lowest recommendation of the window of its direction, by what the
policies allow in their periods. The clock is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from tests.monitoring.alert_files import ROOT
from tests.monitoring.prometheus import Prometheus

WORKERS = ROOT / "k8s/components/workers"
NAMESPACE = "impetus"
TOLERANCE = 0.1
"""Of the autoscaler, by default."""
SYNC_S = 15.0
"""Seconds between two decisions, by default."""


@dataclass(frozen=True)
class Manifest:
    """What autoscaler.yaml says."""

    metric: str
    target: float
    fewest: int
    most: int
    behavior: Mapping[str, Any]

    def recommended(self, current: int, values: Sequence[float]) -> int:
        """The number of pods by the metric alone. values: one for each pod that runs."""
        ratio = sum(values) / len(values) / self.target
        return current if abs(ratio - 1.0) <= TOLERANCE else math.ceil(current * ratio)

    def window(self, how: str) -> float:
        """Seconds of recommendations that a change considers. how: "scaleUp", "scaleDown"."""
        return float(self.behavior[how]["stabilizationWindowSeconds"])


@dataclass
class Autoscaler:
    """The autoscaler over time. Times are seconds of any clock; decisions come in order."""

    manifest: Manifest
    recommendations: list[tuple[float, int]] = field(default_factory=list)
    """(time, number) of each decision before. The first decision adds the number that it found."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """(time, pods that were added; negative: removed)."""

    def decide(self, now: float, current: int, values: Sequence[float]) -> int:
        """The next number of pods. values: of the metric, one for each pod that runs."""
        manifest = self.manifest
        if not self.recommendations:
            self.recommendations.append((now, current))
        wanted = manifest.recommended(current, values)
        lowest = min([wanted, *self._within(now, manifest.window("scaleUp"))])
        highest = max([wanted, *self._within(now, manifest.window("scaleDown"))])
        self.recommendations.append((now, wanted))
        stable = min(max(current, lowest), highest)
        least, largest = self._limit("scaleDown", now, current), self._limit("scaleUp", now, current)
        decided = min(max(stable, manifest.fewest, least), manifest.most, largest)
        if decided != current:
            self.changes.append((now, decided - current))
        return decided

    def _within(self, now: float, seconds: float) -> list[int]:
        return [number for at, number in self.recommendations if at > now - seconds]

    def _limit(self, how: str, now: float, current: int) -> int:
        """The farthest number that the policies of a direction allow now, of which the widest counts."""
        up = how == "scaleUp"
        limits: list[int] = []
        for policy in self.manifest.behavior[how]["policies"]:
            before = current - sum(by for at, by in self.changes if at > now - policy["periodSeconds"])
            value = policy["value"] if policy["type"] == "Pods" else before * policy["value"] / 100
            limits.append(math.ceil(before + value) if up else math.floor(before - value))
        return max([current, *limits]) if up else min([current, *limits])


@cache
def of_the_manifest() -> Manifest:
    """The workers' autoscaler."""
    spec = yaml.safe_load((WORKERS / "autoscaler.yaml").read_text())["spec"]
    ((pods,),) = ([metric["pods"] for metric in spec["metrics"]],)
    target = float(pods["target"]["averageValue"])
    return Manifest(pods["metric"]["name"], target, spec["minReplicas"], spec["maxReplicas"], spec["behavior"])


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
