"""No pod of the manifests can use the API of Kubernetes. Without kubectl: from the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[2] / "k8s"


def documents() -> list[tuple[Path, dict[str, Any]]]:
    """All objects and patches of the manifests."""
    paths = sorted(K8S.rglob("*.yaml"))
    return [
        (path, document)
        for path in paths
        for document in yaml.safe_load_all(path.read_text())
        if isinstance(document, dict)
    ]


def test_no_pod_gets_rights_at_the_api() -> None:
    """There are no roles and no bindings, and no service account has a token mounted."""
    found = documents()
    kinds = {document["kind"] for _, document in found if "kind" in document}
    assert {"StatefulSet", "DaemonSet", "ServiceAccount"} <= kinds
    assert not [kind for kind in kinds if "Role" in kind]
    accounts = [(path, document) for path, document in found if document.get("kind") == "ServiceAccount"]
    assert [path for path, account in accounts if account.get("automountServiceAccountToken") is not False] == []
    workloads = [(path, document) for path, document in found if document.get("kind") in {"StatefulSet", "DaemonSet"}]
    pods = [(path, workload["spec"].get("template", {}).get("spec", {})) for path, workload in workloads]
    assert [path for path, pod in pods if pod.get("automountServiceAccountToken", False) is not False] == []
