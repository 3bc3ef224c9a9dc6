"""Load transformers models through Penstock, from a hub, a directory or an object store.

`from_pretrained` returns the same model as the class's own `from_pretrained`. If the model's tensors match the
checkpoint, a single process fills an empty model on the device. In other cases, transformers loads the model inside
`patched_libraries()`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    ConfigError,
    FormatError,
    HubUnavailable,
    MissingExtra,
    NotFound,
    PenstockError,
    SourceChanged,
    SourceError,
    SourceTruncated,
    also,
)
from penstock.spi import (
    ProgressOption,
    Settings,
    is_remote,
    local_path,
    log_named,
    model_name,
    open_weights,
    parse_bytes,
    parse_repository,
    read_small,
    texts_of,
)
from penstock_hf.patched_libraries import (
    directory,
    patched_libraries,  # re-exported for users of transformers
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from penstock import Shard
    from penstock.modules import BackgroundLoad as BackgroundLoad
    from penstock.spi import LoadFunction, TensorTable
    from penstock_compile_cache.key import Key

_logger = log_named("penstock.transformers")

_FILES = ("config.json", "generation_config.json")

_HUB = "hf://"

_IN_PLACE = {"config", "dtype", "device_map"}
"""Options of transformers with which a model can be filled in place. transformers handles all others."""


def from_pretrained(
    model_class: Any,
    name_or_uri: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    memory_bytes: int | str | None = None,
    verify: bool | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
    trace: str | os.PathLike[str] | None = None,
    weight_cache: bool | str = False,
    **options: Any,
) -> Any:
    """Return the same model as `model_class.from_pretrained(name_or_uri, **options)`, read through Penstock.

    If `group` is None, the checkpoint's tensors match the model's and the model is on one device, the weights are read
    directly into the empty model. In all other cases, transformers' own code loads, merges, splits, casts,
    quantises and shards the weights. This module's logger reports which code loads the model, and why.

    Args:
        model_class: a `PreTrainedModel` class or an `AutoModel...` class of transformers 5.
        name_or_uri: `org/name[@revision]`, `hf://org/name[@revision][/folder]`, a directory, or a prefix in an object
            store (`s3://`, `gs://`, `az://`, `http(s)://`) with `config.json` and safetensors files.
        group: a torch.distributed group whose ranks all make this call. Each rank reads a share of the weights from
            storage, and the ranks exchange the shares. `group` also works with `tp_plan` and FSDP2, where each rank
            keeps only its shards.
        memory_bytes: limit in bytes for host memory during the load. See `penstock.load`. If `group` is passed, half
            of this memory is used for tensors that have not been requested yet.
        verify: whether to compare the weights with the digests in the manifest. See `penstock.load`. If `group` is
            None, a model on a hub is compared with the hub's digests.
        storage_options: credentials and endpoint. See `penstock.load`.
        progress: see `penstock.load`. If the model is not filled in place, `progress` has no effect, and transformers
            shows its own bar.
        trace: see `penstock.load`. `trace` can be used only for a model that is filled in place.
        weight_cache: whether to use the processed parameters in a weight cache on this host, without a copy. If the
            cache has no parameters for the same model, options and versions, load the model and hand its parameters
            over to the cache (see `penstock.cache.cache_parameters`). The cached parameters are called `NAME.KEY`. NAME
            is `weight_cache`, or the model's name if `weight_cache` is True. KEY is a digest of the model, options and
            versions.
        options: options of transformers, such as `config`, `dtype`, `device_map`, `tp_plan`, `distributed_config`,
            `revision`, `token` and `quantization_config`.

    Raises:
        NotFound: the model has no `config.json`.
        MissingExtra: transformers 5 is not installed.
        ConfigError: `trace`, or `verify=True` for a local directory, was passed for a model that is not filled in
            place. ConfigError is also raised if `weight_cache` was passed and the parameters cannot be cached.
        PeerLost: another rank of the group failed.
        PenstockError: see `patched_libraries` and `penstock.load_into`. An error about a file is also an instance of
            the class that transformers raises, such as OSError, `SafetensorError` or `json.JSONDecodeError`. Errors
            from transformers are raised unchanged.
    """
    _check_version()
    # `org/name@revision` becomes a URI on the hub. transformers also accepts names without an organisation.
    name = texts_of(name_or_uri)[0]
    arguments = {
        "storage_options": storage_options,
        "memory_bytes": memory_bytes,
        "verify": verify,
        "progress": progress,
        "trace": trace,
    }
    if weight_cache:
        if group is not None:
            raise ConfigError("weight_cache= cannot be used with group=", hint="omit group= on every rank")
        return _kept(model_class, name, weight_cache, options, arguments)
    if group is not None:
        why = "the ranks of a group read it together"
    elif os.path.isdir(name) or (is_remote(name) and not name.startswith(_HUB)):
        with _as_transformers_raises():
            model, why = _filled(model_class, name, options, arguments, _load_all)
        if model is not None:
            return model
    else:
        why = "it is the name of a model on a hub"
    _logger.info("penstock: %s is loaded by transformers: %s", name, why)
    is_local = os.path.isdir(local_path(name))
    if trace is not None or (verify and group is None and is_local):
        raise ConfigError(
            f"{'trace' if trace is not None else 'verify=True'} cannot be used for this load: {why}",
            hint="omit this argument, and compare all digests first with `penstock.verify(uri)`",
        )
    return _by_transformers(model_class, name, group, options, arguments)


@contextlib.contextmanager
def _as_transformers_raises() -> Iterator[None]:
    """Raise errors from the block as instances of the classes that transformers raises for the same files too."""
    from safetensors import SafetensorError

    try:
        yield
    except (FormatError, SourceError) as error:
        if not isinstance(error, FormatError | SourceTruncated):
            raised: type[Exception] = OSError
        elif (error.uri or "").endswith(".json"):
            raised = json.JSONDecodeError
        else:
            raised = SafetensorError
        raise also(error, raised) from error.__cause__


def start_from_pretrained(
    model_class: Any,
    name_or_uri: str | os.PathLike[str],
    *,
    first: Sequence[str] = (),
    memory_bytes: int | str | None = None,
    verify: bool | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
    trace: str | os.PathLike[str] | None = None,
    **options: Any,
) -> BackgroundLoad:
    """Start loading a model and return immediately. The result's `module` is the model that `from_pretrained` returns.

    The model can be used while its weights arrive, because each layer waits for its own weights. See
    `penstock.modules.load_in_background`.

    Args:
        model_class, name_or_uri: see `from_pretrained`. The location must be a directory or a prefix in an object
            store.
        first: glob patterns for the tensors to read before all others. See `penstock.modules.load_in_background`.
        memory_bytes, verify, storage_options, progress, trace: see `penstock.modules.load_in_background`.
        options: `config`, `dtype` and `device_map` for one device.

    Raises:
        ConfigError: the checkpoint's tensors do not match the tensors of a model on one device, for example because
            experts are merged or weights are quantised. Use `from_pretrained` instead.
        NotFound, MissingExtra: see `from_pretrained`.
        PenstockError: see `penstock.modules.load_in_background`.
    """
    _check_version()
    uri = texts_of(name_or_uri)[0]
    arguments = {
        "storage_options": storage_options,
        "memory_bytes": memory_bytes,
        "verify": verify,
        "progress": progress,
        "trace": trace,
    }
    under_way: list[BackgroundLoad] = []

    def start(model: Any, targets: Mapping[str, str], uri: str, arguments: Mapping[str, Any]) -> None:
        import penstock

        read = _read_arguments(arguments)
        loading = penstock.modules.load_in_background(model, uri, rename=targets.__getitem__, first=first, **read)
        under_way.append(loading)

    why = "it is the name of a model on a hub"
    if os.path.isdir(uri) or (is_remote(uri) and not uri.startswith(_HUB)):
        _, why = _filled(model_class, uri, options, arguments, start)
    if not under_way:
        hint = "use from_pretrained, which returns after the whole model is loaded"
        raise ConfigError(f"the model cannot be used while it loads: {why}", uri=uri, hint=hint)
    return under_way[0]


def weights_loader(model: Any) -> LoadFunction:
    """Return a function that loads weights into a transformers model in the same way as transformers.

    Pass the function to `subscriber` as `load`.

    The function merges experts, renames tensors and casts values like `from_pretrained` of the model's class. The
    results are copied into the model's parameters, whose addresses stay the same. A call needs memory for a second copy
    of the tensors, unless the tensors are on the meta device. Raise MissingExtra if transformers 5 is not installed.
    """
    _check_version()
    from transformers import conversion_mapping, core_model_loading, modeling_utils

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load `weights` into the model's own parameters."""
        import torch

        # transformers replaces the parameters. Restore the original parameters with the new values copied into them.
        before = [(g, dict(g)) for module in model.modules() for g in (module._parameters, module._buffers)]
        mapping = conversion_mapping.get_model_conversion_mapping(model)
        config = modeling_utils.LoadStateDictConfig(dtype=model.dtype, weight_mapping=mapping)
        try:
            core_model_loading.convert_and_load_state_dict_in_model(model, dict(weights), config)
        finally:
            pairs = [(old, group[name]) for group, saved in before for name, old in saved.items()]
            for group, saved in before:
                group.update(saved)
        with torch.no_grad():
            for old, new in pairs:
                if old is not None and new is not old:
                    old.copy_(new)

    return load


