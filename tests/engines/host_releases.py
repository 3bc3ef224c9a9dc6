"""Run a plug-in with the real modules of one release of its engine, and print what it does as JSON.

    python host_releases.py vllm|sglang MODULES CHECKPOINT

MODULES is a directory with the engine's wheel, unpacked without its dependencies. A package that is not installed here
is replaced by an empty module. The classes that the plug-in changes are the engine's own, and so are the loader that
reads CHECKPOINT and the worker that receives versions from a trainer.

`test_vllm_releases` and `test_sglang_releases` run this program, and compare its rows with the tables in the docs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import sys
import types
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from tests.support.ports import free_ports

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


def vllm(register: Any, checkpoint: Path) -> dict[str, Any]:
    """Return which parts vLLM has after `register` ran twice, and what it reads from a checkpoint."""
    register()
    register()
    from vllm.distributed import weight_transfer
    from vllm.model_executor import model_loader
    from vllm.v1.engine.core import EngineCore

    from penstock_vllm import plugin

    loads = "penstock" in model_loader._LOAD_FORMAT_TO_MODEL_LOADER and plugin.LOADS not in plugin.PLUGIN.missing
    return {
        "loads": loads,
        "transfers": "penstock" in weight_transfer.WeightTransferEngineFactory._registry
        and plugin.TRANSFER not in plugin.PLUGIN.missing,
        "sleeps": bool(getattr(getattr(EngineCore, "sleep", None), "_penstock_patches", ())),
        "tensors": read_by_vllm(checkpoint, "penstock") if loads else {},
    }


def import_vllm() -> None:
    """Import the modules of vLLM that one of its processes has imported before it calls plug-ins."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    # A wheel for GPUs finds no platform here.
    platforms._current_platform = CpuPlatform()
    # The process with the HTTP routes imports this module.
    importlib.import_module("vllm.entrypoints.openai.models.serving")


def read_by_vllm(checkpoint: Path, load_format: str) -> dict[str, str]:
    """Return the digests of the tensors that vLLM's own loading passes to a model."""
    from vllm.config import set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    class Reader(torch.nn.Module):
        def load_weights(self, weights: Any) -> None:
            self.digests = {name: digest_of(tensor) for name, tensor in weights}

    # vLLM's own ModelConfig needs an architecture that vLLM can import.
    names = {"model": str(checkpoint), "revision": None, "quantization": None, "is_moe": False}
    config: Any = SimpleNamespace(**names, multimodal_config=None)
    loader, model = get_model_loader(LoadConfig(load_format=load_format)), Reader()
    with set_current_vllm_config(vllm_config()):
        loader.download_model(config)
        loader.load_weights(model, config)
    return model.digests


@cache
def vllm_config() -> Any:
    """Return vLLM's default configuration, which takes seconds to create."""
    from vllm.config import VllmConfig

    return VllmConfig()


class Model(torch.nn.Module):
    """A model with the interface of vLLM's models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)

    def load_weights(self, weights: Any) -> set[str]:
        names = set()
        for name, weight in weights:
            parameter = self.get_parameter(name)
            load = getattr(parameter, "weight_loader", lambda parameter, weight: parameter.data.copy_(weight))
            load(parameter, weight)
            names.add(name)
        return names

    def digests(self) -> list[str]:
        return [digest_of(parameter) for parameter in self.parameters()]


def start_vllm(model: Model) -> tuple[Any, Any]:
    """Return vLLM's worker with a model, and vLLM's engine core for this worker. The worker has created its engine."""
    from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    # vLLM's workers for the CPU replace this function, too.
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[method-assign, assignment]
    (port,) = free_ports(1)
    config = VllmConfig(weight_transfer_config=WeightTransferConfig(backend="penstock"))
    names = {"enable_sleep_mode": False, "dtype": torch.float32, "quantization": None, "is_moe": False}
    config.model_config = SimpleNamespace(**names)
    worker = Worker.__new__(Worker)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        # The constructor of `Worker` needs a GPU.
        WorkerBase.__init__(worker, config, 0, 0, "")
    record_metadata_for_reloading(model)
    runner = SimpleNamespace(
        load_model=lambda **_: None, get_model=lambda: model, model=model, reset_lora_state=lambda: None
    )
    vars(worker).update(device=torch.device("cpu"), _weight_update_active=False, model_runner=runner)
    worker.load_model()
    core = EngineCore.__new__(EngineCore)
    executor = SimpleNamespace(
        collective_rpc=lambda method, timeout, args, kwargs: [getattr(worker, method)(*args, **kwargs or {})]
    )
    scheduler = SimpleNamespace(requests={})
    vars(core).update(vllm_config=config, scheduler=scheduler, model_executor=executor, _weight_version="default")
    return worker, core


class Client:
    """The client of vLLM's interface for trainers, for an engine core in this process."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._core.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._core.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self._core.collective_rpc("finish_weight_update")
        # Since 0.27, vLLM sets the version that a client passes.
        if weight_version is not None and hasattr(AsyncLLM, "update_weight_version"):
            self._core.set_weight_version(weight_version)


