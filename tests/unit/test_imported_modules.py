"""The modules that a verb imports at its first use, beyond torch and numpy. Each module delays the first byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

_NAMES = """
arguments config descriptors entry_points errors exports interrupts lifecycle logs phases report segments types units
waits
cuda cuda.driver cuda.events
digest digest.leaf
engine engine.fetch_ring engine.place engine.run engine.threads engine.trace
loader loader.boxes loader.load loader.progress loader.regions loader.report loader.run loader.session
loader.tensor
memory memory.idle_pools memory.mapping memory.staging
plan plan.layout plan.schedule
storage storage.files storage.foreign_json storage.headers storage.io_uring storage.local
storage.locate storage.manifest storage.mapped storage.safetensors storage.small_files storage.source
storage.weight_set storage.write
telemetry telemetry.journey telemetry.metrics
"""
FOR_LOAD = frozenset(f"penstock.{name}" for name in _NAMES.split())
"""The modules of Penstock that load local files. A module that is not needed for that should be imported later."""

PACKAGES = {"penstock", "msgspec", "blake3", "xxhash", "numpy"}
"""The packages that `load` imports. numpy imports `numpy.typing`."""
SMALL = {"_decimal", "decimal", "hmac", "resource", "secrets", "shlex"}
"""The modules of the standard library that `load` imports and torch does not."""

SLOW = (
    "asyncio",
    "cryptography",
    "email",
    "importlib.metadata",
    "obstore",
    "prometheus_client",
    "ssl",
    "sympy",
    "torch.distributed.tensor",
    "triton",
    "unittest.mock",
)
"""Modules that take 5 ms to a second to import."""

PROGRAM = """
import json, sys
import torch, numpy
before = set(sys.modules)
import penstock as ps
{use}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_by(use: str, *argv: str) -> set[str]:
    """Return the modules that a new process imports for some lines, after torch and numpy."""
    command = [sys.executable, "-c", PROGRAM.format(use=use), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout))


def test_loading_local_files_imports_listed_modules_only(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    new = imported_by("ps.load(sys.argv[1])", str(tmp_path))
    ours = {name for name in new if name.startswith("penstock.")}
    assert ours <= FOR_LOAD, sorted(ours - FOR_LOAD)
    packages = {name.partition(".")[0] for name in new} - PACKAGES - SMALL
    assert not packages


def test_list_of_imported_modules_has_no_stale_entry(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    assert imported_by("ps.load(sys.argv[1])", str(tmp_path)) >= FOR_LOAD


@pytest.mark.parametrize("verb", ["load", "load_into", "stream", "safe_open", "inspect", "verify", "convert"])
def test_local_verb_imports_no_slow_module(verb: str) -> None:
    assert not imported_by(f"ps.{verb}") & set(SLOW)


HOSTS_A_HUB = {"penstock_hub.directory", "penstock_hub.server", "starlette", "uvicorn"}
"""Modules that only the process that hosts the hub of its host needs."""


@pytest.mark.parametrize("verb", ["publisher", "subscriber", "join", "cache.attach"])
def test_fleet_verb_imports_no_hub_server(verb: str) -> None:
    unneeded = {*HOSTS_A_HUB, "cryptography.hazmat.primitives.serialization"}
    new = imported_by(f"ps.{verb}\nimport penstock.hub.local_hub")
    assert "penstock.hub.local_hub" in new
    assert not new & unneeded


def test_first_member_of_host_hosts_hub_without_prometheus(tmp_path: Path) -> None:
    first = "import os\nos.environ['PENSTOCK_RUNTIME_DIR'] = sys.argv[1]"
    use = f"{first}\nwith ps.publisher('m', {{'w': torch.zeros(2)}}): pass"
    new = imported_by(use, str(tmp_path))
    assert new >= HOSTS_A_HUB
    assert not {name for name in new if name.startswith("prometheus_client")}


@pytest.mark.parametrize("verb", ["publisher", "subscriber", "join"])
def test_fleet_verb_imports_no_distributed_tensors(verb: str) -> None:
    new = imported_by(f"ps.{verb}")
    assert not new & {"asyncio", "email", "obstore", "sympy", "torch.distributed.tensor", "triton", "unittest.mock"}


COLLECTIONS = """
import gc, os
os.environ["PENSTOCK_RUNTIME_DIR"] = sys.argv[1]
callers = set()
def note(phase, info):
    frame = sys._getframe(1)
    while frame is not None:
        callers.add(frame.f_code.co_qualname)
        frame = frame.f_back
gc.callbacks.append(note)
gc.set_threshold(20)
with ps.publisher("m", {"w": torch.zeros(2)}):
    assert gc.isenabled()
assert "publisher" in callers
assert "Member.join" not in callers
"""


def test_join_delays_garbage_collection_until_it_returns(tmp_path: Path) -> None:
    assert imported_by(COLLECTIONS, str(tmp_path))


def test_garbage_collection_is_enabled_after_import() -> None:
    assert imported_by("ps.load\nimport gc\nassert gc.isenabled()")
    assert imported_by("import gc\ngc.disable()\nps.load\nassert not gc.isenabled()")


def test_command_run_imports_neither_numpy_nor_other_packages() -> None:
    program = (
        "import json, sys\n"
        "from penstock.cli.main import add_commands\n"
        "add_commands(['run', '--', 'true'])\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    packages = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "penstock_hf" in packages
    assert not packages & {"numpy", "torch", "penstock_convert", "penstock_tools", "penstock_compile_cache"}
