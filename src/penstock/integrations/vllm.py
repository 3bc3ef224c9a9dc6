"""vLLM's `--load-format penstock`: weights of local and object-store models through `penstock.stream`.

In: vLLM's plugin entry point calls `register`; `--model-loader-extra-config` carries options. Out: a registered loader,
and the registered weight-transfer backend.
Not here: what vLLM's default loader does: finding a model's files, mapping names, checking that all was loaded;
what a fleet takes (`replica`); new versions of the weights of a live model (`vllm_sync`).

Written for vLLM 0.32 and 0.33. Where a version lacks what is used, vLLM's own error or a ConfigError says so.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from penstock.config import parse_bytes
from penstock.errors import ConfigError
from penstock.integrations import replica
from penstock.integrations.vllm_log import vllm_logger

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "penstock"

OPTIONS = ("device", "distributed", "memory_bytes", "storage_options", "verify", *replica.OPTIONS)
"""Keys of `--model-loader-extra-config`: of `penstock.stream`, but for `distributed`; then those of a fleet."""

_OBJECT_STORES = ("s3://", "gs://", "az://")
_logger = vllm_logger()


def register() -> None:
    """Make `penstock` known to vLLM in this process as a load format and a weight-transfer backend.

    vLLM calls it by entry point; again is harmless.

    For models in object stores it also gives vLLM what it takes from Run:ai Model Streamer when that is not installed
    (the pulling of config and tokenizer), and lets its check of load formats pass this one.
    """
    from vllm.model_executor import model_loader

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT in known:
        return
    model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())
    _give_object_stores()
    _give_weight_transfer()


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
    """Return the loader, a subclass of vLLM's default one: made when vLLM is there to be subclassed."""
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

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill `model`. vLLM keeps the URI of an object-store model apart, its config's copy in `model`."""
            if weights := getattr(model_config, "model_weights", ""):
                self._objects[model_config.model] = weights
            self.counter_before_loading_weights = time.perf_counter()
            super().load_weights(model, model_config)

        def download_model(self, model_config: Any) -> None:
            """Download a hub's model; what is in an object store is read from there."""
            weights = getattr(model_config, "model_weights", "") or model_config.model
            if not _is_object(weights):
                super().download_model(model_config)

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
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
    given = {"model_name_or_path": source.model_or_path, **vars(source)}
    needed = inspect.signature(loader._prepare_weights).parameters
    missing = [n for n, p in needed.items() if n not in given and p.default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"this version of vLLM finds files by {missing}, which Penstock does not know")
    _, files, use_safetensors, *_ = loader._prepare_weights(**{n: given[n] for n in needed if n in given})
    if not use_safetensors:
        raise ConfigError(f"{source.model_or_path} has no safetensors files", hint="use --load-format auto for it")
    return sorted(files)


def _wanted(loader: Any, source: Any) -> Callable[[str], bool] | None:
    """Names worth reading on this rank: not another rank's experts, not what the model says it does not use."""
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

    in_fleet = replica.FleetOptions.read(options)
    if in_fleet is not None:
        rank = _rank()
        shared = {name: options[name] for name in ("memory_bytes",) if name in options}
        fleet = replica.join(in_fleet, files, log=_logger, rank=rank, **shared)
        if fleet is not None:
            # Host memory by default: beside the parameters a GPU may have no room for the checkpoint.
            device, stores = options.get("device", "cpu"), options.get("storage_options")
            found = replica.tensors(
                fleet, files, in_fleet, log=_logger, device=device, storage_options=stores, serves=rank == 0
            )
            yield from ((prefix + name, tensor) for name, tensor in found if wanted is None or wanted(name))
            return
    arguments = {name: options[name] for name in ("memory_bytes", "storage_options", "verify") if name in options}
    device = options.get("device") or _device(load_config)
    group = _group() if options.get("distributed") else None
    progress = None if getattr(load_config, "use_tqdm_on_load", True) else False
    with api.stream(files, device=device, names=wanted, group=group, progress=progress, **arguments) as stream:
        for name, tensor in stream:
            yield prefix + name, tensor
        _logger.info("penstock: %s", stream.report.summary())


def _rank() -> int:
    """Of this process among those of one replica on this host, which read the same checkpoint."""
    from vllm.distributed import get_world_group

    return int(get_world_group().local_rank)


def _device(load_config: Any) -> str:
    """Return where weights go first: the device vLLM's parameters are on."""
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


def _give_object_stores() -> None:
    """Let vLLM take object-store models with this load format. What is not found is left to vLLM's own errors."""
    import importlib.util

    from vllm.config import VllmConfig
    from vllm.transformers_utils import runai_utils

    from penstock.compat import runai_streamer

    if importlib.util.find_spec("runai_model_streamer") is None:
        # vLLM holds placeholders there that only raise.
        for name, function in (
            ("runai_pull_files", runai_streamer.pull_files),
            ("runai_list_safetensors", runai_streamer.list_safetensors),
        ):
            if hasattr(runai_utils, name):
                setattr(runai_utils, name, function)
    original = getattr(VllmConfig, "try_verify_and_update_config", None)
    if original is None:
        return

    def try_verify_and_update_config(self: Any) -> Any:
        """vLLM's own, which refuses object stores to formats it does not list; with this one it is not asked."""
        model: Any = getattr(self, "model_config", None)
        load = getattr(self, "load_config", None)
        weights = getattr(model, "model_weights", "")
        if not weights or getattr(load, "load_format", "") != LOAD_FORMAT:
            return original(self)
        model.model_weights = ""
        try:
            return original(self)
        finally:
            model.model_weights = weights

    VllmConfig.try_verify_and_update_config = try_verify_and_update_config


def _give_weight_transfer() -> None:
    """The backend of `--weight-transfer-config`; caches that tell versions apart; answers that are the call's own."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from penstock.integrations.vllm_prefix_cache import salt_requests
    from penstock.integrations.vllm_replies import receive_all_replies

    if LOAD_FORMAT not in WeightTransferEngineFactory._registry:
        engine = "penstock.integrations.vllm_sync", "PenstockWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(LOAD_FORMAT, *engine)
    salt_requests(EngineCore, LOAD_FORMAT)
    receive_all_replies(MultiprocExecutor, LOAD_FORMAT)
