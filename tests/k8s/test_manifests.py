"""Every overlay and component is built, and each object is one that Kubernetes takes as it stands."""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.k8s.checks import problems
from tests.k8s.manifests import EVERY, EVERYTHING, ROOT, build, needs_kubectl
from tests.k8s.objects import namespace, of_kind, pods, settings, title
from tests.k8s.pod_checks import pods_are_restricted

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says which of its own dependencies are old
    import kubernetes_validate

pytestmark = needs_kubectl

SCHEMAS = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("schemas/*.json")))
}


OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version().rpartition(".")[0]
"""Of Kubernetes: what README.md says, and the newest whose schemas are at hand."""


@functools.cache
def _refusal(text, version):
    thing = json.loads(text)
    if schema := SCHEMAS.get((thing["apiVersion"], thing["kind"])):
        return jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(thing))
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return error
    return None


def refusal(thing, version=NEWEST):
    """What a schema says against an object; None if nothing. Most objects are in several kustomizations."""
    return _refusal(json.dumps(thing), version)


def first(folder, kind):
    """An object of a kind from a kustomization."""
    return of_kind(build(folder), kind)[0]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", EVERY)
def test_every_object_is_as_its_schema_wants_it(folder, version):
    """No unknown field, none missing, none of another type."""
    refusals = {title(each): refusal(each, version) for each in build(folder)}
    assert {name: error for name, error in refusals.items() if error is not None} == {}


@pytest.mark.parametrize("folder", EVERY)
def test_objects_fit_each_other_and_their_programs(folder):
    """No check has anything to say."""
    assert problems(build(folder)) == []


@pytest.mark.parametrize("folder", EVERY)
def test_no_object_is_there_twice(folder):
    """Kind, namespace and name are one object's."""
    names = [(each["kind"], namespace(each), each["metadata"]["name"]) for each in build(folder)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("folder", EVERY)
def test_every_object_says_that_it_is_ours(folder):
    """`kubectl get all -l app.kubernetes.io/part-of=impetus` finds it."""
    assert [
        title(each)
        for each in build(folder)
        if each["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") != "impetus"
    ] == []


@pytest.mark.parametrize("folder", EVERY)
def test_nobody_has_rights_and_no_secret_is_written_down(folder):
    """No role, no binding, and no Secret with anything in it: those that are named are made elsewhere."""
    kinds = {each["kind"] for each in build(folder)}
    assert kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret"} == set()


@pytest.mark.parametrize("folder", EVERY)
def test_every_object_can_be_applied(folder):
    """`kubectl apply` writes an object into an annotation of itself, and annotations end at 256 KiB."""
    assert {title(each): size for each in build(folder) if (size := len(json.dumps(each))) > 200 << 10} == {}


def test_every_component_is_built_by_a_test():
    """A folder with a kustomization is an overlay of the product, or part of an overlay here."""
    written = "".join(path.read_text() for path in (ROOT / "tests/k8s/overlays").glob("*/kustomization.yaml"))
    written += "".join(path.read_text() for path in (ROOT / "k8s").glob("overlays/*/kustomization.yaml"))
    components = [
        path.parent.relative_to(ROOT / "k8s") for path in (ROOT / "k8s/components").rglob("kustomization.yaml")
    ]
    assert len(components) >= 5
    assert [str(each) for each in components if f"{each}\n" not in written] == []


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
def test_a_wrong_field_is_seen(kind, change):
    """Unknown, missing, of another type, or not one of the values that there are."""
    thing = first(EVERYTHING, kind)
    assert refusal(thing) is None
    change(thing["spec"])
    assert refusal(thing) is not None


def test_the_pod_for_backups_is_as_good_as_the_coordinators():
    """Its volume is the coordinator's, and so are its user and all that it may not."""
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


def test_readme_names_the_versions_that_were_checked():
    """Of Kubernetes the newest and the oldest, of the others those whose schemas are here."""
    page = (ROOT / "k8s/README.md").read_text()
    assert f"the schemas of Kubernetes {NEWEST}," in page
    assert f"Kubernetes {OLDEST} is the oldest" in page
    for kind, words in {"Certificate": "cert-manager", "PodMonitor": "operator", "Gateway": "Gateway API"}.items():
        schema = next(schema for (_, name), schema in SCHEMAS.items() if name == kind)
        found = re.search(r" v(\d+\.\d+)\.", schema["$comment"])
        assert found is not None
        assert f"{words} {found[1]}" in page


def test_production_asks_for_more_than_the_base():
    """Threads and durability come on top of the base's settings, in the order of the arguments."""
    [pod] = pods(build("k8s/overlays/production"))
    [told] = settings(build("k8s/overlays/production"), pod)
    assert (told["threads"], told["durability"], told["listen"]) == (4, "power", "0.0.0.0:7070")
    assert pod.containers[0]["resources"]["requests"]["cpu"] == str(told["threads"])


def test_a_changed_setting_rolls_the_pod():
    """The name of a ConfigMap with settings follows its content, and the pod names it."""
    names = []
    for folder in ("k8s/base", "k8s/overlays/production"):
        [pod] = pods(build(folder))
        names.append(pod.volumes["settings"]["configMap"]["name"])
    assert len(set(names)) == 2
    assert all(name.startswith("fl-server-settings-") for name in names)


def test_the_gateway_is_the_only_way_in():
    """With it the coordinator's Service has no load balancer, whatever the overlay says."""
    kinds = {
        folder: next(each["spec"]["type"] for each in of_kind(build(folder), "Service") if "type" in each["spec"])
        for folder in (EVERYTHING, "k8s/overlays/production", "k8s/overlays/dev")
    }
    assert list(kinds.values()) == ["ClusterIP", "LoadBalancer", "NodePort"]
