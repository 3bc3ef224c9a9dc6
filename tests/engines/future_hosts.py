"""Run a plug-in with an engine whose modules lack one name, as in a future release, and print what happens as JSON.

    python future_hosts.py vllm|sglang CHECKPOINT

The engine is the installed one. Its modules are imported once, and then each case runs in a fork of this process. The
cases are the names of the engine that the adapter's source mentions, so a name that the adapter begins to use is a new
case. A removed module cannot be imported anymore, but the engine's other modules still refer to its contents, as if the
engine had moved the module.

`test_vllm_future` and `test_sglang_future` run this program.
"""

from __future__ import annotations

import abc
import ast
import asyncio
import functools
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from enum import EnumType
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.engines import host_releases

FUTURE = {"vllm": "0.34.0", "sglang": "0.5.24"}
"""The release that each engine claims to be."""
NUM_PROCESSES = 2
TIMEOUT_S = 60
GROWN = "every patched function has one more argument"
"""The case in which no name is missing, but signatures have changed."""
CHANGED = {
    "vllm": [
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader._get_weights_iterator()",
        "vllm.distributed.weight_transfer.base:WeightTransferEngine.new_step()",
    ],
    "sglang": [
        "sglang.srt.model_loader.loader:DefaultModelLoader._get_weights_iterator()",
        "sglang.srt.model_loader.loader:DefaultModelLoader._prepare_weights()",
    ],
}
"""Methods that get other parameters, or that are new and abstract. The adapter's classes override or call them."""
OTHER = SimpleNamespace(load_format="auto")
"""The configuration of an engine that does not use Penstock."""


