"""vLLM's `--load-format penstock`: weights of local, object-store and hub models through `penstock.stream`.

In: vLLM's plugin entry point calls `register`; `--model-loader-extra-config` carries options. Out: a registered loader,
and the registered weight-transfer backend; the logger of the whole integration.
Not here: finding a local model's files, mapping names and checking that all was loaded, which stay with vLLM's default
loader, as a hub model's config and tokenizer stay with vLLM; its options, and reading from a keeper, a fleet or
storage (`spi.engine_weights`); changes of vLLM's classes (`patches`); new versions of the weights of a live model
(`weight_transfer`).

Written for vLLM 0.32 and 0.33. Any other version starts too: parts that it lacks are off (`host_plugin`).
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
    read_options,
    texts_of,
)
from penstock_vllm import compile_cache, patches, sleep

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "penstock"
LOGGER = "penstock.vllm"

_IGNORED = ["original/**/*"]
"""The default of `--ignore-patterns`: directories, which are not read anyway."""

_OBJECT_STORES = ("s3://", "gs://", "az://")


def vllm_logger() -> Log:
    """Return the integration's logger, with the handlers and level of vLLM's where the application gave it none."""
    # vLLM configures its own logger `vllm` only: without its handlers, no line of ours below a warning would be shown.
    # Called where a line is written: this module may be imported before vLLM has configured its logger.
    logger, theirs = logging.getLogger(LOGGER), logging.getLogger("vllm")
    if theirs.handlers and not logger.hasHandlers():
        for handler in theirs.handlers:
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(theirs.level)
    return log_named(LOGGER)


OBJECT_STORES = "models in object stores"
PREFIX_CACHES = "prefix caches by version"
REPLIES = "replies of all workers"
ARTIFACTS = "compiled code of engines"
SLEEP = "verified weights after a sleep"

PLUGIN = HostPlugin("vllm", supported="vLLM 0.32 or 0.33", log=vllm_logger)
"""What this version of vLLM supports of Penstock, once `register` has run in this process."""


def register() -> None:
    """Make `penstock` known to vLLM in this process as a load format and a weight-transfer backend.

    vLLM calls it by entry point, in each of its processes and perhaps several times: a second call does nothing. It
    never raises: a line in the log names the parts that this version of vLLM does not support, and an engine that is
    asked for one of them refuses it then.
    """
    PLUGIN.register(
        {
            "--load-format penstock": _add_load_format,
            OBJECT_STORES: lambda: patches.accept_object_stores(LOAD_FORMAT),
            "the weight-transfer backend": _add_backend,
            PREFIX_CACHES: _salt_requests,
            REPLIES: _receive_all_replies,
            "phases of the start": _report_phases,
            "functions that torch compiled ahead": _load_functions_of_torch,
            ARTIFACTS: _carry_artifacts,
            SLEEP: _protect_sleep,
            "names of the newest adapters": _name_newest_adapter,
        }
    )


def _add_load_format() -> None:
    from vllm.model_executor import model_loader

    if LOAD_FORMAT not in getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}):
        model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())


def _add_backend() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if LOAD_FORMAT not in WeightTransferEngineFactory._registry:
        # By name: `weight_transfer` is imported in workers that use it, not by every process of vLLM.
        engine = "penstock_vllm.weight_transfer", "PenstockWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(LOAD_FORMAT, *engine)


def _salt_requests() -> None:
    from vllm.v1.engine.core import EngineCore

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


def _carry_artifacts() -> None:
    from vllm.v1.executor.abstract import Executor

    compile_cache.carry(Executor, LOAD_FORMAT, vllm_logger)


def _protect_sleep() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    sleep.protect_engine(EngineCore, LOAD_FORMAT)
    sleep.protect_workers(WorkerBase, LOAD_FORMAT)


def _name_newest_adapter() -> None:
    # Only the process of the HTTP routes has it, and has imported it by now: the others need not.
    if routes := sys.modules.get("vllm.entrypoints.openai.models.serving"):
        patches.name_newest_adapter(routes.OpenAIServingModels)


def refuse_unprotected_sleep(vllm_config: Any) -> None:
    """Raise ConfigError if the engine may sleep and Penstock could not bring its weights back.

    Raises:
        ConfigError: this version of vLLM does not support it.
    """
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        PLUGIN.require(SLEEP, feature="--enable-sleep-mode with Penstock")


def _loader_class() -> type[Any]:
    """Return the loader, a subclass of vLLM's default one."""
    # Defined inside a function, because this module must be importable without vLLM.
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class PenstockVllmLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's default loader, reading through Penstock.

        It is given a configuration of format `safetensors`, so that finding a local model's files, filters, secondary
        weights and the check that every parameter was loaded stay vLLM's own.
        """

        def __init__(self, load_config: Any) -> None:
            self._options = read_options(load_config.model_loader_extra_config or {})
            if self._options.get("artifacts"):
                PLUGIN.require(ARTIFACTS, feature='the option "artifacts"')
            plain = dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={})
            super().__init__(plain)
            self._objects: dict[str, str] = {}
            self._after_weights: ExitStack | None = None
            self._vllm_config: Any = None

        def load_model(self, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
            """Return a new model with its weights."""
            refuse_unprotected_sleep(vllm_config)
            self._vllm_config = vllm_config
            with ExitStack() as self._after_weights:
                model = super().load_model(vllm_config, *arguments, **named)
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
            """Download a model that cannot be streamed from where it is when it is loaded."""
            weights = getattr(model_config, "model_weights", "") or model_config.model
            source = self.Source(weights, model_config.revision)
            if not _is_object(weights) and _hub_uri(self, source, self._options) is None:
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
                files = _hub_uri(self, source, self._options) or _files(self, source)
            place = RankInfo(rank=_local_rank, device=partial(_device, self.load_config), group=_group)
            progress = None if getattr(self.load_config, "use_tqdm_on_load", True) else False
            tensors = checkpoint(
                files, _wanted(self, source), self._options, place, model=uri, log=vllm_logger(), progress=progress
            )
            return ((source.prefix + name, tensor) for name, tensor in tensors)

    return PenstockVllmLoader


def _hub_uri(loader: Any, source: Any, options: Mapping[str, Any]) -> str | None:
    """Return the pinned URI by which a hub's model is streamed; None: vLLM finds or downloads its files.

    For a model of a hub that is not streamed, a line in the log says why.
    """
    try:
        uri = texts_of(source.model_or_path)[0]
    except ConfigError:
        # A scheme that only vLLM knows.
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
            vllm_logger().info("penstock: weights are read from %s, without a copy on the disk", place)
            return place
        except (SourceUnavailable, MissingExtra) as error:
            # What vLLM has in its cache can be loaded all the same.
            why = str(error)
    vllm_logger().warning("penstock: vLLM itself finds or downloads the weights of %s: %s", source.model_or_path, why)
    return None


def _why_not_streamed(load_config: Any, source: Any, options: Mapping[str, Any]) -> str | None:
    """Return why the weights of a hub's model come by a download to the disk; None: they can be streamed."""
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
        # Each rank would read all of it from the hub.
        return 'there are several ranks, and neither "distributed" nor "fleet" is given'
    return None


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


def rank_of_engine() -> tuple[int, int]:
    """Return the rank of this process among all ranks that share one model's parameters, and their number.

    Experts may be sharded over data-parallel ranks: these count, on all hosts. Data-parallel replicas of a dense model
    are engines of their own: each counts its ranks from 0.
    """
    # Not of the configuration: a draft model has one of its own without data parallelism, and its numbers mean
    # different things under an external launcher. vLLM sets up the world group by its own rules for all of these.
    from vllm.distributed import get_world_group

    world = get_world_group()
    return int(world.rank), int(world.world_size)


def _local_rank() -> int:
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
