"""Checks that all references exist: namespaces, volumes, ConfigMaps, Secrets, files, issuers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tests.k8s.objects import Object, Pod, config_files, find, lies_outside, namespace, of_kind, pods, settings, title

Problems = Iterator[str]
Keys = dict[tuple[str, str], set[str]]
"""Keys of Secrets, by namespace and name."""
TLS_KEYS = ("ca.crt", "tls.crt", "tls.key")
_CLUSTER_WIDE = ("Namespace", "PriorityClass")


def namespaces_are_guarded(objects: Sequence[Object]) -> Problems:
    """Each object has a namespace, which is created here and has a Pod Security level."""
    made = {space["metadata"]["name"]: space["metadata"].get("labels", {}) for space in of_kind(objects, "Namespace")}
    for checked in objects:
        if checked["kind"] not in _CLUSTER_WIDE and namespace(checked) not in made:
            yield f"{title(checked)}: its namespace {namespace(checked)!r} is none of {', '.join(made)}"
    for name, labels in made.items():
        if "pod-security.kubernetes.io/enforce" not in labels:
            yield f"Namespace/{name}: no level of Pod Security is enforced"


def volumes_are_there(objects: Sequence[Object]) -> Problems:
    """Each mount has its volume, and each volume is mounted."""
    for pod in pods(objects):
        mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        volumes = {*pod.volumes, *pod.claims}
        yield from (f"{pod.title}: there is no volume {name} to mount" for name in sorted(mounted - volumes))
        yield from (f"{pod.title}: no container mounts the volume {name}" for name in sorted(volumes - mounted))


def references_are_there(objects: Sequence[Object]) -> Problems:
    """ConfigMaps, service accounts and issuers that are named are among the objects."""
    for pod in pods(objects):
        maps = [volume["configMap"]["name"] for volume in pod.volumes.values() if "configMap" in volume]
        wanted = [("ServiceAccount", pod.spec["serviceAccountName"]), *(("ConfigMap", name) for name in maps)]
        for kind, name in wanted:
            if find(objects, kind, name, pod.namespace) is None:
                yield f"{pod.title}: there is no {kind} {name}"
        if (priority := pod.spec.get("priorityClassName")) and not find(objects, "PriorityClass", priority, ""):
            yield f"{pod.title}: there is no PriorityClass {priority}"
    for certificate in of_kind(objects, "Certificate"):
        issuer = certificate["spec"]["issuerRef"]
        if find(objects, issuer["kind"], issuer["name"], namespace(certificate)) is None:
            yield f"{title(certificate)}: there is no {issuer['kind']} {issuer['name']}"


def secrets_that_are_missing(objects: Sequence[Object], documented: Keys) -> Problems:
    """Secrets that are used, but neither made by a Certificate nor documented, with their keys."""
    made = {
        (namespace(certificate), certificate["spec"]["secretName"]): {*TLS_KEYS}
        for certificate in of_kind(objects, "Certificate")
    }
    for holder, where, name, keys in _wanted(objects):
        missing = keys - documented.get((where, name), set()) - made.get((where, name), set())
        if missing:
            yield f"{holder}: the Secret {name} has no source of {', '.join(sorted(missing))}"


def _wanted(objects: Sequence[Object]) -> Iterator[tuple[str, str, str, set[str]]]:
    for issuer in of_kind(objects, "Issuer"):
        yield title(issuer), namespace(issuer), issuer["spec"]["ca"]["secretName"], {"tls.crt", "tls.key"}
    for pod in pods(objects):
        for name, keys in [*_mounted(pod), *_in_the_environment(pod)]:
            yield pod.title, pod.namespace, name, keys


def _mounted(pod: Pod) -> Iterator[tuple[str, set[str]]]:
    for volume in pod.volumes.values():
        if secret := volume.get("secret"):
            yield secret["secretName"], {item["key"] for item in secret.get("items", [])} or {*TLS_KEYS}
        for source in volume.get("projected", {}).get("sources", []):
            yield source["secret"]["name"], {item["key"] for item in source["secret"]["items"]}


def _in_the_environment(pod: Pod) -> Iterator[tuple[str, set[str]]]:
    for variable in (variable for container in pod.containers for variable in container.get("env", [])):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            yield reference["name"], {reference["key"]}


def files_are_there(objects: Sequence[Object]) -> Problems:
    """Files that a program reads are mounted at their paths; paths that it writes are persistent."""
    for pod in pods(objects):
        files, lasting = _files(objects, pod), _lasting(pod)
        arguments = [argument for container in pod.containers for argument in container["args"]]
        paths = [path for path in arguments if path.startswith("/") and "$" not in path and path not in lasting]
        for config in settings(objects, pod):
            tls, state = config.get("tls", {}), config.get("state_dir")
            own = [value for key, value in tls.items() if key in {"ca", "cert", "key", "client_ca"}]
            paths += [path for path in own if not (tls.get("renew") and path.startswith(f"{state}/tls/current/"))]
            paths += [*config.get("web_tls", {}).values(), *config.get("worker_tls", {}).values()]
            paths += [value for key, value in config.get("enrollment", {}).items() if key in {"ca_cert", "ca_key"}]
            if state not in lasting and not (pod.owner["kind"] == "Deployment" and lies_outside(pod)):
                yield f"{pod.title}: state_dir {state} does not outlive the pod"
            if tls.get("renew") and not any(_enrolls(init, state) for init in pod.spec.get("initContainers", [])):
                yield f"{pod.title}: no init container gets a certificate into {state}"
        yield from (f"{pod.title}: {path} is not mounted" for path in sorted({*paths} - files))


def _enrolls(container: Object, state_dir: str | None) -> bool:
    """Whether the container gets this node's certificate into the state directory."""
    given = dict(pairwise(container["args"]))
    return given.get("--state-dir") == state_dir and given.get("--client-id") == "$(NODE_NAME)"