class Host:
    """An engine with its own loader, and with requests for features of the plug-in."""

    name: str
    plugin: Any
    """The adapter's module with `PLUGIN`."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def load_plugins(self) -> None:
        """Load plug-ins as the engine does."""
        raise NotImplementedError

    def own(self) -> object:
        """Use the engine without Penstock."""
        raise NotImplementedError

    def requests(self) -> dict[str, Callable[[], object]]:
        """Return, by part of the plug-in, a request for a feature that needs the part."""
        raise NotImplementedError

    def patched(self) -> Iterator[tuple[Any, str]]:
        """Yield the owner and the name of each function that the plug-in has replaced."""
        raise NotImplementedError


class Vllm(Host):
    name = "vllm"

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        host_releases.import_vllm()
        from vllm import plugins
        from vllm.config import WeightTransferConfig, set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.model_executor.model_loader import get_model_loader

        import penstock_vllm.plugin

        self.plugin = penstock_vllm.plugin
        self._plugins, self._load_config, self._get_loader = plugins, LoadConfig, get_model_loader
        self._factory, self._transfer = WeightTransferEngineFactory, WeightTransferConfig(backend="penstock")
        self._config, self._set_config = host_releases.vllm_config(), set_current_vllm_config
        self._model: Any = SimpleNamespace(
            model=str(checkpoint), revision=None, quantization=None, is_moe=False, multimodal_config=None
        )

    def load_plugins(self) -> None:
        self._plugins.plugins_loaded = False
        self._plugins.load_general_plugins()

    def read(self, load_format: str, extra: dict[str, Any] | None = None) -> object:
        loader = self._get_loader(self._load_config(load_format=load_format, model_loader_extra_config=extra or {}))
        read: dict[str, str] = {}
        model: Any = torch.nn.Module()
        model.load_weights = lambda weights: read.update((name, host_releases.digest_of(t)) for name, t in weights)
        with self._set_config(self._config):
            loader.load_weights(model, self._model)
        return read

    def own(self) -> object:
        self._config.try_verify_and_update_config()
        return self.read("safetensors")

    def requests(self) -> dict[str, Callable[[], object]]:
        compiled = {"compile_cache": True}
        sleeps = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        model = host_releases.Model()
        return {
            self.plugin.LOADS: lambda: self.read("penstock"),
            self.plugin.COMPILE_CACHE: lambda: self._get_loader(
                self._load_config(load_format="penstock", model_loader_extra_config=compiled)
            ),
            self.plugin.SLEEP: lambda: self.plugin.refuse_unprotected_sleep(sleeps),
            self.plugin.TRANSFER: lambda: self._factory.create_engine(
                self._transfer, self._config, torch.device("cpu"), model
            ),
        }

    def patched(self) -> Iterator[tuple[Any, str]]:
        for owner in owners_of(self.name):
            for name, function in list(vars(owner).items()):
                if isinstance(function, FunctionType) and hasattr(function, "_penstock_patches"):
                    yield owner, name


class Sglang(Host):
    name = "sglang"

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        importlib.import_module("tests.engines.sglang_loads")  # It replaces the kernels.
        host_releases.import_sglang()
        from sglang.srt import plugins, runtime_context
        from sglang.srt.arg_groups import resolution_hooks
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import loader
        from sglang.srt.plugins.hook_registry import HookRegistry

        import penstock_sglang.plugin

        self.plugin = penstock_sglang.plugin
        self._load_config, self._hooks, self._targets = LoadConfig, resolution_hooks, HookRegistry._patched

        def load_plugins() -> None:
            plugins._plugins_loaded = False
            plugins.load_plugins()

        self._load_plugins = load_plugins
        self._default_loader = loader.DefaultModelLoader
        one = SimpleNamespace(local_rank=0, world_size=1)
        runtime_context.get_parallel = lambda: SimpleNamespace(world_group=one, tp_group=one)
        settings = SimpleNamespace(
            load_format="auto",
            model_loader_extra_config={"memory_bytes": "64M"},
            weight_loader_disable_mmap=False,
            weight_loader_prefetch_checkpoints=False,
            weight_loader_prefetch_num_threads=1,
            weight_loader_drop_cache_after_load=False,
        )
        runtime_context.get_model = loader.get_model = lambda: settings
        runtime_context.get_exec = lambda: SimpleNamespace(features=SimpleNamespace(enable_memory_saver=True))
        # SGLang asks them for a model's checksum.
        loader.get_server_args = loader.get_global_server_args = lambda: None

    def load_plugins(self) -> None:
        self._load_plugins()

    def read(self, load_format: str) -> object:
        config = self._load_config(load_format=load_format)
        loader = config.load_format(config) if load_format == "penstock" else self._default_loader(config)
        source = loader.Source(str(self.checkpoint), None, fall_back_to_pt=False)
        return {name: host_releases.digest_of(tensor) for name, tensor in loader._get_weights_iterator(source)}

    def own(self) -> object:
        steps: list[Any] = []

        def handle_model_source_paths(server_args: Any) -> None:
            steps.append(server_args)

        self._hooks.run_hook(handle_model_source_paths, OTHER)
        assert steps == [OTHER]
        return self.read("safetensors")

    def requests(self) -> dict[str, Callable[[], object]]:
        def sleep() -> object:
            # A loader with this part would load a whole model.
            if self.plugin.SLEEP in self.plugin.PLUGIN.missing:
                config = self._load_config(load_format="penstock")
                config.load_format(config).load_model(
                    model_config=SimpleNamespace(quantization=None), device_config=None
                )
            return None

        return {self.plugin.LOADS: lambda: self.read("penstock"), self.plugin.SLEEP: sleep}

    def patched(self) -> Iterator[tuple[Any, str]]:
        for target in self._targets:
            path, _, name = target.rpartition(".")
            module, _, owner = path.rpartition(".")
            yield getattr(sys.modules[module], owner), name


HOSTS: dict[str, type[Host]] = {"vllm": Vllm, "sglang": Sglang}


def used_names(host: str) -> list[str]:
    """Return the names of an engine that its adapter mentions: `module`, `module:name` and `module:class.name`."""
    imported, words = mentioned(host)
    owners = owners_of(host)
    found = set()
    for module, name in imported:
        value = value_of(module, name)
        if value is None:
            continue  # A name of another release.
        found.add(module)
        inside = f"{module}:{name}."
        if isinstance(value, ModuleType):
            found.add(f"{module}.{name}")
            inside = f"{module}.{name}:"
        else:
            found.add(f"{module}:{name}")
        found |= {inside + word for word in words if is_used(value, word, host, owners)}
    return sorted(found - {host})


def mentioned(host: str) -> tuple[set[tuple[str, str]], set[str]]:
    """Return what an adapter's plug-in imports from its engine, and all identifiers in its source."""
    imported: set[tuple[str, str]] = set()
    words: set[str] = set()
    modules: set[str] = set()
    for file in Path(importlib.import_module(f"penstock_{host}").__path__[0]).glob("*.py"):
        if file.stem == "trainer":
            continue  # The plug-in does not use it.
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if f"{module}.".startswith(f"{host}."):
                    imported |= {(module, alias.name) for alias in names}
                case ast.Attribute(attr=word) | ast.FunctionDef(name=word) | ast.keyword(arg=str(word)):
                    words.add(word)
                case ast.Constant(value=str(word)) if word.isidentifier():
                    words.add(word)
                case ast.Constant(value=str(word)) if word in sys.modules:
                    modules.add(word)
    # A process may have imported a module that the adapter does not import.
    classes = {(module, word) for module in modules for word in words if is_class(sys.modules[module], word)}
    return imported | classes, words


