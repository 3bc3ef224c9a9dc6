"""SGLang's `--load-format penstock`: weights from a URI, through `penstock.stream`, a fleet, a weight cache or a sync.

The loader is a subclass of SGLang's default loader, which still maps names, quantises, and checks the model. For a URI,
the configuration and the tokenizer are downloaded once, before the first process starts, and SGLang receives the path
of their directory. A file in the directory contains the URI of the weights, which each rank streams.

`/update_weights_from_disk` loads new weights from a path, from any URI, or from a trainer (`sync://NAME/VERSION`). The
model changes only after all ranks have received and verified the version.

Tested with SGLang 0.5.15 to 0.5.23. In other versions of SGLang, unsupported parts of the integration are disabled.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, FormatError, NotFound
from penstock.spi import (
    HostPlugin,
    Log,
    RankInfo,
    Settings,
    checkpoint,
    connection_of,
    copy_other_files,
    display,
    is_remote,
    log_named,
    model_name,
    pinned_uri,
    prepare_checkpoint,
    read_options,
)
from penstock_sglang import runtime, sleep

if TYPE_CHECKING:
    import torch

    from penstock import ConnectionSettings
    from penstock.spi import VersionReceiver

LOAD_FORMAT = "penstock"
LOGGER = "penstock.sglang"
SYNC = "sync://"
"""Prefix of an update's path if a trainer publishes the weights."""
SYNC_OPTIONS = {"sync_listen": "listen", "sync_data_port": "data_port"}
"""Options for the ports of a sync, mapped to their names in `ConnectionSettings`."""
LOADS = "--load-format penstock"
READS = "SGLang's loader"
"""Part of the plugin that is registered for the first model, because it imports many of SGLang's modules."""
URIS = "models at URIs"
SLEEP = "verified weights after memory is released"
_QUANTISED_WHILE_LOADED = ("auto-round-int8", "modelopt", "modelopt_fp8", "modelopt_mixed")
"""Values of `--quantization` for which SGLang's `get_model_loader` selects different loaders. Source: SGLang 0.5.23."""
_WEIGHTS_FILE = ".penstock-weights.json"
"""File with the URI of the weights, in the directory whose path SGLang receives in place of a model's URI."""


def sglang_logger() -> Log:
    """Return the integration's logger, at SGLang's log level. SGLang configures only the root logger's handler."""
    logger = logging.getLogger(LOGGER)
    if logger.level == logging.NOTSET and (level := logging.getLogger("sglang").getEffectiveLevel()) < logging.WARNING:
        logger.setLevel(level)
    return log_named(LOGGER)


PLUGIN = HostPlugin("sglang", tested=("0.5.15", "0.5.23"), log=sglang_logger)
"""The parts of Penstock that this version of SGLang supports. The list is complete after `register`."""


def register() -> None:
    """Register Penstock with SGLang in this process as a load format.

    SGLang calls this through its plugin entry point, in each of its processes and possibly several times. `register`
    never raises. One log line names the parts that this version of SGLang does not support.
    """
    PLUGIN.register(
        {
            SLEEP: sleep.SchedulerSleep(LOAD_FORMAT).register,
            URIS: _add_uris,
            LOADS: _add_load_format,
        }
    )


def register_runai() -> None:
    """Let SGLang's `--load-format runai_streamer` read through Penstock, in each of its processes.

    Penstock is used if Run:ai's package is not installed, or if `SGLANG_PLUGINS` names `penstock_runai`. Like
    `register`, this function never raises.
    """
    PLUGIN.register({"--load-format runai_streamer by Penstock": _replace_runai})


def _add_uris() -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view  # noqa: F401 - the hook needs them
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.environ import envs

    _ = envs.SGLANG_CACHE_DIR
    register_resolution_hook("handle_model_source_paths")(_give_directory)


def _add_load_format() -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        from sglang.srt.arg_groups import choices
    except ImportError:
        # Before version 0.5.21, SGLang defines the load format choices in `server_args`.
        from sglang.srt import server_args as choices
    add_choices, _ = choices.add_load_format_choices, LoadConfig._verify_load_format
    if LOAD_FORMAT not in choices.LOAD_FORMAT_CHOICES:
        HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify, HookType.AROUND)
        add_choices([LOAD_FORMAT])
    # If this check fails, the load format raises ConfigError with the reason.
    runtime.require()


