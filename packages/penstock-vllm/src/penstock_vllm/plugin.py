"""Register Penstock with vLLM: a load format, a weight-transfer backend, and changes to vLLM's classes.

`--load-format penstock` reads local, object-store and hub models through `penstock.stream`, with options from
`--model-loader-extra-config`. vLLM's default loader still finds a local model's files, maps the tensors' names, and
checks that every parameter was loaded. Tested with vLLM 0.24 to 0.33. In other versions of vLLM, unsupported parts of
the integration are disabled.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.errors import ConfigError, MissingExtra, SourceUnavailable
from penstock.spi import (
    FleetOptions,
    HostPlugin,
    Log,
    Phases,
    RankInfo,
    Settings,
    checkpoint,
    log_named,
    pinned_uri,
    prepare_checkpoint,
    read_options,
    texts_of,
)
from penstock_vllm import compile_cache, patches, sleep

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "penstock"
LOGGER = "penstock.vllm"

_IGNORED = ["original/**/*"]
"""Default of `--ignore-patterns`, which excludes subdirectories that Penstock does not read."""

_OBJECT_STORES = ("s3://", "gs://", "az://")

_REFUSED = "RefusedLoader"
"""Name of the loader that is registered if this version of vLLM lacks a name that Penstock's loader needs."""

_STEPS_OF_ENGINE = {
    "init_transfer_engine",
    "start_weight_update",
    "receive_weights",
    "finish_weight_update",
    "shutdown",
    "trainer_send_weights",
}
"""Abstract methods of vLLM's weight-transfer engines. Source: vLLM 0.24 to 0.33."""


def vllm_logger() -> Log:
    """Return Penstock's logger, with vLLM's handlers and level unless the application configured the logger."""
    # vLLM configures only the logger `vllm`, so this logger would drop messages below warning level. vLLM may configure
    # its logger after this module is imported.
    logger, theirs = logging.getLogger(LOGGER), logging.getLogger("vllm")
    if theirs.handlers and not logger.hasHandlers():
        for handler in theirs.handlers:
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(theirs.level)
    return log_named(LOGGER)


LOADS = "--load-format penstock"
OBJECT_STORES = "models in object stores"
TRANSFER = "the weight-transfer backend"
PREFIX_CACHES = "prefix caches by version"
REPLIES = "replies of all workers"
COMPILE_CACHE = "compiled code of engines"
SLEEP = "verified weights after a sleep"

PLUGIN = HostPlugin("vllm", tested=("0.24", "0.33"), log=vllm_logger)
"""The parts of Penstock that this version of vLLM supports. The list is complete after `register`."""


def register() -> None:
    """Register Penstock with vLLM in this process as a load format and a weight-transfer backend.

    vLLM calls this through its plugin entry point, in each process and possibly several times. `register` never raises.
    One log line names the parts that this version of vLLM does not support. An engine whose options require an
    unsupported part fails with a ConfigError.
    """
    PLUGIN.register(
        {
            LOADS: _add_load_format,
            OBJECT_STORES: lambda: patches.accept_object_stores(LOAD_FORMAT),
            TRANSFER: _add_backend,
            PREFIX_CACHES: _salt_requests,
            REPLIES: _receive_all_replies,
            "phases of the start": _report_phases,
            "functions that torch compiled ahead": _load_functions_of_torch,
            COMPILE_CACHE: _carry_compile_cache,
            SLEEP: _protect_sleep,
            "names of the newest adapters": _name_newest_adapter,
        }
    )


def _add_load_format() -> None:
    from vllm.model_executor import model_loader

    loaders = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    is_known = LOAD_FORMAT in loaders
    if is_known and loaders[LOAD_FORMAT].__name__ != _REFUSED:
        return
    try:
        loader = _loader_class()
    except (ImportError, AttributeError):
        base = getattr(model_loader, "BaseModelLoader", None)
        if not is_known and base is not None:
            model_loader.register_model_loader(LOAD_FORMAT)(_refused_loader_class(base))
        raise
    model_loader.register_model_loader(LOAD_FORMAT)(loader)


def _refused_loader_class(base: type[Any]) -> type[Any]:
    """Return a loader that raises ConfigError with the reason, because vLLM's error says that the name is unknown."""

    def refuse(cls: type[Any], *_: Any, **__: Any) -> None:
        PLUGIN.require(LOADS, feature=LOADS)

    return type(_REFUSED, (base,), {"__new__": refuse})


