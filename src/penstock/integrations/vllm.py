"""vLLM's `--load-format penstock`: weights of local and object-store models through `penstock.stream`.

In: vLLM's plugin entry point calls `register`; `--model-loader-extra-config` carries options. Out: a registered loader,
and the registered weight-transfer backend; the logger of the whole integration.
Not here: finding a model's files, mapping names and checking that all was loaded, which stay with vLLM's default
loader; reading from a fleet (`replica`); changes of vLLM's classes (`vllm_patches`); new versions of the weights of a
live model (`vllm_sync`).

Written for vLLM 0.32 and 0.33. Where a version lacks what is used, vLLM's own error or a ConfigError says so.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from penstock.config import parse_bytes
from penstock.errors import ConfigError
from penstock.integrations import replica, vllm_patches
from penstock.phases import Phases

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "penstock"
LOGGER = "penstock.vllm"

OPTIONS = ("device", "distributed", "memory_bytes", "storage_options", "verify", *replica.OPTIONS)
"""Keys of `--model-loader-extra-config`: of `penstock.stream`, but for `distributed`; then those of a fleet."""

_OBJECT_STORES = ("s3://", "gs://", "az://")


def vllm_logger() -> logging.Logger:
    """Return the integration's logger, with the handlers and level of vLLM's where the application gave it none."""
    # vLLM configures its own logger `vllm` only: without its handlers, no line of ours below a warning would be shown.
    # Called where a line is written: this module may be imported before vLLM has configured its logger.
    logger, theirs = logging.getLogger(LOGGER), logging.getLogger("vllm")
    if theirs.handlers and not logger.hasHandlers():
        for handler in theirs.handlers:
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(theirs.level)
    return logger


def register() -> None:
    """Make `penstock` known to vLLM in this process as a load format and a weight-transfer backend.

    vLLM calls it by entry point, in each of its processes and perhaps several times: a second call does nothing.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor import model_loader
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.worker_base import WorkerBase

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT in known:
        return
    model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())
    vllm_patches.accept_object_stores(LOAD_FORMAT)
    if LOAD_FORMAT not in WeightTransferEngineFactory._registry:
        # By name: `vllm_sync` is imported in workers that use it, not by every process of vLLM.
        engine = "penstock.integrations.vllm_sync", "PenstockWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(LOAD_FORMAT, *engine)
    vllm_patches.salt_requests(EngineCore, LOAD_FORMAT)
    vllm_patches.receive_all_replies(MultiprocExecutor, LOAD_FORMAT)
    vllm_patches.report_phases(WorkerBase, LOAD_FORMAT)


def read_options(extra: Any) -> dict[str, Any]:
    """Check `model_loader_extra_config`.

    Raises:
        ConfigError: it is no mapping, holds an unknown key, or a value of the wrong type.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(f"model_loader_extra_config must be a mapping, not {type(extra).__name__}")
    unknown = sorted(set(extra) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"unknown model_loader_extra_config keys {unknown}", hint=f"known are {list(OPTIONS)}")
    options = dict(extra)
    if "memory_bytes" in options:
        options["memory_bytes"] = parse_bytes(options["memory_bytes"])
    for name in ("distributed", "verify"):
        if not isinstance(options.get(name, False), bool):
            raise ConfigError(f"model_loader_extra_config {name!r} must be true or false, not {options[name]!r}")
    if not isinstance(options.get("storage_options", {}), Mapping):
        raise ConfigError("model_loader_extra_config 'storage_options' must be a mapping of strings")
    if replica.FleetOptions.read(options) is not None and options.get("distributed"):
        raise ConfigError("'distributed' and 'fleet' both share the reading", hint="give one of them")
    return options


def _loader_class() -> type[Any]:
    """Return the loader, a subclass of vLLM's default one."""
    # Defined inside a function, because this module must be importable without vLLM.
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class PenstockModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's default loader, reading through Penstock.

        It is given a configuration of format `safetensors`, so that finding a model's files, downloading them from a
        hub, filters, secondary weights and the check that every parameter was loaded stay vLLM's own.
        """

        def __init__(self, load_config: Any) -> None:
            self._options = read_options(load_config.model_loader_extra_config or {})
            plain = dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={})
            super().__init__(plain)
            self._objects: dict[str, str] = {}
            self._after_weights: ExitStack | None = None

        def load_model(self, *arguments: Any, **named: Any) -> Any:
            """Return a new model with its weights."""
            with ExitStack() as self._after_weights:
                model = super().load_model(*arguments, **named)
            self._after_weights = None
            return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill `model`."""
            # Of an object-store model vLLM keeps the URI in `model_weights`, and a local copy of the config in `model`.
            if weights := getattr(model_config, "model_weights", ""):
                self._objects[model_config.model] = weights
            self.counter_before_loading_weights = time.perf_counter()
            with Phases("load weights", journey="engine"):
                super().load_weights(model, model_config)
            # What follows in `load_model`; nothing does in a load into a model that is there already.
            if self._after_weights is not None:
                self._after_weights.enter_context(Phases("process weights", journey="engine"))

        def download_model(self, model_config: Any) -> None:
            """Download a hub's model; a model in an object store is read from there when it is loaded."""
            weights = getattr(model_config, "model_weights", "") or model_config.model
            if not _is_object(weights):
                super().download_model(model_config)

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            """Return the named tensors of one source of weights."""
            if getattr(self.load_config, "safetensors_load_strategy", None) == "torchao":
                raise ConfigError("torchao checkpoints are rebuilt by vLLM's own reader", hint="use --load-format auto")
            uri = self._objects.get(source.model_or_path, source.model_or_path)
            if _is_object(uri):
                subfolder = getattr(source, "subfolder", None)
                files: str | list[str] = f"{uri.rstrip('/')}/{subfolder}" if subfolder else uri
            else:
                files = _files(self, source)
            return _stream(files, _wanted(self, source), self._options, self.load_config, prefix=source.prefix)

    return PenstockModelLoader


