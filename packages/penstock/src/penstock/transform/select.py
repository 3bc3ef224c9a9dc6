"""Selection of the tensors to quantise, and the entry in config.json with which engines load the result."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.transform.formats import Format, fault
from penstock.types import DType

KEEP = (
    "*embed*",
    "*wte.weight",
    "*wpe.weight",
    "*lm_head*",
    "*shared_head*",
    "head.weight",
    "*.head.weight",
    "output.weight",
    "*model.output.weight",
    "score.weight",
    "*.score.weight",
    "*classifier*",
    "*qa_outputs*",
    "*norm*",
    "*.gate.weight",
    "*router*",
    "*shared_expert_gate*",
    "*.eh_proj.weight",
    "*.weights_proj.weight",
    "*conv*",
    "*visual*",
    "*vision*",
)
"""Patterns of names that stay unchanged. Source: tensors that stay BF16 in the checkpoints of DeepSeek-V3 and V3.2
(embeddings, norms, `mlp.gate`, `eh_proj`, `shared_head`, the indexer's `weights_proj`, `lm_head`) and Qwen3-FP8
(`mlp.gate`, `lm_head`, norms), and vision towers and convolutions in the recipes of llm-compressor. Embeddings are
`wte` and `wpe` in GPT-2. Heads are `output` in InternLM2 and Mistral's files, `score` and `classifier` in transformers'
sequence classification, and `qa_outputs` in its question answering."""

_SHOWN = 3
"""Number of reasons that the error lists if nothing is left to quantise."""

Tensor = tuple[str, DType, tuple[int, ...]]
"""Name, dtype and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Tensors of a model that are quantised, and the reasons why the others are not."""

    names: tuple[str, ...]
    """Tensors to quantise, in the order given."""
    kept: Mapping[str, str]
    """Reason for each tensor that is kept unchanged."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each kept tensor."""
    stored: frozenset[str] = frozenset()
    """Kept tensors that the source already stores in this format."""

    def modules_kept(self) -> tuple[str, ...]:
        """Return the modules that are not quantised. Without this list engines treat every linear layer as quantised.

        A stack of experts is a parameter of its module, so the module is listed. The output layer of a model with tied
        embeddings has no tensor. It is always listed unless it is quantised.
        """
        modules = set()
        for name in self.kept.keys() - self.stored:
            if name.endswith(".weight"):
                modules.add(name.removesuffix(".weight"))
            elif len(self.shapes[name]) > 2 and "." in name:
                modules.add(name.rpartition(".")[0])
        if not any(HEAD in name for name in (*self.names, *self.kept)):
            modules.add(HEAD)
        return tuple(sorted(modules))


HEAD = "lm_head"
"""Name of a language model's output layer in transformers, also if it is tied to the embedding."""


def select(
    form: Format,
    tensors: Iterable[Tensor],
    *,
    keep: Sequence[str] = KEEP,
    only: Sequence[str] = ("*.weight",),
    stored: Collection[str] = (),
) -> Selection:
    """Select linear weights: tensors of two dims whose name matches `only` and not `keep` (shell patterns for the whole
    name).

    Args:
        form: format in which they are to be stored.
        tensors: all tensors of the model.
        stored: names of tensors that are stored in this format already.

    Raises:
        PlanError: nothing is left to quantise.
    """
    tensors = list(tensors)
    why = reasons(form, tensors, keep=keep, only=only)
    # This overrides the reasons, so that a tensor that is stored in this format already is not quantised again.
    why |= dict.fromkeys(stored, f"it is already stored as {form.tag}")
    names = tuple(name for name, reason in why.items() if not reason)
    if not names:
        common = Counter(why[name] for name, _, shape in tensors if len(shape) > 1).most_common(_SHOWN)
        detail = "; ".join(f"{reason} ({count} tensors)" for reason, count in common)
        raise PlanError(
            f"no tensor is left to store as {form.tag}: {detail}", hint="change the patterns only= and keep="
        )
    return Selection(
        names=names,
        kept={name: reason for name, reason in why.items() if reason},
        shapes={name: shape for name, _, shape in tensors if why[name]},
        stored=frozenset(stored),
    )


def reasons(
    form: Format, tensors: Sequence[Tensor], *, keep: Sequence[str] = KEEP, only: Sequence[str] = ("*.weight",)
) -> dict[str, str]:
    """Return why each tensor is kept unchanged. An empty reason means that it is quantised. Arguments are those of
    `select`."""
    # Check all tensors first, since the biases of other modules can show that a weight is transposed.
    transposed = _transposed(tensors)

    def reason(name: str, dtype: DType, shape: tuple[int, ...]) -> str:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in only):
            return "its name matches no pattern of only="
        if pattern := next((pattern for pattern in keep if fnmatch.fnmatchcase(name, pattern)), None):
            return f"its name matches {pattern}"
        # Three dims are a stack of experts or a convolution, which engines quantise in their own ways.
        if len(shape) != 2:
            return f"{len(shape)} dims, not 2"
        if _leaf(name) in transposed:
            return "it is stored [in, out], as its bias shows (Conv1D), which no engine reads quantised"
        return fault(form, dtype, shape) or ""

    return {name: reason(name, dtype, shape) for name, dtype, shape in tensors}


def _transposed(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Return the last parts of the names of modules whose weights are stored [in, out], like GPT-2's Conv1D.

    A bias has one number per output, so a bias as long as the second dim shows this order. It holds for all modules of
    the same last name, since a square weight (GPT-2's `attn.c_proj`) does not show its order.
    """
    shapes = {name: shape for name, _, shape in tensors}
    modules = set()
    for name, shape in shapes.items():
        bias = shapes.get(f"{name.removesuffix('.weight')}.bias", ())
        if name.endswith(".weight") and len(shape) == 2 and len(bias) == 1 and shape[0] != bias[0] == shape[1]:
            modules.add(_leaf(name))
    return frozenset(modules)


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def quantization_config(form: Format, selection: Selection) -> dict[str, Any]:
    """Return the `quantization_config` entry for `config.json`.

    Raises:
        PlanError: the format needs no entry, for example a cast.
    """
    if form.config is None:
        raise PlanError(f"{form.tag} needs no quantization_config, since the tensors have its dtype")
    return form.config(selection.modules_kept())
