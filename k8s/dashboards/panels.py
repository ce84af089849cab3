"""The common style of all panels; each panel has a title, a unit and a description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphGradientMode,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, table.Panel, heatmap.Panel)
Steps = Mapping[float, str]
"""The colour from each value on; the first value is `-inf`."""
LOWEST = float("-inf")
REFS = "ABCDEFGHIJKLMNOP"
"""Grafana's names of a panel's queries, in their order."""
NOTHING = "-"
"""The text of a panel without a value."""

RUN_STATES = {
    "waiting": "yellow",
    "running": "green",
    "paused": "blue",
    "completed": "purple",
    "stopped": "text",
    "failed": "red",
}
COLOURS: Mapping[str, Mapping[str, str]] = {
    "outcomes": {"committed": "green", "abandoned": "red", "below quorum": "orange"},
    "ends": {"admitted": "green", "cancelled": "text", "lost": "orange", "failed": "purple", "refused": "red"},
    "phases": {
        "selecting": "text",
        "agreeing": "text",
        "tossing": "text",
        "sharing": "text",
        "collecting": "blue",
        "signing": "text",
        "opening": "text",
        "reducing": "yellow",
        "stepping": "orange",
        "committing": "purple",
        "evaluating": "green",
    },
}
"""Name of a table for `colours` of a panel -> series -> colour. Ends: the end states of assignments."""


@dataclass(frozen=True)
class What:
    """The content of a panel: its title, the unit by Grafana's name, and a description for its reader."""

    title: str
    unit: str
    description: str


@dataclass(frozen=True)
class Query:
    """An expression, in any number of lines, and the names of its series."""

    expr: str
    legend: str = "__auto"
    format: PromQueryFormat = PromQueryFormat.TIME_SERIES
    instant: bool = False

    def built(self, ref: str) -> prometheus.Dataquery:
        """Return the query in Grafana's form."""
        target = prometheus.Dataquery().expr(" ".join(self.expr.split())).legend_format(self.legend)
        target = target.format(self.format).ref_id(ref)
        return target.instant() if self.instant else target.range()


def lines(what: What, *queries: Query) -> timeseries.Panel:
    """Lines over time, with an axis from 0 unless the panel sets another minimum."""
    legend = common.VizLegendOptions().show_legend(True)
    legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    panel = timeseries.Panel().line_width(2).fill_opacity(8).show_points(VisibilityMode.NEVER).axis_soft_min(0)
    return _asking(panel.legend(legend).tooltip(tooltip), what, queries)


def stacked(what: What, *queries: Query) -> timeseries.Panel:
    """Stacked areas, for series with a meaningful sum."""
    panel = lines(what, *queries).line_width(1).fill_opacity(55).gradient_mode(GraphGradientMode.NONE)
    return panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))


def number(what: What, expr: str, steps: Steps | None = None) -> stat.Panel:
    """The current number, coloured by threshold, with its history behind it."""
    panel = stat.Panel().graph_mode(BigValueGraphMode.AREA).color_mode(BigValueColorMode.VALUE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).no_value(NOTHING)
    return _asking(panel.thresholds(thresholds(steps or {LOWEST: "blue"})), what, [Query(expr)])


def word(what: What, expr: str, words: Mapping[str, tuple[str, str]]) -> stat.Panel:
    """A number that is shown as a word. words: number -> (word, colour)."""
    panel = stat.Panel().graph_mode(BigValueGraphMode.NONE).color_mode(BigValueColorMode.BACKGROUND)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).no_value(NOTHING)
    return _asking(panel.mappings(mappings(words)), what, [Query(expr)])


def rows(what: What, *queries: Query) -> table.Panel:
    """A table of current values."""
    panel = table.Panel().no_value(NOTHING).show_header(True)
    asked = [Query(query.expr, "", PromQueryFormat.TABLE, instant=True) for query in queries]
    return _asking(panel, what, asked)


def buckets(what: What, expr: str) -> heatmap.Panel:
    """A histogram over time."""
    colours = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Blues").steps(32)
    panel = heatmap.Panel().calculate(False).color(colours.reverse(True))
    return _asking(panel, what, [Query(expr, "{{le}}", PromQueryFormat.HEATMAP)])


def _asking(panel: AnyPanel, what: What, queries: Sequence[Query]) -> AnyPanel:
    for ref, query in zip(REFS, queries, strict=False):
        panel = panel.with_target(query.built(ref))
    return panel.title(what.title).unit(what.unit).description(what.description).datasource(DATASOURCE)


def thresholds(steps: Steps) -> ThresholdsConfig:
    """Set the colours by value."""
    return ThresholdsConfig().steps(
        [Threshold(None if value == LOWEST else value, colour) for value, colour in sorted(steps.items())]
    )


def limit(panel: timeseries.Panel, steps: Steps) -> timeseries.Panel:
    """Draw the thresholds as dashed lines."""
    style = common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
    return panel.thresholds(thresholds({LOWEST: "transparent", **steps})).thresholds_style(style)


def mappings(words: Mapping[str, tuple[str, str]]) -> list[ValueMapping]:
    """Show words in place of values. words: value -> (word, colour)."""
    results = {
        value: ValueMappingResult(text, colour, index=index)
        for index, (value, (text, colour)) in enumerate(words.items())
    }
    return [ValueMap(results)]


def coloured(panel: timeseries.Panel, colours: Mapping[str, str]) -> timeseries.Panel:
    """Give series of the same meaning the same colour everywhere. colours: name of a series -> colour."""
    for name, colour in colours.items():
        panel = overridden(panel, name, {"color": _fixed(colour)})
    return panel


def dashed(panel: timeseries.Panel, *names: str) -> timeseries.Panel:
    """Draw series for comparison: dashed, without a filled area."""
    for name in names:
        line = {"fill": "dash", "dash": [8, 6]}
        panel = overridden(panel, name, {"custom.lineStyle": line, "custom.fillOpacity": 0})
    return panel


def band(panel: timeseries.Panel, low: str, high: str) -> timeseries.Panel:
    """Fill the area between two series in pale blue."""
    thin = {"color": _fixed("blue"), "custom.lineWidth": 0}
    panel = overridden(panel, low, {**thin, "custom.fillOpacity": 0})
    return overridden(panel, high, {**thin, "custom.fillBelowTo": low, "custom.fillOpacity": 20})


def overridden(panel: AnyPanel, name: str, properties: Mapping[str, object]) -> AnyPanel:
    """Set properties of one series, or of one column of a table."""
    return panel.override_by_name(name, [DynamicConfigValue(of, value) for of, value in properties.items()])


def _fixed(colour: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": colour}