def _add_backend() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if LOAD_FORMAT not in WeightTransferEngineFactory._registry:
        # Register by name, so that only workers that use `weight_transfer` import it. The import raises ConfigError
        # with the reason if a check below fails.
        engine = "penstock_vllm.weight_transfer", "PenstockWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(LOAD_FORMAT, *engine)
    from vllm.config import get_current_vllm_config, set_current_vllm_config  # noqa: F401 - the engine needs them
    from vllm.distributed import get_pp_group, get_tp_group, get_world_group  # noqa: F401
    from vllm.distributed.weight_transfer.base import (  # noqa: F401
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    if hasattr(WeightTransferEngine, "receive_sparse_weights"):
        # vLLM 0.24
        from vllm.v1.worker.worker_base import WorkerBase

        patches.run_updates_in_engine(WorkerBase, LOAD_FORMAT)
    else:
        # Fail now if an update has other steps, as before vLLM 0.24.
        _ = WeightTransferEngine.start_weight_update
    steps: frozenset[str] = getattr(WeightTransferEngine, "__abstractmethods__", frozenset())
    if unknown := steps - _STEPS_OF_ENGINE:
        raise AttributeError(f"Penstock's engine has no {', '.join(sorted(unknown))}")


def _salt_requests() -> None:
    from vllm.v1.engine.core import EngineCore

    patches.add_weight_version(EngineCore, LOAD_FORMAT)
    patches.salt_requests(EngineCore, LOAD_FORMAT)


def _receive_all_replies() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    patches.receive_all_replies(MultiprocExecutor, LOAD_FORMAT)


def _report_phases() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    patches.report_phases(WorkerBase, LOAD_FORMAT)


def _load_functions_of_torch() -> None:
    from vllm.compilation import decorators

    patches.load_functions_of_torch(decorators, LOAD_FORMAT)


def _carry_compile_cache() -> None:
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform  # noqa: F401 - code is restored with these names
    from vllm.v1.executor.abstract import Executor

    _ = VllmConfig.compute_hash
    compile_cache.carry(Executor, LOAD_FORMAT, vllm_logger)


def _protect_sleep() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    sleep.protect_engine(EngineCore, LOAD_FORMAT)
    sleep.protect_workers(WorkerBase, LOAD_FORMAT)


def _name_newest_adapter() -> None:
    # Only vLLM's HTTP server process has imported the module with `OpenAIServingModels`.
    if routes := sys.modules.get("vllm.entrypoints.openai.models.serving"):
        patches.name_newest_adapter(routes.OpenAIServingModels)


def refuse_unprotected_sleep(vllm_config: Any) -> None:
    """Raise ConfigError if sleep mode is on and weights cannot be verified after a sleep in this version of vLLM."""
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        PLUGIN.require(SLEEP, feature="--enable-sleep-mode with Penstock")


def _loader_class() -> type[Any]:
    # This module must be importable without vLLM, so define the class in a function.
    from vllm import envs  # noqa: F401 - a load needs these names
    from vllm.distributed import get_tp_group, get_world_group  # noqa: F401
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight  # noqa: F401
    from vllm.platforms import current_platform  # noqa: F401

    # If vLLM called a method with a different name, it would read the weights itself.
    for name in ("Source", "_prepare_weights", "download_model", "load_model", "load_weights"):
        getattr(DefaultModelLoader, name)
    parameters = list(inspect.signature(DefaultModelLoader._get_weights_iterator).parameters)
    if parameters != ["self", "source"]:
        raise AttributeError(f"_get_weights_iterator has different parameters: {', '.join(parameters)}")

    class PenstockVllmLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's default loader, but with reads through Penstock. The base class is configured for `safetensors`."""

        def __init__(self, load_config: Any) -> None:
            self._options = read_options(load_config.model_loader_extra_config or {})
            if self._options.get("compile_cache"):
                PLUGIN.require(COMPILE_CACHE, feature='the option "compile_cache"')
            plain = dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={})
            super().__init__(plain)
            self._objects: dict[str, str] = {}
            self._after_weights: ExitStack | None = None
            self._vllm_config: Any = None

        def load_model(self, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
            """Return a new model with its weights."""
            refuse_unprotected_sleep(vllm_config)
            self._vllm_config = vllm_config
            prepare_checkpoint(self._options, partial(_device, self.load_config))
            with ExitStack() as self._after_weights:
                model = super().load_model(vllm_config, *arguments, **named)
            self._after_weights = None
            return model

        def load_weights(self, model: Any, model_config: Any, *arguments: Any, **named: Any) -> None:
            """Fill `model`."""
            # For an object-store model, `model_weights` is the URI and `model` the config's local copy.
            if weights := getattr(model_config, "model_weights", ""):
                self._objects[model_config.model] = weights
            self.counter_before_loading_weights = time.perf_counter()
            with Phases("load weights", journey="engine"):
                super().load_weights(model, model_config, *arguments, **named)
            # `_after_weights` is None in a reload, in which vLLM does not call `load_model`.
            if self._after_weights is not None:
                self._after_weights.enter_context(Phases("process weights", journey="engine"))

        def download_model(self, model_config: Any, *arguments: Any, **named: Any) -> None:
            """Download the model unless it can be streamed."""
            weights = getattr(model_config, "model_weights", "") or model_config.model
            source = self.Source(weights, model_config.revision)
            if not _is_object(weights) and _hub_uri(self, source, self._options) is None:
                super().download_model(model_config, *arguments, **named)

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            if getattr(self.load_config, "safetensors_load_strategy", None) == "torchao":
                raise ConfigError("torchao checkpoints are rebuilt by vLLM's own reader", hint="use --load-format auto")
            uri = self._objects.get(source.model_or_path, source.model_or_path)
            if _is_object(uri):
                subfolder = getattr(source, "subfolder", None)
                files: str | list[str] = f"{uri.rstrip('/')}/{subfolder}" if subfolder else uri
            else:
                files = _hub_uri(self, source, self._options) or _files(self, source)
            place = RankInfo(rank=_local_rank, device=partial(_device, self.load_config), group=_group)
            progress = None if getattr(self.load_config, "use_tqdm_on_load", True) else False
            tensors = checkpoint(
                files, _wanted(self, source), self._options, place, model=uri, log=vllm_logger(), progress=progress
            )
            return ((source.prefix + name, tensor) for name, tensor in tensors)

    return PenstockVllmLoader


def _hub_uri(loader: Any, source: Any, options: Mapping[str, Any]) -> str | None:
    """Return the pinned URI for streaming a model from a model hub, or None if vLLM must find or download the files.

    If a model from a model hub cannot be streamed, the reason is logged.
    """
    try:
        uri = texts_of(source.model_or_path)[0]
    except ConfigError:
        # Only vLLM can read URIs with this scheme.
        return None
    if not uri.startswith("hf://"):
        return None
    why = _why_not_streamed(loader.load_config, source, options)
    if why is None:
        if source.revision:
            uri += f"@{quote(source.revision, safe='')}"
        if subfolder := getattr(source, "subfolder", None):
            uri += f"{'' if source.revision else '@main'}/{subfolder}"
        try:
            place = pinned_uri(uri, settings=Settings.read(), storage_options=options.get("storage_options"))
            vllm_logger().info("penstock: reading weights from %s, without a copy on disk", place)
            return place
        except (SourceUnavailable, MissingExtra) as error:
            # vLLM can still load the files in its cache.
            why = str(error)
    vllm_logger().warning("penstock: vLLM finds or downloads the weights of %s itself: %s", source.model_or_path, why)
    return None


def _why_not_streamed(load_config: Any, source: Any, options: Mapping[str, Any]) -> str | None:
    """Return why a model from a model hub has to be downloaded to disk, or None if it can be streamed."""
    from vllm import envs

    if getattr(envs, "VLLM_USE_MODELSCOPE", False):
        return "VLLM_USE_MODELSCOPE is set"
    if load_config.download_dir:
        return "download_dir is set"
    if getattr(source, "allow_patterns_overrides", None):
        return f"the model's code selects files by {source.allow_patterns_overrides}"
    if list(load_config.ignore_patterns or ()) != _IGNORED:
        return f"ignore_patterns is {load_config.ignore_patterns}"
    if (
        FleetOptions.read(options, source.model_or_path) is None
        and not options.get("distributed")
        and rank_of_engine()[1] > 1
    ):
        # Each rank would read the whole model from the model hub.
        return 'there are several ranks, and neither "distributed" nor "fleet" is given'
    return None


def _files(loader: Any, source: Any) -> list[str]:
    """Return the paths of a model's safetensors files, which vLLM's default loader finds or downloads."""
    # The parameters of this method differ between vLLM's versions, so pass the known parameters by name.
    known = {"model_name_or_path": source.model_or_path, **vars(source)}
    needed = inspect.signature(loader._prepare_weights).parameters
    missing = [n for n, p in needed.items() if n not in known and p.default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"this version of vLLM finds files with arguments that Penstock does not support: {missing}")
    _, files, use_safetensors, *_ = loader._prepare_weights(**{n: known[n] for n in needed if n in known})
    if not use_safetensors:
        raise ConfigError(f"{source.model_or_path} has no safetensors files", hint="use --load-format auto")
    return sorted(files)


def _wanted(loader: Any, source: Any) -> Callable[[str], bool] | None:
    """Return a filter that excludes other ranks' experts and unused weights, or None if nothing is excluded."""
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


def rank_of_engine() -> tuple[int, int]:
    """Return this process's rank among all ranks that share one model's parameters, and the number of these ranks.

    Experts may be sharded over data-parallel ranks, so data-parallel ranks on all hosts are included. Data-parallel
    replicas of a dense model are separate engines, each with ranks numbered from 0.
    """
    # The configuration contains different numbers for a draft model or with an external launcher. vLLM's world group is
    # correct in all cases.
    from vllm.distributed import get_world_group

    world = get_world_group()
    return int(world.rank), int(world.world_size)


def _local_rank() -> int:
    """Return this process's rank among one replica's processes on this host, all of which read the same checkpoint."""
    from vllm.distributed import get_world_group

    return int(get_world_group().local_rank)


def _device(load_config: Any) -> str:
    if load_config.device:
        return str(load_config.device)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return "cpu"
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _group() -> Any:
    """Return the tensor-parallel group, whose ranks read the same checkpoint, or None for a single rank."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return group.device_group if group.world_size > 1 else None


def _is_object(uri: str) -> bool:
    return uri.lower().startswith(_OBJECT_STORES)
