"""Manifests as Kubernetes would get them: built by `kubectl kustomize`, once for each folder."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OURS = ("k8s/base", "k8s/overlays/dev", "k8s/overlays/production", "k8s/overlays/production-ha")
COMPONENTS = tuple(f"tests/k8s/overlays/{path.name}" for path in sorted((ROOT / "tests/k8s/overlays").iterdir()))
EVERY = (*OURS, *COMPONENTS)
EVERYTHING = "tests/k8s/overlays/everything"

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


# The loader in C, where it was built, takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def _built(folder: str) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Kustomize warns about deprecated fields.
    assert not done.stderr, done.stderr
    return list(yaml.load_all(done.stdout, _LOADER))


def build(folder: str) -> list[dict[str, Any]]:
    """The objects of a kustomization, the caller's own to change."""
    return copy.deepcopy(_built(folder))
