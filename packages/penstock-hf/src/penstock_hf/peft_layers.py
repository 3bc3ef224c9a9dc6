"""Check a PeftModel's layers at every publish and update, because their state affects what the model computes.

A merged layer ignores the adapter's tensors, because its base weight already includes them. `scale_layer` changes the
factor by which a layer scales its adapter. PEFT stores this state neither in tensors nor in the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key

from penstock.errors import PlanError
from penstock.spi import unwrapped

_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeftLayer:
    """The part of a PEFT layer's state that affects what the layer computes."""

    kind: str
    merged: tuple[str, ...]
    active: tuple[str, ...]
    is_disabled: bool
    options: tuple[tuple[str, object], ...]
    """The adapter's rank, alpha, kind of scaling, and whether it uses DoRA."""
    scaling: float | None
    """Factor by which a LoRA layer scales the adapter's part. None if the layer has no such factor."""
    expected: float | None
    """The same factor according to the adapter's configuration."""


class AdapterState:
    """The state that a model's layers had when a publisher or subscriber for an adapter was created.

    Args:
        model: a `PeftModel`.
        adapter: name of the adapter in the model.
        look_up: function that returns the current tensors to publish or fill.

    Attributes:
        tensors: mapping that a publisher or subscriber uses. `follow` and `require_same` update the mapping, because
            the model's tensors may have moved.

    Raises:
        PlanError: the adapter's factors do not match its configuration.
    """

    def __init__(self, model: torch.nn.Module, adapter: str, look_up: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._model = unwrapped(model)
        self._adapter = adapter
        self._look_up = look_up
        self.tensors = look_up()
        self._layers = _layers(self._model, adapter)
        self._require_scaling(self._layers)

    def require_same(self, *, is_used: bool) -> None:
        """Look up `tensors` again, and check that the model's layers have not changed.

        The check inspects the model's modules and state dict, but reads no tensor values.

        Args:
            is_used: whether the adapter must still be active if it was active before.

        Raises:
            PlanError: layers have changed. The message names the layers and the change, and the hint names the call
                that undoes the change. Nothing was changed.
        """
        layers = _layers(self._model, self._adapter)
        merged = {name: layer for name, layer in layers.items() if layer.merged}
        if merged:
            names = sorted({adapter for layer in merged.values() for adapter in layer.merged})
            message = f"PEFT has merged {', '.join(names)} into the base: {_shown(merged)}"
            raise PlanError(message, hint="call unmerge_adapter() before the publish or update")
        changed = [
            name
            for name in sorted({*layers, *self._layers})
            if name not in layers or name not in self._layers or _fixed(layers[name]) != _fixed(self._layers[name])
        ]
        if changed:
            message = f"layers of the adapter {self._adapter!r} were changed or replaced: {_shown(changed)}"
            raise PlanError(message, hint="create the publisher or subscriber again")
        if is_used:
            idle = [name for name, layer in layers.items() if self._is_idle(self._layers[name], layer)]
            if idle:
                message = f"the model does not use the adapter {self._adapter!r} any more: {_shown(idle)}"
                raise PlanError(message, hint=f"call enable_adapter_layers() and set_adapter({self._adapter!r})")
        self._require_scaling(layers)
        if lost := sorted(self.tensors.keys() ^ self._follow().keys()):
            message = f"{len(lost)} tensors of the adapter {self._adapter!r} are gone or new: {_shown(lost)}"
            raise PlanError(message, hint="create the publisher or subscriber again")

    def follow(self) -> None:
        """Look up the tensors again. Call this before an update, because the update writes to the current tensors."""
        self._follow()

    def _follow(self) -> dict[str, torch.Tensor]:
        """Return the model's current tensors, and store them in `tensors` unless their names have changed."""
        tensors = self._look_up()
        # Keep the old tensors if names have changed, because `require_same` then raises an error.
        if tensors.keys() == self.tensors.keys():
            self.tensors.update(tensors)
        return tensors

    def _is_idle(self, before: _PeftLayer, now: _PeftLayer) -> bool:
        """Return whether a layer used the adapter before but no longer does."""
        was_used = self._adapter in before.active and not before.is_disabled
        return was_used and (now.is_disabled or now.active != before.active)

    def _require_scaling(self, layers: Mapping[str, _PeftLayer]) -> None:
        for name, layer in layers.items():
            if layer.scaling is None or layer.expected is None:
                continue
            if not math.isclose(layer.scaling, layer.expected, rel_tol=1e-6):
                message = f"the adapter {self._adapter!r} is scaled by {layer.scaling:g} in {name}"
                raise PlanError(
                    f"{message}, but its configuration says {layer.expected:g}",
                    hint="call unscale_layer(), or set lora_alpha in the LoraConfig of both sides",
                )


def _fixed(layer: _PeftLayer) -> tuple[str, tuple[tuple[str, object], ...]]:
    return layer.kind, layer.options


def _shown(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"{', '.join(listed[:_LISTED])}{more}"


def _layers(model: torch.nn.Module, adapter: str) -> dict[str, _PeftLayer]:
    """Return the state of all PEFT layers by name, including the layers that only other adapters use."""
    config = getattr(model, "peft_config", {}).get(adapter)
    return {
        name.replace("_orig_mod.", ""): _layer(module, adapter, name, config)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }


def _layer(module: Any, adapter: str, name: str, config: Any) -> _PeftLayer:
    def of(option: str) -> Any:
        options = getattr(module, option, None)
        return options.get(adapter) if isinstance(options, Mapping) else None

    scaling, expected = of("scaling"), None
    # These options have a different meaning in other kinds of layers.
    if isinstance(module, LoraLayer) and not isinstance(module, AdaLoraLayer) and scaling is not None:
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
        expected = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    kinds = ("r", "lora_alpha", "use_rslora", "use_dora")
    fixed: list[tuple[str, object]] = [(kind, of(kind)) for kind in kinds]
    fixed.append(("variant", type(of("lora_variant")).__name__))
    if expected is None:
        fixed.append(("scaling", scaling))
    return _PeftLayer(
        # Do not compare the class itself, because `fully_shard` and `torch.compile` replace it.
        kind="tuner" if isinstance(module, BaseTunerLayer) else "wrapper",
        merged=tuple(module.merged_adapters),
        active=tuple(module.active_adapters),
        is_disabled=bool(module.disable_adapters),
        options=tuple(fixed),
        scaling=None if expected is None else float(scaling),
        expected=expected,
    )