def checkpoint_shards(
    model: Any, uri: str, *, storage_options: Mapping[str, str] | None = None
) -> dict[str, Sequence[Shard]]:
    """Return this rank's shards of a model for `publisher`, under the checkpoint's tensor names.

    If the model is not sharded with FSDP2, the result contains whole tensors.

    A tensor that the class has merged, such as experts, is split into views that match the checkpoint's tensors.

    Args:
        model: a transformers model, with or without FSDP2.
        uri: a checkpoint of the model, from which only tensor names and shapes are read.
        storage_options: see `penstock.load`.

    Raises:
        PlanError: the model's class computes some weights during loading. The error message names these weights.
        MissingExtra: transformers 5 is not installed.
    """
    _check_version()
    import torch
    from torch.distributed.fsdp import FSDPModule
    from transformers import initialization

    from penstock.spi import layout, record

    # `fully_shard` replaces a model's class with a subclass, which cannot be created from a config.
    own: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with initialization.no_init_weights(), torch.device("meta"):
        empty = own._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
        table = weights.manifest.tensors
    return layout.checkpoint_shards(model, record(empty, table, load=weights_loader(empty)))


def _read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of `from_pretrained` to those of `penstock.load_into`."""
    from penstock import ReadSettings

    fields = ("storage_options", "memory_bytes", "trace")
    settings = ReadSettings(**{name: arguments[name] for name in fields if name in arguments})
    return {**{name: arguments[name] for name in arguments if name not in fields}, "settings": settings}


def _load_all(model: Any, targets: Mapping[str, str], uri: str, arguments: Mapping[str, Any]) -> None:
    """Fill the model's tensors, and return when all tensors are loaded."""
    import penstock

    state = model.state_dict(keep_vars=True)
    filled = {name: state[name] for name in targets.values()}
    if is_remote(uri) or any(tensor.device.type != "cpu" for tensor in filled.values()):
        penstock.load_into(filled, uri, rename=targets.__getitem__, **_read_arguments(arguments))
        return
    # On the CPU, let the model use the mapped files instead of a copy, as transformers does.
    for name, tensor in penstock.load(uri, **_read_arguments(arguments)).items():
        filled[targets[name]].data = tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """A model without quantisation on a single device, which can be filled in place."""

    config: Any
    concrete: Any
    """Class of the model."""
    device: Any
    dtype: Any
    tensors: TensorTable
    """Tensors of the checkpoint."""
    revision: str
    """Revision of the checkpoint."""

    def key(self) -> Key:
        """Return the key of the model's processed parameters, which covers everything that affects the parameters."""
        from penstock_compile_cache.key import key_of

        # Omit the location, because the same model at a different location has the same parameters.
        fields = {field: value for field, value in self.config.to_dict().items() if field != "_name_or_path"}
        described = {
            "class": self.concrete.__qualname__,
            "dtype": str(self.dtype),
            "config": json.dumps(fields, sort_keys=True, default=str),
        }
        return key_of(self.revision, engine="transformers", config=described, device=str(self.device))


