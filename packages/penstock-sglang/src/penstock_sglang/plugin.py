"""SGLang's `--load-format penstock`: weights of any URI through `penstock.stream`, a fleet, a keeper or a sync.

In: SGLang's plugin entry points call `register` and `register_runai` in each of its processes;
`--model-loader-extra-config` carries options. Out: a load format, whose loader is a subclass of SGLang's default one.
Not here: mapping names, quantisation and checks of the model, which stay with SGLang; reading from a keeper, fleet or
storage, and the options (`spi.engine_weights`); receiving versions (`spi.version_receiver`).

New weights come by SGLang's `/update_weights_from_disk`: from a path, from any URI, or from a trainer that publishes
them (`sync://NAME/VERSION`). The model is changed only after all ranks have received and verified the version.

SGLang takes a directory or a name of Hugging Face. For any other URI its configuration and tokenizer are downloaded
once, before the first process starts, and SGLang is given that directory; a file in it names the weights' URI, which
each rank streams.

Written for SGLang 0.5.23. With a version that was not tried, SGLang starts without this load format.
"""

from __future__ import annotations

import importlib.util
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
    read_options,
)
from penstock_sglang import sleep

if TYPE_CHECKING:
    import torch

    from penstock.spi import VersionReceiver

LOAD_FORMAT = "penstock"
LOGGER = "penstock.sglang"
VERSIONS = ("0.5.23",)
"""Versions of SGLang that this was run with."""
SYNC = "sync://"
"""Begin of the path of an update whose weights a trainer publishes."""
_QUANTISED_WHILE_LOADED = ("auto-round-int8", "modelopt", "modelopt_fp8", "modelopt_mixed")
"""Values of `--quantization` for which `get_model_loader` chooses another loader. Source: SGLang 0.5.23."""
_WEIGHTS_FILE = ".penstock-weights.json"
"""In the directory that SGLang is given for a URI: where the weights are."""


def sglang_logger() -> Log:
    """Return the integration's logger at SGLang's level; SGLang configures the root logger's handler."""
    logger = logging.getLogger(LOGGER)
    if logger.level == logging.NOTSET and (level := logging.getLogger("sglang").getEffectiveLevel()) < logging.WARNING:
        logger.setLevel(level)
    return log_named(LOGGER)


PLUGIN = HostPlugin("sglang", supported=f"SGLang {' or '.join(VERSIONS)}", log=sglang_logger)
"""What this version of SGLang supports of Penstock, once `register` has run in this process."""


def register() -> None:
    """Make `penstock` known to SGLang in this process as a load format.

    SGLang calls it by entry point, in each of its processes. A second call does nothing. It never raises: for a version
    of SGLang that was not tried, a line in the log says so and `penstock` is no load format.
    """
    PLUGIN.register({"--load-format penstock": _add_load_format})


def register_runai() -> None:
    """Let SGLang's `--load-format runai_streamer` use Penstock, in each of its processes.

    It does so if Run:ai's package is not installed, or if `SGLANG_PLUGINS` names `penstock_runai`: an
    installed package is replaced only if the user says so. It never raises, as `register`.
    """
    PLUGIN.register({"--load-format runai_streamer by Penstock": _replace_runai})


def _add_load_format() -> None:
    from sglang.version import __version__

    if __version__ not in VERSIONS:
        raise ConfigError(
            f"penstock_sglang.plugin was not tried with SGLang {__version__}",
            hint=f"install one of {list(VERSIONS)}, or use --load-format runai_streamer (docs/serve/sglang.md)",
        )
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
        return
    register_resolution_hook("handle_model_source_paths")(_give_directory)
    HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify, HookType.AROUND)
    sleep.SchedulerSleep(LOAD_FORMAT).register()
    # Last: without one of the hooks, a load format that users can name would do other things than documented.
    add_load_format_choices([LOAD_FORMAT])


def _replace_runai() -> None:
    from sglang.srt.environ import envs

    is_named = "penstock_runai" in (envs.SGLANG_PLUGINS.get() or "").replace(" ", "").split(",")
    if is_named or importlib.util.find_spec("runai_model_streamer") is None:
        from penstock_hf import runai_streamer

        runai_streamer.install()


def _verify(original: Any, load_config: Any) -> None:
    """Check a load format as SGLang does; in place of `penstock`, put the class of its loader."""
    # `get_model_loader` instantiates a class that it finds here: that is SGLang's way for loaders from outside.
    if load_config.load_format == LOAD_FORMAT:
        load_config.load_format = _loader_class()
    else:
        original(load_config)


