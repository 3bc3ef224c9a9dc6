"""Formats against `transform.quantize` on whole tensors; the same bits however rows are cut; back again."""

from __future__ import annotations

import pytest
import torch
from tests.support.transform_suite import values

from penstock.errors import ConfigError, PlanError
from penstock.transform.formats import FORMATS, fault, format_of
from penstock.transform.quantize import dtype_of, quantise, torch_dtype
from penstock.types import DType
from penstock_convert.operations.formats import Dequantise, StoreOperation
from penstock_convert.operations.merge import Linear, Slerp, Ties
from penstock_convert.operations.operation import Chain, Rename
from penstock_convert.operations.read_codes import dequantise
from penstock_convert.testing import check_rows, outputs_of, table_of

BLOCKS = [tag for tag, form in FORMATS.items() if form.scaling != "none"]
CASTS = [tag for tag, form in FORMATS.items() if form.scaling == "none"]
SHAPES = [(128, 128), (300, 416), (129, 32), (1, 64), (0, 32), (5, 0), (513, 1056)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    found = {f"l{i}.weight": values(shape, dtype, i) for i, shape in enumerate(SHAPES)}
    return {**found, "l.norm.weight": torch.ones(64), "l.bias": torch.ones(3), "steps": torch.tensor(3)}


@pytest.mark.parametrize("tag", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sliced_block_quantisation_matches_unsliced_quantisation(tag, dtype):
    given, form = weights(dtype), format_of(tag)
    found = check_rows(StoreOperation(tag), given)
    for name, tensor in given.items():
        if name.startswith(("l.", "steps")) or fault(form, dtype_of(tensor), tuple(tensor.shape)):
            assert torch.equal(raw(found.pop(name)), raw(tensor)), name
            continue
        wanted = quantise(form, tensor)
        suffixes = (form.values_suffix, form.scales_suffix, form.global_suffix)
        for suffix, part in zip(suffixes, wanted, strict=False):
            got = found.pop(name + suffix)
            assert got.shape == part.shape and got.dtype == part.dtype, name + suffix
            assert torch.equal(raw(got), raw(part)), name + suffix
    assert not found


@pytest.mark.parametrize("tag", CASTS)
def test_cast_converts_every_float_tensor(tag):
    form = format_of(tag)
    given = {**weights(), "stack": values((3, 5, 7), torch.float32, 1), "scalar": torch.tensor(1.5)}
    found = check_rows(StoreOperation(tag), given)
    for name, tensor in given.items():
        is_cast = tensor.is_floating_point() and dtype_of(tensor) is not form.values
        wanted = quantise(form, tensor)[0] if is_cast else tensor
        assert found[name].dtype == wanted.dtype and torch.equal(raw(found[name]), raw(wanted)), name


def test_stacked_experts_have_separate_quantisation_blocks():
    given = {"experts.weight": values((5, 130, 200), torch.bfloat16, 2), "w.weight": torch.ones(4, 4)}
    form = format_of("fp8-block128")
    recipes = {
        recipe.outputs[0].spec.name: recipe for recipe in StoreOperation("fp8-block128").recipes([table_of(given)])
    }
    assert len(recipes["experts.weight"].outputs) == 1  # chosen are linear weights, of two dims
    store = StoreOperation("fp8-block128")
    spec = recipes["experts.weight"].inputs[0].spec
    recipe = store._recipe(spec)
    wanted = quantise(form, given["experts.weight"])
    found = [store.run(recipe, a, b, [given["experts.weight"][a:b]]) for a, b in ((0, 2), (2, 5))]
    for i, part in enumerate(wanted):
        assert torch.equal(raw(torch.cat([one[i] for one in found])), raw(part))
        assert recipe.outputs[i].byte_range(0, 2)[1] == found[0][i].nbytes


def test_only_and_keep_options_match_full_names():
    given = {"a.weight": torch.ones(64, 64), "b.weight": torch.ones(64, 64), "c.table": torch.ones(64, 64)}
    assert "a.weight_scale" in outputs_of(StoreOperation("mxfp8", keep=("b.*",)), given)
    assert (
        outputs_of(StoreOperation("mxfp8", keep="b.*"), given).keys()
        == outputs_of(StoreOperation("mxfp8", keep=("b.*",)), given).keys()
    )
    assert outputs_of(StoreOperation("mxfp8", only=("c.*",)), given).keys() == {*given, "c.table_scale"}
    assert outputs_of(StoreOperation("cast:BF16", only=("a.*",)), given)["b.weight"].dtype is torch.float32
    with pytest.raises(PlanError, match="no tensor is left"):
        StoreOperation("mxfp8", only=("d.*",)).recipes([table_of(given)])
    with pytest.raises(ConfigError, match="there is no transform"):
        StoreOperation("fp7")


@pytest.mark.parametrize("tag", BLOCKS)
@pytest.mark.parametrize("to", [DType.BF16, DType.F32])
def test_dequantise_reads_every_format_that_penstock_writes(tag, to):
    given, form = weights(), format_of(tag)
    stored = outputs_of(StoreOperation(tag), given)
    found = check_rows(Dequantise(to), stored)
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        if name.startswith(("l.", "steps")) or fault(form, dtype_of(tensor), tuple(tensor.shape)):
            assert torch.equal(raw(found[name]), raw(tensor))
        else:
            assert torch.equal(raw(found[name]), raw(dequantise(form, quantise(form, tensor), to))), name


CODES = torch.randn(256, 384, generator=torch.Generator().manual_seed(7)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("name", "shape", "block"),
    [
        ("weight_scale_inv", (2, 3), (128, 128)),
        ("weight_scale", (2, 3), (128, 128)),
        ("weight_scale", (256, 1), (1, 384)),
        ("weight_scale", (256,), (1, 384)),
        ("weight_scale", (1,), (256, 384)),
        ("weight_scale", (), (256, 384)),
        ("weight_scale_inv", (256, 12), (1, 32)),
    ],
)
def test_foreign_fp8_with_any_scale_shape_is_dequantised(name, shape, block, dtype):
    """Qwen3-FP8's BF16 blocks, llm-compressor's FP8_BLOCK, FP8_DYNAMIC and FP8, FBGEMM's rows."""
    scales = torch.exp2(torch.randint(-6, 6, shape, generator=torch.Generator().manual_seed(1)).float()).to(dtype)
    given = {"a.weight": CODES, f"a.{name}": scales, "a.input_scale": torch.ones(1), "norm.weight": torch.ones(4)}
    found = check_rows(Dequantise("F32"), given)
    factor = scales.float().reshape(*(scales.shape or (1,)), *([1] * (2 - max(1, scales.ndim))))
    factor = factor.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:256, :384]
    assert found.keys() == {"a.weight", "norm.weight"}
    assert torch.equal(found["a.weight"], CODES.float() * factor)


def test_stacked_expert_scales_apply_along_leading_dim():
    codes = torch.stack([CODES, CODES, CODES])
    for shape in ((3, 2, 3), (3, 1, 1), (3,), (3, 256, 1), (3, 256)):
        scales = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
        found = check_rows(Dequantise("F32"), {"experts.up": codes, "experts.up_scale": scales})
        dims = scales.reshape(*shape, *([1] * (3 - len(shape))))
        rows, cols = 256 // dims.shape[1], 384 // dims.shape[2]
        wanted = codes.float() * dims.repeat_interleave(rows, 1).repeat_interleave(cols, 2)
        assert torch.equal(found["experts.up"], wanted), shape


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"weight": CODES, "weight_scale_inv": torch.ones(3, 2)}, r"scales \[3, 2\] do not fit \[256, 384\]"),
        ({"weight": CODES, "weight_scale": torch.ones(256, 12, dtype=torch.int8)}, "its scales are I8"),
        ({"weight": torch.ones(8, 8, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}, "I8 codes"),
        ({"weight": torch.ones(8, 8), "weight_scale": torch.ones(8, 1)}, "codes are missing"),
        ({"weight_packed": torch.ones(8, 8, dtype=torch.int32), "weight_scale": torch.ones(8, 1)}, "I32 codes"),
        ({"weight_packed": torch.ones(8, 8, dtype=torch.uint8)}, "U8 codes"),
        ({"qweight": torch.ones(8, 8, dtype=torch.int32), "scales": torch.ones(8, 1).half()}, "codes are missing"),
        ({"weight": CODES, "weight_scale": torch.ones(1), "weight_scale_2": torch.ones(1)}, "an unknown format"),
    ],
)
def test_unreadable_quantised_tensor_is_refused(parts, says):
    given = {f"l.0.{name}": tensor for name, tensor in parts.items()}
    with pytest.raises(PlanError, match=says) as raised:
        Dequantise().recipes([table_of(given)])
    assert raised.value.tensor.startswith("l.0.")
    for merge in (Linear(), Slerp(0.5), Ties(0.5)):
        with pytest.raises(PlanError, match=r"source \d is quantised"):
            merge.recipes([table_of(given), table_of(given)])


