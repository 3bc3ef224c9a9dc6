"""Selection, by name, shape and dtype, of the tensors to quantise."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

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
`wte` and `wpe` in GPT-2. Heads are `output` in InternLM2 and Mistral's files, and `score`, `classifier` and
`qa_outputs` in transformers."""

Tensor = tuple[str, DType, tuple[int, ...]]
"""Name, dtype and shape."""


def reasons(
    form: Format, tensors: Sequence[Tensor], *, keep: Sequence[str] = KEEP, only: Sequence[str] = ("*.weight",)
) -> dict[str, str]:
    """Return why each tensor stays unchanged, or an empty string for a tensor that is quantised.

    Args:
        keep: shell patterns of names that stay unchanged.
        only: shell patterns. A tensor is quantised only if its name matches at least one pattern.
    """
    # The biases of other modules can show that a weight is transposed.
    transposed = _transposed(tensors)

    def reason(name: str, dtype: DType, shape: tuple[int, ...]) -> str:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in only):
            return "its name matches no pattern of only="
        if pattern := next((pattern for pattern in keep if fnmatch.fnmatchcase(name, pattern)), None):
            return f"its name matches {pattern}"
        # A tensor with three dims is a stack of experts or a convolution, which engines quantise differently.
        if len(shape) != 2:
            return f"{len(shape)} dims, not 2"
        if _leaf(name) in transposed:
            return "it is stored [in, out], as its bias shows (Conv1D), which no engine reads quantised"
        return fault(form, dtype, shape) or ""

    return {name: reason(name, dtype, shape) for name, dtype, shape in tensors}


def _transposed(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Return the last name segments of modules whose weights are stored as [in, out], like GPT-2's Conv1D.

    A bias has one number per output, so a bias whose length is the second dim reveals the order [in, out]. All modules
    with the same last segment are assumed to have the same order, because a square weight does not reveal its order.
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