def received_by_vllm() -> dict[str, Any]:
    """Return what vLLM's worker has after it received versions, from a publisher and from vLLM's trainer interface."""
    import penstock
    from penstock.errors import ConfigError

    model, trained = Model(), Model()
    worker, core = start_vllm(model)
    client = Client(core)
    found: dict[str, Any] = {"engine": type(worker.weight_transfer_engine).__name__, "versions": []}
    try:
        client.start_weight_update()
    except ConfigError as error:
        # The next update starts, although this one was refused.
        found["refused"] = error.message

    def sees(version: int) -> None:
        installed = worker.weight_transfer_engine.installed
        is_same = model.digests() == trained.digests()
        found["versions"].append([installed == version, is_same, core.get_weight_version() == str(version)])

    with penstock.publisher("published", trained) as publisher:
        client.init_weight_transfer_engine({"name": "published"})
        for version in (3, 7):
            change(trained)
            publisher.publish(version)
            client.start_weight_update()
            client.update_weights({"version": version})
            client.finish_weight_update(str(version))
            sees(version)
    try:
        from penstock_vllm.trainer import PenstockTrainerInitInfo
    except ConfigError:
        found["trainer"] = False
    else:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ModuleSource

        found["trainer"] = True
        info = PenstockTrainerInitInfo(name="trained", rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(trained))
        for version in (8, 11):
            change(trained)
            trainer.send_weights(version)
            sees(version)
        trainer.shutdown()
    worker.weight_transfer_engine.shutdown()
    return found


def change(model: Model) -> None:
    """Give a model new weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def digest_of(tensor: torch.Tensor) -> str:
    """Return the dtype, the shape, and the digest of the bytes of a tensor."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {sha256(data).hexdigest()}"


def sglang(register: Any, checkpoint: Path) -> dict[str, Any]:
    """Return which parts SGLang has after `register` ran twice, and what it reads from a checkpoint."""
    register()
    register()
    from sglang.srt.plugins.hook_registry import HookRegistry

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
        "errors": errors,
        "loads": loads,
        "uris": uris,
        "sleeps": any("release_memory_occupation" in target for target in HookRegistry._patched),
        "tensors": read_by_sglang(checkpoint) if loads else {},
    }


def import_sglang() -> None:
    """Import the modules of SGLang that one of its processes has imported before it calls plug-ins."""
    from transformers import AutoConfig

    # An older release adds configurations that this transformers has already.
    add = AutoConfig.register
    AutoConfig.register = staticmethod(lambda *names, **_: add(*names, exist_ok=True))
    importlib.import_module("sglang.srt.server_args")


def read_by_sglang(checkpoint: Path) -> dict[str, str]:
    """Return the digests of the tensors that SGLang's own loader passes to a model, in one process without ranks."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig

    one = SimpleNamespace(local_rank=0, world_size=1)
    runtime_context.get_parallel = lambda: SimpleNamespace(world_group=one, tp_group=one)
    config = LoadConfig(load_format="penstock", model_loader_extra_config={"memory_bytes": "64M"})
    # SGLang's `get_model_loader` calls it, too.
    loader = config.load_format(config)
    # SGLang asks them for a model's checksum.
    module: Any = sys.modules["sglang.srt.model_loader.loader"]
    module.get_server_args = module.get_global_server_args = lambda: None
    source = loader.Source(str(checkpoint), None, fall_back_to_pt=False)
    return {name: digest_of(tensor) for name, tensor in loader._get_weights_iterator(source)}


HOSTS: dict[str, Any] = {
    "vllm": ("vllm.general_plugins", import_vllm, vllm),
    "sglang": ("sglang.srt.plugins", import_sglang, sglang),
}
"""For each engine: the group of its entry points, and the functions that import and register."""


def main() -> None:
    host, wheel, checkpoint = sys.argv[1:]
    sys.meta_path.append(Finder(host, wheel))
    sys.path.insert(0, wheel)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    group, import_host, register = HOSTS[host]
    # There are two of them if the adapter is installed, too.
    point = next(iter(importlib.metadata.entry_points(group=group, name="penstock")))
    import_host()
    plugin = sys.modules[point.load().__module__]

    found = register(point.load(), Path(checkpoint)) | {"off": list(plugin.PLUGIN.missing), "lines": lines}
    if host == "vllm":
        found["own"] = read_by_vllm(Path(checkpoint), "safetensors")
    if found.get("transfers"):
        found["received"] = received_by_vllm()
    print(json.dumps(found))
    # The engine's threads need not end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
