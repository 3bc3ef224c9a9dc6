"""Load transformers models through Penstock, from a hub, a directory or an object store.

`from_pretrained` returns the same model as the class's own method. In one process, if the checkpoint's tensors match
the model's, it fills an empty model on the device. In all other cases transformers loads in `patched_libraries()`.
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

from penstock.errors import ConfigError, HubUnavailable, MissingExtra, NotFound, PenstockError, SourceChanged
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
    """Return the model that `model_class.from_pretrained(name_or_uri, **options)` returns, read through Penstock.

    In one process, weights that match the model's tensors are read straight into the empty model on its only device.
    Otherwise, and for every load of a group, transformers' own code loads, merges, splits, casts, quantises and shards
    them. The logger of this module reports the choice and the reason.

    Args:
        model_class: a `PreTrainedModel` class or an `AutoModel...` class of transformers 5.
        name_or_uri: `org/name[@revision]`, `hf://org/name[@revision][/folder]`, a directory, or a prefix in an object
            store (`s3://`, `gs://`, `az://`, `http(s)://`) with `config.json` and safetensors files.
        group: a torch.distributed group whose ranks all make this call. Each rank reads a share of the weights from
            storage, and the ranks exchange the shares. This also works with `tp_plan` and FSDP2, where each rank keeps
            only its shards.
        memory_bytes: limit in bytes for host memory during the load. See `penstock.load`. In a group, half of it is for
            tensors that have arrived but have not been requested yet.
        verify: whether to compare the weights with the digests in the manifest. See `penstock.load`. In one process, a
            model on a hub is compared with the hub's digests.
        storage_options: credentials and endpoint. See `penstock.load`.
        progress: see `penstock.load`. It applies only if the model is filled in place. Otherwise transformers shows its
            own bar.
        trace: see `penstock.load`. It applies only if the model is filled in place.
        weight_cache: use without a copy the processed parameters that a weight cache on this host holds from an earlier
            process with the same model, options and versions. If there are none, load the model and hand its parameters
            over to the cache (see `penstock.cache.cache_parameters`). They are stored under `NAME.KEY`. The name is
            this string, or the model's name if this is True. The key is a digest of the model, options and versions.
        options: options of transformers, such as `config`, `dtype`, `device_map`, `tp_plan`, `distributed_config`,
            `revision`, `token` and `quantization_config`.

    Raises:
        NotFound: there is no `config.json`.
        MissingExtra: transformers 5 is not installed.
        ConfigError: `trace`, or `verify=True` for a local directory, was passed for a model that is not filled in
            place. Or `weight_cache` was passed with options or a model whose parameters cannot be cached.
        PeerLost: another rank of the group failed.
        PenstockError: see `patched_libraries` and `penstock.load_into`. transformers' own errors are raised too.
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
            raise ConfigError(
                "weight_cache= cannot be used with group=", hint="load the model on each rank without group="
            )
        return _kept(model_class, name, weight_cache, options, arguments)
    if group is not None:
        why = "the ranks of a group read it together"
    elif os.path.isdir(name) or (is_remote(name) and not name.startswith(_HUB)):
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
    """Start to load a model and return at once. The result's `module` is the model that `from_pretrained` returns.

    The model can be used while its weights arrive, because each layer waits for its own weights. See
    `penstock.modules.load_in_background`.

    Args:
        model_class, name_or_uri: see `from_pretrained`. The location must be a directory or a prefix in an object
            store.
        first: glob patterns for the tensors to read before all others. See `penstock.modules.load_in_background`.
        memory_bytes, verify, storage_options, progress, trace: see `penstock.modules.load_in_background`.
        options: `config`, `dtype` and `device_map` for one device.

    Raises:
        ConfigError: the checkpoint's tensors do not match the model's on one device, for example because experts are
            merged or weights are quantised. The message states the reason. Use `from_pretrained` instead.
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
    """Return a function that loads weights into a transformers model as transformers does.

    Pass it to `subscriber` as `load`.

    The function merges experts, changes names and casts values as from_pretrained does for this class. The results are
    copied into the model's parameters, whose addresses stay the same. When it runs with real tensors, it takes memory
    for a second copy of them until it returns. Raises MissingExtra if transformers 5 is not installed.
    """
    _check_version()
    from transformers import conversion_mapping, core_model_loading, modeling_utils

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load `weights` into the model's own parameters."""
        import torch

        # transformers creates new parameters. Restore the model's parameters with the new values copied into them.
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
    """Return this rank's shards of a model by the checkpoint's names, for `publisher`.

    Without FSDP2, they are the whole model.

    Tensors that the class has merged, such as experts, are split into the checkpoint's tensors as views without a copy.

    Args:
        model: a transformers model, which FSDP2 may have wrapped.
        uri: a checkpoint of the model. Its names and shapes are read, but not its tensors.
        storage_options: see `penstock.load`.

    Raises:
        PlanError: the class computes some of the model's weights when it loads. The message names these weights.
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
    """Fill the model's tensors, and return when all of them are loaded."""
    import penstock

    state = model.state_dict(keep_vars=True)
    filled = {name: state[name] for name in targets.values()}
    penstock.load_into(filled, uri, rename=targets.__getitem__, **_read_arguments(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """A model that is one module on one device, in the dtype from its options, without quantisation."""

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
        """Return the key of the model's processed parameters. It covers everything that the parameters depend on."""
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
    """Describe a model by its configuration and its weights' headers.

    Return the reason instead if the model is not plain.
    """
    from transformers import AutoConfig

    from penstock.spi import revision_of

    others = sorted(set(options) - _IN_PLACE)
    if others:
        return f"{others[0]} is given"
    device = _one_device(options.get("device_map"))
    if device is None:
        return f"device_map is {options['device_map']!r}"
    config = options.get("config")
    if config is None and not (files / "config.json").exists():
        raise NotFound("there is no config.json", uri=uri)
    # Copy the config, because building a model writes to it.
    config = AutoConfig.from_pretrained(files) if config is None else copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        return "it is quantised"
    concrete = _concrete(model_class, config)
    # Read only headers. They show whether the checkpoint matches the model before any weights are read.
    with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
        manifest = weights.manifest
    dtype = _dtype(options.get("dtype")) or config.dtype or _first_floating(manifest.tensors)
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
    """Return the model, filled in place, or None and the reason why transformers has to load the model.

    Args:
        model_class, uri, options: See `from_pretrained`.
        arguments: Arguments for the load.
        fill: Called with the empty model, a mapping from the checkpoint's tensor names to the model's, the URI and
            `arguments`.
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
        # transformers initialises every tensor without this mark at random, but these tensors will be loaded.
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        # Compute buffers that no checkpoint holds (rotary frequencies) on the CPU, as from_pretrained does.
        model.initialize_weights()
        _read_generation(model, files)
        fill(model, targets, uri, arguments)
    _logger.info("penstock: %s filled in place", uri)
    return model.eval(), ""


def _kept(
    model_class: Any, uri: str, weight_cache: bool | str, options: dict[str, Any], arguments: Mapping[str, Any]
) -> Any:
    """Return the model with processed parameters from a weight cache.

    If the cache has none, load them and hand them over.
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
                # Keep the attachment to the cache only now. If the model cannot use the parameters, no lease may remain
                # during the load.
                stack.pop_all()
        except (NotFound, HubUnavailable) as error:
            _logger.info("penstock: loading %s: %s", uri, error.message)
        except NOT_USABLE as error:
            # Log the text. A log handler that stores the exception would keep its frames alive, and with them the
            # model.
            _logger.warning("penstock: loading %s, because its cached parameters cannot be used: %s", uri, str(error))
        else:
            for tensor in model.state_dict(keep_vars=True).values():
                tensor._is_hf_initialized = True
            # Buffers that are in no checkpoint have no memory yet, and `initialize_weights` computes them.
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
        # The files may have been replaced after their headers were read. A configuration from the caller cannot have
        # been replaced, but transformers may have written to it.
        given = {} if options.get("config") is None else {"config": config}
        with _local_files(uri, storage_options) as files:
            now = _plain(model_class, uri, files, {**options, **given}, storage_options)
        if isinstance(now, str) or (loaded := now.key()) != key:
            changed = now if isinstance(now, str) else ", ".join(key.differences(loaded))
            raise SourceChanged(f"the checkpoint changed during the load: {changed}", uri=uri)
        report = penstock.cache.cache_parameters(model, name).report
    # The model is loaded, and a failed hand-over leaves the model unchanged. While config.json is being replaced, it
    # may be invalid JSON, and transformers then raises ValueError or OSError.
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
    """Return the model as loaded by transformers' own code, which reads through Penstock."""
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
    """Return the name and the options with which transformers loads a URI on a hub. Raise ConfigError if it cannot."""
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
    """Return the only device in a `device_map`. Return None for several devices or if transformers must choose."""
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


def _dtype(dtype: Any) -> Any | None:
    """Return the torch dtype that an option names. None means the config's dtype."""
    import torch

    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def _targets(model: Any, table: TensorTable) -> tuple[dict[str, str], str | None]:
    """Return the model's name for each tensor in the checkpoint, or the reason why the tensors do not match."""
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
    # Tied parameters are one tensor with several names, and a checkpoint must contain exactly one of these names.
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
    """Return `model_class` itself, or an Auto class's model class for this config.

    Raise ConfigError if there is none.
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
    """Yield a directory with the model's configuration: the model's directory, or a temporary local copy."""
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