def _plain(
    model_class: Any, uri: str, files: Path, options: Mapping[str, Any], storage_options: Mapping[str, str] | None
) -> _Plain | str:
    """Return a description of a model from its configuration and the headers of its weights.

    If the model cannot be filled in place, return the reason instead.
    """
    import torch
    from transformers import AutoConfig

    from penstock.spi import revision_of

    others = sorted(set(options) - _IN_PLACE)
    if others:
        return f"{others[0]} is given"
    device = _one_device(options.get("device_map"))
    if device is None:
        return f"device_map is {options['device_map']!r}"
    given = options.get("dtype")
    if isinstance(given, str):
        given = None if given == "auto" else getattr(torch, given, given)
    if not isinstance(given, torch.dtype | None):
        return f"dtype is {options['dtype']!r}"
    config = options.get("config")
    if config is None and not (files / "config.json").exists():
        hint = "copy config.json next to the weights, or pass config="
        # transformers raises a ValueError in this case.
        raise also(NotFound("there is no config.json", uri=uri, hint=hint), ValueError)
    # Copy the config, because building a model writes to it.
    config = AutoConfig.from_pretrained(files) if config is None else copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        return "it is quantised"
    concrete = _concrete(model_class, config)
    # Read only the headers, to check whether the checkpoint matches the model before any weights are read.
    with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
        manifest = weights.manifest
    dtype = given or config.dtype or _first_floating(manifest.tensors)
    return _Plain(
        config=config,
        concrete=concrete,
        device=device,
        dtype=dtype,
        tensors=manifest.tensors,
        revision=revision_of(manifest),
    )


