"""PEFT: a trainer publishes an adapter by itself, and another process receives it into a `PeftModel`.

In: a `PeftModel`, sharded by FSDP2 or not, and its base. Out: the adapter's own parameters, under the names and with
the configuration that `save_pretrained` of PEFT writes.
Not here: receivers without PEFT (`adapter`), engines (`lora_server`), merged weights (`lora_merge`).

    adapter_publisher:   lora_A, lora_B, modules_to_save (this rank's shards)  ->  a version for one base
    adapter_subscriber:  a version for this base  ->  the same parameters of another PeftModel
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
from penstock.sync import Publisher
from penstock_hf.adapter import AdapterSubscriber, Base, adapter_metadata, base_identity
from penstock_hf.adapter import adapter_subscriber as _subscriber
from penstock_hf.peft_layers import AdapterState

VERSIONS = ("0.21",)
"""Releases of PEFT whose names and options this module was run with."""

_FREE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("init_lora_weights", "lora_dropout", "corda_config", "eva_config", "lora_ga_config", "loftq_config"),
        *("ephemeral_gpu_offload", "ensure_weight_tying"),
        # Which modules have an adapter is in the names of the tensors, which are compared by the sync.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    }
)
"""Options that do not change what a model computes with given tensors. Source: PEFT 0.21, tuners/lora/config.py."""


def adapter_tensors(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the live parameters of an adapter by the names that PEFT saves them under; DTensors of FSDP2 as they are.

    Args:
        model: a `PeftModel`, also after `fully_shard`.
        adapter: its name in the model.

    Raises:
        ConfigError: the model has no such adapter, or another release of PEFT is installed.

    Order: for FSDP2 between steps; this reshards the module, as its `state_dict` does.
    """
    return {name: tensor.detach() for name, tensor in adapter_parameters(model, adapter).items()}


def adapter_parameters(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the parameters that `adapter_tensors` returns detached: objects that stay while nothing is replaced."""
    _config(model, adapter)
    # The parameters themselves, not the copies that `get_peft_model_state_dict` would take for a model under tensor
    # parallelism. Without embeddings that only the base has: PEFT adds those of adapted embeddings to what it saves.
    # The wrapper of torch.compile has other names, in which PEFT does not find the adapter.
    model = unwrapped(model)
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    named: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    return named


def adapter_config(model: torch.nn.Module, adapter: str = "default") -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`. Raises as `adapter_tensors`."""
    config: dict[str, Any] = _config(model, adapter).to_dict()
    # As PEFT saves it: whoever loads the adapter does not train it.
    return {**config, "inference_mode": True}


def _config(model: torch.nn.Module, adapter: str) -> Any:
    if not peft.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        message = f"PEFT {peft.__version__} is not one of {', '.join(VERSIONS)}, whose adapters Penstock knows"
        raise ConfigError(message, hint="install one of these")
    configs = getattr(unwrapped(model), "peft_config", None)
    if not isinstance(configs, Mapping) or adapter not in configs:
        known = ", ".join(map(str, configs)) if isinstance(configs, Mapping) else "none"
        message = f"a {type(model).__name__} has no adapter {adapter!r}; its adapters: {known}"
        raise ConfigError(message, hint="pass the PeftModel, also after fully_shard")
    return configs[adapter]


class AdapterPublisher(Closeable):
    """A trainer rank that publishes an adapter. Made by `adapter_publisher`; a context manager.

    Attributes:
        publisher: the publisher of the sync.
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
        """Return the newest version that this rank published; -1: none yet."""
        return self.publisher.version

    @property
    def latest(self) -> int:
        """Return the highest version that any member had when this rank joined; later versions are above it."""
        return self.publisher.latest

    def publish(self, version: int) -> PublishReport:
        """Publish the adapter's present values, for the present version of the base. See
        `penstock.sync.Publisher.publish`.

        Raises:
            ConfigError: also if the base has no version yet.
            PlanError: an adapter is merged into the base; or this adapter's layers have other options, or are scaled
                otherwise than the configuration says. Nothing is published.
            Others as `penstock.sync.Publisher.publish`.

        Order: all ranks call this.
        """
        # Which adapters are active does not matter here: this one is published by its name.
        self._state.require_same(is_used=False)
        return self.publisher.publish(version, metadata=adapter_metadata(self._base, self._config))

    def wait_subscribers(self, count: int, timeout_s: float | None = None) -> None:
        """Wait until this number of subscribers take part. See `penstock.sync.Publisher.wait_subscribers`."""
        self.publisher.wait_subscribers(count, timeout_s)

    def close(self) -> None:
        """Leave. Idempotent."""
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
    replica: str = "device",
) -> AdapterPublisher:
    """Publish an adapter of this rank under a name that receivers know.

    Args:
        name: of the sync.
        model: a `PeftModel`; after `fully_shard`, if it is sharded.
        base: the weights below the adapter: see `adapter.base_identity`. Receivers with another base refuse it.
        adapter: its name in the model.
        connection, mode, rank, replica: see `penstock.publisher`.

    Raises:
        ConfigError: as `adapter_tensors`. Others as `penstock.publisher`.

    Order: all ranks call this at the same time, and publish the same versions.
    """
    base_identity(base)
    config = adapter_config(model, adapter)
    state = AdapterState(model, adapter, lambda: adapter_parameters(model, adapter))
    publisher = penstock.publisher(name, state.tensors, connection=connection, mode=mode, rank=rank, replica=replica)
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
    serve: bool = True,
) -> AdapterSubscriber:
    """Receive the versions of an adapter into the parameters of a `PeftModel`.

    The model's own adapter must be of the same kind: an update raises PlanError, before a byte is read, if an option
    that changes what the model computes differs (`lora_alpha`, `use_rslora`, ...), or a tensor's name or shape. So does
    an update of a model whose layers would not compute the version: merged, disabled, with other options, or scaled
    otherwise. Parameters that were moved or replaced are filled where they are now.

    Args:
        name: of the sync.
        model: a `PeftModel`; its parameters keep their memory.
        base: the weights below the adapter: see `adapter.base_identity`.
        adapter: its name in the model.
        hooks, connection, mode, rank, serve: see `penstock.subscriber`.

    Raises:
        ConfigError: as `adapter_tensors`. Others as `penstock.subscriber`.
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
        serve=serve,
    )


def _check_alike(published: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise PlanError where two configurations differ in what a model computes."""
    differing = [
        f"{name}: published {published.get(name)!r}, here {own.get(name)!r}"
        for name in sorted({*published, *own} - _FREE)
        if _normal(published.get(name)) != _normal(own.get(name))
    ]
    if differing:
        lines = "\n  ".join(differing)
        raise PlanError(
            f"the published adapter is configured differently:\n  {lines}",
            hint="make the receiver's model with the trainer's LoraConfig",
        )


def _normal(value: Any) -> Any:
    """Return an option as JSON has it; an empty one as None, which PEFT means by it."""
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value)) or None
    if isinstance(value, Mapping):
        return {str(key): _normal(item) for key, item in value.items()} or None
    return value.value if isinstance(value, enum.Enum) else value
