"""The public names of Penstock. Adding one edits this list, which a reviewer sees."""

from __future__ import annotations

import subprocess
import sys

import penstock
from penstock import errors

VERBS = ["attach", "inspect", "join", "load", "load_file", "load_into", "safe_open", "stream", "verify"]
VERBS += ["publisher", "subscriber", "convert", "manifest", "phase", "serve_metrics", "drain", "status", "why"]
VERBS += ["log_prob_check", "start_loading", "hand_over", "empty_module", "tensor_parallel"]
VALUES = [
    "AttachReport",
    "Attached",
    "Box",
    "ConnectionSettings",
    "DType",
    "Emptied",
    "FetchReport",
    "Fleet",
    "InspectReport",
    "Manifest",
    "LoadReport",
    "Loading",
    "TensorStream",
    "Variant",
]
VALUES += ["ConvertReport", "ManifestReport", "MetricsEndpoint", "Keeper", "VerifyReport", "Weights", "WorkerSettings"]
VALUES += ["HubReporter"]
VALUES += [
    "Hooks",
    "PublishReport",
    "Publisher",
    "Shard",
    "StagedVersion",
    "StoredVersion",
    "Subscriber",
    "UpdateReport",
]
ERRORS = sorted(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.PenstockError) and value.__module__ == errors.__name__
)


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == sorted([*VERBS, *VALUES, *ERRORS, "__version__"])


def test_every_public_name_is_there() -> None:
    assert [name for name in penstock.__all__ if not hasattr(penstock, name)] == []
    assert set(penstock.__all__) <= set(dir(penstock))


def test_every_public_name_is_documented() -> None:
    bare = [name for name in penstock.__all__ if name != "__version__" and not getattr(penstock, name).__doc__]
    assert bare == []


def test_importing_penstock_imports_no_torch() -> None:
    code = "import penstock, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