def is_class(module: Any, name: str) -> bool:
    return getattr(vars(module).get(name), "__module__", None) == module.__name__


def value_of(module: str, name: str) -> Any:
    """Return a name of a module, which may be a submodule, or None."""
    try:
        return importlib.import_module(f"{module}.{name}")
    except ImportError:
        return getattr(importlib.import_module(module), name, None)


def is_used(owner: Any, word: str, host: str, owners: list[Any]) -> bool:
    """Return whether an owner or a base that is no owner has a function, a class, a constant or a private name."""
    if isinstance(owner, EnumType) or not isinstance(owner, (type, ModuleType)) or word.startswith("__"):
        return False
    holder = holder_of(owner, word)
    if holder is None or (holder is not owner and holder in owners):
        return False
    value = vars(holder)[word]
    is_of_host = getattr(value, "__module__", None) or getattr(holder, "__module__", holder.__name__)
    kinds = callable(value) or isinstance(value, (property, classmethod, staticmethod))
    return is_of_host.startswith(host) and (kinds or word.isupper() or word.startswith("_"))


def holder_of(owner: Any, name: str) -> Any:
    """Return the module, or the class among a class's bases, that defines a name."""
    holders = owner.__mro__ if isinstance(owner, type) else [owner]
    return next((holder for holder in holders if name in vars(holder)), None)


def owners_of(host: str) -> list[Any]:
    """Return the modules and classes that an adapter imports from its engine."""
    values = [value_of(module, name) for module, name in mentioned(host)[0]]
    return [value for value in values if isinstance(value, (type, ModuleType))]


def remove(case: str) -> None:
    """Remove a name from the engine, or a module with its submodules."""
    module, _, path = case.partition(":")
    if not path:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{module}.")]:
            sys.modules[name] = None  # type: ignore[assignment]
        parent, _, child = module.rpartition(".")
        delattr(sys.modules[parent], child)
        return
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, sys.modules[module])
    if holder_of(owner, name) is None:
        owner.__getattr__ = functools.partial(found_without, owner.__getattr__, name)
    while holder := holder_of(owner, name):
        delattr(holder, name)


def change(case: str) -> None:
    """Give a method other parameters, or make a new method abstract."""
    module, _, path = case.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, sys.modules[module])
    is_new = not hasattr(owner, name)

    def changed(self: Any, context: Any) -> None:
        raise NotImplementedError

    changed.__name__ = name
    setattr(owner, name, abc.abstractmethod(changed) if is_new else changed)
    abc.update_abstractmethods(owner)


def found_without(find: Callable[[str], Any], removed: str, name: str) -> Any:
    """Find a module's name that exists only on request, unless the name was removed."""
    if name == removed:
        raise AttributeError(name)
    return find(name)


def answer(host: Host, case: str, has_plugin: bool) -> dict[str, Any]:
    """Return what an engine without one name does."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(f"penstock.{host.name}").addHandler(handler)
    found: dict[str, Any] = {"lines": lines}
    if case.endswith("()"):
        change(case.removesuffix("()"))
    elif case:
        remove(case)
    if has_plugin:
        for _ in range(2):
            host.load_plugins()
    found["own"] = outcome(host.own)
    if has_plugin:
        found["asked"] = {part: outcome(ask) for part, ask in host.requests().items()}
        # The requests may have registered further parts.
        found["missing"] = list(host.plugin.PLUGIN.missing)
        for part in found["missing"]:
            require = functools.partial(host.plugin.PLUGIN.require, part, feature="it")
            found["asked"].setdefault(part, outcome(require))
    if not case:
        # Without modules that also have the names of Run:ai's package.
        found["imported"] = [
            name
            for name, module in sys.modules.items()
            if name.startswith("penstock") and name == module.__name__ and not name.startswith(f"penstock_{host.name}")
        ]
    return found


def outcome(call: Callable[[], object]) -> Any:
    """Return the result of a call if it is JSON, or the exception."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - the test compares the exceptions
        return f"{type(error).__name__}: {error}"
    return result if isinstance(result, dict) else None


