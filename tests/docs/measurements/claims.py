"""Reads the tables of `fl compare` in pages, and the statements about them that stand beside the pages' sentences.

A sentence that says which row is better ends with a comment, on its line or in its cell of a table:

    <!-- holds in reduced-cifar-10 / Test accuracy, Dirichlet 0.3 / last 5: FedDyn > SlowMo >= rest; FedCM ~ FedAvg -->

It names the table's file, the heading over the table and the column, then orders of rows. A sign compares neighbours:

    A > B     more than by the pooled deviation sqrt((s_A^2 + s_B^2) / 2); A < B likewise. A column without deviations
              has 0
    A >= B    the number is not smaller, of whatever size the difference is; A <= B likewise
    A ~ B     within the pooled deviation
    A >> B    more than by two standard errors of the paired difference over the seeds, from results.csv

`rest` are all rows that the order does not name, `best` is the row with the highest number. A sentence that names rows
and uses the same words, but orders no rows of a table, says so:  <!-- no order of rows: what it is -->
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean, stdev

WORDS = re.compile(
    r"\b(over|above|below|under|better|worse|best|worst|first|second|third|highest|lowest|higher|lower|ahead|behind"
    r"|leads?|wins?|beats?|helps?|gains?|like|similar|equal|within|between|distinguished|exceeds?|outperforms?)\b"
    r"|\b(Yes|No|Similar|First|Best):"
)
"""Words of a sentence that orders rows."""
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HOLDS = re.compile(r"<!-- holds in (?P<table>[^/]+) / (?P<heading>[^/]+) / (?P<column>[^:]+): (?P<orders>.+?) -->")
_NO_ORDER = re.compile(r"<!-- no order of rows: .+? -->")
_BLOCK = re.compile(
    r"<!-- fl compare (?P<name>[\w-]+): begin -->(?P<text>.*?)<!-- fl compare (?P=name): end -->", re.DOTALL
)
_NOTES = re.compile(r" \((\d+ of \d+ seeds|diverged: \d+ of \d+)\)")
_VALUE = re.compile(r"\*{0,2}(?P<mean>[+-]?\d[\d.]*)(?: ± (?P<deviation>\d[\d.]*))?")
_QUOTED = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")
_SIGN = re.compile(r" (>>|>=|<=|>|<|~) ")


class ClaimError(AssertionError):
    """A statement does not hold, or names something that a table does not have."""


@dataclass(frozen=True)
class Value:
    """A number of a table, with its deviation over the seeds, or 0 without one."""

    mean: float
    deviation: float = 0.0


@dataclass(frozen=True)
class PageTable:
    """A table: heading -> row -> column -> text of the cell."""

    name: str
    heading: str
    rows: Mapping[str, Mapping[str, str]]
    results: Path | None = None
    """results.csv of its runs."""

    def value(self, row: str, column: str) -> Value:
        """The number of a cell. Raises ClaimError, if the table has no such cell or no number in it."""
        if row not in self.rows:
            raise ClaimError(
                f"{self.name} / {self.heading}: expected one of the rows {', '.join(self.rows)}; got {row}"
            )
        cells = self.rows[row]
        if column not in cells:
            raise ClaimError(f"{self.name} / {self.heading}: expected one of {', '.join(cells)}; got {column}")
        if not (found := _VALUE.match(cells[column])):
            raise ClaimError(f"{self.name} / {self.heading}: {row} has no number in {column}: {cells[column]!r}")
        return Value(float(found["mean"]), float(found["deviation"] or 0.0))

    def numbers(self, column: str) -> dict[str, Value]:
        """The rows that have a number in a column."""
        return {row: self.value(row, column) for row, cells in self.rows.items() if _VALUE.match(cells.get(column, ""))}

    def lasts(self, row: str, last: int) -> dict[int, float]:
        """Seed -> mean of the last evaluations of a row's reported runs, in percent for an accuracy."""
        kind, split = self.heading.removeprefix("Test ").split(", ", 1)
        # A table of another metric may have chosen another setting of the same method.
        own = row, split, self.value(row, "rate").mean, self.rows[row]["own parameters"]
        found: dict[int, list[float]] = {}
        for line in _finals(self.results):
            parameters = [text for text in line["parameters"].split(", ") if not text.startswith("learning_rate ")]
            setting = line["method"], line["split"], float(line["learning_rate"]), ", ".join(parameters)
            if setting == own and line[kind]:
                found.setdefault(int(line["seed"]), []).append(float(line[kind]))
        scale = 100.0 if kind.endswith("accuracy") else 1.0
        return {seed: scale * fmean(values[-last:]) for seed, values in found.items()}