def test_unsupported_quantisation_config_error_states_reason():
    given = table_of({"a.qweight": torch.ones(8, 8, dtype=torch.int32), "a.scales": torch.ones(8, 1)})
    gptq = {"quant_method": "gptq", "bits": 4, "modules_to_not_convert": ["lm_head"] * 1000}
    with pytest.raises(
        PlanError, match="quant_method 'gptq' is not one of compressed-tensors, fbgemm_fp8, fp8"
    ) as raised:
        Dequantise(quantization=gptq).recipes([given])
    assert "'bits': 4" in str(raised.value) and "lm_head" not in str(raised.value)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(PlanError, match="it has no scales"):
        Dequantise(quantization=fp8).recipes([table_of({"a.weight": CODES})])
    rotated = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}
    with pytest.raises(PlanError, match="rotated"):
        Dequantise(quantization=rotated).recipes([table_of({"a.weight": CODES})])


def test_declared_block_shape_overrides_default():
    scales = torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    given = {"a.weight": CODES, "a.weight_scale_inv": scales}
    with pytest.raises(PlanError, match="do not fit"):
        Dequantise().recipes([table_of(given)])
    found = check_rows(Dequantise("F32", {"quant_method": "fp8", "weight_block_size": [64, 64]}), given)
    assert torch.equal(found["a.weight"], CODES.float() * scales.repeat_interleave(64, 0).repeat_interleave(64, 1))