def _files(loader: Any, source: Any) -> list[str]:
    """Return a model's safetensors files, as vLLM's default loader finds (or downloads) them."""
    # vLLM's versions differ in the parameters of this method: those that it has are passed, by name.
    known = {"model_name_or_path": source.model_or_path, **vars(source)}
    needed = inspect.signature(loader._prepare_weights).parameters
    missing = [n for n, p in needed.items() if n not in known and p.default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"this version of vLLM finds files by {missing}, which Penstock does not know")
    _, files, use_safetensors, *_ = loader._prepare_weights(**{n: known[n] for n in needed if n in known})
    if not use_safetensors:
        raise ConfigError(f"{source.model_or_path} has no safetensors files", hint="use --load-format auto for it")
    return sorted(files)


def _wanted(loader: Any, source: Any) -> Callable[[str], bool] | None:
    """Return a filter of the names that this rank reads: no other rank's experts, no weights the model does not use."""
    experts = getattr(loader, "local_expert_ids", None)
    is_unused = getattr(source, "is_unused_weight", None)
    if experts is None and is_unused is None:
        return None

    def wanted(name: str) -> bool:
        if experts is not None:
            from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

            if should_skip_weight(name, experts):
                return False
        return is_unused is None or not is_unused(name)

    return wanted


def _stream(
    files: str | list[str],
    wanted: Callable[[str], bool] | None,
    options: Mapping[str, Any],
    load_config: Any,
    *,
    prefix: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `files` as they arrive, from the fleet if there is one, and a line in the log at the end."""
    from penstock import api

    log = vllm_logger()
    in_fleet = replica.FleetOptions.read(options)
    if in_fleet is not None:
        rank = _rank()
        shared = {name: options[name] for name in ("memory_bytes",) if name in options}
        fleet = replica.join(in_fleet, files, log=log, rank=rank, **shared)
        if fleet is not None:
            # Host memory by default: beside the parameters a GPU may have no room for the checkpoint.
            device, stores = options.get("device", "cpu"), options.get("storage_options")
            tensors = replica.tensors(
                fleet, files, in_fleet, log=log, device=device, storage_options=stores, serves=rank == 0
            )
            yield from ((prefix + name, tensor) for name, tensor in tensors if wanted is None or wanted(name))
            return
    arguments = {name: options[name] for name in ("memory_bytes", "storage_options", "verify") if name in options}
    device = options.get("device") or _device(load_config)
    group = _group() if options.get("distributed") else None
    progress = None if getattr(load_config, "use_tqdm_on_load", True) else False
    with api.stream(files, device=device, names=wanted, group=group, progress=progress, **arguments) as stream:
        for name, tensor in stream:
            yield prefix + name, tensor
        log.info("penstock: %s", stream.report.summary())


def _rank() -> int:
    """Return the rank of this process among those of one replica on this host, which read the same checkpoint."""
    from vllm.distributed import get_world_group

    return int(get_world_group().local_rank)


def _device(load_config: Any) -> str:
    """Return the device of vLLM's parameters, where weights are read to."""
    if load_config.device:
        return str(load_config.device)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return "cpu"
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _group() -> Any:
    """Return the tensor-parallel group, whose ranks read the same weights; None when there is one rank."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return group.device_group if group.world_size > 1 else None


def _is_object(uri: str) -> bool:
    return uri.lower().startswith(_OBJECT_STORES)
