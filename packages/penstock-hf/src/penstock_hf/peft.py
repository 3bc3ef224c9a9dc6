"""Sync of PEFT adapters: a trainer publishes an adapter without its base, and a receiver loads it into a `PeftModel`.

The adapter's parameters have the names that PEFT's `save_pretrained` writes. The model may be sharded with FSDP2.
`adapter` contains receivers that do not require PEFT.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import peft
import torch

import penstock
from penstock import ConnectionSettings, Hooks, PublishReport
from penstock.errors import ConfigError, PlanError
from penstock.spi import Closeable, PublishMode, UpdateMode, unwrapped
from penstock.sync import Publisher, SubscriberSettings
from penstock_hf.adapter import AdapterSubscriber, Base, adapter_metadata, base_identity
from penstock_hf.adapter import adapter_subscriber as _subscriber
from penstock_hf.peft_layers import AdapterState

VERSIONS = ("0.21",)
"""Supported releases of PEFT."""

_FREE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("init_lora_weights", "lora_dropout", "corda_config", "eva_config", "lora_ga_config", "loftq_config"),
        *("ephemeral_gpu_offload", "ensure_weight_tying"),
        # These options decide which modules have an adapter. The sync detects a difference by the tensors' names.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    }
)
"""Options that do not change what a model computes with the same tensors. Source: PEFT 0.21, tuners/lora/config.py."""


def adapter_tensors(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return an adapter's live parameters, under the names in PEFT's saved files. FSDP2's DTensors stay DTensors.

    With FSDP2, call this between training steps, because the call reshards the module, as `state_dict` does. Raise
    ConfigError if the model does not have the adapter or the release of PEFT is not supported.
    """
    return {name: tensor.detach() for name, tensor in adapter_parameters(model, adapter).items()}


