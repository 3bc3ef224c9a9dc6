"""Merges a LoRA adapter in PEFT's format into its base.

The sources are the base and the adapter. Values stay FP32 until a final rounding to the base's dtype. `spec.completed`
reads `adapter_config.json` and the base's `config.json`.

    linear      W + s * B @ A            W: [out, in]    transposed where W is [in, out] (GPT-2's Conv1D)
    embedding   W + s * (B @ A).T        W: [num, dim]   A: [r, num], B: [dim, r]
    bias        b + s * B.bias           `lora_bias`

`modules_to_save`, trained biases and embeddings of a resized vocabulary are copied from the adapter. `W` is the
adapter's `base_layer.weight`, which PEFT saves for adapted embeddings and heads, or else the base's weight. The result
unties embedding and head if the adapter changes them differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.types import TensorTable
from penstock_convert.operations.operation import FLOATS, all_of, copy_recipe, specs_of, whole
from penstock_convert.plan.tasks import Input, Recipe, Spec, TaskOutput

if TYPE_CHECKING:
    import torch

_ROWS = 256
"""Number of rows that are multiplied at once. The bits of a product depend on its number of rows. Tasks are cut at
multiples of this number, so that the bits do not depend on the cuts."""
_SHOWN = 5
_PREFIX = "base_model.model."
_NAMED = ("r", "lora_alpha", "use_rslora", "alpha_pattern", "fan_in_fan_out")
"""Options of the configuration that are part of the operation's name, and therefore of the job's key."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that subtract the adapter's initial values from the base. Source: PEFT 0.21,
tuners/lora/layer.py."""
_NOT_A_SUM = {
    "use_dora": "DoRA rescales the base's columns",
    "alora_invocation_tokens": "an activated adapter (aLoRA) applies to some tokens only",
    "use_qalora": "QA-LoRA pools what goes into the adapter",
    "use_bdlora": "BD-LoRA's factors are block diagonal",
    "monteclora_config": "MonteCLoRA samples its weights",
    "arrow_config": "Arrow routes each token to one of several adapters",
    "kasa_config": "KaSA truncates the base's weights",
    "layer_replication": "replicated layers are not in the base",
    "trainable_token_indices": "adapters of single tokens' embeddings are not supported",
}
"""Options with which PEFT computes something other than W + s * B @ A, or lays out the tensors differently. Source:
PEFT 0.21, tuners/lora/config.py and variants.py."""
_HEADS = {
    "model.embed_tokens.weight": "lm_head.weight",
    "transformer.wte.weight": "lm_head.weight",
    "model.language_model.embed_tokens.weight": "lm_head.weight",
    "language_model.model.embed_tokens.weight": "language_model.lm_head.weight",
}
"""Maps an input embedding to the output head that can be tied to it. Source: `_tied_weights_keys` of transformers 5's
causal models."""
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|shared|word_embeddings|embed_in|tok_embeddings|lm_head)\.weight$")
"""Names of tensors that may be tied to another tensor."""

_FUSED_EXPERTS = re.compile(r"\.experts\.(base_layer\.)?lora_[AB]\.weight$")


@dataclass(slots=True)
class _Change:
    """The change that an adapter makes to one tensor of the base."""

    replaced: Spec | None = None
    """The adapter's own tensor, which replaces the base's tensor."""
    a: Spec | None = None
    b: Spec | None = None
    """The factors A and B of a product to add."""
    bias: Spec | None = None
    """A vector to add."""

    @property
    def is_embedding(self) -> bool:
        """Return whether the product is for an embedding, which PEFT stores transposed."""
        return self.a is not None and self.a.name.endswith("lora_embedding_A")

    @property
    def specs(self) -> list[Spec]:
        return [spec for spec in (self.replaced, self.a, self.b, self.bias) if spec is not None]


@dataclass(frozen=True, slots=True)
class LoraMerge:
    """Merges an adapter into its base, as described in the module's docstring.

    Results are bit-identical only on the same kind of processor, because a library computes the matrix product. Names
    and options are the same as in PEFT 0.21. Source: Hu et al., "LoRA", 2021, section 4.1.

    Args:
        adapter_config: content of `adapter_config.json`.
        tied: `tie_word_embeddings` in the base's `config.json`. None if the option is missing.

    Raises:
        ConfigError: this kind of adapter cannot be merged by adding a product.
    """

    adapter_config: Mapping[str, Any] = field(hash=False)
    tied: bool | None = None
    _of_config: dict[str, Any] = field(default_factory=dict, init=False, compare=False, hash=False, repr=False)
    """Changes that `recipes` found for `config`: a resized vocabulary, or embeddings that are no longer tied."""

    def __post_init__(self) -> None:
        options, init = self.adapter_config, str(self.adapter_config.get("init_lora_weights", ""))
        # Refuse these adapters explicitly, because merging them would produce plausible but wrong weights.
        if options.get("peft_type", "LORA") != "LORA":
            raise ConfigError(f"lora-merge: the adapter has type {options['peft_type']}, not LORA")
        for option, why in _NOT_A_SUM.items():
            if options.get(option):
                raise ConfigError(
                    f"lora-merge: cannot merge this adapter: {why} ({option})", hint="merge the adapter with PEFT"
                )
        if init.lower().startswith(_CHANGE_THE_BASE):
            hint = "save the adapter with path_initial_model_for_weight_conversion, so that PEFT converts it"
            raise ConfigError(f"lora-merge: init_lora_weights={init!r} also changed the base", hint=hint)

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"lora-merge({ {key: self.adapter_config[key] for key in _NAMED if key in self.adapter_config} })"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. Raise PlanError if adapter tensors match no tensor in the base."""
        if len(sources) != 2:
            raise PlanError(f"lora-merge takes a base and an adapter, not {len(sources)} sources")
        base = {spec.name: spec for spec in specs_of(sources[0])}
        changes = _changes_of(specs_of(sources[1]))
        self._of_config.clear()
        added, dropped = self._untie(base, changes)
        if unused := [spec.name for name in changes if name not in base | added for spec in changes[name].specs]:
            shown = ", ".join(sorted(unused)[:_SHOWN])
            message = f"{len(unused)} adapter tensors match no tensor in the base: {shown}"
            hint = "check that the adapter was trained on this base: `penstock inspect` shows tensor names"
            # Like Penstock, PEFT cannot merge a bias into a layer that has no bias.
            bare = [name for name, change in changes.items() if change.bias is not None and name not in base | added]
            layers = [name for name in bare if f"{name.removesuffix('.bias')}.weight" in base]
            if layers and len(layers) == len(unused):
                message = f"the adapter has a bias (lora_bias) for {len(layers)} layers without one: {layers[0]}"
                hint = "serve the adapter separately, or train it without lora_bias"
            if any(_FUSED_EXPERTS.search(name) for name in unused):
                hint = "merge an adapter for fused experts (target_parameters) with PEFT"
            raise PlanError(message, hint=hint)
        remaining = [(spec.name, spec) for spec in base.values() if spec.name not in dropped]
        # If one layer fits only transposed, the model stores all layers transposed, including square ones.
        layers_transposed = bool(self.adapter_config.get("fan_in_fan_out")) or any(
            _orientations(base[name].shape, change.a, change.b) == (False, True)
            for name, change in changes.items()
            if name in base and change.a is not None and change.b is not None and not change.is_embedding
        )
        return [
            self._recipe(name, spec, changes.get(name), layers_transposed)
            for name, spec in (*remaining, *added.items())
        ]

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`. Call `recipes` first."""
        changed = dict(config)
        for key, value in self._of_config.items():
            # In a multimodal model, change the text model's configuration.
            text = changed.get("text_config")
            if isinstance(text, Mapping) and (key in text or key not in changed):
                changed["text_config"] = {**text, key: value}
            if key in changed or not isinstance(text, Mapping):
                changed[key] = value
        return changed

    def _untie(self, base: Mapping[str, Spec], changes: dict[str, _Change]) -> tuple[dict[str, Spec], set[str]]:
        """Return the head to add, if any, mapped to the tensor from which it starts, and the names of tensors to omit.

        Record the changes to the configuration for `config`.
        """
        embedding = next((name for name in _HEADS if name in base), None)
        if embedding is None:
            # The tensor names are unknown, so it cannot be determined which head is tied to an embedding.
            heads = set(_HEADS.values())
            unknown = [name for name in changes if _EMBEDDING.search(name) and name in base and name not in heads]
            if unknown and self.tied is not False:
                message = "the adapter changes an embedding, but it is unknown which head is tied to it"
                hint = "untie the base, and set tie_word_embeddings to false in its config.json"
                raise PlanError(message, tensor=unknown[0], hint=hint)
            return {}, set()
        head = _HEADS[embedding]
        changed = changes.get(embedding)
        rows = (changed.replaced if changed is not None and changed.replaced else base[embedding]).shape[0]
        if rows != base[embedding].shape[0]:
            self._of_config["vocab_size"] = rows
        if changed is None and head not in changes:
            return {}, set()
        is_tied = bool(self.tied) or (self.tied is None and head not in base)
        # The embedding stays tied to the head, so the change of the embedding also changes the head.
        if is_tied and self._stays_tied(changed, changes.get(head)):
            changes.pop(head, None)
            return {}, {head} & base.keys()
        if not is_tied and head not in base:
            return {}, set()
        # Set `tie_word_embeddings` explicitly, because its default in transformers depends on the model.
        if is_tied or self.tied is None:
            self._of_config["tie_word_embeddings"] = False
        original, other = base.get(head, base[embedding]), changes.get(head)
        if (other.replaced if other is not None and other.replaced else original).shape[0] != rows:
            message = f"the adapter resizes the embedding to {rows} rows, but not the head"
            raise PlanError(message, tensor=head, hint="save the adapter with save_embedding_layers=True")
        return ({} if head in base else {head: original}), set()

    def _stays_tied(self, embedding: _Change | None, head: _Change | None) -> bool:
        """Return whether embedding and head stay equal: they were trained while tied, or neither was trained."""
        if embedding is None or head is None:
            return False
        trained = self.adapter_config.get("modules_to_save") or ()
        are_trained = (
            embedding.a or head.a or any(re.search(r"(embed_tokens|wte|lm_head)$", module) for module in trained)
        )
        return bool(self.adapter_config.get("ensure_weight_tying")) or not are_trained

    def _recipe(self, name: str, base: Spec, change: _Change | None, layers_transposed: bool) -> Recipe:
        """Return the recipe for one tensor of the result, which starts from `base` in the first source.

        Args:
            name, base, change: the tensor's name, spec and change.
            layers_transposed: whether square linear weights have the shape [in, out].
        """
        if change is None:
            return copy_recipe(0, base, name)
        # Add the factors to the adapter's own copy of the tensor, on which the adapter was trained.
        source, original = (0, base) if change.replaced is None else (1, change.replaced)
        if not all(spec.dtype in FLOATS for spec in (base, *change.specs)):
            raise PlanError(
                f"cannot add an adapter to a {base.dtype} tensor",
                tensor=name,
                hint="dequantise the base first",
            )
        # Only a vocabulary may have a different size. Other tensors with a different shape belong to a different base.
        resizable = bool(_EMBEDDING.search(name))
        if original.shape[1 if resizable else 0 :] != base.shape[1 if resizable else 0 :]:
            message = f"the adapter's tensor has the shape {list(original.shape)}, but the base has {list(base.shape)}"
            raise PlanError(message, tensor=name, hint="check that the adapter was trained on this base")
        output = replace(base, name=name, shape=original.shape)
        if change.a is None and change.b is None and change.bias is None and original.dtype == base.dtype:
            return copy_recipe(source, original, name)
        inputs: tuple[Input, ...] = (whole(source, original),)
        if change.bias is not None:
            if change.bias.shape != original.shape:
                raise PlanError(
                    f"the adapter's bias has the shape {list(change.bias.shape)}, not {list(original.shape)}",
                    tensor=name,
                )
            inputs += (whole(1, change.bias),)
        elif change.a is not None or change.b is not None:
            a, b = change.a, change.b
            if a is None or b is None:
                raise PlanError("the adapter has only one of the two LoRA factors A and B", tensor=name)
            plain, transposed = _orientations(output.shape, a, b)
            if not (plain or transposed) or (change.is_embedding and not transposed):
                message = (
                    f"the adapter's factors {list(b.shape)} @ {list(a.shape)} do not fit the shape {list(output.shape)}"
                )
                raise PlanError(message, tensor=name)
            # A square weight fits in both orientations, so follow `layers_transposed`.
            if plain and transposed and not change.is_embedding:
                # A head is never a Conv1D.
                transposed = layers_transposed and name not in _HEADS.values()
            # Rows of B correspond to rows of the result, so a task reads only its rows of B. In a transposed product,
            # every row requires all of A and B.
            inputs += (all_of(1, a), all_of(1, b) if transposed else whole(1, b))
        if not original.shape:
            return Recipe(outputs=(TaskOutput(spec=output, per=0),), inputs=inputs, num_rows=1, align=0)
        return Recipe(outputs=(TaskOutput(spec=output),), inputs=inputs, num_rows=original.shape[0], align=_ROWS)

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        from penstock.loader.tensor import torch_dtype

        weight, *others = (tensor for tensor in inputs if tensor is not None)
        output = recipe.outputs[0].spec
        dtype = torch_dtype(output.dtype)
        if not others:
            return [weight.to(dtype)]
        module = re.sub(r"\.(weight|bias)$", "", output.name)
        if len(others) == 1:
            # A bias has no factors that show the rank, so the scale uses the rank from the configuration.
            return [others[0].float().mul_(self._scale(module, None)).add_(weight).to(dtype)]
        a, b = (factor.float() for factor in others)
        scale = self._scale(module, a.shape[0])
        # In a transposed product, rows of the result correspond to columns of A.
        if recipe.inputs[2].at is None:
            a, b = b.T.contiguous(), a[:, start:stop].T.contiguous()
        merged = weight.new_empty(weight.shape, dtype=dtype)
        for at in range(0, len(weight), _ROWS):
            change = (b[at : at + _ROWS] @ a).mul_(scale)
            merged[at : at + _ROWS] = change.add_(weight[at : at + _ROWS])
        return [merged]

    def _scale(self, module: str, rank: int | None) -> float:
        """Return the scale of the product. If `rank` is None, use the configuration's rank."""
        if rank is None:
            rank = int(self._by_pattern("rank_pattern", module, self.adapter_config.get("r", 8)))
        alpha = self._by_pattern("alpha_pattern", module, self.adapter_config.get("lora_alpha", rank))
        return float(alpha) / (rank**0.5 if self.adapter_config.get("use_rslora") else rank)

    def _by_pattern(self, key: str, module: str, otherwise: float) -> float:
        """Return the value of an option for a module. The option contains patterns, which match names as in PEFT."""
        patterns: Mapping[str, float] = self.adapter_config.get(key) or {}
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return otherwise


def _orientations(shape: Sequence[int], a: Spec, b: Spec) -> tuple[bool, bool]:
    """Return whether B @ A has the given shape, and whether the transpose of B @ A has this shape."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        return False, False
    product = (b.shape[0], a.shape[1])
    return tuple(shape) == product, tuple(shape) == product[::-1]


def _changes_of(specs: Sequence[Spec]) -> dict[str, _Change]:
    """Return the changes in an adapter, by the names of the base's tensors.

    PEFT saves the tensors of a wrapped module under `base_layer`, and the tensors of a completely trained module under
    the module's name.
    """
    changes: dict[str, _Change] = {}
    named = {spec.name.removeprefix(_PREFIX): spec for spec in specs}
    for name, spec in named.items():
        # Skip the base's own weights, which PEFT stores next to the trained copy.
        if ".original_module." in name:
            continue
        if (plain := name.replace(".modules_to_save.", ".")) != name and plain in named:
            continue
        for suffix, tensor, part in _PARTS:
            if plain.endswith(suffix):
                setattr(changes.setdefault(plain.removesuffix(suffix) + tensor, _Change()), part, spec)
                break
        else:
            changes.setdefault(plain.replace(".base_layer.", "."), _Change()).replaced = spec
    return changes


_PARTS = (
    (".lora_A.weight", ".weight", "a"),
    (".lora_B.weight", ".weight", "b"),
    (".lora_B.bias", ".bias", "bias"),
    (".lora_embedding_A", ".weight", "a"),
    (".lora_embedding_B", ".weight", "b"),
)
"""Tuples of the suffix of an adapter tensor, the suffix of the base tensor that it changes, and the field of
`_Change`."""
