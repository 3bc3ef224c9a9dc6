"""The plan of a sync is executed on dense arrays: every wanted element arrives once, from a rank that holds it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shards import shard_box

from penstock.errors import PlanError
from penstock.plan.layout import Form, Layout, decode, encode
from penstock.plan.sync import ReceiverPlan, SyncPlan, plan_key, plan_sync
from penstock.types import Box, DType
from penstock_tools.plan_command import explain_sync

Row = tuple[str, Form]
NUMPY = {DType.U8: "<u1", DType.BF16: "<u2", DType.F32: "<u4"}


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def layout(member: str, rows: Sequence[Row], gap: int = 0) -> Layout:
    """Return a layout with adjacent rows, `gap` bytes apart."""
    forms = list(dict.fromkeys(form for _, form in rows))
    sizes = np.array([form.span_bytes + gap for _, form in rows], np.int64)
    return Layout(
        member=member,
        regions=(int(sizes.sum()),),
        forms=tuple(forms),
        names=tuple(name for name, _ in rows),
        form=np.array([forms.index(form) for _, form in rows], np.int64),
        offset=np.cumsum(sizes) - sizes,
    )


def view(memory: np.ndarray, offset: int, form: Form) -> np.ndarray:
    """Return a view of the box in memory. Its elements have whole bytes."""
    width = form.dtype.bits // 8
    if not form.box.num_elements:
        return np.zeros(form.box.shape, NUMPY[form.dtype])
    return np.lib.stride_tricks.as_strided(
        memory[offset:], (*form.box.shape, width), (*(step * width for step in form.strides), 1)
    )


def elements(array: np.ndarray) -> np.ndarray:
    """Return an array's elements as bytes, with one more dim."""
    return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8).reshape(*array.shape, array.itemsize)


def fill(one: Layout, tensors: dict[str, np.ndarray]) -> np.ndarray:
    memory = np.full(sum(one.regions), 0xEE, np.uint8)
    for name, f, offset in zip(one.names, one.form.tolist(), one.offset.tolist(), strict=True):
        form = one.forms[f]
        if form.box.num_elements:
            view(memory, offset, form)[...] = elements(tensors[name][index(form.box)])
    return memory


