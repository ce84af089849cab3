"""The pages in k8s: their commands exist, those that need no cluster are run, and their claims are checked."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fl_common.settings import read_settings
from fl_ops.certificates import pki
from fl_ops.commands.cli import app
from fl_server.settings.config import ServerConfig
from tests.docs.pages import Command, File, check_fl_command, follow, on_free_ports, read_page, steps
from tests.k8s.checks import problems
from tests.k8s.manifests import EVERY, EVERYTHING, ROOT, build, needs_kubectl
from tests.k8s.objects import config_files, find, namespace, of_kind, pods
from tests.k8s.reference_checks import Keys, secrets_that_are_missing

FIRST = read_page("k8s/README.md")
PAGE = FIRST + read_page("k8s/production.md") + read_page("k8s/operate.md")
COMMANDS = [step.text for step in steps(PAGE) if isinstance(step, Command)]
IN_PROSE = re.findall(r"`((?:kubectl|fl) [^`]+)`", PAGE)
EVERY_COMMAND = list(dict.fromkeys([*COMMANDS, *IN_PROSE]))
FILES = {step.name: step.text for step in steps(PAGE) if isinstance(step, File)}
SITE = "k8s/overlays/site"
"""The reader's own overlay, which is only on the page."""


def words(command: Any, program: str) -> Iterator[list[str]]:
    """The arguments of every call of a program in a command."""
    for part in re.split(r"\s\|\s|\s&$|\s[<>]\s\S+", command):
        call = shlex.split(part)
        if call[:1] == [program]:
            yield call[1:]


CALLS_OF_FL = [call for command in EVERY_COMMAND for call in words(command, "fl")]
CALLS_OF_KUBECTL = [call for command in EVERY_COMMAND for call in words(command, "kubectl")]


@pytest.mark.parametrize("arguments", CALLS_OF_FL, ids=" ".join)
def test_every_fl_command_exists(arguments: str) -> None:
    """The command and each of its options exist, and it has its required arguments."""
    check_fl_command(arguments)


@cache
def _help(*arguments: str) -> str:
    """What kubectl prints about a command. Many calls of the page have the same one."""
    return subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=True).stdout


@needs_kubectl
@pytest.mark.parametrize("arguments", CALLS_OF_KUBECTL, ids=" ".join)
def test_every_kubectl_command_exists(arguments: str) -> None:
    """The verb and its options exist, and applied paths exist."""
    verb = [word for word in arguments[:3] if re.fullmatch("[a-z-]+", word)]
    verb = verb[: {"create": 3, "rollout": 2}.get(verb[0], 1)]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    known = _help(*verb, "--help") + _help("options")
    options = [word.partition("=")[0] for word in own if re.match(r"--\w|-[a-z]$", word)]
    assert [option for option in options if not re.search(rf"(^|\s){option}[\s=,]", known)] == []
    for option, path in pairwise(own):
        if option in {"-f", "-k"} and path not in {"-", SITE}:
            assert (ROOT / path / "kustomization.yaml" if option == "-k" else ROOT / path).is_file()


@pytest.mark.skipif(not (ROOT / "k8s/images").exists(), reason="the images' part of the tree is not here")
def test_files_that_are_built_from_are_there() -> None:
    """Containerfiles, and every path in the tables and the text."""
    for path in re.findall(r"^\| `([\w/.-]+)` \|", PAGE, re.MULTILINE):
        assert (ROOT / "k8s" / path).exists(), path
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE):
        assert (ROOT / "k8s" / link).exists(), link
    for path in re.findall(r"`((?:components|gpu-clients)(?:/[\w./-]+)?)`", PAGE):
        assert (ROOT / "k8s" / path).exists(), path
    [row] = re.findall(r"^\| `components` \| .*", FIRST, re.MULTILINE)
    components = {path.name for path in (ROOT / "k8s/components").iterdir()}
    assert {*re.findall(r"`([\w-]+)`", row)} == {"components", *components}
    for path in re.findall(r"docker build -f (\S+)", PAGE):
        assert (ROOT / path).is_file(), path


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands run."""
    return tmp_path_factory.mktemp("typed")


@pytest.fixture(scope="module")
def typed(work: Path) -> list[Any]:
    """The Secrets that kubectl creates from certificates of the page's commands."""
    folder = work
    (folder / "ledger.toml").write_text(FILES["ledger.toml"])
    (folder / "objects.toml").write_text(FILES["objects.toml"])
    for name in ("postgres-ca.crt", "postgres-password", "store-ca.crt", "access-key-id", "secret-access-key", "token"):
        (folder / name).write_text(name)
    with chdir(folder):
        for call in (call for command in COMMANDS for call in words(command, "fl") if call[0] == "ca"):
            done = CliRunner().invoke(app, call)
            assert done.exit_code == 0, done.output
        asked = [call for command in COMMANDS for call in words(command, "kubectl") if call[:2] == ["create", "secret"]]
        return [yaml.safe_load(_printed(["kubectl", *call])) for call in asked]


