"""A model filled by sync is bit-identical to the same model filled by its loader, for many shardings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import pytest
import torch
from tests.unit.sync.moved import assert_same, move, spoil
from tests.unit.sync.toy import EXPERTS, Place, Toy, checkpoint, table_of

from penstock.memory.local_shards import local_runs
from penstock.sync.recording.requirements import Requirements, record, wanted
from penstock.sync.shards import Shard, ShardRow, declared

TRAINERS = [
    (1, 1, 1),
    (2, 1, 1),
    (3, 1, 1),
    (8, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (3, 4, 1),
    (1, 1, 2),
    (2, 1, 4),
    (2, 2, 2),
]
"""FSDP, tensor and expert parallelism."""
ENGINES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4)]
"""Tensor and expert parallelism."""

COLUMN = (
    "q.weight",
    "k.weight",
    "v.weight",
    "q.bias",
    "kv_b.weight",
    "mlp.gate",
    "mlp.up",
    ".w1",
    ".w3",
    "embed.weight",
)
ROW = ("o.weight", "mlp.down", ".w2")


def trainer(tensors: Mapping[str, torch.Tensor], fsdp: int, tp: int, ep: int) -> list[tuple[ShardRow, ...]]:
    """Return the rows of each rank with tensor parallelism, FSDP over dim 0, and expert parallelism."""
    ranks = []
    for f, t, e in itertools.product(range(fsdp), range(tp), range(ep)):
        held: dict[str, list[Shard]] = {}
        for name, whole in tensors.items():
            expert = int(name.split(".")[3]) if ".experts." in name else None
            if expert is not None and expert // (EXPERTS // ep) != e:
                continue
            dim = 0 if name.endswith(COLUMN) else 1 if name.endswith(ROW) else None
            runs = [[(0, n)] for n in whole.shape]
            for d, n in enumerate(whole.shape):
                # As in DTensor, FSDP comes first in the mesh and shards the tensor-parallel shards.
                cuts = [(fsdp, f, tp if dim == 0 else 1)] if d == 0 else []
                runs[d] = local_runs(n, [*cuts, (tp, t, 1)] if d == dim else cuts)
            for box in itertools.product(*runs):
                part = whole[tuple(slice(a, b) for a, b in box)].clone()
                shard = Shard(tensor=part, global_shape=tuple(whole.shape), offset=tuple(a for a, _ in box))
                held.setdefault(name, []).append(shard)
        ranks.append(declared(held))
    return ranks


@functools.cache
def receivers(tp: int, ep: int, dtype: torch.dtype) -> list[tuple[Toy, Requirements]]:
    table, found = table_of(checkpoint()), []
    for t, e in itertools.product(range(tp), range(ep)):
        model = Toy(Place(tp_rank=t, tp=tp, ep_rank=e, ep=ep, dtype=dtype))
        found.append((model, wanted(model, record(model, table), table)))
    return found


@functools.cache
def trues(tp: int, ep: int, dtype: torch.dtype) -> list[Toy]:
    found = [
        Toy(Place(tp_rank=t, tp=tp, ep_rank=e, ep=ep, dtype=dtype)) for t, e in itertools.product(range(tp), range(ep))
    ]
    for model in found:
        model.load_weights(checkpoint().items())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("cuts", TRAINERS, ids=str)
def test_recorded_sync_matches_loaded_model(
    cuts: tuple[int, int, int], engine: tuple[int, int], dtype: torch.dtype
) -> None:
    publishers = trainer(checkpoint(), *cuts)
    made = receivers(*engine, dtype)
    for model, _ in made:
        spoil(model.state_dict().values())
    addresses = [[t.data_ptr() for t in model.state_dict().values()] for model, _ in made]
    plan = move(publishers, [want.rows for _, want in made])
    assert plan.unwanted == ("vision.proj",)
    for (model, want), true, before in zip(made, trues(*engine, dtype), addresses, strict=True):
        want.install()
        want.finish()
        assert_same(model, true)
        assert [t.data_ptr() for t in model.state_dict().values()] == before
        assert not want.unrecorded
