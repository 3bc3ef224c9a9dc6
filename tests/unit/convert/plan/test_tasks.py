"""Tasks: every row once, none much larger than another, cuts on alignment; output tensors with places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, PlanError
from penstock.types import GB, MIB, Box, DType
from penstock_convert.plan.tasks import Input, Recipe, Spec, TaskOutput, cut, lay_out, read_bytes, spread, task_bytes_of


def spec(name: str, shape: tuple[int, ...], dtype: DType = DType.BF16) -> Spec:
    return Spec(name=name, dtype=dtype, shape=shape)


def cast(name: str, shape: tuple[int, ...], align: int = 1, to: DType = DType.F32) -> Recipe:
    source = spec(name, shape)
    return Recipe(
        outputs=(TaskOutput(spec=spec(name, shape, to)),),
        inputs=(Input(source=0, spec=source, box=Box.full(shape)),),
        num_rows=shape[0] if shape else 1,
        align=align,
    )


def block(name: str, shape: tuple[int, int]) -> Recipe:
    rows, columns = shape
    scales = (-(-rows // 128), -(-columns // 128))
    return Recipe(
        outputs=(
            TaskOutput(spec=spec(name, shape, DType.F8_E4M3)),
            TaskOutput(spec=spec(f"{name}_scale_inv", scales, DType.F32), per=128),
        ),
        inputs=(Input(source=0, spec=spec(name, shape), box=Box.full(shape)),),
        num_rows=rows,
        align=128,
    )


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300)), max_size=12),
    task_bytes=st.integers(256, 1 << 17),
    leaf_bytes=st.sampled_from([1, 256, 4096]),
    data=st.data(),
)
def test_every_recipe_row_belongs_to_exactly_one_task(shapes, task_bytes, leaf_bytes, data):
    aligns = [data.draw(st.sampled_from([0, 1, 128])) for _ in shapes]
    recipes = [
        block(f"t{i}", shape) if align == 128 else cast(f"t{i}", shape, align)
        for i, (shape, align) in enumerate(zip(shapes, aligns, strict=True))
    ]
    tasks = cut(recipes, task_bytes=task_bytes, leaf_bytes=leaf_bytes)
    seen = [np.zeros(recipe.num_rows, int) for recipe in recipes]
    reached: set[int] = set()
    for task in range(len(tasks)):
        taken = given_ = 0
        for index, start, stop in tasks.entries(task):
            recipe = recipes[index]
            reached.add(index)
            seen[index][start:stop] += 1
            assert start % max(recipe.align, 1) == 0
            assert stop == recipe.num_rows or stop % max(recipe.align, 1) == 0
            more = recipe.nbytes(start, stop)
            taken, given_ = taken + more[0], given_ + more[1]
        assert (taken, given_) == (tasks.in_bytes[task], tasks.out_bytes[task])
        entries = list(tasks.entries(task))
        if len(entries) > 1:
            assert tasks.cost[task] <= task_bytes
    assert reached == set(range(len(recipes)))
    for held_to in (0, 1000):
        read = read_bytes(recipes, tasks, [held_to])
        for task in range(len(tasks)):
            given_ranges = [(one, a, b) for i, a, b in tasks.entries(task) for one in recipes[i].inputs]
            ranges = [one.leaf_range(a, b, held_to) for one, a, b in given_ranges]
            assert read[task, 0] == sum(last - first for first, last in ranges)
    assert all((rows == 1).all() for rows in seen)
    whole = sum(sum(recipe.nbytes(0, recipe.num_rows)) for recipe in recipes)
    assert tasks.cost.sum() == whole


def test_large_embedding_is_split_into_tasks():
    recipes = [cast("norm", (4096,)), cast("embed", (150_000, 4096)), cast("norm2", (4096,))]
    tasks = cut(recipes, task_bytes=64 << 20)
    assert tasks.cost.max() <= 1.1 * (64 << 20)
    assert len(tasks) == -(-150_000 * 4096 * 6 // (64 << 20)) + 1


def test_unsplittable_tensors_are_scheduled_largest_first():
    recipes = [cast("a", (64, 64)), cast("big", (512, 512), align=0), cast("bigger", (1024, 512), align=0)]
    tasks = cut(recipes, task_bytes=1 << 17)
    assert [next(tasks.entries(t))[0] for t in range(3)] == [2, 1, 0]


def test_task_bounds_align_to_leaves():
    recipe = cast("t", (1000, 64), to=DType.F32)  # 256 bytes a row
    tasks = cut([recipe], task_bytes=1 << 15, leaf_bytes=1 << 12)
    assert all(start * 256 % (1 << 12) == 0 for t in range(len(tasks)) for _, start, _ in tasks.entries(t))


@pytest.mark.parametrize("task_bytes", [0, -1])
def test_non_positive_task_bytes_are_refused(task_bytes):
    with pytest.raises(ConfigError, match="task_bytes"):
        cut([block("w", (300, 256))], task_bytes=task_bytes)


def test_concatenated_input_selects_only_its_own_rows():
    source = spec("part", (10, 4))
    one = Input(source=1, spec=source, box=Box(start=(2, 0), stop=(8, 4)), at=100)
    assert one.taken(0, 100) is None
    assert one.taken(102, 104) == Box(start=(4, 0), stop=(6, 4))
    assert one.taken(0, 1000) == one.box
    assert Input(source=1, spec=source, box=one.box, at=None).taken(5, 6) == one.box


def test_verified_reads_extend_to_leaf_bounds():
    one = Input(source=0, spec=spec("t", (100, 8)), box=Box.full((100, 8)))  # 16 bytes a row
    assert one.byte_range(10, 20) == (160, 320)
    assert one.leaf_range(10, 20, 0) == (160, 320)
    assert one.leaf_range(10, 20, 100) == (100, 400)
    assert one.leaf_range(10, 20, 160) == (160, 320)
    assert one.leaf_range(95, 100, 1000) == (1000, 1600)  # the tensor's last leaf is short
    assert one.leaf_range(0, 1, 1 << 30) == (0, 1600)
    part = Input(source=0, spec=one.spec, box=Box(start=(2, 3), stop=(8, 5)), at=50)
    assert part.byte_range(0, 52) == (32, 64)  # rows in their full width
    assert part.leaf_range(0, 50, 100) == (0, 0)  # nothing of it: of no leaf
    scalar = spec("s", (), DType.F32)
    assert Input(source=0, spec=scalar, box=Box.full(())).leaf_range(0, 1, 3) == (0, 4)


def test_scale_rows_correspond_to_blocks():
    out = block("w", (300, 256)).outputs[1]
    assert out.rows(0, 128) == (0, 1)
    assert out.rows(256, 300) == (2, 3)
    assert out.byte_range(128, 300) == (8, 24)


def test_tensors_are_stored_by_descending_element_width():
    specs = [
        spec("a", (3,), DType.U8),
        spec("b", (2,), DType.F64),
        spec("c", (4,), DType.F32),
        spec("d", (), DType.F32),
    ]
    files = lay_out(specs, shard_bytes=20)
    assert files.table.file_index.tolist() == [0, 0, 1, 1]
    assert files.table.offset.tolist() == [16, 0, 0, 16]
    assert files.body_nbytes == (19, 20)


def test_duplicate_tensor_name_is_refused():
    with pytest.raises(PlanError, match="same name") as caught:
        lay_out([spec("a", (1,)), spec("b", (1,)), spec("a", (2,))], shard_bytes=100)
    assert caught.value.tensor == "a"


def test_tensor_ending_within_a_byte_is_refused():
    with pytest.raises(PlanError, match="whole bytes"):
        lay_out([spec("a", (3,), DType.F4)], shard_bytes=100)


def test_consecutive_tasks_write_to_different_files():
    recipes = [cast("huge", (1, 4000)), *(cast(f"t{i}", (10, 10)) for i in range(12))]
    tasks = cut(recipes, task_bytes=700)
    file_of = np.array([0, *(i // 4 for i in range(12))])
    found = spread(tasks, file_of, task_bytes=700)
    files = [int(file_of[next(found.entries(task))[0]]) for task in range(len(found))]
    assert files == [0, *([0, 1, 2] * 4)]
    assert [next(found.entries(task))[0] for task in range(4)] == [0, 1, 5, 9]
    before = sorted((list(tasks.entries(t)), int(tasks.cost[t])) for t in range(len(tasks)))
    assert sorted((list(found.entries(t)), int(found.cost[t])) for t in range(len(found))) == before
    empty = cut([], task_bytes=1)
    assert len(spread(empty, np.zeros(0, np.int64), task_bytes=1)) == 0


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(0, 64 * MIB), (8 * GB, 64 * MIB), (16 * GB, 16 * GB // 128), (70 * GB, 128 * MIB)]
)
def test_large_sources_have_larger_tasks(nbytes: int, expected: int) -> None:
    assert task_bytes_of(nbytes) == expected
