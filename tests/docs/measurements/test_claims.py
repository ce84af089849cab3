"""Sentences of docs/measurements that order rows of a table have a statement beside them, and the tables have it."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from tests.docs.measurements.claims import Claim, ClaimError, Page, PageTable, check

MEASUREMENTS = Path(__file__).parents[3] / "docs/measurements"
PAGES = [
    Page(MEASUREMENTS / f"{name}.md", {path.parent.name: path for path in (MEASUREMENTS / name).glob("*/results.csv")})
    for name in ("results", "papers")
]
TABLES = {key: table for page in PAGES for key, table in page.tables.items()}
CLAIMS = [claim for page in PAGES for claim in page.claims()]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.where)
def test_a_statement_holds_in_its_table(claim: Claim) -> None:
    """An order that the numbers do not have, and a quoted number that is not in the column, fail here."""
    check(claim, TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_sentence_that_orders_rows_has_a_statement(page: Page) -> None:
    """tests/docs/measurements/claims.py has the form. A sentence about something else says what it is about."""
    assert page.without_statement() == []


@pytest.mark.parametrize(
    "table", [table for table in TABLES.values() if table.results], ids=lambda table: table.heading
)
def test_a_table_has_the_numbers_of_its_runs(table: PageTable) -> None:
    """Column last N is the mean over the seeds of results.csv, rounded to two digits, of every row with a number."""
    for column in {column for cells in table.rows.values() for column in cells if re.fullmatch(r"last \d+", column)}:
        for row, value in table.numbers(column).items():
            lasts = table.lasts(row, int(column.split()[1]))
            assert value.mean == pytest.approx(fmean(lasts.values()), abs=0.0051), row


PAGE = """# A page

Best is what the page has before its first section of results: A is above B.

## Results

{sentence}

<!-- fl compare small: begin -->

### Test accuracy, even

| Method | rate | own parameters | final | last 2 | rounds to 50 % |
| --- | --- | --- | --: | --: | --: |
| A | 0.1 (edge) |  | 70.00 ± 1.00 | **70.00 ± 1.00** | 4 (1 of 2) |
| B, heavy ball | 0.1 | beta 0.9 | 69.00 ± 1.00 | 69.00 ± 1.00 | 5 |
| C (diverged: 1 of 2) | 0.1 |  | 60.00 | 60.00 | - |

<!-- fl compare small: end -->
"""
RESULTS = "method,split,stage,seed,learning_rate,parameters,accuracy\n" + "".join(
    f"{setting},{value + drift}\n"
    for method, parameters, value in (("A", "", 0.70), ('"B, heavy ball"', "beta 0.9", 0.69))
    for seed, drift in ((1, -0.01), (2, 0.01))
    for setting in (f"{method},even,final,{seed},0.1,{parameters}", f"{method},even,tuning,{seed},0.2,{parameters}")
)
"""The lines of the search have the same accuracies, and are not reported runs."""


def page_with(folder: Path, sentence: str) -> Page:
    """The page above, with this sentence and results of two seeds."""
    path, results = folder / "page.md", folder / "results.csv"
    path.write_text(PAGE.format(sentence=sentence), encoding="utf-8")
    results.write_text(RESULTS, encoding="utf-8")
    return Page(path, {"small": results})


def holds(orders: str, column: str = "last 2") -> str:
    """The comment."""
    return f"<!-- holds in small / Test accuracy, even / {column}: {orders} -->"


@pytest.mark.parametrize(
    "statement",
    [
        holds("A > C; A >= B, heavy ball; A ~ B, heavy ball > C; C < A"),
        holds("A >= rest; A ~ best; best > C"),
        holds("A >> B, heavy ball"),
        holds("A < B, heavy ball", "rounds to 50 %"),
        f"A (70.0 ± 1.0) is best. {holds('A >= rest')}",
    ],
)
def test_a_statement_that_holds(tmp_path: Path, statement: str) -> None:
    """Every sign, both words, labels with commas and notes, and numbers that a sentence quotes."""
    page = page_with(tmp_path, statement)
    (claim,) = page.claims()
    check(claim, page.tables)
    assert page.without_statement() == []


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (holds("A > B, heavy ball"), r"A > B, heavy ball does not hold by last 2: 70 and 69, pooled deviation 1"),
        (holds("C >= A"), "C >= A does not hold"),
        (holds("A ~ C"), "A ~ C does not hold"),
        (holds("B, heavy ball >= rest"), "B, heavy ball >= A does not hold"),
        (holds("B, heavy ball >> A"), "does not hold: -1.00, standard error 0.00"),
        (holds("A >> C"), "needs two common seeds"),
        (holds("A > D"), "expected one of the rows A, B, heavy ball, C; got D"),
        (
            holds("A > C", "last 3"),
            "expected one of Method, rate, own parameters, final, last 2, rounds to 50 %; got last 3",
        ),
        (holds("A < C", "rounds to 50 %"), "C has no number in rounds to 50 %"),
        (holds("A"), "expected rows with a sign between them"),
        (holds("A > C").replace("even", "odd"), "expected one of the tables small / Test accuracy, even; got"),
        (f"A has 71.0 ± 1.0. {holds('A > C')}", r"71.0 ± 1.0 is no number of A, B, heavy ball, C in small"),
        (f"A (69.0 ± 1.0) is best. {holds('A > C')}", r"69.0 ± 1.0 is no number of A in small"),
    ],
)
def test_a_statement_that_does_not_hold_is_named_with_its_line(tmp_path: Path, statement: str, message: str) -> None:
    """Also one about a row, column, table or number that is not there: a renamed row must not silence a claim."""
    page = page_with(tmp_path, statement)
    (claim,) = page.claims()
    with pytest.raises(ClaimError, match=rf"^page.md:7: .*{message}"):
        check(claim, page.tables)


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("A is above C.", True),
        ("| papers | A beats C, which is best. |", True),
        ("| A over C | the same |", False),
        ("A is above C. <!-- no order of rows: published -->", False),
        ("A has 70 %.", False),
        ("The best row is far above.", False),
    ],
)
def test_a_sentence_that_orders_rows_without_a_statement_is_found(tmp_path: Path, sentence: str, found: bool) -> None:
    """It has a row's name and a word of comparison, and stands in or after the section of a table with results."""
    assert bool(page_with(tmp_path, sentence).without_statement()) == found
