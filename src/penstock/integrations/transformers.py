"""transformers models filled through Penstock: `load_pretrained`, for `from_pretrained` of a path or an object store.

In: a model class, the URI of a model. Out: the model, on one device, in eval mode, equal to from_pretrained's. For a
live model: `weights_loader`, its own loading in place, and `checkpoint_shards`, the shards that a trainer's rank
publishes.
Not here: hubs, quantisers, device maps over several devices, adapters.

    checkpoint fits the model tensor by tensor:        empty model on the device -> load_into
    it must be merged, split, cast, or lacks a part:   load -> from_pretrained(state_dict=...), which does and reports
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Settings
from penstock.errors import ConfigError, MissingExtra, NotFound
from penstock.storage import is_remote, local_path, read_small
from penstock.storage.weight_set import open_weights

if TYPE_CHECKING:
    import torch

    from penstock.sync.recording.layout import Load
    from penstock.sync.shards import Shard
    from penstock.types import TensorTable

_logger = logging.getLogger(__name__)

_FILES = ("config.json", "generation_config.json")


def load_pretrained(
    model_class: Any,
    uri: str,
    *,
    config: Any = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    storage_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Return a model with the weights at `uri`; its outputs equal those of `model_class.from_pretrained`.

    Args:
        model_class: a `PreTrainedModel` class or an `AutoModel...` class of transformers 5.
        uri: a directory, or a prefix in an object store, with `config.json` and safetensors files.
        config: a `PretrainedConfig`; None reads that of `uri`.
        dtype: dtype of the parameters; None takes the config's, or if it has none the weights'.
        device: one device.
        storage_options: credentials and endpoint of an object store.
        options: `penstock.load_into`'s: `memory_bytes`, `verify`, `group`, `progress`, `trace`.

    Raises:
        NotFound: there is no `config.json`. ConfigError: the config asks for a quantiser.
        MissingExtra: transformers 5 is not installed. Else as `penstock.load_into` and `from_pretrained`.

    A parameter that the checkpoint lacks is initialised and reported by transformers, as it does.
    Cost: one copy of the weights on the device where the checkpoint fits the model; which way was taken is logged.
    """
    _check_version()
    with _local_files(uri, storage_options) as directory:
        from transformers import AutoConfig

        if config is None and not (directory / "config.json").exists():
            raise NotFound("there is no config.json", uri=uri)
        # A copy: building a model writes to its config.
        config = AutoConfig.from_pretrained(directory) if config is None else copy.deepcopy(config)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError("quantised models are loaded by their quantiser", uri=uri, hint="use from_pretrained")
        concrete = _concrete(model_class, config)
        # Headers only: they tell whether the checkpoint fits, before a byte of it is read.
        with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
            table = weights.manifest.tensors
        kind = dtype or config.dtype or _first_floating(table)
        arguments = {"storage_options": storage_options, **options}
        model = _filled(concrete, config, kind, device, uri, table, arguments)
        if model is None:
            model = _converted(concrete, config, kind, device, uri, arguments)
        if model.can_generate() and (directory / "generation_config.json").exists():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def weights_loader(model: Any) -> Load:
    """Return a function that loads weights into a transformers model as transformers does: `load=` of `subscriber`.

    Experts are merged, names changed and values cast as from_pretrained does for this class. The results are copied
    into the model's parameters, whose addresses stay.

    Raises:
        MissingExtra: transformers 5 is not installed.

    Cost: when it runs with real tensors, a second copy of those given, until it returns.
    """
    _check_version()
    from transformers import conversion_mapping, core_model_loading, modeling_utils

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load these weights into the model's own parameters."""
        import torch

        # transformers replaces parameters by new ones: they are put back afterwards, with the new values copied in.
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
    """Return this rank's shards of a model (FSDP2's, or all of it) by the checkpoint's names, for `publisher`.

    Tensors that the class has merged (experts) are split again into the checkpoint's: views, nothing is copied.

    Args:
        model: a transformers model, perhaps wrapped by FSDP2.
        uri: a checkpoint of the model, for its names and shapes; its tensors are not read.
        storage_options: see `penstock.load`.

    Raises:
        PlanError: the class computes some of its weights on loading; names them.
        MissingExtra: transformers 5 is not installed.
    """
    _check_version()
    import torch
    from torch.distributed.fsdp import FSDPModule
    from transformers import initialization

    from penstock.sync.recording import layout as rename
    from penstock.sync.recording.requirements import record

    # `fully_shard` replaces a model's class by a subclass, which cannot be created from a config.
    own: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with initialization.no_init_weights(), torch.device("meta"):
        empty = own._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
        table = weights.manifest.tensors
    return rename.checkpoint_shards(model, record(empty, table, load=weights_loader(empty)))