@cache
def _finals(path: Path | None) -> list[dict[str, str]]:
    """The rounds of the reported runs."""
    if path is None or not path.is_file():
        raise ClaimError(f"a paired difference needs the results.csv of the table's runs, got {path}")
    lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["stage"] == "final"]


@dataclass(frozen=True)
class Claim:
    """A statement: where it stands, the sentence before it, and its orders of rows."""

    where: str
    sentence: str
    table: tuple[str, str]
    """(name, heading)."""
    column: str
    orders: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A page with tables. path: of its Markdown file, beside which folders of its results are."""

    path: Path
    results: Mapping[str, Path] = field(default_factory=dict)
    """Name of a table -> its results.csv."""

    @cached_property
    def text(self) -> str:
        """The page."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def apart(self) -> str:
        """The tables that are in a file of their own, beside the results, and no part of the page."""
        path = self.path.with_suffix("") / "tables.txt"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @cached_property
    def tables(self) -> dict[tuple[str, str], PageTable]:
        """(name, heading) -> table."""
        found = {}
        for block in _BLOCK.finditer(self.text + self.apart):
            for part in block["text"].split("\n### ")[1:]:
                heading, body = part.split("\n", 1)
                rows = _rows(body)
                found[block["name"], heading] = PageTable(block["name"], heading, rows, self.results.get(block["name"]))
        return found

    def claims(self) -> Iterator[Claim]:
        """The statements of the page."""
        for number, line in enumerate(self.text.splitlines(), 1):
            for cell in _cells(line):
                for found in _HOLDS.finditer(cell):
                    orders = tuple(order.strip() for order in found["orders"].split(";"))
                    table = found["table"], found["heading"]
                    where = f"{self.path.name}:{number}"
                    yield Claim(where, _COMMENT.sub("", cell), table, found["column"], orders)

    def without_statement(self) -> list[str]:
        """Sentences that seem to order rows, of the sections from the first table with results on."""
        rows = {row for table in self.tables.values() for row in table.rows}
        labels = sorted({*rows, *(row.split(",")[0] for row in rows)}, key=len, reverse=True)
        names = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, labels))})(?![\w-])")
        return [
            f"{self.path.name}:{number}: {cell.strip()}"
            for number, line in self._lines_about_results()
            for cell in _cells(line)[-1:]  # of a table of claims, the cells before it are those of papers
            if names.search(line) and WORDS.search(cell) and not _HOLDS.search(cell) and not _NO_ORDER.search(cell)
        ]

    def _lines_about_results(self) -> Iterator[tuple[int, str]]:
        about, in_block, in_code = False, False, False
        filled = {table.name for table in self.tables.values() if _has_results(table)}
        sections = re.split(r"(?m)^(?=## )", self.text)
        number = 0
        for section in sections:
            about = about or any(f"<!-- fl compare {name}: begin -->" in section for name in filled)
            about = about or f"({self.path.stem}/tables.txt)" in section
            for line in section.splitlines():
                number += 1
                in_code ^= line.startswith("```")
                in_block = (in_block or ": begin -->" in line) and ": end -->" not in line
                if about and not in_block and not in_code:
                    yield number, line


def _has_results(table: PageTable) -> bool:
    return table.heading.startswith("Test ") and any(
        column.startswith("last ") and _VALUE.match(cell) for row in table.rows.values() for column, cell in row.items()
    )


def _cells(line: str) -> list[str]:
    """The cells of a line of a table, or the line itself."""
    return line.strip().strip("|").split(" | ") if line.startswith("|") else [line]