def _give_directory(server_args: Any, previous: Any) -> None:
    """Give SGLang a directory for each model, draft and tokenizer that is a URI, if the load format is `penstock`."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    if config.load_format == LOAD_FORMAT:
        extra = config.model_loader_extra_config or {}
        options = read_options(json.loads(extra) if isinstance(extra, str) else extra)
        stores = options.get("storage_options")
        replaced: dict[str, str] = {}
        for field in ("model_path", "tokenizer_path", "speculative_draft_model_path"):
            uri = getattr(config, field)
            if uri is not None and is_remote(uri):
                replaced[field] = str(model_directory(uri, storage_options=stores))
        if "model_path" in replaced and config.served_model_name is None:
            # SGLang's default, the path, would be the name of a directory in its cache.
            replaced["served_model_name"] = model_name(config.model_path)
        if replaced:
            declare_resolution(server_args, "penstock", **replaced)
    previous(server_args)


def model_directory(uri: str, *, storage_options: Mapping[str, str] | None = None) -> Path:
    """Return a directory with all files of a model but its weights, below SGLang's cache; they are downloaded anew.

    Raises:
        NotFound: nothing is at `uri`, or it has no config.json. SourceError: the storage failed.
    """
    settings = Settings.read()
    # Once, for configuration and weights: a branch that moves meanwhile must not be mixed of two commits.
    place = pinned_uri(uri, settings=settings, storage_options=storage_options)
    directory = _cache() / sha256(place.encode()).hexdigest()[:16]
    note = json.dumps({"weights": place, "model": uri}).encode()
    copy_other_files(place, directory, {_WEIGHTS_FILE: note}, storage_options)
    if not (directory / "config.json").is_file():
        raise NotFound("there is no config.json", uri=display(uri))
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedModel:
    """A model whose directory, as SGLang is given it, was made by `model_directory`."""

    weights: str
    """Pinned URI of the weights."""
    model: str
    """URI of the model as its user gave it."""

    @classmethod
    def find(cls, path: str) -> StreamedModel | None:
        """Read the URIs in the directory's note; return None for an ordinary directory.

        Raises:
            FormatError: the note was not written by this version of Penstock.
        """
        file = Path(path) / _WEIGHTS_FILE
        # Only in our own directory: a model's files must not say that its weights are elsewhere.
        if file.parent.parent != _cache():
            return None
        try:
            note = json.loads(file.read_text())
            return cls(weights=str(note["weights"]), model=str(note["model"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"not written by this version of Penstock: {error}", uri=str(file), hint="remove the directory"
            ) from error


def _cache() -> Path:
    """Return the directory of the directories that SGLang is given."""
    from sglang.srt.environ import envs

    return Path(os.path.expanduser(envs.SGLANG_CACHE_DIR.get())) / "penstock"


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that are for vLLM alone."""
    if options.get("finished"):
        raise ConfigError('"finished" is for vLLM', hint='give "keeper", which attaches to the checkpoint')
    # DeepGEMM and FlashInfer are imported by now, and have read where their caches are.
    if options.get("compile_cache"):
        hint = 'run eval "$(penstock compile-cache restore URI --engine sglang)" before SGLang'
        raise ConfigError("SGLang cannot move its caches when it loads a model", hint=hint)


