"""Quantised shards are bit-identical to slices of the quantised whole tensor, for any sharding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.unit.sync.moved import move

from penstock.errors import BudgetTooSmall, ConfigError, PlanError
from penstock.sync.messages import TableReply
from penstock.sync.publish.offer import Offer, OfferOptions
from penstock.sync.publish.transformed import Transformed, Transforms, choose, required_bytes
from penstock.sync.receive.target import select_tensors
from penstock.sync.shards import Shard, ShardRow, declared
from penstock.transform.formats import format_of, outputs
from penstock.transform.quantize import dtype_of, quantise
from penstock.types import Box

BLOCKS = ["fp8-block128", "fp8-block128-ue8m0", "fp8-block128-e8m0", "fp8-block1x128", "fp8-channel", "mxfp8"]
SHAPES = [(300, 256), (128, 96), (1, 32), (260, 160), (513, 384)]


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.w.weight": torch.randn(shape, generator=chance).to(dtype) * 2.0 ** (3 * i - 8)
        for i, shape in enumerate(SHAPES)
    }


def sharded(whole: dict[str, torch.Tensor], rank: int, grid: tuple[int, int]) -> dict[str, list[Shard]]:
    """Return chunks of rows and columns, as torch shards them. Some ranks have no chunk."""
    row, column = divmod(rank, grid[1])
    found: dict[str, list[Shard]] = {}
    for name, tensor in whole.items():
        box = []
        for n, count, i in zip(tensor.shape, grid, (row, column), strict=True):
            width = -(-n // count)
            box.append((min(n, i * width), min(n, (i + 1) * width)))
        (a, b), (c, d) = box
        shard = Shard(tensor=tensor[a:b, c:d].clone(), global_shape=tuple(tensor.shape), offset=(a, c))
        found[name] = [shard] if shard.tensor.numel() else []
    return found


def expected(whole: dict[str, torch.Tensor], tag: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in whole.items():
        shape = tuple(tensor.shape)
        parts = outputs(format_of(tag), name, dtype_of(tensor), shape, Box.full(shape))
        found |= {part.name: value for part, value in zip(parts, quantise(format_of(tag), tensor), strict=True)}
    return found


def fill_ranks(ranks: Sequence[Transformed], rows: Sequence[Sequence[ShardRow]]) -> None:
    """Exchange boundary elements by a real plan, and fill all ranks."""
    move(rows, [rank.wants for rank in ranks])
    for rank in ranks:
        ready: list[int] = []
        rank.fill(lambda numbers, ready=ready: ready.extend(numbers.tolist()))
        assert sorted(ready) == list(range(len(rank.rows))), "each row must be ready once"


def check(ranks: Sequence[Transformed], truth: dict[str, torch.Tensor], tag: str, cuts: int = 2) -> None:
    """Check what receivers with a different sharding of codes and scales read."""
    for rank in range(cuts):
        mine = {}
        for name, tensor in truth.items():
            width = -(-len(tensor) // cuts)
            part = tensor[rank * width : (rank + 1) * width]
            got = torch.full_like(part.view(torch.uint8), 0xA5).view(part.dtype)
            if part.numel():
                offset = (rank * width, *(0,) * (part.ndim - 1))
                mine[name] = Shard(tensor=got, global_shape=tuple(tensor.shape), offset=offset, tag=tag)
        move([rank.rows for rank in ranks], [declared(mine)])
        for name, shard in mine.items():
            at = shard.offset[0]
            true = truth[name][at : at + len(shard.tensor)]
            assert torch.equal(shard.tensor.view(torch.uint8), true.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (7, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("tag", BLOCKS)
def test_sharded_blocks_match_unsharded_tensor(tag: str, grid: tuple[int, int]) -> None:
    live = [declared(sharded(tensors(), rank, grid)) for rank in range(grid[0] * grid[1])]
    ranks = [Transformed(choose(tag, rows), bucket_bytes=20_000) for rows in live]
    # The second version uses the same memory and the same batches.
    for seed in (0, 1):
        whole = tensors(seed)
        for rank, rows in enumerate(live):
            for row, new in zip(rows, declared(sharded(whole, rank, grid)), strict=True):
                row.tensor.copy_(new.tensor)
        fill_ranks(ranks, live)
        check(ranks, expected(whole, tag), tag)
    if grid == (1, 1):
        assert not any(rank.wants or rank.boundary_bytes for rank in ranks)
    blocks = sum(int(np.prod(row.form.box.shape)) for rank in ranks for row in rank.rows)
    assert blocks == sum(t.numel() for t in expected(tensors(), tag).values()), (
        "each block must be quantised by one rank"
    )


def test_bf16_cast_includes_every_float32_tensor() -> None:
    whole = tensors(dtype=torch.float32) | {"norm.weight": torch.randn(7), "scale": torch.tensor(2.5)}
    whole["already"] = torch.ones(3, dtype=torch.bfloat16)
    rows = declared(whole)
    transformed = Transformed(choose("cast:BF16", rows))
    fill_ranks([transformed], [rows])
    assert not transformed.wants
    assert {row.name for row in transformed.rows} == set(whole) - {"already"}
    for row in transformed.rows:
        assert torch.equal(row.tensor, whole[row.name].bfloat16()), row.name
        assert row.form.tag == "cast:BF16"


def test_per_tensor_scale_of_shard_raises() -> None:
    whole = {name: tensor for name, tensor in tensors().items() if tensor.shape[1] % 16 == 0}
    rows = declared(whole)
    transformed = Transformed(choose("nvfp4", rows))
    fill_ranks([transformed], [rows])
    check([transformed], expected(whole, "nvfp4"), "nvfp4", cuts=1)
    with pytest.raises(PlanError, match="one scale for the whole tensor"):
        choose("nvfp4", declared(sharded(whole, 0, (2, 1))))


def test_transform_patterns_select_format_per_tensor() -> None:
    rows = declared(tensors() | {"lm_head.weight": torch.zeros(128, 128, dtype=torch.bfloat16)})
    transforms: Transforms = {"fp8-block128": ["layers.[01].*", "lm_head*"], "mxfp8": ["layers.1.*"]}
    chosen = choose(transforms, rows)
    assert [(choice.row.name, choice.form.tag) for choice in chosen] == [
        ("layers.0.w.weight", "fp8-block128"),
        ("layers.1.w.weight", "fp8-block128"),
        ("layers.1.w.weight", "mxfp8"),
    ]
    with pytest.raises(ConfigError, match="there is no transform"):
        choose("fp9", rows)


def offer(rows: Sequence[ShardRow], **options: object) -> Offer:
    defaults = {"transforms": "fp8-block128", "keep_plain": True, "world_size": 1, "copies": None, "memory_bytes": None}
    return Offer(rows, OfferOptions(arena=False, pack_bytes=0, **(defaults | options)))  # type: ignore[arg-type]


def test_transform_memory_above_limit_raises() -> None:
    rows = declared(sharded(tensors(), 0, (3, 1)))
    nbytes, boundary_bytes = required_bytes(choose("fp8-block128", rows))
    offered = offer(rows, memory_bytes=nbytes + boundary_bytes)
    assert (offered.transformed.nbytes, offered.transformed.boundary_bytes) == (nbytes, boundary_bytes)
    assert boundary_bytes > 0
    with pytest.raises(BudgetTooSmall) as caught:
        offer(rows, memory_bytes=nbytes + boundary_bytes - 1)
    assert caught.value.minimum_bytes == nbytes + boundary_bytes
    copied = sum(memory.nbytes for memory in offered.memories)
    with pytest.raises(BudgetTooSmall) as caught:
        offer(rows, memory_bytes=1, copies="device")
    assert caught.value.minimum_bytes == nbytes + boundary_bytes + copied
    # Without the plain rows nothing is copied.
    with pytest.raises(BudgetTooSmall) as caught:
        offer(rows, memory_bytes=1, copies="device", keep_plain=False)
    assert caught.value.minimum_bytes == nbytes + boundary_bytes
    with pytest.raises(PlanError, match="no tensor can be transformed"):
        offer(rows, transforms={"fp8-block128": ["nothing"]})


TABLE = TableReply(
    names=("a.weight", "b.weight", "a.weight", "a.weight_scale_inv", "a.weight_packed", "a.weight_scale"),
    dtypes=("BF16", "BF16", "F8_E4M3", "F32", "U8", "F8_E4M3"),
    shapes=((256, 256), (4,), (256, 256), (2, 2), (256, 128), (256, 16)),
    tags=("", "", "fp8-block128", "fp8-block128", "nvfp4", "nvfp4"),
)


def test_receiver_selects_offered_formats() -> None:
    plain = select_tensors(TABLE, None)
    assert list(plain.table.names) == ["a.weight", "b.weight"]
    assert not plain.tags
    blocks = select_tensors(TABLE, "fp8-block128")
    assert dict(zip(blocks.table.names, map(str, blocks.table.dtypes), strict=True)) == {
        "b.weight": "BF16",
        "a.weight": "F8_E4M3",
        "a.weight_scale_inv": "F32",
    }
    assert set(blocks.tags) == {"a.weight", "a.weight_scale_inv"}
    assert list(select_tensors(TABLE, ["nvfp4"]).table.names) == ["b.weight", "a.weight_packed", "a.weight_scale"]
    with pytest.raises(PlanError, match="no publisher offers tensors as mxfp8, only as fp8-block128, nvfp4"):
        select_tensors(TABLE, "mxfp8")


class Quantised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(256, 256).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_quantised_receiver_selects_its_format() -> None:
    assert set(select_tensors(TABLE, None, Quantised()).tags.values()) == {"fp8-block128"}
    assert not select_tensors(TABLE, None, torch.nn.Linear(4, 4)).tags
