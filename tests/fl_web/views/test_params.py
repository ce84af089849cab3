"""The values of an address."""

from __future__ import annotations

import pytest

from fl_web.coordinator.calls import WrongInput
from fl_web.rendering import load_templates, rendered
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb


def test_an_address_keeps_what_is_not_changed() -> None:
    """A link to the next page keeps the filters; an empty value leaves one out."""
    params = Params({"q": ["a b"], "state": ["running", "failed"], "page": ["x"]})
    assert params.address(page="y&z") == "q=a+b&state=running&state=failed&page=y%26z"
    assert params.address("page", q="") == "state=running&state=failed"


@pytest.mark.parametrize("text", ["-1", "1.5", "zwölf", "9" * 19, "1e3"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    """The error states what was expected and what came."""
    with pytest.raises(WrongInput, match="before: expected a whole number of at least 0, got "):
        Params({"before": [text]}).number("before")


def test_a_word_of_no_list_is_refused() -> None:
    """The error lists the words."""
    with pytest.raises(WrongInput, match="x: expected one of rounds, bytes, got 'colour'"):
        Params({"x": ["colour"]}).one_of("x", ("rounds", "bytes"))


def test_a_very_long_value_is_refused() -> None:
    """It never reaches the coordinator."""
    with pytest.raises(WrongInput, match="q: expected at most 4096 characters, got 5000"):
        Params({"q": ["a" * 5000]})


def test_empty_values_are_none() -> None:
    """A form sends its empty fields."""
    assert Params({"q": [""], "run": ["a", "", "a", "b"]}).texts("run") == ["a", "b"]
    assert Params({"q": [""]}).text("q") == ""


@pytest.mark.parametrize(
    ("template", "command"),
    [("clients/_list.html", "fl-client --config client.toml"), ("runs/_list.html", "fl run create run.toml")],
)
def test_an_empty_list_says_how_its_first_row_comes(template: str, command: str) -> None:
    """A list that a filter has emptied says that nothing matches."""
    load_templates()
    lists = {"clients": [], "next_page": "", "overview": pb.GetOverviewResponse()}
    assert command in rendered(template, {**lists, "params": Params({})})
    filtered = rendered(template, {**lists, "params": Params({"q": ["porto"]})})
    assert "matches" in filtered
    assert command not in filtered