def _loader_class() -> type[Any]:
    """Return the loader, a subclass of SGLang's default one."""
    # Defined inside a function, because this module must be importable without SGLang.
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

    class PenstockSglangLoader(DefaultModelLoader):  # type: ignore[misc]
        """SGLang's default loader, reading through Penstock.

        It is given a configuration of format `safetensors`, so that finding a local model's files, downloading a name
        of Hugging Face, secondary weights and all that follows the reading stay SGLang's own.
        """

        def __init__(self, load_config: Any) -> None:
            self._options = read_options(load_config.model_loader_extra_config or {})
            _refuse_options(self._options)
            self._begun = 0.0
            super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config={}))

        def download_model(self, model_config: Any) -> None:
            """Download a model of Hugging Face; one at another URI is read from there when it is loaded."""
            if StreamedModel.find(model_config.model_path) is None:
                super().download_model(model_config)

        def load_model(self, *, model_config: Any, device_config: Any) -> Any:
            """Return a new model with its weights."""
            # SGLang has its own loaders for these, but does not use them when the load format is a class.
            kind = model_config.quantization
            has_own_loader = kind in _QUANTISED_WHILE_LOADED and not model_config._is_already_quantized()
            if has_own_loader or getattr(model_config, "modelopt_quant", None):
                raise ConfigError(
                    f"SGLang quantises this model while it loads it ({kind}), by a loader of its own",
                    uri=model_config.model_path,
                    hint="use --load-format auto, or a checkpoint that is quantised already",
                )
            import torch

            with sleep.loading(torch.device(_device()), sglang_logger()):
                return super().load_model(model_config=model_config, device_config=device_config)

        def _get_weights_iterator(
            self, source: Any, *, resolved_source: Any = None, **_: Any
        ) -> Iterator[tuple[str, torch.Tensor]]:
            """Return the named tensors of one source of weights."""
            options = self._options
            if not options:
                # For `update_weights_from_disk` SGLang makes a loader without options: use those of the start.
                options = read_options(_published_extra())
            if options.get("keeper") and (not self._options or getattr(source.model_config, "is_draft_model", False)):
                # The keeper's name is of the target model's weights at the start.
                options = {name: value for name, value in options.items() if name != "keeper"}
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
            """Return the tensors of a checkpoint, the first of which has arrived."""
            streamed = StreamedModel.find(source.model_or_path)
            if streamed is None and is_remote(source.model_or_path):
                # An update's path. At the start, URIs were replaced by directories.
                stores = options.get("storage_options")
                weights = pinned_uri(source.model_or_path, settings=Settings.read(), storage_options=stores)
                streamed = StreamedModel(weights=weights, model=source.model_or_path)
            files = self._local_files(source, resolved_source) if streamed is None else self._uri(source, streamed)
            place = RankInfo(rank=_rank, device=_device, group=_group)
            model = source.model_or_path if streamed is None else streamed.model
            log = sglang_logger()
            # With its first tensor, so that an update from a path with nothing in it fails before the model is changed.
            return _begun(checkpoint(files, None, options, place, model=model, log=log, progress=None))

        def _uri(self, source: Any, streamed: StreamedModel) -> str:
            """Return the URI of a source's weights."""
            if source.allow_patterns_overrides is not None:
                hint, uri = "give a local directory", display(streamed.model)
                raise ConfigError("this model's weights are in several directories", uri=uri, hint=hint)
            return streamed.weights

        def _local_files(self, source: Any, resolved_source: Any) -> list[str]:
            """Return the local files of a source as SGLang finds or downloads them."""
            if resolved_source is None:
                folder, files, is_safetensors = self._prepare_weights(
                    source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
                )
                if is_safetensors and source.model_config is not None:
                    config = source.model_config.hf_config
                    files = maybe_add_mtp_safetensors(files, folder, "model.safetensors.index.json", config)
            else:
                files, is_safetensors = list(resolved_source.weight_files), resolved_source.use_safetensors
            if not is_safetensors:
                hint = "use --load-format auto for it"
                raise ConfigError("the model has no safetensors files", uri=source.model_or_path, hint=hint)
            return sorted(files)

    return PenstockSglangLoader


def _begun(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the same tensors, the first of which has arrived."""
    return chain(list(islice(tensors, 1)), tensors)


_receivers: dict[str, VersionReceiver] = {}
"""This process's subscriptions, by name: they keep their memory, and serve other receivers, until the process ends."""


def _of_sync(path: str, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a version that a trainer publishes, once all ranks have received and verified it.

    Raises:
        ConfigError: the path names no sync, or no version: all ranks must receive the same one.
        PenstockError: as `VersionReceiver.receive`.
    """
    from penstock.spi import VersionReceiver

    name, _, version = path.removeprefix(SYNC).partition("/")
    if not name or not version.isdecimal():
        raise ConfigError("the path names no version of a sync", uri=path, hint=f"give {SYNC}NAME/VERSION")
    if name not in _receivers:
        group = _parallel_group()
        _receivers[name] = VersionReceiver(
            name,
            connection=connection_of(options, _rank()),
            device=options.get("device", "cpu"),
            rank=(0, 1) if group is None else (group.rank_in_group, group.world_size),
            group=None if group is None else group.cpu_group,
        )
    receiver = _receivers[name]
    tensors = receiver.receive(int(version))
    assert receiver.report is not None
    sglang_logger().info("penstock: %s", receiver.report)
    return tensors


def _published_extra() -> Mapping[str, Any]:
    """Return the `--model-loader-extra-config` that this process of SGLang was started with."""
    from sglang.srt.runtime_context import get_model

    extra = get_model().model_loader_extra_config or {}
    return json.loads(extra) if isinstance(extra, str) else extra


def _rank() -> int:
    """Return the rank of this process among the replica's processes on this host, which read the same checkpoint."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().world_group.local_rank)


def _device() -> str:
    """Return the device of the parameters, where weights are read to."""
    import torch

    # SGLang makes parameters under `with torch.device(...)`, and has chosen the process's GPU before.
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _group() -> Any:
    """Return the tensor-parallel group, whose ranks read the same weights; None when there is one rank."""
    group = _parallel_group()
    return None if group is None else group.device_group


def _parallel_group() -> Any:
    """Return SGLang's tensor-parallel group; None when there is one rank."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return group if group.world_size > 1 else None