def grown(host: Host) -> dict[str, Any]:
    """Return the calls of functions with a new argument that did not reach the engine unchanged."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        host.load_plugins()
        os.write(writer, json.dumps([(*path_of(owner), name) for owner, name in host.patched()]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        targets = json.load(file)
    os.waitpid(pid, 0)
    calls: list[Any] = []
    for module, owner, name in targets:
        holder = functools.reduce(getattr, filter(None, [owner]), sys.modules[module])
        setattr(holder, name, recorder(getattr(holder, name), calls))
    for _ in range(2):
        host.load_plugins()
    wrong = []
    config = SimpleNamespace(load_config=OTHER, weight_transfer_config=None)
    self = SimpleNamespace(vllm_config=config, load_config=OTHER, load_format="auto")
    for module, owner, name in targets:
        holder = functools.reduce(getattr, filter(None, [owner]), sys.modules[module])
        arguments = (self, "first", "second")
        calls.clear()
        try:
            result = getattr(holder, name)(*arguments, new="new")
            if inspect.isawaitable(result):
                asyncio.run(awaited(result))
        except Exception as error:  # noqa: BLE001 - the test reports it
            wrong.append(f"{owner}.{name}: {type(error).__name__}: {error}")
            continue
        if calls != [(arguments, {"new": "new"})]:  # Without a copy of an argument, or a default.
            wrong.append(f"{owner}.{name}: {calls}")
    return {"wrong": wrong, "targets": sorted(f"{owner}.{name}" for _, owner, name in targets)}


def path_of(owner: Any) -> tuple[str, str]:
    """Return the module of a class and its name, or the name of a module and nothing."""
    return (owner.__name__, "") if isinstance(owner, ModuleType) else (owner.__module__, owner.__qualname__)


async def awaited(call: Any) -> Any:
    return await call


def recorder(original: Any, calls: list[Any]) -> Any:
    """Return a function that accepts any arguments, as a function of a future release may."""
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def later(*arguments: Any, **named: Any) -> None:
            calls.append((arguments, named))

        return later

    @functools.wraps(original)
    def record(*arguments: Any, **named: Any) -> None:
        calls.append((arguments, named))

    return record


def run_forked(calls: dict[str, Callable[[], Any]], directory: Path) -> dict[str, Any]:
    """Run each call in a fork of this process, a few at a time, and return the results."""
    running: dict[int, str] = {}
    found: dict[str, Any] = {}

    def collect() -> None:
        pid, status = os.wait()
        name = running.pop(pid)
        file = directory / str(pid)
        found[name] = json.loads(file.read_text()) if file.exists() else {"crash": f"exit status {status}"}

    for name, call in calls.items():
        while len(running) >= NUM_PROCESSES:
            collect()
        if pid := os.fork():
            running[pid] = name
            continue
        signal.alarm(TIMEOUT_S)
        try:
            result = call()
        except BaseException:  # noqa: BLE001 - the parent reports it
            result = {"crash": traceback.format_exc()}
        (directory / str(os.getpid())).write_text(json.dumps(result))
        os._exit(0)
    while running:
        collect()
    return found


def main() -> None:
    name, checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    host = HOSTS[name](Path(checkpoint))
    vars(sys.modules[name])["__version__"] = FUTURE[name]
    with tempfile.TemporaryDirectory() as directory:
        found = run_forked({"": functools.partial(answer, host, "", True)}, Path(directory))
        whole = found[""]
        # All processes need these modules, which do not import the engine.
        for module in whole.pop("imported", ()):
            importlib.import_module(module)
        calls = {case: functools.partial(answer, host, case, True) for case in [*used_names(name), *CHANGED[name]]}
        found |= run_forked({GROWN: functools.partial(grown, host), **calls}, Path(directory))
        # Find out whether the engine itself needs a name.
        broken = [case for case in calls if found[case].get("own") != whole.get("own")]
        alone = run_forked({case: functools.partial(answer, host, case, False) for case in broken}, Path(directory))
    for case, result in alone.items():
        found[case]["alone"] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()