def _read_generation(model: Any, files: Path) -> None:
    """If the model can generate, set its generation configuration from the file next to the weights."""
    from transformers import GenerationConfig

    if model.can_generate() and (files / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(files)


def _filled(
    model_class: Any,
    uri: str,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    fill: Callable[[Any, Mapping[str, str], str, Mapping[str, Any]], None],
) -> tuple[Any | None, str]:
    """Return the model after filling it in place, or None and the reason why transformers must load the model.

    Args:
        model_class, uri, options: See `from_pretrained`.
        arguments: Arguments for the load.
        fill: Function that fills the empty model. `fill` is called with the model, a mapping from the checkpoint's
            tensor names to the model's names, the URI and `arguments`.
    """
    import torch
    from transformers import initialization

    storage_options = arguments["storage_options"]
    with _local_files(uri, storage_options) as files:
        plain = _plain(model_class, uri, files, options, storage_options)
        if isinstance(plain, str):
            return None, plain
        config, concrete, device, kind, table = plain.config, plain.concrete, plain.device, plain.dtype, plain.tensors
        # Skip the initialisation, because every parameter will be overwritten.
        with initialization.no_init_weights(), torch.device(device):
            model = concrete._from_config(copy.deepcopy(config), dtype=kind)
        model.tie_weights()
        targets, why = _targets(model, table)
        if why is not None:
            return None, why
        # Mark the tensors as loaded, so that transformers does not initialise these tensors at random below.
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        # Compute the buffers that are not in the checkpoint, such as rotary frequencies, as `from_pretrained` does.
        model.initialize_weights()
        _read_generation(model, files)
        fill(model, targets, uri, arguments)
    _logger.info("penstock: %s filled in place", uri)
    return model.eval(), ""


def _kept(
    model_class: Any, uri: str, weight_cache: bool | str, options: dict[str, Any], arguments: Mapping[str, Any]
) -> Any:
    """Return the model with processed parameters from a weight cache.

    If the cache does not have the parameters, load them and hand them over to the cache.
    """
    import torch
    from transformers import initialization

    import penstock
    from penstock.spi import NOT_USABLE

    if not (os.path.isdir(uri) or is_remote(uri)) or uri.startswith(_HUB):
        hint = "pass a directory or a prefix in an object store"
        raise ConfigError("weight_cache= cannot be used for names on a hub", uri=uri, hint=hint)
    storage_options = arguments["storage_options"]
    with _local_files(uri, storage_options) as files:
        plain = _plain(model_class, uri, files, options, storage_options)
        if isinstance(plain, str):
            message = f"the model's parameters cannot be cached: {plain}"
            raise ConfigError(message, uri=uri, hint="omit weight_cache=")
        config, concrete, device, kind = plain.config, plain.concrete, plain.device, plain.dtype
        key = plain.key()
        # Add the key to the user's name too, because another checkpoint may have tensors with the same names and
        # shapes.
        name = f"{weight_cache if isinstance(weight_cache, str) else model_name(uri)}.{key.id}"
        try:
            with contextlib.ExitStack() as stack:
                attached = stack.enter_context(
                    penstock.cache.attach(name, device=device, verify=arguments["verify"] is not False, timeout_s=0)
                )
                with initialization.no_init_weights(), torch.device("meta"):
                    model = concrete._from_config(copy.deepcopy(config), dtype=kind)
                model.tie_weights()
                attached.attach_into(model)
                # Keep the lease on the cached parameters only now. If the model cannot use them, the lease must end
                # before the load.
                stack.pop_all()
        except (NotFound, HubUnavailable) as error:
            _logger.info("penstock: loading %s: %s", uri, error.message)
        except NOT_USABLE as error:
            # Log only the text. A log handler that stores the exception would keep its frames and the model alive.
            _logger.warning("penstock: loading %s, because its cached parameters cannot be used: %s", uri, str(error))
        else:
            for tensor in model.state_dict(keep_vars=True).values():
                tensor._is_hf_initialized = True
            # Allocate the buffers that are not in the checkpoint, because `initialize_weights` computes their values.
            for module in model.modules():
                for buffer in module._non_persistent_buffers_set:
                    if (empty := module._buffers[buffer]) is not None:
                        module._buffers[buffer] = torch.empty_like(empty, device=device)
            model.initialize_weights()
            _read_generation(model, files)
            _logger.info("penstock: %s", attached.report)
            return model.eval()
    model = from_pretrained(model_class, uri, **arguments, **options)
    try:
        # The files may have been replaced after their headers were read. Use a copy of the caller's configuration,
        # because transformers may have modified the original.
        given = {} if options.get("config") is None else {"config": config}
        with _local_files(uri, storage_options) as files:
            now = _plain(model_class, uri, files, {**options, **given}, storage_options)
        if isinstance(now, str) or (loaded := now.key()) != key:
            changed = now if isinstance(now, str) else ", ".join(key.differences(loaded))
            raise SourceChanged(f"the checkpoint changed during the load: {changed}", uri=uri)
        report = penstock.cache.cache_parameters(model, name).report
    # The model is usable even if the hand-over fails. If config.json is being replaced at this time, transformers may
    # raise ValueError or OSError.
    except (PenstockError, OSError, ValueError) as error:
        _logger.warning("penstock: the parameters of %s are not cached for the next process: %s", uri, error)
    else:
        _logger.info("penstock: handed over: %s", report)
    return model


def _by_transformers(
    model_class: Any,
    name: str,
    group: ProcessGroup | None,
    options: dict[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """Return the model that transformers' own code loads while it reads through Penstock."""
    storage_options = arguments["storage_options"]
    memory_bytes = arguments["memory_bytes"]
    block = patched_libraries(
        group=group,
        memory_bytes=None if memory_bytes is None else parse_bytes(memory_bytes),
        verify=bool(arguments["verify"]),
        storage_options=storage_options,
    )
    with block as report:
        if name.startswith(_HUB):
            name, options = _hub_options(name, options)
        elif is_remote(name):
            name = directory(name)
        elif os.path.isdir(local_path(name)):
            name = local_path(name)
        model = model_class.from_pretrained(name, **options)
    _logger.info("penstock: %s", report)
    return model


def _hub_options(uri: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the arguments with which transformers loads a URI on a hub. Raise ConfigError for an unsupported URI."""
    where = parse_repository(uri, "hf")
    if where.kind != "model":
        raise ConfigError(f"a {where.kind} is not a model", uri=uri, hint="use hf://org/name[@revision][/folder]")
    if where.path.endswith((".safetensors", ".safetensors.index.json")):
        raise ConfigError("transformers loads a folder, not a file", uri=uri, hint="use the URI of the file's folder")
    named = {key: value for key, value in (("revision", where.revision), ("subfolder", where.path)) if value}
    twice = [key for key, value in named.items() if options.get(key, value) != value]
    if twice:
        raise ConfigError(f"{twice[0]}= differs from the {twice[0]} in the URI", uri=uri, hint=f"omit {twice[0]}=")
    return where.name, options | named


def _one_device(device_map: Any) -> Any | None:
    """Return the only device in a `device_map`, or None if there are several devices or transformers must choose."""
    import torch

    if device_map is None:
        return "cpu"
    if isinstance(device_map, Mapping) and set(device_map) == {""}:
        device_map = device_map[""]
    if isinstance(device_map, int):
        return torch.device("cuda", device_map)
    if isinstance(device_map, torch.device):
        return device_map
    return device_map if isinstance(device_map, str) and device_map.partition(":")[0] in {"cpu", "cuda"} else None


def _targets(model: Any, table: TensorTable) -> tuple[dict[str, str], str | None]:
    """Return the model's tensor name for each checkpoint tensor, and the reason for any mismatch, or None."""
    from transformers import conversion_mapping, core_model_loading

    from penstock.spi import torch_dtype, torch_shape

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, core_model_loading.WeightConverter)]
    state = model.state_dict()
    targets: dict[str, str] = {}
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        target, converter = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if converter is not None:
            return {}, f"{name} is merged or split"
        if target not in state:
            return {}, f"the model has no {target}"
        own = state[target]
        if (torch_dtype(dtype), torch_shape(dtype, shape)) != (own.dtype, tuple(own.shape)):
            return {}, f"{name} is {dtype} {list(shape)}, the model's {own.dtype} {list(own.shape)}"
        targets[name] = target
    # Tied parameters are one tensor with several names. The checkpoint must contain exactly one of these names.
    places: dict[int, list[str]] = {}
    for name, tensor in state.items():
        places.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), []).append(name)
    covered = set(targets.values())
    for names in places.values():
        count = sum(name in covered for name in names)
        if count == 0:
            return {}, f"the checkpoint has no {names[0]}"
        if count > 1:
            return {}, f"{names} are tied in the model but separate in the checkpoint"
    return targets, None if len(covered) == len(targets) else "two tensors in the checkpoint have one name in the model"