def _replace_runai() -> None:
    from sglang.srt.environ import envs

    is_named = "penstock_runai" in (envs.SGLANG_PLUGINS.get() or "").replace(" ", "").split(",")
    if is_named or importlib.util.find_spec("runai_model_streamer") is None:
        from penstock_hf import runai_streamer

        runai_streamer.install()


def _verify(original: Any, load_config: Any, *arguments: Any, **named: Any) -> None:
    """Check a load format as SGLang does, but replace `penstock` with the class of its loader."""
    # `get_model_loader` instantiates the load format if it is a class.
    if getattr(load_config, "load_format", None) == LOAD_FORMAT:
        PLUGIN.register({READS: _check_loader})
        for part in (LOADS, READS):
            PLUGIN.require(part, feature=LOADS)
        load_config.load_format = _loader_class()
    else:
        original(load_config, *arguments, **named)


def _check_loader() -> None:
    """Raise ImportError or AttributeError if this version of SGLang lacks a name that the loader needs."""
    from sglang.srt.environ import envs
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors  # noqa: F401

    _ = envs.SGLANG_CACHE_DIR
    # If SGLang called a method with a different name, it would read the weights itself.
    for name in ("Source", "_filter_mtp_weights", "download_model", "load_model"):
        getattr(DefaultModelLoader, name)
    for method, known in (
        (DefaultModelLoader._get_weights_iterator, ["self", "source"]),
        (DefaultModelLoader._prepare_weights, ["self", "model_name_or_path", "revision", "fall_back_to_pt"]),
    ):
        parameters = list(inspect.signature(method).parameters)
        if parameters[: len(known)] != known:
            raise AttributeError(f"{method.__name__} has different parameters: {', '.join(parameters)}")


def _give_directory(server_args: Any, previous: Any, *arguments: Any, **named: Any) -> None:
    """Replace the URI of each model, draft and tokenizer with a directory, if the load format is `penstock`."""
    # A later release may keep its settings differently, so read no other setting of servers without Penstock.
    if getattr(server_args, "load_format", None) != LOAD_FORMAT:
        previous(server_args, *arguments, **named)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    if config.load_format == LOAD_FORMAT:
        extra = config.model_loader_extra_config or {}
        stores = loader_options(json.loads(extra) if isinstance(extra, str) else extra).get("storage_options")
        replaced: dict[str, str] = {}
        for field in ("model_path", "tokenizer_path", "speculative_draft_model_path"):
            uri = getattr(config, field)
            if uri is not None and is_remote(uri):
                replaced[field] = str(model_directory(uri, storage_options=stores))
        if "model_path" in replaced and config.served_model_name is None:
            # SGLang's default name is the path, which would be a directory in SGLang's cache.
            replaced["served_model_name"] = model_name(config.model_path)
        if replaced:
            declare_resolution(server_args, "penstock", **replaced)
    previous(server_args, *arguments, **named)