def adapter_parameters(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the same parameters as `adapter_tensors`, as the model's own objects instead of detached tensors."""
    _config(model, adapter)
    # `get_peft_model_state_dict` alone would copy the parameters of a tensor-parallel model. Skip embeddings of the
    # base, which PEFT saves with adapted embeddings. Unwrap torch.compile's module, because PEFT does not find the
    # adapter under the names in that module.
    model = unwrapped(model)
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    named: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    return named


def adapter_config(model: torch.nn.Module, adapter: str = "default") -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`. Raise the same errors as `adapter_tensors`."""
    config: dict[str, Any] = _config(model, adapter).to_dict()
    # `save_pretrained` also saves `inference_mode=True`, so that a loaded adapter is not trained by default.
    return {**config, "inference_mode": True}


def _config(model: torch.nn.Module, adapter: str) -> Any:
    if not peft.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        message = f"Penstock supports adapters of PEFT {', '.join(VERSIONS)}, not {peft.__version__}"
        raise ConfigError(message, hint="install one of these releases")
    configs = getattr(unwrapped(model), "peft_config", None)
    if not isinstance(configs, Mapping) or adapter not in configs:
        known = ", ".join(map(str, configs)) if isinstance(configs, Mapping) else "none"
        message = f"a {type(model).__name__} has no adapter {adapter!r}, its adapters are: {known}"
        raise ConfigError(message, hint="pass the PeftModel, before or after fully_shard")
    return configs[adapter]


class AdapterPublisher(Closeable):
    """A trainer rank that publishes an adapter. `adapter_publisher` creates it. A context manager.

    Attributes:
        publisher: publisher of the sync.
    """

    def __init__(self, publisher: Publisher, config: Mapping[str, Any], base: Base, state: AdapterState) -> None:
        self.publisher = publisher
        self._config = config
        self._base = base
        self._state = state

    @property
    def name(self) -> str:
        """Return the name of the sync."""
        return self.publisher.name

    @property
    def version(self) -> int:
        """Return the newest version that this rank has published, or -1 before the first version."""
        return self.publisher.version

    @property
    def latest(self) -> int:
        """Return the highest version that any member had when this rank joined.

        New versions must have larger numbers.
        """
        return self.publisher.latest

    def publish(self, version: int) -> PublishReport:
        """Publish the adapter's current values, for the current version of the base. All ranks call this.

        Raises:
            ConfigError: the base has no version yet.
            PlanError: an adapter is merged into the base, or this adapter's layers have options or a scaling that
                differ from its configuration. Nothing is published.
            PenstockError: see `penstock.sync.Publisher.publish`.
        """
        # Publishing does not depend on which adapters are active, because the adapter is selected by name.
        self._state.require_same(is_used=False)
        return self.publisher.publish(version, metadata=adapter_metadata(self._base, self._config))

    def wait_subscribers(self, count: int, timeout_s: float | None = None) -> None:
        """Wait until `count` subscribers have joined. See `penstock.sync.Publisher.wait_subscribers`."""
        self.publisher.wait_subscribers(count, timeout_s)

    def close(self) -> None:
        """Leave the sync. Idempotent."""
        self.publisher.close()


def adapter_publisher(
    name: str,
    model: torch.nn.Module,
    *,
    base: Base,
    adapter: str = "default",
    connection: ConnectionSettings | str | None = None,
    mode: PublishMode = "snapshot",
    rank: tuple[int, int] | None = None,
    snapshot_device: str = "device",
) -> AdapterPublisher:
    """Publish an adapter from this rank under a name that receivers know.

    All ranks make this call at the same time, and publish the same versions. Raises the same errors as
    `adapter_tensors` and `penstock.publisher`.

    Args:
        name: name of the sync.
        model: a `PeftModel`. If the model is to be sharded, call `fully_shard` before this call.
        base: the weights that the adapter belongs to. See `adapter.base_identity`. Receivers with a different base
            reject the adapter.
        adapter: name of the adapter in the model.
        connection, mode, rank, snapshot_device: see `penstock.publisher`.
    """
    base_identity(base)
    config = adapter_config(model, adapter)
    state = AdapterState(model, adapter, lambda: adapter_parameters(model, adapter))
    publisher = penstock.publisher(
        name, state.tensors, connection=connection, mode=mode, rank=rank, snapshot_device=snapshot_device
    )
    return AdapterPublisher(publisher, config, base, state)


def adapter_subscriber(
    name: str,
    model: torch.nn.Module,
    *,
    base: Base,
    adapter: str = "default",
    hooks: Hooks | None = None,
    connection: ConnectionSettings | str | None = None,
    mode: UpdateMode = "staged",
    rank: tuple[int, int] | None = None,
    settings: SubscriberSettings | None = None,
) -> AdapterSubscriber:
    """Receive the versions of an adapter into the parameters of a `PeftModel`.

    The model must already have an adapter with the same names, shapes and options. An update raises PlanError before it
    reads a byte if a tensor's name or shape differs, or if an option that changes the results of the model differs
    (`lora_alpha`, `use_rslora`, ...). An update also raises PlanError if the model would not use the version, because
    the adapter's layers are merged, disabled, scaled or have different options. An update fills the current parameters,
    even after they were moved or replaced. Raises the same errors as `adapter_tensors` and `penstock.subscriber`.

    Args:
        name: name of the sync.
        model: a `PeftModel`, whose parameters are overwritten in place.
        base: the weights that the adapter belongs to. See `adapter.base_identity`.
        adapter: name of the adapter in the model.
        hooks, connection, mode, rank, settings: see `penstock.subscriber`.
    """
    own = adapter_config(model, adapter)
    state = AdapterState(model, adapter, lambda: adapter_parameters(model, adapter))
    return _subscriber(
        name,
        base=base,
        target=state.tensors,
        check=lambda published: _check_alike(published, own),
        check_target=lambda: state.require_same(is_used=True),
        follow_target=state.follow,
        hooks=hooks,
        connection=connection,
        mode=mode,
        rank=rank,
        settings=settings,
    )


def _check_alike(published: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise PlanError if two configurations differ in an option that changes the results of a model."""
    differing = [
        f"{name}: published {published.get(name)!r}, here {own.get(name)!r}"
        for name in sorted({*published, *own} - _FREE)
        if _normal(published.get(name)) != _normal(own.get(name))
    ]
    if differing:
        lines = "\n  ".join(differing)
        raise PlanError(
            f"the published adapter is configured differently:\n  {lines}",
            hint="create the receiver's model with the trainer's LoraConfig",
        )


def _normal(value: Any) -> Any:
    """Return an option as a JSON value. Return None for an empty option, because PEFT treats it like None."""
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value)) or None
    if isinstance(value, Mapping):
        return {str(key): _normal(item) for key, item in value.items()} or None
    return value.value if isinstance(value, enum.Enum) else value