def carry_out(part: ReceiverPlan, memories: Sequence[np.ndarray], nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the receiver's memory, and how often each of its bytes was written."""
    mine, times = np.full(nbytes, 0xEE, np.uint8), np.zeros(nbytes, int)
    for i in range(len(part.row)):
        for src, dst, run in zip(*(column.tolist() for column in part.runs(i, i + 1)), strict=True):
            mine[dst : dst + run] = memories[part.source[i]][src : src + run]
            times[dst : dst + run] += 1
    return mine, times


def prove_by_bytes(plan: SyncPlan, holdings: Sequence[Layout], wants: Sequence[Layout]) -> None:
    """Execute the plan on synthetic values, and compare every byte."""
    chance = np.random.default_rng(7)
    tensors: dict[str, np.ndarray] = {}
    for one in (*holdings, *wants):
        for name, f in zip(one.names, one.form.tolist(), strict=True):
            form = one.forms[f]
            kind = NUMPY[form.dtype]
            tensors.setdefault(name, chance.integers(0, 1 << form.dtype.bits, form.shape, np.uint64).astype(kind))
    memories = [fill(one, tensors) for one in holdings]
    for r, want in enumerate(wants):
        part = plan.part(r)
        heard = decode(encode(part), ReceiverPlan)
        heard.check(src_nbytes=[sum(one.regions) for one in holdings], dst_nbytes=sum(want.regions))
        assert encode(heard) == encode(part)
        mine, times = carry_out(part, memories, sum(want.regions))
        expected = fill(want, tensors)
        assert (mine == expected).all()
        marks = np.zeros(len(mine), int)
        for f, offset in zip(want.form.tolist(), want.offset.tolist(), strict=True):
            form = want.forms[f]
            if form.box.num_elements:
                spot = np.zeros(len(mine), np.uint8)
                view(spot, offset, form)[...] = 1
                marks += spot
        assert (times == marks).all()
        assert part.nbytes == int(times.sum()) == int(part.link_bytes().sum())
        spans = np.diff(part.bucket_first)
        assert spans.sum() == len(part.row) and len(spans) == plan.num_buckets
        for start, stop in itertools.pairwise(part.bucket_first.tolist()):
            asked = [source for source, _ in itertools.groupby(part.source[start:stop].tolist())]
            assert len(asked) == len(set(asked))


def cut(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Return an uneven grid of boxes over the shape. Some boxes are empty."""
    edges = [sorted([0, n, *(chance.randint(0, n) for _ in range(chance.randint(0, 2)))]) for n in shape]
    cells = itertools.product(*(list(itertools.pairwise(edge)) for edge in edges))
    return [Box(start=tuple(a for a, _ in cell), stop=tuple(b for _, b in cell)) for cell in cells]


def some_form(dtype: DType, shape: tuple[int, ...], box: Box, chance: random.Random) -> Form:
    """Return a form for the box, with its dims in any order, with or without padding."""
    if chance.random() < 0.5:
        return Form(dtype=dtype, shape=shape, box=box)
    strides, step = [0] * len(shape), 1
    for d in chance.sample(range(len(shape)), len(shape)):
        strides[d] = step
        step = step * max(box.shape[d], 1) + chance.choice([0, 0, 3])
    return Form(dtype=dtype, shape=shape, box=box, strides=tuple(strides))


def some_side(word: str, model: dict[str, Form], chance: random.Random) -> list[Layout]:
    """Return layouts in which each tensor is cut as a grid and each box is on one or several ranks."""
    rows: list[list[Row]] = [[] for _ in range(chance.randint(1, 4))]
    for name, whole in model.items():
        for box in cut(whole.shape, chance):
            form = some_form(whole.dtype, whole.shape, box, chance)
            for rank in chance.sample(range(len(rows)), chance.randint(1, len(rows))):
                rows[rank].append((name, form))
    return [layout(f"{word}{i}", mine, gap=chance.choice([0, 5])) for i, mine in enumerate(rows)]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([(), (0,), (7,), (4, 6), (3, 1, 5), (2, 3, 4)]), max_size=5),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_every_wanted_byte_is_planned_once(shapes: list[tuple[int, ...]], bucket: int, chance: random.Random) -> None:
    model = {
        f"model.layers.{i // 2}.w{i}": Form(dtype=chance.choice(list(NUMPY)), shape=shape, box=Box.full(shape))
        for i, shape in enumerate(shapes)
    }
    holdings, wants = some_side("t", model, chance), some_side("e", model, chance)
    plan = plan_sync(holdings, wants, bucket_bytes=bucket)
    prove_by_bytes(plan, holdings, wants)
    assert plan == plan_sync(holdings, wants, bucket_bytes=bucket)
    assert decode(encode(plan), SyncPlan) == plan and hash(plan) == hash(decode(encode(plan), SyncPlan))
    assert (plan.link_bytes().sum(axis=1) == [plan.part(r).nbytes for r in range(len(wants))]).all()
    assert explain_sync(plan, limit=1).count("\n") >= 2


def sharded(name: str, shape: tuple[int, ...], dim: int, rank: int, world: int, **more) -> Row:
    return name, Form(**{"dtype": DType.BF16, **more}, shape=shape, box=shard_box(shape, dim, rank, world))


def whole(name: str, shape: tuple[int, ...], **more) -> Row:
    return name, Form(**{"dtype": DType.BF16, **more}, shape=shape, box=Box.full(shape))


def test_fsdp_to_tensor_parallel_plan_uses_rectangles() -> None:
    holdings = [layout(f"t{r}", [sharded("w", (8, 12), 0, r, 4)]) for r in range(4)]
    wants = [layout(f"e{r}", [sharded("w", (8, 12), 1, r, 2)]) for r in range(2)]
    plan = plan_sync(holdings, wants)
    part = plan.part(1)
    assert part.num_rows.tolist() == [2] * 4 and part.run_bytes.tolist() == [12] * 4
    assert part.src_pitch.tolist() == [24] * 4 and part.src.tolist() == [12] * 4
    # The rectangles are contiguous here, so the second begins where the first ends. The receiver begins with source 2.
    assert part.source.tolist() == [2, 3, 0, 1] and part.dst.tolist() == [48, 72, 0, 24]
    prove_by_bytes(plan, holdings, wants)


def test_unsliced_expert_is_sent_as_one_run() -> None:
    names = [f"model.layers.{layer}.experts.{e}" for layer in range(3) for e in range(8)]
    holdings = [layout(f"t{r}", [whole(n, (4, 4)) for i, n in enumerate(names) if i % 8 // 4 == r]) for r in range(2)]
    wants = [layout(f"e{r}", [whole(n, (4, 4)) for i, n in enumerate(names) if i % 8 // 2 == r]) for r in range(4)]
    plan = plan_sync(holdings, wants)
    assert plan.link_bytes().tolist() == [[192, 0], [192, 0], [0, 192], [0, 192]]
    assert len(plan.strip_run) == 2  # The tensors have two kinds, which differ in their holders.
    prove_by_bytes(plan, holdings, wants)


@pytest.mark.parametrize(("num_holders", "num_takers"), [(4, 1), (4, 4), (3, 7), (8, 5), (1, 6)])
def test_replicas_send_equal_bytes_over_few_links(num_holders: int, num_takers: int) -> None:
    rows = [whole(f"layers.{i}.w", (16,)) for i in range(60)]
    plan = plan_sync(
        [layout(f"t{r}", rows) for r in range(num_holders)], [layout(f"e{r}", rows) for r in range(num_takers)]
    )
    links = plan.link_bytes()
    given = links.sum(axis=0)
    assert given.max() - given.min() <= 64
    assert (links > 0).sum() <= num_holders + num_takers - 1


def test_source_with_unique_tensors_sends_fewer_shared_bytes() -> None:
    rows = [whole(f"layers.{i}.w", (16,)) for i in range(64)]
    own = [whole(f"layers.{i}.own", (16,)) for i in range(32)]
    plan = plan_sync([layout("t0", rows + own), layout("t1", rows), layout("t2", rows)], [layout("e", rows + own)])
    assert plan.link_bytes().tolist() == [[32 * 32] * 3]
    lone = plan_sync([layout("t0", rows[:2] + own), layout("t1", rows[:2])], [layout("e", rows[:2] + own)])
    assert lone.link_bytes().tolist() == [[32 * 32, 64]]


def test_bucket_contains_one_layer_when_layer_fits() -> None:
    rows = [whole("embed", (4,)), *(whole(f"m.{layer}.w{i}", (4,)) for layer in (1, 0, 2) for i in range(3))]
    rows.append(whole("m.10.w", (100,)))
    holdings, wants = [layout("t", rows)], [layout("e", rows[::-1])]

    def bucketed(bucket_bytes: int) -> list[list[str]]:
        plan = plan_sync(holdings, wants, bucket_bytes=bucket_bytes)
        part = plan.part(0)
        firsts = itertools.pairwise(part.bucket_first.tolist())
        return [[wants[0].names[row] for row in part.row[a:b].tolist()] for a, b in firsts]

    assert [len(one) for one in bucketed(1 << 20)] == [11]
    assert [{name.split(".")[1] for name in one if "." in name} for one in bucketed(32)] == [
        {"0"},
        {"1"},
        {"2"},
        {"10"},
    ]
    assert bucketed(32)[0][0] == "embed"
    assert [len(one) for one in bucketed(16)] == [1, 2, 1, 2, 1, 2, 1, 1]


def test_bucket_closes_when_full_for_any_receiver() -> None:
    rows = [whole(f"w{i}", (4,)) for i in range(4)]
    plan = plan_sync([layout("t", rows)], [layout("a", rows[:1]), layout("b", rows)], bucket_bytes=16)
    assert plan.part(0).bucket_first.tolist() == [0, 1, 1]
    assert plan.part(1).bucket_first.tolist() == [0, 2, 4]


def test_plan_error_lists_mismatched_tensors() -> None:
    holdings = [layout("t", [whole("a", (4,)), whole("b", (4,)), whole("spare", (4,)), whole("q", (4,), tag="fp8")])]
    wants = [layout("e", [whole("a", (4,), dtype=DType.F32), whole("b", (2, 2)), whole("c", (4,)), whole("q", (4,))])]
    with pytest.raises(PlanError) as caught:
        plan_sync(holdings, wants)
    assert caught.value.message.splitlines() == [
        "names, dtypes, shapes or tags differ: 4 wanted and 4 held tensors have no match:",
        "  a: wanted as F32 [4], held as BF16 [4]",
        "  b: wanted as BF16 [2, 2], held as BF16 [4]",
        "  q: wanted as BF16 [4], held as BF16 [4] fp8",
        "  c: wanted as BF16 [4], not held",
        "  spare: not wanted, held as BF16 [4]",
    ]
    both = [layout("e", [whole("b", (4,))]), layout("f", [whole("b", (2, 2))])]
    with pytest.raises(PlanError, match=r"b: wanted as BF16 \[2, 2\], held as BF16 \[4\]"):
        plan_sync(holdings, both)
    many = [layout("e", [whole(f"x{i}", (1,)) for i in range(30)])]
    with pytest.raises(PlanError, match=r"30 wanted and 0 held tensors(.|\n)*and 10 more"):
        plan_sync([layout("t", [])], many)


def test_same_tensor_is_planned_in_two_dtypes() -> None:
    low, high = whole("w", (4, 4), dtype=DType.U8, tag="fp8"), whole("w", (4, 4), tag="")
    plan = plan_sync([layout("t", [high, low])], [layout("a", [low]), layout("b", [high])])
    assert [plan.part(r).nbytes for r in range(2)] == [16, 32]
    assert [plan.part(r).src.tolist() for r in range(2)] == [[32], [0]]


def test_plan_error_lists_missing_elements_by_tensor() -> None:
    def holding(names: list[str], rank: int) -> Layout:
        return layout(f"t{rank}", [sharded(name, (8, 4), 0, rank, 4) for name in names])

    names = [f"layers.{i}.w" for i in range(3)]
    holdings = [holding(names, r) for r in (0, 1, 3)]
    with pytest.raises(PlanError) as caught:
        plan_sync(holdings, [layout("e", [whole(name, (8, 4)) for name in names])])
    assert caught.value.message.splitlines() == [
        "no rank holds some wanted elements:",
        "  layers.0.w and 2 tensors like it: BF16 [8, 4], no rank holds [4:6, 0:4), wanted in [0:8, 0:4)",
    ]
    apart = [layout(f"t{i}", [sharded(f"w{i}", (30,), 0, 0, 2)]) for i in range(30)]
    with pytest.raises(PlanError, match="and 10 more"):
        plan_sync(apart, [layout("e", [whole(f"w{i}", (30,)) for i in range(30)])])


def test_overlapping_shards_are_sent_once() -> None:
    shape = (12, 4)
    holdings = [
        layout("t0", [("w", Form(dtype=DType.BF16, shape=shape, box=Box(start=(0, 0), stop=(8, 4))))]),
        layout("t1", [("w", Form(dtype=DType.BF16, shape=shape, box=Box(start=(4, 0), stop=(12, 4))))]),
        layout("t2", [("w", Form(dtype=DType.BF16, shape=shape, box=Box(start=(0, 0), stop=(12, 2))))]),
    ]
    wants = [layout("e0", [whole("w", shape)]), layout("e1", [sharded("w", shape, 0, 1, 3)])]
    prove_by_bytes(plan_sync(holdings, wants), holdings, wants)


def test_duplicate_region_is_received_by_both_tensors() -> None:
    twice = [whole("w", (4,)), whole("w", (4,))]
    holdings, wants = [layout("t", twice)], [layout("e", twice)]
    plan = plan_sync(holdings, wants)
    assert plan.part(0).src.tolist() == [0, 0] and plan.part(0).dst.tolist() == [0, 8]
    prove_by_bytes(plan, holdings, wants)


def test_sub_byte_tensor_is_split_only_at_byte_boundaries() -> None:
    holdings = [layout("t", [whole("w", (4, 8), dtype=DType.F4)])]
    plan = plan_sync(holdings, [layout("e", [sharded("w", (4, 8), 1, 1, 2, dtype=DType.F4)])])
    assert (plan.part(0).src.tolist(), plan.part(0).run_bytes.tolist()) == ([2], [2])
    with pytest.raises(PlanError, match=r"\[0:4, 1:2\) of F4 \[4, 8\] cuts through a byte"):
        plan_sync(holdings, [layout("e", [sharded("w", (4, 8), 1, 1, 8, dtype=DType.F4)])])


def test_plan_key_depends_on_every_input() -> None:
    rows = [whole("w", (4,))]
    t, e = layout("t", rows), layout("e", rows)
    keys = {
        plan_key([t], [e]),
        plan_key([e], [t]),
        plan_key([t, t], [e]),
        plan_key([t], [e, e]),
        plan_key([msgspec.structs.replace(t, address="again")], [e]),
        plan_key([msgspec.structs.replace(t, member="t-2")], [e]),
        plan_key([msgspec.structs.replace(t, offset=t.offset + 0, regions=(9,))], [e]),
        plan_key([t], [e], 5),
    }
    assert len(keys) == 8
    plan = plan_sync([t], [e])
    assert plan.key == plan_key([t], [e]) and plan != plan_sync([t], [e, e]) and plan != "a plan"


def test_plan_explanation_lists_links_and_sizes() -> None:
    rows = [whole("w", (4,)), whole("v", (4,))]
    plan = plan_sync([layout("t", [*rows, whole("mtp.w", (4,))])], [layout(f"e{i}", rows) for i in range(3)])
    assert explain_sync(plan, limit=2).splitlines() == [
        "2 tensors, 1 sources -> 3 receivers, 48 bytes in 1 buckets",
        f"plan {plan.key}",
        "held but not wanted: 1 (mtp.w)",
        "t sends most, 48 bytes; mean 48",
        "e0 receives most, 16 bytes; mean 16",
        "e0: 16 bytes from 1 sources",
        "e1: 16 bytes from 1 sources",
        "... and 1 more",
    ]
    assert math.prod(plan.link_bytes().shape) == 3


def test_empty_sync_plan_is_valid() -> None:
    assert explain_sync(plan_sync([], [])).startswith("0 tensors, 0 sources -> 0 receivers, 0 bytes")
    plan = plan_sync([layout("t", [whole("w", (0, 4))])], [layout("e", [whole("w", (0, 4))]), layout("f", [])])
    assert plan.nbytes == 0 and plan.part(0).nbytes == plan.part(1).nbytes == 0 and plan.num_tensors == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"src": np.array([-1, 12])},
        {"src": np.array([0, 25])},
        {"dst": np.array([0, 61])},
        {"dst_pitch": np.array([1 << 62, 24])},
        {"src_pitch": np.array([12, -1])},
        {"num_rows": np.array([0, 2])},
        {"num_rows": np.array([2, 1 << 61])},
        {"run_bytes": np.array([0, 12])},
        {"run_bytes": np.array([12, (1 << 63) - 1])},
        {"source": np.array([0, 2])},
        {"source": np.array([-1, 0])},
        {"bucket_first": np.array([0, 1])},
        {"bucket_first": np.array([0, 3, 2])},
        {"bucket_first": np.array([1, 2])},
        {"bucket_first": np.zeros(0, np.int64)},
        {"row": np.array([0])},
        {"sources": ("t0",)},
    ],
)
def test_invalid_receiver_plan_is_rejected(wrong: dict[str, object]) -> None:
    holdings = [layout(f"t{r}", [sharded("w", (4, 12), 0, r, 2)]) for r in range(2)]
    part = plan_sync(holdings, [layout("e", [sharded("w", (4, 12), 1, 0, 2)])]).part(0)
    sizes = {"src_nbytes": [48, 48], "dst_nbytes": 48}
    part.check(**sizes)
    with pytest.raises(PlanError, match="e: "):
        msgspec.structs.replace(part, **wrong).check(**sizes)