def _printed(command: Any) -> str:
    dry = ["--dry-run=client", "--output", "yaml"]
    return subprocess.run([*command, *dry], capture_output=True, text=True, check=True).stdout


@needs_kubectl
@pytest.mark.parametrize("folder", EVERY)
def test_every_secret_is_made_by_a_command_of_the_page(folder: str, typed: Any) -> None:
    """With all the keys that the objects ask for, in their namespace."""
    documented: Keys = {}
    for secret in typed:
        place = (secret["metadata"]["namespace"], secret["metadata"]["name"])
        documented.setdefault(place, set()).update(secret["data"])
    assert list(secrets_that_are_missing(build(folder), documented)) == []


@needs_kubectl
def test_no_authoritys_key_is_where_it_does_not_belong(typed: Any, work: Path) -> None:
    """That of operators is in no Secret, no other is beside daemons, and no issuer signs for all namespaces."""
    objects = build(EVERYTHING)
    daemons = {pod.namespace for pod in pods(objects) if "fl-client" in pod.title}
    assert daemons == {"impetus-clients"}
    made = {(secret["metadata"]["namespace"], secret["metadata"]["name"]) for secret in typed}
    assert {where for where, name in made if name == "impetus-ca"} == {"impetus"}
    first = b64encode((work / "pki" / "ca.key").read_bytes()).decode()
    assert [secret["metadata"]["name"] for secret in typed if first in secret["data"].values()] == []
    keys = [secret["metadata"]["name"] for secret in typed if "tls.key" in secret["data"]
            and secret["metadata"]["namespace"] in daemons]  # fmt: skip
    assert keys == []
    issuers = [candidate for candidate in objects if candidate["kind"].endswith("Issuer")]
    assert {(issuer["kind"], issuer["metadata"]["namespace"]) for issuer in issuers} == {("Issuer", "impetus")}


@needs_kubectl
def test_a_secret_of_certificates_has_the_type_that_cert_manager_gives_it() -> None:
    """A Secret's type never changes, so one made by hand can be handed over to cert-manager."""
    made = [command for command in COMMANDS if "secret generic" in command and "tls.crt" in command]
    assert made
    assert [command for command in made if "--type kubernetes.io/tls" not in command] == []


@needs_kubectl
def test_the_certificate_has_every_name_that_cert_managers_has() -> None:
    """By hand or by cert-manager: the coordinator answers to the same names."""
    certificate = find(build("k8s/overlays/production"), "Certificate", "fl-server", "impetus")
    assert certificate is not None
    wanted = {*certificate["spec"]["dnsNames"], *certificate["spec"]["ipAddresses"]}
    issued = [call for call in CALLS_OF_FL if call[:3] == ["ca", "issue", "server"] and "fl.example.org" in call]
    assert len(issued) == 2
    for call in issued:
        given = {option: [name for key, name in pairwise(call) if key == option] for option in ("--host", "--service")}
        assert set(pki.server_hosts(given["--host"], given["--service"])) == wanted


