"""The destination of a fetch: new tensors of any dtype and shape in one arena."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import PlanError
from penstock.fetcher.discover import FetchTarget
from penstock.holding.weight_layout import WeightLayout, tabulate
from penstock.hub.messages import Identity
from penstock.memory.arena import Arena
from penstock.peer.local_weights import LocalWeights
from penstock.types import DType

TENSORS: dict[str, tuple[DType, tuple[int, ...], torch.dtype]] = {
    "a.scalar": (DType.F32, (), torch.float32),
    "b.odd": (DType.I8, (3, 7), torch.int8),
    "c.empty": (DType.BF16, (0, 4), torch.bfloat16),
    "d.wide": (DType.F64, (2, 3, 5), torch.float64),
    "e.packed": (DType.F4, (3, 6), torch.float4_e2m1fn_x2),
    "f.small": (DType.F8_E4M3, (513,), torch.float8_e4m3fn),
    "g.bool": (DType.BOOL, (1,), torch.bool),
    "h.last": (DType.I64, (65,), torch.int64),
    "i.empty": (DType.U8, (0,), torch.uint8),
}


def target_of(tensors: dict[str, tuple[DType, tuple[int, ...]]]) -> FetchTarget:
    table = tabulate(list(tensors), [dtype for dtype, _ in tensors.values()], [shape for _, shape in tensors.values()])
    layout = WeightLayout.of(table, leaf_bytes=16, chunk_bytes=64)
    return FetchTarget(identity=Identity(model="m"), layout=layout, device=torch.device("cpu"))


def allocate(target: FetchTarget) -> tuple[LocalWeights, dict[str, torch.Tensor]]:
    weights, make = target.allocate({}, 4, lambda: False)
    assert make is not None
    return weights, dict(zip(target.layout.table.names, make(), strict=True))


def test_allocated_tensors_share_memory_with_byte_rows() -> None:
    # The names are not in sorted order, which the layout uses.
    weights, tensors = allocate(target_of({name: TENSORS[name][:2] for name in reversed(TENSORS)}))
    assert list(tensors) == sorted(TENSORS)
    (region,) = weights.memory.place.regions
    assert isinstance(region.owner, Arena)
    for row, (name, tensor) in enumerate(tensors.items()):
        dtype, shape, kind = TENSORS[name]
        assert tensor.dtype is kind and tensor.is_contiguous() and not tensor.requires_grad
        assert tuple(tensor.shape) == ((3, 3) if dtype is DType.F4 else shape)
        raw = weights.memory.rows[row]
        assert raw.shape == (tensor.nbytes,) and raw.dtype is torch.uint8
        if tensor.numel():
            assert tensor.data_ptr() == raw.data_ptr() == int(weights.memory.place.row_address[row])
            assert tensor.data_ptr() % 512 == 0
            raw.fill_(row + 1)
            assert tensor.reshape(-1).view(torch.uint8).tolist() == [row + 1] * tensor.nbytes
        else:
            assert weights.memory.place.row_region[row] == -1
    # Only the row's bytes were written.
    rows = weights.memory.rows
    assert [row.tolist() for row in rows] == [[i + 1] * row.numel() for i, row in enumerate(rows)]


def test_model_of_empty_tensors_is_allocated() -> None:
    weights, tensors = allocate(target_of({"a": (DType.F32, (0, 2)), "b": (DType.U8, (0,))}))
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(0, 2), (0,)] and weights.is_whole
    assert allocate(target_of({}))[1] == {}


def test_unsupported_dtype_is_refused_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("memory was allocated")

    monkeypatch.setattr(Arena, "allocate", refuse)
    with pytest.raises(PlanError, match="F6_E3M2"):
        target_of({"a": (DType.F6_E3M2, (4,)), "b": (DType.U8, (4,))}).allocate({}, 4, lambda: False)
    with pytest.raises(PlanError, match="divisible by 2"):
        target_of({"a": (DType.F4, (2, 3))}).allocate({}, 4, lambda: False)


def test_arena_row_digests_match_tensor_digests() -> None:
    weights, tensors = allocate(target_of({name: spec[:2] for name, spec in TENSORS.items()}))
    for row in weights.memory.rows:
        row.copy_(torch.arange(row.numel(), dtype=torch.int64).to(torch.uint8))
    alone = [tensor.reshape(-1).view(torch.uint8).clone() for tensor in tensors.values()]
    chunks = np.arange(weights.layout.chunks.num_chunks)
    apart = LocalWeights(weights.identity, weights.layout, alone)
    assert weights.memory.digest(chunks).tolist() == apart.memory.digest(chunks).tolist()
