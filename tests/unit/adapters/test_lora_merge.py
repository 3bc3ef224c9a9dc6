"""The merge of a box equals the box of the merged tensor, however a rank's shard is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import PlanError
from penstock.sync.shards import row_of
from penstock_hf.lora_merge import AdapterMerge

PREFIX = "base_model.model."
RANK = 3


def tensors(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(len(shapes))
    return {name: torch.randn(shape, generator=made) for name, shape in shapes}


CASES: list[tuple[str, dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]] = []


def case(
    name: str, base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], true: torch.Tensor, **config: Any
) -> None:
    CASES.append((name, {"r": RANK, "lora_alpha": 6} | config, base, adapter, true))


_base = tensors(("q.weight", (10, 8)), ("q.bias", (10,)), ("n.weight", (4,)))
_lora = tensors((f"{PREFIX}q.lora_A.weight", (RANK, 8)), (f"{PREFIX}q.lora_B.weight", (10, RANK)))
case(
    "q.weight",
    _base,
    _lora,
    _base["q.weight"] + 2 * _lora[f"{PREFIX}q.lora_B.weight"] @ _lora[f"{PREFIX}q.lora_A.weight"],
)
_base = tensors(("c.weight", (8, 10)), ("n.weight", (4,)))
_lora = tensors((f"{PREFIX}c.lora_A.weight", (RANK, 8)), (f"{PREFIX}c.lora_B.weight", (10, RANK)))
case(
    "c.weight",
    _base,
    _lora,
    _base["c.weight"] + 2 * (_lora[f"{PREFIX}c.lora_B.weight"] @ _lora[f"{PREFIX}c.lora_A.weight"]).T,
    fan_in_fan_out=True,
)
_base = tensors(("q.weight", (10, 8)), ("q.bias", (10,)))
_lora = tensors(
    (f"{PREFIX}q.lora_A.weight", (RANK, 8)),
    (f"{PREFIX}q.lora_B.weight", (10, RANK)),
    (f"{PREFIX}q.lora_B.bias", (10,)),
)
case("q.bias", _base, _lora, _base["q.bias"] + 2 * _lora[f"{PREFIX}q.lora_B.bias"], lora_bias=True)
_base = tensors(("score.weight", (10, 8)), ("n.weight", (4,)))
_lora = tensors(
    (f"{PREFIX}score.weight", (10, 8)),
)
case("score.weight", _base, _lora, _lora[f"{PREFIX}score.weight"], modules_to_save=["score"])


@pytest.mark.parametrize(("name", "config", "base", "adapter", "true"), CASES, ids=[one[0] for one in CASES])
def test_merged_slices_match_slices_of_merged_tensor(
    name: str,
    config: dict[str, Any],
    base: dict[str, torch.Tensor],
    adapter: dict[str, torch.Tensor],
    true: torch.Tensor,
) -> None:
    merge = AdapterMerge(config, base, adapter, tied=False)
    assert name in merge.changed and "n.weight" not in merge.changed
    shape = base[name].shape
    for rows in ((0, shape[0]), (0, 4), (4, 7), (7, shape[0])):
        for columns in ((0, 8), (2, 5)) if len(shape) == 2 else ((0, 1),):
            index = (slice(*rows), slice(*columns))[: len(shape)]
            offset = (rows[0], columns[0])[: len(shape)]
            part = base[name][index]
            made = merge.merged(row_of(name, part, shape, offset), part, adapter)
            assert made.shape == part.shape
            assert torch.allclose(made, true[index], atol=1e-5), (rows, columns)


def test_adapter_changing_tensor_set_is_refused() -> None:
    base = tensors(("model.embed_tokens.weight", (16, 8)), ("q.weight", (10, 8)))
    resized = tensors(
        (f"{PREFIX}model.embed_tokens.weight", (18, 8)),
    )
    with pytest.raises(PlanError):
        AdapterMerge({"r": RANK, "lora_alpha": 6}, base, resized, tied=True)
    untied = tensors(
        (f"{PREFIX}model.embed_tokens.lora_embedding_A", (RANK, 16)),
        (f"{PREFIX}model.embed_tokens.lora_embedding_B", (8, RANK)),
    )
    with pytest.raises(PlanError, match="unties the head"):
        AdapterMerge({"r": RANK, "lora_alpha": 6}, base, untied, tied=True)
