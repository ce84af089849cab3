"""docs/operation/runbook.md: its commands and metrics exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fl_server.metrics import REASONS
from tests.docs.pages import check_fl_command, read_page
from tests.monitoring.alert_files import RULES, alerts
from tests.monitoring.programs import needed

PAGE = read_page("docs/operation/runbook.md")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TYPED = [line for kind, body in BLOCKS if kind == "sh" for line in body.splitlines()]
INLINE = re.findall(r"`((?:fl|kubectl) [^`]+)`", PAGE)
COMMANDS = sorted({text.removesuffix(" ...") for text in (*TYPED, *INLINE)})
OURS = [text for text in COMMANDS if text.startswith("fl ") and text != "fl"]
KUBECTL = [text for text in COMMANDS if text.startswith("kubectl ")]


@pytest.mark.parametrize("text", OURS)
def test_fl_takes_the_command(text: str) -> None:
    """The command is there, and it accepts these arguments and options as they stand."""
    check_fl_command(shlex.split(text)[1:])


@pytest.mark.parametrize("text", KUBECTL)
def test_kubectl_takes_the_command(text: str) -> None:
    """The command and each of its options are in kubectl's own help."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    words = [word for word in shlex.split(text.partition(" -- ")[0])[1:] if word not in ("-n", "impetus")]
    shown = subprocess.run(["kubectl", *_verbs(words), "--help"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert words[0] in shown.stdout
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert f"{option}=" in shown.stdout


def _verbs(words: list[str]) -> list[str]:
    return words[:2] if words[0] == "top" else words[:1]


def test_the_lines_for_an_overlay_make_every_link_whole(tmp_path: Path) -> None:
    """Each alert's link leads to its section at the site's own address, and nothing else is built."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / RULES.name).write_text(RULES.read_text())
    lines = next(body for kind, body in BLOCKS if kind == "yaml")
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{RULES.name}]\n{lines}")
    built = subprocess.run(["kubectl", "kustomize", "."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (found,) = yaml.safe_load_all(built.stdout)
    rules = [rule for group in found["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    links = [rule["annotations"]["runbook_url"] for rule in rules]
    page = "https://example.org/impetus/docs/operation/runbook.md"
    assert links == [f"{page}#{rule['alert'].lower()}" for rule in alerts()]


def test_every_command_is_a_known_program() -> None:
    """Blocks of shell have commands of fl and kubectl, one a line."""
    assert {text.split()[0] for text in TYPED} == {"fl", "kubectl"}
    assert len(OURS) > 10
    assert len(KUBECTL) > 5


def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    """Each line of a PromQL block is one expression."""
    needed("promtool")
    lines = [line for kind, body in BLOCKS if kind == "promql" for line in body.splitlines()]
    rules = [{"record": f"line_{number}", "expr": line} for number, line in enumerate(lines)]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "runbook", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(lines) > 20


def test_every_section_is_complete() -> None:
    """It has the meaning, the checks, the remedy, and the harmless cases."""
    for section in PAGE.split("\n## ")[1:]:
        name = section.partition("\n")[0]
        assert "```sh\n" in section, name
        assert "```promql\n" in section or name == "FlRunFailed", name
        assert re.search(r"^- ", section, re.MULTILINE), name
        assert re.search(r"^Harmless ", section, re.MULTILINE), name


def test_every_reason_of_a_refusal_is_explained() -> None:
    """Each counted reason has its line, and each line has an existing reason."""
    section = PAGE[PAGE.index("## FlUpdatesRefusedHigh") : PAGE.index("## FlAccuracyFalling")]
    lines = re.findall(r"^- ((?:`\w+`(?:, )?)+):", section, re.MULTILINE)
    assert sorted(reason for line in lines for reason in re.findall(r"\w+", line)) == sorted(REASONS)
