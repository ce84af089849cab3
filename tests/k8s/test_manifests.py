"""Every overlay and component builds, and each object is valid for Kubernetes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.k8s.checks import problems
from tests.k8s.manifests import EVERY, EVERYTHING, ROOT, build, needs_kubectl
from tests.k8s.objects import namespace, of_kind, pods, settings, title
from tests.k8s.pod_checks import pods_are_restricted
from tests.k8s.schemas.validation import NEWEST, OLDEST, SCHEMAS, refusal
from tests.marks import slow_except

pytestmark = needs_kubectl


def first(folder: str, kind: str) -> dict[str, Any]:
    """An object of a kind from a kustomization."""
    return of_kind(build(folder), kind)[0]


@pytest.mark.parametrize("version", slow_except([OLDEST, NEWEST], NEWEST))
@pytest.mark.parametrize("folder", EVERY)
def test_every_object_fits_its_schema(folder: str, version: str) -> None:
    """No unknown field, none missing, none of another type."""
    refusals = {title(built): refusal(built, version) for built in build(folder)}
    assert {name: error for name, error in refusals.items() if error is not None} == {}


@pytest.mark.parametrize("folder", EVERY)
def test_objects_fit_each_other_and_their_programs(folder: str) -> None:
    """No check finds a problem."""
    assert problems(build(folder)) == []


@pytest.mark.parametrize("folder", EVERY)
def test_no_object_is_defined_twice(folder: str) -> None:
    """Kind, namespace and name are unique."""
    names = [(built["kind"], namespace(built), built["metadata"]["name"]) for built in build(folder)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("folder", EVERY)
def test_every_object_has_our_labels(folder: str) -> None:
    """`kubectl get all -l app.kubernetes.io/part-of=impetus` finds it."""
    assert [
        title(built)
        for built in build(folder)
        if built["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") != "impetus"
    ] == []


@pytest.mark.parametrize("folder", EVERY)
def test_no_api_rights_and_no_secret_in_the_manifests(folder: str) -> None:
    """There is no role, no binding, and no Secret with content."""
    kinds = {built["kind"] for built in build(folder)}
    assert kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret"} == set()


@pytest.mark.parametrize("folder", EVERY)
def test_every_object_can_be_applied(folder: str) -> None:
    """`kubectl apply` writes an object into an annotation of itself, and annotations end at 256 KiB."""
    assert {title(built): size for built in build(folder) if (size := len(json.dumps(built))) > 200 << 10} == {}


def test_every_component_is_built_by_a_test() -> None:
    """A folder with a kustomization is an overlay of the product, or part of an overlay here."""
    written = "".join(path.read_text() for path in (ROOT / "tests/k8s/overlays").glob("*/kustomization.yaml"))
    written += "".join(path.read_text() for path in (ROOT / "k8s").glob("overlays/*/kustomization.yaml"))
    components = [
        path.parent.relative_to(ROOT / "k8s") for path in (ROOT / "k8s/components").rglob("kustomization.yaml")
    ]
    assert len(components) >= 5
    assert [str(component) for component in components if f"{component}\n" not in written] == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("StatefulSet", lambda spec: spec.update(replica=1)),
        ("StatefulSet", lambda spec: spec["template"]["spec"]["containers"][0].pop("name")),
        ("Service", lambda spec: spec["ports"][0].update(port="grpc")),
        ("NetworkPolicy", lambda spec: spec.update(policyType=["Ingress"])),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(intervall="1s")),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(interval="soon")),
        ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(ports="metrics")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update(annotation={})),
        ("Certificate", lambda spec: spec.pop("issuerRef")),
        ("Certificate", lambda spec: spec["privateKey"].update(algorithm="ecdsa")),
        ("Issuer", lambda spec: spec["ca"].update(secret="x")),
        ("Gateway", lambda spec: spec["listeners"][0]["tls"].update(mode="PassThrough")),
        ("TLSRoute", lambda spec: spec["rules"][0]["backendRefs"][0].update(port="7070")),
        ("TLSRoute", lambda spec: spec.update(hostname="fl.example.org")),
    ],
)
def test_a_wrong_field_is_found(kind: str, change: Any) -> None:
    """Unknown, missing, of another type, or not one of the values that there are."""
    thing = first(EVERYTHING, kind)
    assert refusal(thing) is None
    change(thing["spec"])
    assert refusal(thing) is not None


def test_the_backup_pod_has_the_coordinators_restrictions() -> None:
    """It has the coordinator's volume, user and restrictions."""
    shell = yaml.safe_load((ROOT / "k8s/tools/state.yaml").read_text())
    assert refusal(shell) is None
    [pod] = pods(build("k8s/base"))
    owner = {"kind": "Deployment", "metadata": shell["metadata"], "spec": {"template": shell}}
    assert list(pods_are_restricted([owner])) == []
    assert shell["spec"]["securityContext"] == pod.spec["securityContext"]
    assert shell["spec"]["containers"][0]["image"] == pod.containers[0]["image"]
    [volume] = shell["spec"]["volumes"]
    [claim] = pod.claims
    assert volume["persistentVolumeClaim"]["claimName"] == f"{claim}-{pod.owner['metadata']['name']}-0"


def test_readme_names_the_versions_that_were_checked() -> None:
    """They are the newest and the oldest of Kubernetes, and those of the other projects' schemas."""
    page = (ROOT / "k8s/README.md").read_text()
    assert f"the schemas of Kubernetes {NEWEST}," in page
    assert f"Kubernetes {OLDEST} is the oldest" in page
    for kind, words in {"Certificate": "cert-manager", "PodMonitor": "operator", "Gateway": "Gateway API"}.items():
        schema = next(schema for (_, name), schema in SCHEMAS.items() if name == kind)
        found = re.search(r" v(\d+\.\d+)\.", schema["$comment"])
        assert found is not None
        assert f"{words} {found[1]}" in page


def test_production_asks_for_more_than_the_base() -> None:
    """Threads and durability come on top of the base's settings, in the order of the arguments."""
    [pod] = pods(build("k8s/overlays/production"))
    [config] = settings(build("k8s/overlays/production"), pod)
    assert (config["threads"], config["durability"], config["listen"]) == (4, "power", "0.0.0.0:7070")
    assert pod.containers[0]["resources"]["requests"]["cpu"] == str(config["threads"])


def test_a_changed_setting_rolls_the_pod() -> None:
    """The name of a ConfigMap with settings follows its content, and the pod names it."""
    names = []
    for folder in ("k8s/base", "k8s/overlays/production"):
        [pod] = pods(build(folder))
        names.append(pod.volumes["settings"]["configMap"]["name"])
    assert len(set(names)) == 2
    assert all(name.startswith("fl-server-settings-") for name in names)


def test_the_gateway_is_the_only_way_in() -> None:
    """With it the coordinator's Service has no load balancer in any overlay."""
    kinds = {
        folder: next(
            service["spec"]["type"]
            for service in of_kind(build(folder), "Service")
            if service["metadata"]["name"] == "fl-server"
        )
        for folder in (EVERYTHING, "k8s/overlays/production", "k8s/overlays/dev")
    }
    assert list(kinds.values()) == ["ClusterIP", "LoadBalancer", "NodePort"]
