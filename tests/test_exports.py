"""The public names of Penstock. Adding one edits this list, which a reviewer sees."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import exports

ROOT = Path(__file__).resolve().parent.parent
VERBS = ["convert", "inspect", "join", "load", "load_file", "load_into", "manifest", "publisher", "safe_open"]
VERBS += ["stream", "subscriber", "tensor_parallel", "verify"]
VALUES = [
    "Box",
    "ConnectionSettings",
    "DType",
    "Fleet",
    "Hooks",
    "Manifest",
    "ReadSettings",
    "Shard",
    "TensorStream",
    "Variant",
    "Weights",
]
REPORTS = ["ConvertReport", "FetchReport", "LoadReport", "PublishReport", "UpdateReport"]
ERRORS = ["ConfigError", "HubUnavailable", "IntegrityError", "NotFound", "PenstockError", "PlanError", "SourceError"]
ERRORS += ["VersionRefused"]
MODULES = {
    "cache": ["AttachReport", "Attached", "WeightCache", "attach", "cache_parameters"],
    "hub": ["drain", "status", "why"],
    "modules": ["BackgroundLoad", "load_in_background"],
    "reports": ["InspectReport", "ManifestReport", "VerifyReport"],
    "sync": ["Publisher", "PublisherSettings", "StagedVersion", "StoredVersion", "Subscriber", "SubscriberSettings"],
    "telemetry": ["MetricsEndpoint", "phase", "serve_metrics"],
}


def test_exported_names_match_snapshot() -> None:
    assert sorted(penstock.__all__) == sorted([*VERBS, *VALUES, *REPORTS, *ERRORS, "__version__"])
    assert len(penstock.__all__) <= 40


def test_public_modules_match_snapshot() -> None:
    assert {name: sorted(table) for name, table in exports.MODULES.items()} == MODULES


def test_every_public_name_has_docstring() -> None:
    places = [(penstock, penstock.__all__)]
    places += [(importlib.import_module(f"penstock.{name}"), names) for name, names in MODULES.items()]
    for module, names in places:
        assert set(names) <= set(dir(module))
        bare = [name for name in names if name != "__version__" and not getattr(module, name).__doc__]
        assert bare == []


def test_public_functions_have_at_most_ten_parameters() -> None:
    tables = {"": exports.PUBLIC, **{f".{name}": table for name, table in exports.MODULES.items()}, ".spi": exports.SPI}
    for place, table in tables.items():
        module = importlib.import_module(f"penstock{place}")
        for name in table:
            verb = getattr(module, name)
            # Fields of a value are not counted: they have names of their own, and most are left out.
            if inspect.isfunction(verb) or name == "WeightCache":
                assert len(inspect.signature(verb).parameters) <= 10, name


def test_public_submodule_is_available_without_explicit_import() -> None:
    code = "import penstock; print(penstock.cache.attach.__name__, penstock.errors.PeerLost.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["attach", "PeerLost"]


def test_public_names_stay_callable_after_submodule_imports() -> None:
    for name, names in MODULES.items():
        module = importlib.import_module(f"penstock.{name}")
        for place in exports.MODULES[name].values():
            importlib.import_module(place.partition(":")[0])
        assert all(callable(getattr(module, each)) for each in names)


@pytest.mark.parametrize("name", sorted(exports.GUESSES))
def test_unknown_name_error_suggests_public_name(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(penstock, name)
    instead = exports.GUESSES[name]
    assert instead in str(caught.value)
    if instead.startswith("penstock."):
        path = instead.partition("(")[0].split(".")[1:]
        found = penstock
        for part in path:
            found = getattr(found, part)


def test_import_penstock_does_not_import_torch() -> None:
    code = "import penstock, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_stubs_match_export_tables() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "stubs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
