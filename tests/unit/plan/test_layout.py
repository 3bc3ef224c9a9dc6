"""Forms and layouts: valid layouts are accepted, and errors name the faulty part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards import shard_box

from penstock.errors import FormatError, PlanError
from penstock.plan.layout import MAX_ELEMENTS, Form, Layout, box_runs, decode, encode
from penstock.types import Box, DType


def form(shape: tuple[int, ...], box: Box | None = None, strides: tuple[int, ...] | None = None, **more) -> Form:
    return Form(**{"dtype": DType.BF16, **more}, shape=shape, box=box or Box.full(shape), strides=strides)


def layout(**more) -> Layout:
    told = {
        "member": "m0",
        "regions": (64, 64),
        "forms": (form((4, 8)), form((0,)), form(())),
        "names": ("a", "b", "c"),
        "form": np.array([0, 1, 2]),
        "offset": np.array([64, 0, 62]),
    }
    return Layout(**{**told, **more})


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6)), max_size=4))
def test_region_runs_contain_exactly_region_bytes(dims: list[tuple[int, int, int]]) -> None:
    shape = tuple(n for n, _, _ in dims)
    start = tuple(min(a, b, n) for n, a, b in dims)
    stop = tuple(min(max(a, b), n) for n, a, b in dims)
    array = np.arange(np.prod(shape, dtype=int), dtype="<u2").reshape(shape)
    runs = box_runs(shape, Box(start=start, stop=stop), 16)
    raw = array.tobytes()
    got = b"".join(
        raw[first + row * runs.pitch_bytes :][: runs.run_bytes]
        for first in runs.offsets.tolist()
        for row in range(runs.num_rows)
    )
    assert got == array[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].tobytes()
    assert runs.nbytes == len(got)


def test_region_outside_tensor_is_rejected() -> None:
    with pytest.raises(PlanError, match="outside"):
        box_runs((2,), Box(start=(0,), stop=(3,)), 8)
    with pytest.raises(PlanError, match="through a byte"):
        box_runs((4, 3), Box(start=(0, 0), stop=(1, 1)), 4)


def test_shard_region_matches_rank_slice() -> None:
    assert shard_box((4, 6), -1, 1, 3) == Box(start=(0, 2), stop=(4, 4))
    with pytest.raises(PlanError, match="does not exist"):
        shard_box((4,), 1, 0, 2)
    with pytest.raises(PlanError, match="cannot be split evenly"):
        shard_box((4,), 0, 0, 3)


def test_forms_with_same_memory_layout_are_equal() -> None:
    assert form((4, 8)) == form((4, 8), strides=(8, 1))
    assert form((1, 8)) == form((1, 8), strides=(77, 1))
    assert form((0, 8)) == form((0, 8), strides=(3, 3))
    assert form((4, 8)) != form((4, 8), strides=(1, 4))
    assert form((4, 8), tag="fp8").spec == "BF16 [4, 8] fp8"


def test_form_span_extends_from_first_to_last_byte() -> None:
    assert form((4, 8), strides=(10, 1)).span_bytes == (3 * 10 + 8) * 2
    assert form((0, 8)).span_bytes == 0
    assert form(()).span_bytes == 2
    assert form((3,), dtype=DType.F4).span_bytes == 2


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (form((1,) * 9), "dims"),
        (form((MAX_ELEMENTS, 2)), "elements"),
        (form((-1, -2), Box.full((1, 1))), "negative"),
        (form((4,), Box(start=(0,), stop=(5,))), "outside"),
        (form((4,), Box.full((4, 1))), "outside"),
        (form((4, 4), strides=(1,)), "1 strides"),
        (form((4, 4), strides=(3, 1)), "overlap"),
        (form((4, 4), strides=(4, 0)), "overlap"),
        (form((4, 4), strides=(4, -1)), "overlap"),
        (form((4, 4), strides=(MAX_ELEMENTS, 1)), "too far"),
    ],
)
def test_invalid_form_error_names_layout_and_reason(bad: Form, why: str) -> None:
    assert why in str(bad.fault())
    with pytest.raises(PlanError, match=f"m0.*{why}"):
        layout(forms=(bad, form((0,)), form(()))).check()


def test_valid_strided_form_is_accepted() -> None:
    assert form((4, 4), strides=(1, 4)).fault() is None
    assert form((2, 3, 4), Box(start=(0, 1, 0), stop=(2, 2, 4)), (9, 0, 2)).fault() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": np.array([65, 0, 62])},
        {"offset": np.array([63, 0, 62])},
        {"offset": np.array([64, 0, 128])},
        {"offset": np.array([64, 0, -2])},
        {"offset": np.array([64, 0, (1 << 63) - 1])},
        {"form": np.array([0, 1, 3])},
        {"form": np.array([-1, 1, 2])},
        {"regions": ()},
    ],
)
def test_error_for_row_outside_memory_names_tensor(wrong: dict[str, object]) -> None:
    layout().check()
    with pytest.raises(PlanError, match=r"m0: form -?\d+ at") as caught:
        layout(**wrong).check()
    assert caught.value.tensor in {"a", "c"}


def test_invalid_layout_columns_are_refused() -> None:
    with pytest.raises(PlanError, match="3 names, 2 forms"):
        layout(form=np.array([0, 1])).check()
    with pytest.raises(PlanError, match="invalid region sizes"):
        layout(regions=(-1,)).check()
    none = np.zeros(0, np.int64)
    layout(names=(), form=none, offset=none, regions=()).check()


def test_encoded_layout_decodes_with_same_digest() -> None:
    told = layout()
    heard = decode(encode(told), Layout)
    assert heard.digest() == told.digest() and heard.forms == told.forms and heard.names == told.names
    assert len(told.digest()) == 32
    others = [
        layout(member="m1"),
        layout(address="x"),
        layout(names=("a", "b", "d")),
        layout(offset=np.array([64, 0, 60])),
    ]
    assert len({told.digest(), *(other.digest() for other in others)}) == 5


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        encode(1),
        encode(("a",)),
        encode(layout())[:-1],
        encode(layout()).replace(b"\xc4\x18", b"\xc4\x17", 1)[:-1],
        encode(layout()).replace(b"BF16", b"BF17"),
    ],
)
def test_invalid_layout_bytes_raise_format_error(raw: bytes) -> None:
    with pytest.raises(FormatError, match="as Layout"):
        decode(raw, Layout)