@needs_kubectl
def test_the_numbers_on_the_page_are_the_manifests() -> None:
    """Drain, preStop and grace."""
    [pod] = pods(build("k8s/base"))
    sleep = pod.containers[0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = read_settings(ROOT / "k8s/base/server.toml", ServerConfig).drain_grace_s
    assert f"`drain_grace_s` ({drain:g} s)" in PAGE
    assert f"`preStop` of {sleep} s and a grace of {pod.spec['terminationGracePeriodSeconds']} s" in PAGE


@needs_kubectl
def test_a_second_federation_is_in_its_own_namespaces(tmp_path: Path) -> None:
    """An overlay with a namespace over each of the two parts: no equal names, and nothing is left in the first ones."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("images", "*.py"))
    for over, where in (("../production", "impetus-2"), ("../../gpu-clients", "impetus-2-clients")):
        folder = tmp_path / "k8s/overlays" / where
        folder.mkdir()
        kind = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        (folder / "kustomization.yaml").write_text(f"{kind}namespace: {where}\nresources: [{over}]\n")
        objects = build(str(folder))
        assert {namespace(one) for one in objects} <= {"", where}
        assert [space["metadata"]["name"] for space in of_kind(objects, "Namespace")] == [where]


@needs_kubectl
def test_the_overlay_of_ones_own_is_built(tmp_path: Path) -> None:
    """With the page's text and the other overlays all checks pass, and it has its own settings."""
    [text] = re.findall(r"```yaml\n(# k8s/overlays/site/kustomization.yaml\n.*?)```", PAGE, re.DOTALL)
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("images", "*.py"))
    (tmp_path / SITE).mkdir()
    (tmp_path / SITE / "kustomization.yaml").write_text(text)
    [copy] = re.findall(r"`(cp -r [^`]+)`", PAGE)
    subprocess.run(shlex.split(copy), cwd=tmp_path, check=True)
    (tmp_path / SITE / "nodes" / "gpu-1.toml").write_text("[shard]\nindex = 1  # of this site\n")
    objects = build(str(tmp_path / SITE))
    assert problems(objects) == []
    [pod] = [pod for pod in pods(objects) if "fl-server" in pod.title]
    [daemon] = [pod for pod in pods(objects) if "fl-client" in pod.title]
    assert "# of this site" in config_files(objects, daemon)["/etc/impetus/nodes/gpu-1.toml"]
    assert pod.containers[0]["image"] == "registry.example.org/impetus/fl-server:0.1.0"
    assert pod.claims["state"]["spec"]["storageClassName"] == "fast"
    certificate = find(objects, "Certificate", "fl-server", "impetus")
    assert certificate is not None
    assert certificate["spec"]["dnsNames"][-1] == "fl.mine.example.org"


def test_the_documented_ledger_setting_is_valid(tmp_path: Path) -> None:
    """On top of the base it is read, and it holds no password."""
    (tmp_path / "ledger.toml").write_text(FILES["ledger.toml"])
    config = read_settings(ROOT / "k8s/base/server.toml", ServerConfig, [tmp_path / "ledger.toml"])
    assert config.ledger is not None
    assert "sslmode=verify-full" in config.ledger.get_secret_value()
    assert ":" not in config.ledger.get_secret_value().partition("://")[2].partition("@")[0]
    assert tomllib.loads(FILES["ledger.toml"]).keys() == {"ledger"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_federation_runs_as_on_the_page(tmp_path: Path) -> None:
    """The page's certificates, devices and run work with a coordinator with the base's settings, without a cluster."""
    page, ports = on_free_ports(FIRST)
    todo = [
        step for step in steps(page) if not (isinstance(step, Command) and re.match("kind|docker|kubectl", step.text))
    ]
    first_device = next(number for number, step in enumerate(todo) if isinstance(step, File))
    here = f"""state_dir = "state"
listen = "127.0.0.1:{ports["7070"]}"
admin_listen = "127.0.0.1:{ports["7071"]}"
metrics_listen = ""
health_listen = ""
[tls]
cert = "pki/server-coordinator.crt"
key = "pki/server-coordinator.key"
client_ca = "pki/ca.crt"
"""
    pod: list[File | Command] = [
        File("here.toml", here),
        Command(f"fl-server --config {ROOT}/k8s/base/server.toml --config here.toml > server.log &"),
        Command("grep serving server.log", ('"event": "serving"',)),
    ]
    follow([*todo[:first_device], *pod, *todo[first_device:]], ports, tmp_path / "work")
    assert (tmp_path / "work" / "first.safetensors").stat().st_size > 0
