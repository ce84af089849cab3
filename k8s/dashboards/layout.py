"""Arranges panels in sections, rows and Grafana's grid of 24 columns; holes and overlaps are impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders.dashboard import Dashboard as DashboardBuilder
from grafana_foundation_sdk.builders.dashboard import Row as RowBuilder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Dashboard, GridPos, Panel

COLUMNS = 24
IDS_PER_SECTION = 100
"""Panel ids count within a section, so a new panel changes only the links to later panels of its section."""


@dataclass(frozen=True)
class Row:
    """Panels side by side with equal height and width."""

    height: int
    panels: Sequence[Builder[Panel]]

    @property
    def width(self) -> int:
        """The columns of each panel. Raises ValueError if they would leave a hole."""
        if COLUMNS % len(self.panels):
            raise ValueError(f"expected panels that share {COLUMNS} columns evenly, got {len(self.panels)} in a row")
        return COLUMNS // len(self.panels)


@dataclass(frozen=True)
class Section:
    """A foldable heading and the rows below it."""

    title: str
    rows: Sequence[Row]


def place(dashboard: DashboardBuilder, sections: Sequence[Section]) -> Dashboard:
    """Place the sections one below the other and return the finished dashboard."""
    y = 0
    for number, section in enumerate(sections, start=1):
        id = number * IDS_PER_SECTION
        dashboard.with_row(RowBuilder(section.title).id(id).grid_pos(GridPos(x=0, y=y, w=COLUMNS, h=1)))
        y += 1
        for row in section.rows:
            for column, panel in enumerate(row.panels):
                id += 1
                built = panel.build()
                built.id_val = id
                built.grid_pos = GridPos(x=column * row.width, y=y, w=row.width, h=row.height)
                dashboard.with_panel(panel)
            y += row.height
    return dashboard.build()