def keys_are_not_shared(objects: Sequence[Object]) -> Problems:
    """Pods of one workload on several nodes get no private key, and no container that runs tasks sees their token."""
    for pod in pods(objects):
        if pod.owner["kind"] != "DaemonSet":
            continue
        yield from (f"{pod.title}: each pod can read {key} of the Secret {name}, which is for one holder"
                    for name, keys in _mounted(pod) for key in sorted(keys) if key.endswith(".key"))  # fmt: skip
        tokens = {name for name, volume in pod.volumes.items() if "token" in str(volume.get("secret", {}))}
        for container in (running for running in pod.spec["containers"] if running["args"][0] != "init"):
            for mount in container.get("volumeMounts", []):
                if mount["name"] in tokens:
                    yield f"{pod.title}: the container {container['name']} can read the token"


def _files(objects: Sequence[Object], pod: Pod) -> set[str]:
    """Paths of all files of a pod from ConfigMaps and Secrets."""
    files = set(config_files(objects, pod))
    for mount in (mount for container in pod.containers for mount in container.get("volumeMounts", [])):
        volume = pod.volumes.get(mount["name"], {})
        sources = [source["secret"] for source in volume.get("projected", {}).get("sources", [])]
        for secret in [volume["secret"]] if "secret" in volume else sources:
            names = [item["path"] for item in secret.get("items", [])] or TLS_KEYS
            files |= {f"{mount['mountPath']}/{name}" for name in names}
    return files


def _lasting(pod: Pod) -> set[str]:
    """Paths at which a pod writes persistent files."""
    lasting = {*pod.claims, *(name for name, volume in pod.volumes.items() if "hostPath" in volume)}
    mounts = [mount for container in pod.containers for mount in container.get("volumeMounts", [])]
    return {mount["mountPath"] for mount in mounts if mount["name"] in lasting and not mount.get("readOnly")}


def certificates_name_roles(objects: Sequence[Object]) -> Problems:
    """A certificate has the URI by which both ends know its holder, and the use that the role needs."""
    uses = {"server": "server auth", "client": "client auth", "worker": "client auth"}
    for certificate in of_kind(objects, "Certificate"):
        found = re.fullmatch(r"fl://(server|client|worker)/[\w.-]{1,64}", "".join(certificate["spec"].get("uris", [])))
        if found is None or uses[found[1]] not in certificate["spec"]["usages"]:
            yield f"{title(certificate)}: expected one URI fl://ROLE/NAME and the use of that role"
        elif found[1] == "server" and not certificate["spec"].get("dnsNames"):
            yield f"{title(certificate)}: a server without a name that a client could check"