def model_directory(uri: str, *, storage_options: Mapping[str, str] | None = None) -> Path:
    """Download all files of a model except its weights to a directory in SGLang's cache, and return the directory.

    Raises:
        NotFound: `uri` does not exist, or has no config.json.
        SourceError: the storage failed.
    """
    settings = Settings.read()
    # Pin the URI once for the configuration and the weights, so that a branch that moves does not mix files from two
    # commits.
    place = pinned_uri(uri, settings=settings, storage_options=storage_options)
    directory = _cache() / sha256(place.encode()).hexdigest()[:16]
    note = json.dumps({"weights": place, "model": uri}).encode()
    copy_other_files(place, directory, {_WEIGHTS_FILE: note}, storage_options)
    if not (directory / "config.json").is_file():
        raise NotFound("the model has no config.json", uri=display(uri))
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedModel:
    """The URIs of a model for which `model_directory` has created a directory."""

    weights: str
    """Pinned URI of the weights."""
    model: str
    """URI of the model as the user wrote it."""

    @classmethod
    def find(cls, path: str) -> StreamedModel | None:
        """Read the URIs from Penstock's file in the directory, or return None for an ordinary directory.

        Raises FormatError if a different version of Penstock wrote the file.
        """
        file = Path(path) / _WEIGHTS_FILE
        # Accept the file only in Penstock's cache directory, because a model's own files must not redirect its weights.
        if file.parent.parent != _cache():
            return None
        try:
            note = json.loads(file.read_text())
            return cls(weights=str(note["weights"]), model=str(note["model"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"a different version of Penstock wrote this file: {error}", uri=str(file), hint="remove the directory"
            ) from error


def _cache() -> Path:
    """Return the parent directory of the directories that replace URIs."""
    from sglang.srt.environ import envs

    return Path(os.path.expanduser(envs.SGLANG_CACHE_DIR.get())) / "penstock"


def loader_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Check SGLang's `--model-loader-extra-config`. Raise ConfigError for invalid or vLLM-only options."""
    own = {name: extra[name] for name in SYNC_OPTIONS if name in extra}
    options = read_options({name: extra[name] for name in extra if name not in own} if own else extra) | own
    sync_connection(options, 0)
    # DeepGEMM and FlashInfer are already imported at this point, and have read the paths of their caches.
    if options.get("compile_cache"):
        hint = 'run eval "$(penstock compile-cache restore URI --engine sglang)" before SGLang'
        raise ConfigError("SGLang cannot change its compile cache when it loads a model", hint=hint)
    return options


def sync_connection(options: Mapping[str, Any], rank: int) -> ConnectionSettings:
    """Return the connection settings that a replica uses for a sync.

    The replica's fleet member uses the ports in `listen` and `data_port`.

    The sync uses `sync_listen` and `sync_data_port`, or else free ports at the host of `listen`. An invalid value
    raises ConfigError.

    Args:
        options: result of `loader_options`.
        rank: rank of this process among one replica's processes on this host. Only rank 0 uses the configured ports.
    """
    given = {name: options[option] for option, name in SYNC_OPTIONS.items() if options.get(option) is not None}
    if "listen" in given:
        return connection_of({**options, "data_port": 0, **given}, rank)
    if given:
        raise ConfigError("sync_data_port needs sync_listen", hint='add "sync_listen": "HOST:PORT"')
    return connection_of(options, max(rank, 1))


def _loader_class() -> type[Any]:
    # This module must be importable without SGLang, so define the class in a function.
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

    class PenstockSglangLoader(DefaultModelLoader):  # type: ignore[misc]
        """SGLang's default loader, but with reads through Penstock. The base class is configured for `safetensors`."""

        def __init__(self, load_config: Any) -> None:
            self._options = loader_options(load_config.model_loader_extra_config or {})
            self._begun = 0.0
            super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config={}))

        def download_model(self, model_config: Any) -> None:
            """Download a model from Hugging Face, unless its weights are streamed when the model is loaded."""
            if StreamedModel.find(model_config.model_path) is None:
                super().download_model(model_config)

        def load_model(self, *, model_config: Any, device_config: Any) -> Any:
            """Return a new model with its weights."""
            # SGLang has separate loaders for these quantisation methods, but does not use them if the load format is a
            # class.
            kind = model_config.quantization
            has_own_loader = kind in _QUANTISED_WHILE_LOADED and not model_config._is_already_quantized()
            if has_own_loader or getattr(model_config, "modelopt_quant", None):
                raise ConfigError(
                    f"SGLang quantises this model with a separate loader ({kind})",
                    uri=model_config.model_path,
                    hint="use --load-format auto, or a checkpoint that is already quantised",
                )
            if runtime.may_release():
                PLUGIN.require(SLEEP, feature="--enable-memory-saver with Penstock")
            import torch

            prepare_checkpoint(self._options, _device)
            with sleep.loading(torch.device(_device()), sglang_logger()):
                return super().load_model(model_config=model_config, device_config=device_config)

        def _get_weights_iterator(
            self, source: Any, *, resolved_source: Any = None, **_: Any
        ) -> Iterator[tuple[str, torch.Tensor]]:
            options = self._options
            if not options:
                # For `update_weights_from_disk`, SGLang creates a loader without options. Use the options that the
                # server was started with.
                options = loader_options(runtime.extra_config())
            if options.get("weight_cache") and (
                not self._options or getattr(source.model_config, "is_draft_model", False)
            ):
                # The weight cache's name applies only to the target model's original weights.
                options = {name: value for name, value in options.items() if name != "weight_cache"}
            if source.model_or_path.startswith(SYNC):
                tensors = iter(_of_sync(source.model_or_path, options).items())
            else:
                tensors = self._checkpoint(source, resolved_source, options)
            if self.load_config.draft_model_idx is not None:
                return iter(self._filter_mtp_weights(tensors, source.prefix, self.load_config.draft_model_idx))
            if not self._begun:
                self.counter_before_loading_weights = self._begun = time.perf_counter()
            return ((source.prefix + name, tensor) for name, tensor in tensors)

        def _checkpoint(
            self, source: Any, resolved_source: Any, options: Mapping[str, Any]
        ) -> Iterator[tuple[str, torch.Tensor]]:
            """Wait for a checkpoint's first tensor, and return an iterator over all of its tensors."""
            streamed = StreamedModel.find(source.model_or_path)
            if streamed is None and is_remote(source.model_or_path):
                # The path of an update may be a URI. At the server's start, URIs were replaced with directories.
                stores = options.get("storage_options")
                weights = pinned_uri(source.model_or_path, settings=Settings.read(), storage_options=stores)
                streamed = StreamedModel(weights=weights, model=source.model_or_path)
            files = self._local_files(source, resolved_source) if streamed is None else self._uri(source, streamed)
            place = RankInfo(rank=_rank, device=_device, group=_group)
            model = source.model_or_path if streamed is None else streamed.model
            log = sglang_logger()
            # Wait for the first tensor, so that an update from an empty path fails before the model changes.
            return _begun(checkpoint(files, None, options, place, model=model, log=log, progress=None))

        def _uri(self, source: Any, streamed: StreamedModel) -> str:
            if _file_patterns(source):
                hint, uri = "use a local directory", display(streamed.model)
                raise ConfigError("cannot stream weights from several directories of a model", uri=uri, hint=hint)
            return streamed.weights

        def _local_files(self, source: Any, resolved_source: Any) -> list[str]:
            """Return the paths of a source's local files, which SGLang finds or downloads."""
            if resolved_source is None:
                folder, files, is_safetensors = self._prepare_weights(
                    source.model_or_path, source.revision, source.fall_back_to_pt, *_file_patterns(source)
                )
                if is_safetensors and source.model_config is not None:
                    config = source.model_config.hf_config
                    files = maybe_add_mtp_safetensors(files, folder, "model.safetensors.index.json", config)
            else:
                files, is_safetensors = list(resolved_source.weight_files), resolved_source.use_safetensors
            if not is_safetensors:
                hint = "use --load-format auto"
                raise ConfigError("the model has no safetensors files", uri=source.model_or_path, hint=hint)
            return sorted(files)

    return PenstockSglangLoader


