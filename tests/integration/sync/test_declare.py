"""Ranks declare the same shards of their DTensors that torch gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import run_ranks
from tests.unit.sync.moved import move
from torch import nn

from penstock.errors import PlanError
from penstock.sync.shards import Shard, ShardRow, declared

EncodedRows = list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]


def encoded(rows: tuple[ShardRow, ...]) -> EncodedRows:
    return [(row.name, row.form.shape, row.form.box.start, row.tensor.numpy().copy()) for row in rows]


def decoded(rank: EncodedRows) -> tuple[ShardRow, ...]:
    held: dict[str, list[Shard]] = {}
    for name, shape, offset, values in rank:
        held.setdefault(name, []).append(Shard(tensor=torch.from_numpy(values), global_shape=shape, offset=offset))
    return declared(held)


def assert_whole(ranks: list[EncodedRows], true: dict[str, torch.Tensor]) -> None:
    """Assemble all tensors by a plan from the ranks' rows."""
    mine = {name: torch.full_like(tensor, 7) for name, tensor in true.items()}
    move([decoded(rank) for rank in ranks], [declared(mine)])
    for name, tensor in true.items():
        assert torch.equal(mine[name], tensor), name


def full(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def cases() -> Iterator[tuple[tuple[int, ...], list[Any], tuple[int, ...]]]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for shape in ((8, 6), (7, 5), (3, 2), (1, 9), (13,), (4, 3, 5), (0, 4)):
        yield (4,), [Shard(0)], shape
        yield (4,), [Replicate()], shape
        yield (2, 2), [Replicate(), Shard(0)], shape
        yield (2, 2), [Shard(0), Shard(0)], shape
        yield (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], shape
        yield (4,), [_StridedShard(0, split_factor=3)], shape
        if len(shape) > 1:
            yield (2, 2), [Shard(1), Shard(0)], shape
            yield (2, 2), [Shard(-1), Replicate()], shape
            yield (4, 1), [_StridedShard(1, split_factor=2), Shard(1)], shape
    yield (), [], ()


def _distributed(rank: int, world_size: int) -> EncodedRows:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, distribute_tensor
    from torch.distributed.tensor import Shard as ShardOf

    held = {}
    for i, (mesh, placements, shape) in enumerate(cases()):
        if mesh:
            held[f"t{i}"] = distribute_tensor(
                full(shape), init_device_mesh("cpu", mesh), placements, src_data_rank=None
            )
            assert torch.equal(held[f"t{i}"].full_tensor(), full(shape)), (mesh, placements, shape)
        else:
            held[f"t{i}"] = full(shape)
    # A mesh of some ranks, a tensor with transposed memory, and several dtypes.
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    held["half"] = distribute_tensor(full((6, 4)), half, [ShardOf(1)])
    rows = declared(held)
    with pytest.raises(PlanError, match="no rank has the values"):
        declared({"p": type(held["half"]).from_local(torch.ones(2), half, [Partial()])})
    addresses = {t._local_tensor.untyped_storage().data_ptr() for t in held.values() if hasattr(t, "placements")}
    assert all(row.tensor.untyped_storage().data_ptr() in addresses for row in rows if row.form.shape), "a copy"
    return encoded(rows)


def test_dtensor_regions_are_correct_for_any_mesh() -> None:
    outcomes = run_ranks(_distributed, 4, timeout_s=120)
    assert [(one.ended, one.value if one.ended == "raised" else "") for one in outcomes] == [("returned", "")] * 4
    true = {f"t{i}": full(shape) for i, (_, _, shape) in enumerate(cases())}
    assert_whole([one.value for one in outcomes], true | {"half": full((6, 4))})


CUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Tensor parallelism and HSDP on four ranks."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(self.up(self.embed(x)))))


def _trained(rank: int, world_size: int) -> list[tuple[EncodedRows, dict[str, np.ndarray]]]:
    return [_step(world_size, tp, replicas) for tp, replicas in CUTS]


def _step(world_size: int, tp: int, replicas: int) -> tuple[EncodedRows, dict[str, np.ndarray]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(5)
    model = Net()
    shape = (replicas, world_size // tp // replicas, tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s", "t"))
    if tp > 1:
        parallelize_module(model, mesh["t"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    within = mesh["r", "s"] if replicas > 1 else mesh["s"]
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=within)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(8) % 11).square().mean().backward()
    optimizer.step()
    model(torch.arange(8) % 11)  # the root stays gathered after a forward pass
    rows = declared(model)
    state = model.state_dict()
    return encoded(rows), {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().numpy() for name, t in state.items()
    }


def test_fsdp2_with_tensor_parallelism_declares_all_elements() -> None:
    outcomes = run_ranks(_trained, 4, timeout_s=120)
    assert [(one.ended, one.value if one.ended == "raised" else "") for one in outcomes] == [("returned", "")] * 4
    for i in range(len(CUTS)):
        true = {name: torch.from_numpy(values) for name, values in outcomes[0].value[i][1].items()}
        assert {"embed.weight", "head.weight", "norm.running_mean", "up.weight"} <= true.keys()
        assert_whole([one.value[i][0] for one in outcomes], true)
