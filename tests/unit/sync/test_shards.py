"""Declarations of a rank's tensors, and errors that name undeclarable tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.errors import PlanError
from penstock.memory.arena import Arena
from penstock.memory.local_shards import local_runs
from penstock.sync.shards import Shard, declared, layout_of, regions_of
from penstock.types import Box, DType


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("made", torch.ones(3), persistent=False)

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(2)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def test_module_declares_parameters_and_persistent_buffers() -> None:
    model = Net()
    rows = declared(model)
    assert [row.name for row in rows] == ["kept", "embed.weight", "head.weight"]
    assert {row.tensor.data_ptr() for row in rows[1:]} == {model.embed.weight.data_ptr()}
    assert not any(row.tensor.requires_grad for row in rows)
    assert len(regions_of(rows)) == 2
    outer = nn.Module()
    outer._orig_mod = model
    assert [row.name for row in declared(outer)] == [row.name for row in rows]


def test_views_keep_strides_and_shards_keep_position() -> None:
    w = torch.arange(48.0).view(6, 8)
    parts = [Shard(tensor=w[:, a : a + 4], global_shape=(6, 12), offset=(0, a + 4), tag="t") for a in (0, 4)]
    rows = declared({"t": w.t(), "s": parts, "x": w[::2, 1:3]})
    assert [row.form.strides for row in rows] == [(1, 8), (8, 1), (8, 1), (16, 1)]
    assert [row.form.box.start for row in rows] == [(0, 0), (0, 4), (0, 8), (0, 0)]
    assert [row.form.tag for row in rows] == ["", "t", "t", ""]
    (region,) = regions_of(rows)
    layout = layout_of(rows, "m", "a", (region,))
    assert layout.offset.tolist() == [0, 0, 16, 4]
    assert (layout.member, layout.address, layout.regions) == ("m", "a", (192,))


def test_packed_f4_shape_counts_single_elements() -> None:
    raw = torch.zeros(4, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    whole, part = declared({"w": raw, "p": Shard(tensor=raw[:, 2:], global_shape=(4, 6), offset=(0, 2))})
    assert (whole.form.dtype, whole.form.shape, whole.form.strides) == (DType.F4, (4, 12), (12, 1))
    assert part.form.box == Box(start=(0, 4), stop=(4, 12))
    with pytest.raises(PlanError, match="last dim"):
        declared({"w": raw.t()})


def test_shard_offset_counts_bytes_of_preceding_regions() -> None:
    arena = Arena.allocate(4096)
    inside = arena.bytes_at(512, 16).view(torch.float32)
    held = {"a": torch.zeros(6), "i": inside, "b": torch.zeros(3, dtype=torch.int8), "e": torch.zeros(0, 4)}
    rows = declared(held)
    regions = regions_of(rows, [arena])
    assert [region.nbytes for region in regions] == [4096, 24, 3], "arenas come first"
    for order in (regions, regions[::-1]):
        layout = layout_of(rows, "m", "", order)
        first = dict(
            zip(map(id, order), [0, *torch.tensor([r.nbytes for r in order]).cumsum(0).tolist()], strict=False)
        )
        assert layout.offset[0] == first[id(regions[1])]
        assert layout.offset[1] == first[id(regions[0])] + 512
        assert layout.offset[2] == first[id(regions[2])]
    with pytest.raises(PlanError, match=r"none of the regions.*'i'"):
        layout_of(rows, "m", "", [regions[1], regions[2]])
    with pytest.raises(PlanError, match=r"none of the regions.*'a'"):
        layout_of(rows, "m", "", [])
    assert len(layout_of(rows[3:], "m", "", []).names) == 1


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros(1, 4).expand(3, 4), "overlap"),
        (torch.zeros(2, dtype=torch.complex128), "no dtype"),
        (torch.zeros(3, 3).to_sparse(), "not a single plain tensor"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "differ from the bytes in memory"),
        (Shard(tensor=torch.zeros(2, 2), global_shape=(3, 2), offset=(2, 0)), "outside shape"),
        (Shard(tensor=torch.zeros(2, 2), global_shape=(3, 2), offset=(-1, 0)), "is negative"),
        (Shard(tensor=torch.zeros(2, 2), global_shape=(4,), offset=(0,)), "different numbers of dims"),
    ],
)
def test_undeclarable_value_error_names_tensor(value: object, why: str) -> None:
    with pytest.raises(PlanError, match=why) as caught:
        declared({"w": value})
    assert caught.value.tensor == "w"


def test_meta_tensors_have_no_regions() -> None:
    with pytest.raises(PlanError, match="meta device"):
        regions_of(declared({"w": torch.empty(3, device="meta")}))


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=3))
def test_nested_sharding_covers_each_element_once(num: int, axes: list[tuple[int, int]]) -> None:
    def expected(numbers: torch.Tensor, cuts: list[tuple[int, int, int]]) -> list[int]:
        for size, coordinate, factor in cuts:
            pieces = [piece.chunk(size) for piece in numbers.chunk(factor)]
            mine = [piece[coordinate] for piece in pieces if coordinate < len(piece)]
            numbers = torch.cat(mine) if mine else numbers[:0]
        return numbers.tolist()

    seen: list[int] = []
    places = [()]
    for size, _ in axes:
        places = [(*place, i) for place in places for i in range(size)]
    for place in places:
        cuts = [(size, at, factor) for (size, factor), at in zip(axes, place, strict=True)]
        mine = [n for a, b in local_runs(num, cuts) for n in range(a, b)]
        assert mine == expected(torch.arange(num), cuts)
        seen += mine
    assert sorted(seen) == list(range(num))