def test_compressed_tensors_int8_is_read_if_config_declares_it():
    codes = torch.randint(-127, 128, (8, 16), dtype=torch.int8)
    given = {"a.weight": codes, "a.weight_scale": torch.rand(8, 1)}
    said = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}},
    }
    found = check_rows(Dequantise("F32", said), given)
    assert torch.equal(found["a.weight"], codes.float() * given["a.weight_scale"])


def test_fp8_without_scales_dequantises_to_unscaled_values():
    found = check_rows(Dequantise("F32"), {"a.weight": CODES, "b": torch.ones(3)})
    assert torch.equal(found["a.weight"], CODES.float()) and torch.equal(found["b"], torch.ones(3))


@pytest.mark.parametrize("tag", ["cast:F32", "cast:F16", "cast:F8_E5M2"])
def test_cast_leaves_quantised_codes_and_scales_unchanged(tag):
    parts = {
        "a.weight": CODES,
        "a.weight_scale_inv": torch.rand(2, 3).bfloat16(),
        "a.input_scale": torch.ones(1).bfloat16(),
        "attn.k_scale": torch.ones(1).bfloat16(),
        "b.qweight": torch.ones(8, 8, dtype=torch.int32),
        "b.scales": torch.ones(8, 1).bfloat16(),
        "c.weight_packed": torch.zeros(16, 16, dtype=torch.uint8),
        "c.weight_scale": torch.ones(16, 2).to(torch.float8_e4m3fn),
        "c.weight_global_scale": torch.ones(1),
    }
    others = {"norm.weight": torch.rand(7).bfloat16(), "attn.logit_scale": torch.ones(1).bfloat16()}
    found = check_rows(StoreOperation(tag), {**parts, **others})
    for name, tensor in parts.items():
        assert found[name].dtype is tensor.dtype and torch.equal(raw(found[name]), raw(tensor)), name
    assert {found[name].dtype for name in others} == {torch_dtype(format_of(tag).values)}


def test_mixed_quantisation_error_names_tensor():
    form, first = format_of("fp8-block128"), {"a.weight": values((256, 256), torch.bfloat16, 4)}
    given = {
        **outputs_of(StoreOperation("fp8-block128"), first),
        "b.weight": torch.ones(128, 128),
        "lm_head.weight": torch.ones(8, 8),
    }
    store = StoreOperation("fp8-block128")
    found = check_rows(store, given)
    assert torch.equal(raw(found["a.weight"]), raw(quantise(form, first["a.weight"])[0]))
    assert found["b.weight"].dtype is torch.float8_e4m3fn
    assert store.config({})["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    with pytest.raises(PlanError, match="quantised in a different format") as raised:
        StoreOperation("fp8-channel").recipes([table_of(given)])
    assert raised.value.tensor == "a.weight" and "dequantise" in str(raised.value)


def test_chained_format_operations_read_source_once():
    given = {"a.weight": values((260, 300), torch.bfloat16, 4)}
    stored = outputs_of(StoreOperation("fp8-block128"), given)
    chain = Chain(Dequantise("F32"), Chain(Rename(((r"^a", "b"),)), StoreOperation("fp8-channel")))
    found = check_rows(chain, stored)
    form = format_of("fp8-block128")
    wanted = quantise(format_of("fp8-channel"), dequantise(form, quantise(form, given["a.weight"]), DType.F32))
    assert torch.equal(raw(found["b.weight"]), raw(wanted[0]))
    assert torch.equal(raw(found["b.weight_scale"]), raw(wanted[1]))


def test_output_config_describes_stored_format():
    given = [table_of({"a.weight": torch.ones(128, 128), "lm_head.weight": torch.ones(8, 8)})]
    store = StoreOperation("fp8-block128")
    store.recipes(given)
    said = store.config({"x": 1, "torch_dtype": "bfloat16"})
    assert said["quantization_config"]["quant_method"] == "fp8" and said["x"] == 1
    assert said["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert Dequantise("F16", said["quantization_config"]).config(said) == {"x": 1, "torch_dtype": "float16"}
    with pytest.raises(PlanError, match="differs from the one used to plan"):
        Dequantise("F16").config(said)
    nested = {"text_config": {"n": 1, "quantization_config": said["quantization_config"]}}
    left = Dequantise("F16", said["quantization_config"]).config(nested)
    assert left == {"text_config": {"n": 1}, "torch_dtype": "float16"}
    cast = StoreOperation("cast:F32")
    cast.recipes(given)
    assert cast.config({"dtype": "bfloat16"}) == {"dtype": "float32"}  # as transformers 5 calls it
    with pytest.raises(ConfigError, match="cannot dequantise to"):
        Dequantise("F8_E4M3")
