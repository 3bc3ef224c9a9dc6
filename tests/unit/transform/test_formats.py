"""Shards own every block once for any cuts, and boxes that cut a block raise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, PlanError
from penstock.transform.formats import FORMATS, alignment, foreign, format_of, needed, outputs, owned, widened
from penstock.types import Box, DType


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def test_unaligned_shard_produces_complete_blocks() -> None:
    form, held = format_of("fp8-block128"), Box(start=(100, 0), stop=(300, 512))
    mine = owned(form, (1000, 512), held)
    assert mine == Box(start=(128, 0), stop=(384, 512)) == needed(form, (1000, 512), held)
    assert foreign(held, mine) == (Box(start=(300, 0), stop=(384, 512)),)
    codes, scales = outputs(form, "a.weight", DType.BF16, (1000, 512), mine)
    assert (codes.name, codes.dtype, codes.box) == ("a.weight", DType.F8_E4M3, mine)
    assert (scales.name, scales.shape) == ("a.weight_scale_inv", (8, 4))
    assert scales.box == Box(start=(1, 0), stop=(3, 4))
    with pytest.raises(PlanError, match=r"widen the box to \[\(0, 0\), \(384, 512\)\)"):
        outputs(form, "a.weight", DType.BF16, (1000, 512), held)


@given(
    tag=st.sampled_from(sorted(FORMATS)),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 12).map(lambda n: 32 * n)),
    cuts=st.tuples(st.lists(st.integers(0, 300), max_size=3), st.lists(st.integers(0, 384), max_size=3)),
)
def test_shards_produce_every_output_element_once(
    tag: str, shape: tuple[int, int], cuts: tuple[list[int], list[int]]
) -> None:
    form = FORMATS[tag]
    edges = [sorted({0, n, *(min(c, n) for c in some)}) for n, some in zip(shape, cuts, strict=True)]
    whole = outputs(form, "w", DType.F32, shape, Box.full(shape))
    given_by = [np.zeros(one.shape, int) for one in whole]
    for a, b in zip(edges[0], edges[0][1:], strict=False):
        for c, d in zip(edges[1], edges[1][1:], strict=False):
            held = Box(start=(a, c), stop=(b, d))
            mine = owned(form, shape, held)
            for count, one in zip(given_by, outputs(form, "w", DType.F32, shape, mine), strict=True):
                count[slices(one.box)] += 1
            wide = widened(form, shape, held)
            assert widened(form, shape, wide) == wide
            have = np.zeros(shape, int)
            have[slices(held)] += 1
            for piece in foreign(held, mine):
                have[slices(piece)] += 1
            assert have.max() == 1
            assert have[slices(mine)].all()
    assert all((count == 1).all() for count in given_by)


def test_channel_scales_require_unsliced_rows() -> None:
    channel, nv = format_of("fp8-channel"), format_of("nvfp4")
    assert alignment(channel, (10, 48)) == (1, 48)
    assert owned(channel, (10, 48), Box(start=(2, 0), stop=(4, 8))) == Box(start=(2, 0), stop=(4, 48))
    assert not owned(channel, (10, 48), Box(start=(2, 8), stop=(4, 48))).num_elements
    part = Box(start=(5, 0), stop=(10, 48))
    assert needed(nv, (10, 48), part) == Box.full((10, 48))
    assert needed(nv, (10, 48), part, amax_given=True) == part
    codes, scales, top = outputs(nv, "a.weight", DType.BF16, (10, 48), part)
    assert (codes.name, codes.box) == ("a.weight_packed", Box(start=(5, 0), stop=(10, 24)))
    assert (scales.dtype, scales.shape, top.name) == (DType.F8_E4M3, (10, 3), "a.weight_global_scale")
    assert top.box == Box(start=(0,), stop=(0,))


@pytest.mark.parametrize(
    ("tag", "dtype", "shape", "says"),
    [
        ("fp8-block128", DType.I32, (4, 4), "cannot be quantised"),
        ("fp8-block128", DType.F8_E4M3, (4, 4), "cannot be quantised"),
        ("fp8-channel", DType.BF16, (4,), "2 or more dims"),
        ("mxfp8", DType.BF16, (4, 33), "divisible by 32"),
        ("nvfp4", DType.BF16, (4, 24), "divisible by 16"),
        ("nvfp4", DType.BF16, (2, 4, 16), "needs 2 dims"),
        ("cast:F32", DType.I64, (4,), "cannot be cast"),
    ],
)
def test_format_with_unsupported_dtype_or_shape_raises(
    tag: str, dtype: DType, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        outputs(format_of(tag), "w", dtype, shape, Box.full(shape))
    with pytest.raises(ConfigError, match="fp8-block128"):
        format_of("int8")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("fp8", "fp8-block128"),
        ("FP8", "fp8-block128"),
        ("bf16", "cast:BF16"),
        ("torch.bfloat16", "cast:BF16"),
        ("cast:bf16", "cast:BF16"),
        ("fp16", "cast:F16"),
        ("fp32", "cast:F32"),
        ("nvfp4a16", "nvfp4"),
        ("fp8_block128", "fp8-block128"),
        ("mxfp-8", "mxfp8"),
    ],
)
def test_format_alias_raises_with_suggested_name(asked: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        format_of(asked)
    assert str(caught.value.hint).startswith(f"did you mean '{meant}'?")
