"""The frame of both dashboards: variables, annotations, links, times."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    IntervalVariable,
    QueryVariable,
)
from grafana_foundation_sdk.models import dashboard as models

from k8s.dashboards.panels import DATASOURCE

OVERVIEW, RUN_DETAIL = "impetus-federation", "impetus-run"
"""The uids, which bookmarks and links of alerts use."""
RUN_URL = f"/d/{RUN_DETAIL}/?${{datasource:queryparam}}&${{window:queryparam}}&${{__url_time_range}}&var-run="
"""Link to Run detail with the same source, window and time; the run's id is appended."""
_OF_THE_SERIES = RUN_URL + "${__field.labels.run}"
WINDOWS = ("30s", "1m", "5m", "15m", "1h", "6h", "1d")
_RUNS = 'query_result(label_join(fl_run_info, "words", " · ", "run", "algorithm", "task"))'
_ID_AND_WORDS = '/words="(?<text>[^"]+)"|run="(?<value>[^"]+)"/g'
"""Grafana shows the group `text` and inserts the group `value` into expressions."""


@dataclass(frozen=True)
class Frame:
    """A dashboard without its panels."""

    uid: str
    title: str
    description: str
    all_runs: bool
    """Whether several runs can be selected together; the default is then all runs."""

    def built(self) -> Dashboard:
        """Return the builder that the panels are added to."""
        dashboard = Dashboard(self.title).uid(self.uid).description(self.description).tags(["impetus"]).editable()
        dashboard = dashboard.timezone("browser").time("now-6h", "now").refresh("30s")
        dashboard = dashboard.tooltip(models.DashboardCursorSync.CROSSHAIR)
        for variable in (_source(), self._run(), _window()):
            dashboard = dashboard.with_variable(variable)
        dashboard = dashboard.link(self._other())
        built = dashboard.build()
        built.annotations = models.AnnotationContainer([*self._annotations()])
        return dashboard

    @property
    def runs(self) -> str:
        """Return the matcher for the selected runs in an expression."""
        return 'run=~"$run"' if self.all_runs else 'run="$run"'

    def _run(self) -> QueryVariable:
        variable = QueryVariable("run").label("Run").datasource(DATASOURCE).query(_RUNS).regex(_ID_AND_WORDS)
        variable = variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        variable = variable.sort(models.VariableSort.ALPHABETICAL_CASE_INSENSITIVE_ASC)
        if not self.all_runs:
            return variable
        everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
        return variable.multi(True).include_all(True).all_value(".+").current(everything)

    def _other(self) -> DashboardLink:
        title, uid = ("Run detail", RUN_DETAIL) if self.uid == OVERVIEW else ("Federation overview", OVERVIEW)
        link = DashboardLink(title).type(models.DashboardLinkType.LINK).icon("dashboard").keep_time(True)
        return link.url(f"/d/{uid}/?${{datasource:queryparam}}&${{window:queryparam}}")

    def _annotations(self) -> list[models.AnnotationQuery]:
        commits = _Marks("Commits", f"1000 * max by (run) (fl_last_commit_timestamp_seconds{{{self.runs}}})", "green")
        commits.title, commits.at_value, commits.enable = "{{run}}: a round was committed", True, False
        commits.step = "1s"
        gone = f'fl_rounds_total{{{self.runs},outcome="abandoned"}}'
        abandoned = _Marks("Abandoned rounds", f"sum by (run) (increase({gone}[1m])) > 0", "orange")
        abandoned.title = "{{run}}: a round was given up"
        started = "1000 * max by (instance) (process_start_time_seconds and on (instance, job) fl_build_info)"
        restarts = _Marks("Coordinator starts", started, "red")
        restarts.title, restarts.at_value = "{{instance}}: the coordinator started", True
        return [commits, abandoned, restarts]


def to_the_run(panel: timeseries.Panel) -> timeseries.Panel:
    """Link each series to Run detail of its run."""
    return panel.data_links([DashboardLink("Run detail").type(models.DashboardLinkType.LINK).url(_OF_THE_SERIES)])


class _Marks(models.AnnotationQuery):
    """Vertical lines from an expression, with fields of Grafana's Prometheus source that the library lacks."""

    title = ""
    at_value = False
    """Whether the value is the time in milliseconds; otherwise each value over 0 makes a mark."""

    step = "10s"
    """Marks within this distance form one region."""

    def __init__(self, name: str, expr: str, colour: str) -> None:
        super().__init__(name=name, datasource=DATASOURCE, icon_color=colour, expr=expr)

    def to_json(self) -> dict[str, object]:
        """Return the annotation with the missing fields."""
        return {**super().to_json(), "titleFormat": self.title, "step": self.step, "useValueForTime": self.at_value}


def _source() -> DatasourceVariable:
    return DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def _window() -> IntervalVariable:
    chosen = models.VariableOption(selected=True, text="15m", value="15m")
    options = [models.VariableOption(selected=window == "15m", text=window, value=window) for window in WINDOWS]
    variable = IntervalVariable("window").label("Over").values(",".join(WINDOWS)).options(options).current(chosen)
    return variable.description("How far back each point of a rate, a share or a mean looks: several rounds' time.")
