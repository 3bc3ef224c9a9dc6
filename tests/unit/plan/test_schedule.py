"""The load plan is executed with numpy and compared with slicing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shards import shard_box

from penstock.errors import PlanError
from penstock.plan import schedule
from penstock.plan.layout import box_runs
from penstock.plan.schedule import LoadPlan, plan_load
from penstock.types import Box, DType, TensorTable

ITEM = {DType.U8: 1, DType.BF16: 2, DType.F32: 4}


def carry_out(plan: LoadPlan, files: list[np.ndarray]) -> list[np.ndarray]:
    slabs = [np.full(int(n), 0xEE, np.uint8) for n in plan.slab_nbytes]
    written = [np.zeros(int(n), np.int64) for n in plan.slab_nbytes]
    for r in range(plan.num_reads):
        start, nbytes = int(plan.read_offset[r]), int(plan.read_nbytes[r])
        data = files[int(plan.read_file[r])][start : start + nbytes]
        assert len(data) == nbytes, "a read must lie inside its file"
        for s in range(int(plan.seg_first[r]), int(plan.seg_first[r + 1])):
            run, pitch, slab = int(plan.seg_run[s]), int(plan.seg_pitch[s]), int(plan.seg_slab[s])
            for k in range(int(plan.seg_rows[s])):
                src = int(plan.seg_src[s]) + k * pitch
                dst = int(plan.seg_dst[s]) + k * run
                assert src + run <= nbytes
                slabs[slab][dst : dst + run] = data[src : src + run]
                written[slab][dst : dst + run] += 1
    for count in written:
        assert (count == 1).all(), "every destination byte exactly once"
    out = []
    for i in range(len(plan.table)):
        if plan.row_slab[i] < 0:
            out.append(np.zeros(0, np.uint8))
            continue
        at = int(plan.row_offset[i])
        out.append(slabs[int(plan.row_slab[i])][at : at + int(plan.row_nbytes[i])])
    return out


@st.composite
def weight_sets(draw: st.DrawFn) -> tuple[TensorTable, list[np.ndarray], list[Box | None]]:
    names, dtypes, shapes, file_index, offset, nbytes, boxes, files = [], [], [], [], [], [], [], []
    for f in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, 40))
        for t in range(draw(st.integers(0, 8))):
            dtype = draw(st.sampled_from(list(ITEM)))
            shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
            n = math.prod(shape) * ITEM[dtype]
            box = None
            if draw(st.booleans()):
                start = tuple(draw(st.integers(0, d)) for d in shape)
                box = Box(start=start, stop=tuple(draw(st.integers(a, d)) for a, d in zip(start, shape, strict=True)))
            for column, value in zip(
                (names, dtypes, shapes, file_index, offset, nbytes, boxes),
                (f"{f}.{t}", dtype, shape, f, at, n, box),
                strict=True,
            ):
                column.append(value)
            at += n
        rng = np.random.default_rng(f)
        files.append(rng.integers(0, 256, at + draw(st.integers(0, 20)), dtype=np.uint8))
    order = draw(st.permutations(range(len(names))))
    table = TensorTable(
        names=tuple(names),
        dtypes=tuple(dtypes),
        shapes=tuple(shapes),
        file_index=np.array(file_index, np.int64),
        offset=np.array(offset, np.int64),
        nbytes=np.array(nbytes, np.int64),
    ).take(order)
    return table, files, [boxes[i] for i in order]


@settings(max_examples=400, deadline=None)
@given(
    data=weight_sets(),
    chunk=st.sampled_from([4, 8, 64, 1024]),
    align=st.sampled_from([1, 4]),
    gap=st.integers(0, 30),
    pack=st.booleans(),
    small=st.sampled_from([16, 64, 1 << 20]),
)
def test_plan_moves_exactly_the_wanted_bytes(data, chunk, align, gap, pack, small):  # type: ignore[no-untyped-def]
    table, files, boxes = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SMALL_BYTES", small)
        patch.setattr(schedule, "SLAB_BYTES", 2 * small)
        plan = plan_load(
            table,
            file_nbytes=[len(f) for f in files],
            chunk_bytes=chunk,
            boxes=boxes,
            pack=pack,
            align_bytes=align,
            max_gap_bytes=gap,
        )
    by_name = dict(zip(table.names, range(len(table)), strict=True))
    for name, got in zip(plan.table.names, carry_out(plan, files), strict=True):
        i = by_name[name]
        raw = files[int(table.file_index[i])][int(table.offset[i]) : int(table.offset[i] + table.nbytes[i])]
        item = ITEM[table.dtypes[i]]
        dense = raw.reshape(*table.shapes[i], item)
        box = boxes[i]
        if box is not None:
            dense = dense[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        assert np.array_equal(got, dense.reshape(-1)), name
    assert plan.max_read_nbytes <= chunk
    assert "tensors" in plan.explain()


@settings(max_examples=200, deadline=None)
@given(data=weight_sets(), chunk=st.sampled_from([4, 64]), gap=st.sampled_from([0, 30]), choice=st.data())
def test_reordered_reads_move_same_bytes(data, chunk, gap, choice):  # type: ignore[no-untyped-def]
    table, files, boxes = data
    nbytes = [len(f) for f in files]
    plan = plan_load(table, file_nbytes=nbytes, chunk_bytes=chunk, boxes=boxes, pack=False, max_gap_bytes=gap)
    wanted = choice.draw(st.permutations(range(len(plan.slab_nbytes))))
    other = plan.in_order_of(wanted)
    assert all(map(np.array_equal, carry_out(plan, files), carry_out(other, files)))
    # A read is not later than any read whose slabs are all wanted after its first slab.
    bounds = zip(other.seg_first[:-1].tolist(), other.seg_first[1:].tolist(), strict=True)
    first_wanted = [min(wanted.index(slab) for slab in other.seg_slab[a:b].tolist()) for a, b in bounds]
    assert first_wanted == sorted(first_wanted)


@settings(max_examples=200, deadline=None)
@given(data=weight_sets())
def test_exact_plan_reads_no_extra_bytes(data):  # type: ignore[no-untyped-def]
    table, files, _ = data
    plan = plan_load(table, file_nbytes=[len(f) for f in files], chunk_bytes=64)
    assert int(plan.read_nbytes.sum()) == plan.nbytes
    assert plan.covered().all()


def test_only_small_rows_share_allocations() -> None:
    n = [8192] * 600 + [schedule.SMALL_BYTES, 64, 4, 64]
    offset = np.concatenate(([16], 16 + np.cumsum(n)))[:-1]
    table = TensorTable(
        names=tuple(map(str, range(len(n)))),
        dtypes=(DType.U8,) * len(n),
        shapes=tuple((k,) for k in n),
        file_index=np.zeros(len(n), np.int64),
        offset=offset.astype(np.int64),
        nbytes=np.array(n, np.int64),
    )
    plan = plan_load(table, file_nbytes=[int(offset[-1]) + 64], chunk_bytes=1 << 20)
    assert len(set(plan.row_slab[:600].tolist())) == 3, "600 x 8 KiB in slabs of 2 MiB"
    assert (plan.slab_nbytes <= schedule.SLAB_BYTES + schedule.SMALL_BYTES).all()
    assert plan.row_slab[601] == plan.row_slab[602] != plan.row_slab[603], "a row that would be misaligned starts anew"
    assert ((plan.row_offset % schedule.ALIGN_IN_SLAB) == 0).all()


def test_slice_outside_tensor_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="outside"):
        box_runs((2, 3), Box(start=(0, 0), stop=(2, 4)), 8)
    with pytest.raises(PlanError, match="through a byte"):
        box_runs((4, 4), Box(start=(0, 1), stop=(4, 2)), 4)
    with pytest.raises(PlanError, match="multiple"):
        plan_load(_empty(), file_nbytes=[], chunk_bytes=5, align_bytes=2)


def test_invalid_shard_slice_raises_plan_error() -> None:
    assert shard_box((8, 6), -1, 1, 3) == Box(start=(0, 2), stop=(8, 4))
    for shape, dim, rank, world in (((8, 6), 2, 0, 2), ((8, 6), 1, 0, 4), ((8, 6), 0, 2, 2)):
        with pytest.raises(PlanError):
            shard_box(shape, dim, rank, world)


def _empty() -> TensorTable:
    none = np.zeros(0, np.int64)
    return TensorTable(names=(), dtypes=(), shapes=(), file_index=none, offset=none, nbytes=none)