def _first_floating(table: TensorTable) -> Any:
    from penstock.spi import torch_dtype

    kinds = [torch_dtype(dtype) for dtype in table.dtypes]
    return next((kind for kind in kinds if kind.is_floating_point), None)


def _concrete(model_class: Any, config: Any) -> Any:
    """Return `model_class` itself, or the model class that an Auto class selects for this config.

    Raise ConfigError if the Auto class has no model class for this config.
    """
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    try:
        classes = mapping[type(config)]
    except KeyError as error:
        raise ConfigError(f"{model_class.__name__} has no model class for {type(config).__name__}") from error
    return classes[0] if isinstance(classes, list | tuple) else classes


@contextlib.contextmanager
def _local_files(uri: str, storage_options: Mapping[str, str] | None) -> Iterator[Path]:
    """Yield a local directory with the model's configuration: the model's directory, or a temporary copy."""
    if not is_remote(uri):
        yield Path(local_path(uri))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        for name in _FILES:
            place = f"{uri.rstrip('/')}/{name}"
            raw = read_small(place, settings=Settings.read(), storage_options=storage_options)
            if raw is not None:
                (Path(temporary) / name).write_bytes(raw)
        yield Path(temporary)


def _check_version() -> None:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers is not installed", hint="pip install 'transformers>=5'") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise MissingExtra(f"transformers {transformers.__version__} is too old", hint="pip install 'transformers>=5'")
