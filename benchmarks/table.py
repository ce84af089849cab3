"""Markdown tables: the benchmarks print the rows of docs/measurements/benchmarks.md themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def markdown(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """A table of rows with the same columns. A column is aligned to the right if its first cell starts with a digit."""
    lines: list[str] = []
    for row in rows:
        if not lines:
            lines += [_line(row), _line("--:" if str(cell)[:1].isdigit() else "---" for cell in row.values())]
        lines.append(_line(row.values()))
    return lines


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