def _rows(body: str) -> dict[str, dict[str, str]]:
    """Rows by label. A table of a search has several rows of a label; they are numbered from the second on."""
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in body.splitlines() if line.startswith("|")]
    found: dict[str, dict[str, str]] = {}
    for cells in lines[2:]:
        label = _NOTES.sub("", cells[0])
        same = sum(known == label or known.startswith(f"{label} #") for known in found)
        found[f"{label} #{same + 1}" if same else label] = dict(zip(lines[0], cells, strict=True))
    return found


def check(claim: Claim, tables: Mapping[tuple[str, str], PageTable]) -> None:
    """Raises ClaimError, with the place and the numbers, if a statement does not hold."""
    try:
        if claim.table not in tables:
            known = "; ".join(" / ".join(key) for key in tables)
            raise ClaimError(f"expected one of the tables {known}; got {' / '.join(claim.table)}")
        for order in claim.orders:
            _check_order(order, tables[claim.table], claim.column)
        _check_quoted(claim, tables[claim.table])
    except ClaimError as error:
        raise ClaimError(f"{claim.where}: {error}") from None


def _check_order(order: str, table: PageTable, column: str) -> None:
    first, *others = _SIGN.split(order)
    names, signs = [first, *others[1::2]], others[::2]
    if not signs:
        raise ClaimError(f"expected rows with a sign between them, such as A > B; got {order!r}")
    numbers = table.numbers(column)
    meant = [_rows_meant(name, names, numbers) for name in names]
    for lefts, sign, rights in zip(meant, signs, meant[1:], strict=False):
        for left in lefts:
            for right in rights:
                _check_pair((left, right), sign, table, column)


def _rows_meant(name: str, names: list[str], numbers: Mapping[str, Value]) -> list[str]:
    if name == "best":
        return [max(numbers, key=lambda row: numbers[row].mean)]
    return [row for row in numbers if row not in names] if name == "rest" else [name]


def _check_pair(pair: tuple[str, str], sign: str, table: PageTable, column: str) -> None:
    left, right = (table.value(row, column) for row in pair)
    difference, pooled = left.mean - right.mean, math.hypot(left.deviation, right.deviation) / math.sqrt(2.0)
    if sign == ">>":
        _check_paired(pair, table, column)
        return
    holds = {
        ">": difference > pooled,
        "<": -difference > pooled,
        ">=": difference >= 0,
        "<=": difference <= 0,
        "~": abs(difference) <= pooled,
    }[sign]
    if not holds:
        raise ClaimError(
            f"{pair[0]} {sign} {pair[1]} does not hold by {column}: {left.mean:g} and {right.mean:g}, "
            f"pooled deviation {pooled:.2g}"
        )


def _check_paired(pair: tuple[str, str], table: PageTable, column: str) -> None:
    if not (last := re.fullmatch(r"last (\d+)", column)):
        raise ClaimError(f"expected the column last N for a paired difference, got {column}")
    left, right = (table.lasts(row, int(last[1])) for row in pair)
    differences = [left[seed] - right[seed] for seed in left.keys() & right.keys()]
    if len(differences) < 2:
        raise ClaimError(f"{pair[0]} >> {pair[1]} needs two common seeds at least, got {len(differences)}")
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    if mean <= 2 * error:
        raise ClaimError(f"{pair[0]} >> {pair[1]} does not hold: {mean:.2f}, standard error {error:.2f}")


def _check_quoted(claim: Claim, table: PageTable) -> None:
    """Every `x ± y` of the sentence is a number of the table, rounded: of the row whose label is before it, if any."""
    for mean, deviation in _QUOTED.findall(claim.sentence):
        quoted = float(mean), float(deviation)
        rows = [row for row in table.rows if f"{row} ({mean} ± {deviation})" in claim.sentence] or list(table.rows)
        half = 0.5001 * 10.0 ** -len(mean.split(".")[1])
        columns = next(iter(table.rows.values()))
        known = (number for column in columns for row, number in table.numbers(column).items() if row in rows)
        if not any(abs(one.mean - quoted[0]) <= half and abs(one.deviation - quoted[1]) <= half for one in known):
            raise ClaimError(f"{mean} ± {deviation} is no number of {', '.join(rows)} in {' / '.join(claim.table)}")
