"""An adapter of PEFT's form added to its base.

In / Out: see `operation`; the sources are the base and the adapter. FP32 until the last rounding, to the base's dtype.
Not here: reading `adapter_config.json` (`complete`).

    linear      W + s * B @ A            W: [out, in]    transposed where `fan_in_fan_out` says that W is [in, out]
    embedding   W + s * (B @ A).T        W: [num, dim]   A: [r, num], B: [dim, r]
    others      the adapter's own: `modules_to_save`, trained biases
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operation import FLOATS, Unchanged, all_of, as_it_is, specs_of, whole
from penstock.plan.tasks import Output, Recipe, Spec
from penstock.types import TensorTable

if TYPE_CHECKING:
    import torch

_ROWS = 256
"""Multiplied at once. Reason: a product's bits depend on how many rows it has; those of a task are cut on this, so
that they are the same however tasks are cut."""
_SHOWN = 5
_PREFIX = "base_model.model."
_TOLD = ("r", "lora_alpha", "use_rslora", "alpha_pattern", "fan_in_fan_out")
_PAIRS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Of `init_lora_weights`. Source: PEFT 0.18, LoraConfig: these take what they begin with out of the base's weights."""


@dataclass(frozen=True, slots=True)
class LoraMerge(Unchanged):
    """See the module. Bits are the same on one kind of processor: products are the library's own.

    Source: Hu et al., "LoRA", 2021, section 4.1; names, `use_rslora`, `alpha_pattern` as of PEFT 0.18.

    Args:
        adapter_config: what `adapter_config.json` says.

    Raises:
        ConfigError: the adapter is of a kind that is not a sum.
    """

    adapter_config: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        told, begun = self.adapter_config, str(self.adapter_config.get("init_lora_weights", ""))
        if told.get("peft_type", "LORA") != "LORA":
            raise ConfigError(f"lora-merge: an adapter of the type {told['peft_type']}, not LORA")
        if told.get("use_dora"):
            raise ConfigError("lora-merge: DoRA rescales the base's columns and is not supported")
        if begun.startswith(_CHANGE_THE_BASE):
            hint = "have PEFT convert it when it is saved (path_initial_model_for_weight_conversion)"
            raise ConfigError(f"lora-merge: init_lora_weights={begun!r} changed the base itself", hint=hint)

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"lora-merge({ {key: self.adapter_config[key] for key in _TOLD if key in self.adapter_config} })"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. PlanError also where tensors of the adapter have no place in the base."""
        if len(sources) != 2:
            raise PlanError(f"lora-merge takes a base and an adapter, not {len(sources)} sources")
        adapter = {spec.name.removeprefix(_PREFIX): spec for spec in specs_of(sources[1])}
        found, unused = [], set(adapter)
        for spec in specs_of(sources[0]):
            module = spec.name.removesuffix(".weight")
            pairs = [[f"{module}.{side}" for side in pair] for pair in _PAIRS]
            pair = next((pair for pair in pairs if unused.issuperset(pair)), None)
            if pair is not None:
                unused -= set(pair)
                found.append(self._recipe(spec, *(adapter[name] for name in pair)))
            elif spec.name in unused:
                unused.remove(spec.name)
                found.append(as_it_is(1, adapter[spec.name], spec.name))
            else:
                found.append(as_it_is(0, spec))
        if unused:
            shown = ", ".join(sorted(unused)[:_SHOWN])
            message = f"{len(unused)} tensors of the adapter have no place in the base: {shown}"
            raise PlanError(message, hint="is it of this base? `penstock inspect` shows the names of both")
        return found

    def _recipe(self, spec: Spec, a: Spec, b: Spec) -> Recipe:
        if not all(one.dtype in FLOATS for one in (spec, a, b)):
            message = f"an adapter cannot be added to {spec.dtype}"
            raise PlanError(message, tensor=spec.name, hint="dequantise the base first")
        turned = self._is_turned(a)
        fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
        if not fits or spec.shape != ((a.shape[1], b.shape[0]) if turned else (b.shape[0], a.shape[1])):
            raise PlanError(
                f"the adapter's {list(b.shape)} @ {list(a.shape)} do not fit {list(spec.shape)}", tensor=spec.name
            )
        inputs = (whole(0, spec), all_of(1, a), all_of(1, b) if turned else whole(1, b))
        return Recipe(outputs=(Output(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=_ROWS)

    def _is_turned(self, a: Spec) -> bool:
        return a.name.endswith("lora_embedding_A") or bool(self.adapter_config.get("fan_in_fan_out"))

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        weight, *pair = (tensor for tensor in inputs if tensor is not None)
        if not pair:
            return [weight]
        a, b = (one.float() for one in pair)
        scale = self._scale(recipe.outputs[0].spec.name.removesuffix(".weight"), a.shape[0])
        if self._is_turned(recipe.inputs[1].spec):
            a, b = b.T.contiguous(), a[:, start:stop].T.contiguous()
        made = weight.new_empty(weight.shape)
        for at in range(0, len(weight), _ROWS):
            change = (b[at : at + _ROWS] @ a).mul_(scale)
            made[at : at + _ROWS] = change.add_(weight[at : at + _ROWS])
        return [made]

    def _scale(self, module: str, rank: int) -> float:
        alpha = self.adapter_config.get("lora_alpha", rank)
        for pattern, other in (self.adapter_config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = other
                break
        return float(alpha) / (rank**0.5 if self.adapter_config.get("use_rslora") else rank)