def _filled(
    concrete: Any, config: Any, kind: Any, device: Any, uri: str, table: TensorTable, arguments: Mapping[str, Any]
) -> Any | None:
    """Return the model, filled in place; None if the checkpoint does not fit it tensor by tensor."""
    import torch
    from transformers import initialization

    from penstock import api

    # Not initialised: every parameter is about to be overwritten.
    with initialization.no_init_weights(), torch.device(device):
        model = concrete._from_config(copy.deepcopy(config), dtype=kind)
    model.tie_weights()
    targets, why = _targets(model, table)
    if why is not None:
        _logger.info("penstock: %s is converted by transformers: %s", uri, why)
        return None
    state = model.state_dict(keep_vars=True)
    api.load_into({name: state[name] for name in targets.values()}, uri, rename=targets.__getitem__, **arguments)
    # transformers initialises every tensor without this mark at random: these are loaded.
    for tensor in state.values():
        tensor._is_hf_initialized = True
    # Buffers that no checkpoint holds (rotary frequencies) are computed as from_pretrained does it, on the CPU.
    model.initialize_weights()
    _logger.info("penstock: %s filled in place", uri)
    return model


def _converted(concrete: Any, config: Any, kind: Any, device: Any, uri: str, arguments: Mapping[str, Any]) -> Any:
    """Return the model by from_pretrained of the loaded tensors, which transformers merges, splits and casts."""
    from penstock import api

    weights = api.load(uri, device=device, **arguments)
    device_map = None if str(device) == "cpu" else {"": device}
    return concrete.from_pretrained(None, config=config, state_dict=dict(weights), dtype=kind, device_map=device_map)


def _targets(model: Any, table: TensorTable) -> tuple[dict[str, str], str | None]:
    """Return the model's name for each tensor of the checkpoint; or the reason why they do not correspond."""
    from transformers import conversion_mapping, core_model_loading

    from penstock.loader.tensor import torch_dtype, torch_shape

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
    # Tied parameters are one tensor under several names, of which a checkpoint must fill exactly one.
    places: dict[int, list[str]] = {}
    for name, tensor in state.items():
        places.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), []).append(name)
    covered = set(targets.values())
    for names in places.values():
        count = sum(name in covered for name in names)
        if count == 0:
            return {}, f"the checkpoint has no {names[0]}"
        if count > 1:
            return {}, f"{names} are tied in the model and apart in the checkpoint"
    return targets, None if len(covered) == len(targets) else "two tensors of the checkpoint have one name in the model"


def _first_floating(table: TensorTable) -> Any:
    from penstock.loader.tensor import torch_dtype

    kinds = [torch_dtype(dtype) for dtype in table.dtypes]
    return next((kind for kind in kinds if kind.is_floating_point), None)


def _concrete(model_class: Any, config: Any) -> Any:
    """Return the class itself, or the class that an Auto class has for this config. ConfigError: it has none."""
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    try:
        classes = mapping[type(config)]
    except KeyError as error:
        raise ConfigError(f"{model_class.__name__} has no model for {type(config).__name__}") from error
    return classes[0] if isinstance(classes, list | tuple) else classes


@contextlib.contextmanager
def _local_files(uri: str, storage_options: Mapping[str, str] | None) -> Iterator[Path]:
    """Yield a directory with the model's configuration: its own, or a temporary copy of an object store's files."""
    if not is_remote(uri):
        yield Path(local_path(uri))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        for name in _FILES:
            place = f"{uri.rstrip('/')}/{name}"
            raw = read_small(place, settings=Settings.read(), storage_options=storage_options)
            if raw is not None:
                (Path(directory) / name).write_bytes(raw)
        yield Path(directory)


def _check_version() -> None:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers is not installed", hint="pip install 'transformers>=5'") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise MissingExtra(f"transformers {transformers.__version__} is too old", hint="pip install 'transformers>=5'")