def _file_patterns(source: Any) -> list[list[str]]:
    """Return a list with the patterns that select a source's files, or an empty list."""
    patterns = getattr(source, "allow_patterns_overrides", None)
    return [] if patterns is None else [patterns]


def _begun(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Wait for the first tensor, and return an iterator over all of the tensors."""
    return chain(list(islice(tensors, 1)), tensors)


_receivers: dict[str, VersionReceiver] = {}
"""This process's subscriptions by name. Until the process ends, they serve other receivers."""


def _of_sync(path: str, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Wait until all ranks have received and verified a trainer's version, and return its tensors.

    A path without a sync's name and a version number raises ConfigError, because all ranks must receive the same
    version.
    """
    from penstock.spi import VersionReceiver

    name, _, version = path.removeprefix(SYNC).partition("/")
    if not name or not version.isdecimal():
        raise ConfigError("the path does not name a sync version", uri=path, hint=f"use {SYNC}NAME/VERSION")
    if name not in _receivers:
        group = _parallel_group()
        _receivers[name] = VersionReceiver(
            name,
            connection=sync_connection(options, _rank()),
            device=options.get("device", "cpu"),
            rank=(0, 1) if group is None else (group.rank_in_group, group.world_size),
            group=None if group is None else group.cpu_group,
        )
    receiver = _receivers[name]
    tensors = receiver.receive(int(version))
    assert receiver.report is not None
    sglang_logger().info("penstock: %s", receiver.report)
    return tensors


def _rank() -> int:
    """Return this process's rank among one replica's processes on this host, all of which read the same checkpoint."""
    return int(runtime.parallel().world_group.local_rank)


def _device() -> str:
    import torch

    # SGLang has already selected this process's GPU, and creates the parameters inside `with torch.device(...)`.
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _group() -> Any:
    """Return the tensor-parallel group, whose ranks read the same weights, or None for a single rank."""
    group = _parallel_group()
    return None if group is None else group.device_group


def _parallel_group() -> Any:
    """Return SGLang's object for the tensor-parallel group, or None for a single rank."""
    group = runtime.parallel().tp_group
    return group if group.world_size > 1 else None
