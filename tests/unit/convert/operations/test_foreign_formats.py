"""Quantised checkpoints of other writers: computed right, left as they are, or refused by name."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import PlanError
from penstock_convert.operations.formats import Dequantise, StoreOperation
from penstock_convert.operations.gguf import StoreGguf
from penstock_convert.operations.merge import Linear
from penstock_convert.operations.stored import declared, without_declared
from penstock_convert.testing import check_rows, table_of


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


CODES = torch.randn(256, 384, generator=torch.Generator().manual_seed(7)).to(torch.float8_e4m3fn)
SCALE, ROW_SCALES = torch.tensor(0.5), torch.full((256, 1), 0.5)
UNEXPLAINED = {
    "scale without weight": ({"a.weight_scale": SCALE}, None),
    "ComfyUI scale without codes": ({"a.weight": torch.ones(8, 8), "a.scale_weight": SCALE}, None),
    "exponents without codes": (
        {"a.weight": torch.ones(8, 8), "a.scale": torch.ones(1, 1).to(torch.float8_e8m0fnu)},
        None,
    ),
    "FP8 with scale of inputs only": ({"a.weight": CODES, "a.input_scale": SCALE}, None),
    "FP8 with ComfyUI scale of inputs only": ({"a.weight": CODES, "a.scale_input": SCALE}, None),
    "FP8 with marker only": ({"a.weight": CODES, "m.scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, None),
    "FP8 under a configuration": ({"a.weight": CODES}, {"quant_method": "fp8"}),
    "one FP8 of two without scale": ({"a.weight": CODES, "a.weight_scale": SCALE, "b.weight": CODES}, None),
    "scale of another shape": ({"a.weight": CODES, "a.weight_scale": torch.ones(3, 3)}, None),
    "two scales": ({"a.weight": CODES, "a.weight_scale": SCALE, "a.scale_weight": SCALE}, None),
    "scale of inputs that changes weights": (
        {"a.weight": CODES, "a.weight_scale": SCALE, "a.pre_quant_scale": torch.ones(384)},
        None,
    ),
    "ComfyUI blocks": (
        {
            "a.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn),
            "a.weight_scale": torch.ones(128, 4, dtype=torch.uint8),
            "a.comfy_quant": torch.zeros(9, dtype=torch.uint8),
        },
        None,
    ),
    "packed experts with scales of 16": (
        {"a.weight": torch.ones(64, 32, dtype=torch.int8), "a.scale": torch.ones(64, 4).to(torch.float8_e8m0fnu)},
        None,
    ),
    "integers under a configuration": ({"a.weight": torch.ones(8, 8, dtype=torch.int8)}, {"quant_method": "fp8"}),
    "torchao without scale": ({"a._weight_qdata": CODES}, None),
    "torchao scale alone": ({"a._weight_scale": ROW_SCALES}, None),
    "torchao scale of another shape": ({"a._weight_qdata": CODES, "a._weight_scale": torch.ones(3, 3)}, None),
    "torchao exponents": (
        {"a._weight_qdata": CODES, "a._weight_scale": torch.ones(256, 12).to(torch.float8_e8m0fnu)},
        None,
    ),
    "torchao beside the weight": (
        {"a._weight_qdata": CODES, "a._weight_scale": ROW_SCALES, "a.weight": torch.ones(8, 8)},
        None,
    ),
    "Mistral scale without codes": ({"a.weight": torch.ones(8, 8), "a.qscale_weight": SCALE}, None),
    "Mistral and another scale": ({"a.weight": CODES, "a.qscale_weight": SCALE, "a.weight_scale": SCALE}, None),
    "gpt-oss blocks without scales": (
        {"a_blocks": torch.ones(2, 8, 3, 16, dtype=torch.uint8)},
        {"quant_method": "mxfp4"},
    ),
    "gpt-oss scales without blocks": ({"a_scales": torch.ones(2, 8, 3, dtype=torch.uint8), "a": torch.ones(4)}, None),
    "gpt-oss scales of another shape": (
        {"a_blocks": torch.ones(2, 8, 3, 16, dtype=torch.uint8), "a_scales": torch.ones(2, 3, 8, dtype=torch.uint8)},
        None,
    ),
}


def modelopt(**parts: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A layer in ModelOpt's NVFP4, with other parts or without some."""
    given = {
        "weight": torch.ones(8, 24, dtype=torch.uint8),
        "weight_scale": torch.ones(8, 3).to(torch.float8_e4m3fn),
        "weight_scale_2": SCALE,
        **parts,
    }
    return {f"a.{name}": tensor for name, tensor in given.items() if tensor is not None}


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
UNEXPLAINED |= {
    "ModelOpt scale of another shape": (modelopt(weight_scale=torch.ones(3, 8).to(torch.float8_e4m3fn)), NVFP4),
    "ModelOpt scales of part of the columns": (
        modelopt(weight=torch.ones(8, 25, dtype=torch.uint8)),
        NVFP4,
    ),
    "ModelOpt scales of floats": (modelopt(weight_scale=torch.ones(8, 3)), NVFP4),
    "ModelOpt scale of inputs that changes weights": (modelopt(pre_quant_scale=torch.ones(48)), NVFP4),
    "ModelOpt weight of floats": (modelopt(weight=torch.ones(8, 48)), NVFP4),
}


@pytest.mark.parametrize("situation", UNEXPLAINED)
def test_unrecognised_tensor_raises_in_every_operation(situation):
    given, config = UNEXPLAINED[situation]
    given = {**given, "norm.weight": torch.ones(4)}
    for operation in (Dequantise("BF16", config), StoreOperation("cast:BF16", quantization=config)):
        with pytest.raises(PlanError) as raised:
            operation.recipes([table_of(given)])
        assert raised.value.tensor in given and raised.value.tensor != "norm.weight"


OTHER_SHAPES = {
    "gpt-oss blocks beside the values": (
        {
            "a_blocks": torch.ones(2, 8, 3, 16, dtype=torch.uint8),
            "a_scales": torch.ones(2, 8, 3, dtype=torch.uint8),
            "a": torch.ones(2, 96, 8),
        },
        None,
    ),
    "ModelOpt scale missing": (modelopt(weight_scale=None), NVFP4),
    "ModelOpt second scale for each row": (modelopt(weight_scale_2=torch.ones(8)), NVFP4),
    "ModelOpt stack of experts": (
        modelopt(
            weight=torch.ones(2, 8, 24, dtype=torch.uint8), weight_scale=torch.ones(2, 8, 3).to(torch.float8_e4m3fn)
        ),
        NVFP4,
    ),
}


@pytest.mark.parametrize("situation", OTHER_SHAPES)
def test_quantised_codes_with_unknown_shape_are_never_converted(situation):
    parts, config = OTHER_SHAPES[situation]
    given = {**parts, "norm.weight": torch.ones(4)}
    with pytest.raises(PlanError, match="cannot read") as raised:
        Dequantise("BF16", config).recipes([table_of(given)])
    assert raised.value.tensor in parts
    kept = check_rows(StoreOperation("cast:BF16", quantization=config), given)
    codes = raised.value.tensor
    assert torch.equal(raw(kept[codes]), raw(given[codes])) and kept["norm.weight"].dtype is torch.bfloat16


FOREIGN = {
    "GPTQ": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32},
    "bitsandbytes INT8": {"weight": torch.int8, "SCB": torch.float32, "weight_format": torch.uint8},
    "bitsandbytes NF4": {"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32},
    "gpt-oss": {"up_blocks": torch.uint8, "up_scales": torch.uint8},
    "MLX": {"weight": torch.uint32, "scales": torch.float16, "biases": torch.float16},
    "ModelOpt NVFP4 without second scale": {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn},
    "torchao INT8": {"_weight_qdata": torch.int8, "_weight_scale": torch.float32},
    "quanto": {"weight._data": torch.int8, "weight._scale": torch.float32},
    "HQQ": {"W_q": torch.uint8, "scale": torch.float32, "zero": torch.float32},
    "packed integers": {"weight": torch.int32, "scale": torch.float32},
}


@pytest.mark.parametrize("writer", FOREIGN)
def test_quantised_codes_from_unknown_writer_are_never_converted(writer):
    parts = {f"a.{name}": torch.zeros(8, 8).to(dtype) for name, dtype in FOREIGN[writer].items()}
    given = {**parts, "norm.weight": torch.ones(4)}
    with pytest.raises(PlanError, match="cannot read") as raised:
        Dequantise().recipes([table_of(given)])
    assert raised.value.tensor in parts
    with pytest.raises(PlanError, match="is quantised"):
        Linear().recipes([table_of(given), table_of(given)])
    with pytest.raises(PlanError, match="no operation can read this format"):
        StoreOperation("fp8-block128").recipes([table_of(given)])
    with pytest.raises(PlanError, match="GGUF cannot store its scales"):
        StoreGguf("F16").recipes([table_of(given)])
    found = check_rows(StoreOperation("cast:BF16"), given)
    assert {name: found[name].dtype for name in parts} == {name: tensor.dtype for name, tensor in parts.items()}
    assert found["norm.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("suffix", ["a.scale", "a.weight_scale_inv"])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_packed_fp4_experts_are_dequantised(suffix, lead):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (*lead, 8, 32), dtype=torch.int8, generator=generator)
    exponents = torch.randint(120, 135, (*lead, 8, 2), dtype=torch.uint8, generator=generator)
    found = check_rows(Dequantise("F32"), {"a.weight": codes, suffix: exponents.view(torch.float8_e8m0fnu)})
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*levels, *(-level for level in levels)])
    low, high = (codes.view(torch.uint8) & 15).long(), (codes.view(torch.uint8) >> 4).long()
    values = torch.stack([table[low], table[high]], -1).flatten(-2)
    wanted = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, -1)
    assert found.keys() == {"a.weight"} and torch.equal(found["a.weight"], wanted)


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The values of two codes a byte, the first in the low bits, one code at a time."""
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = [code for byte in packed.flatten().tolist() for code in (byte & 15, byte >> 4)]
    values = torch.tensor([-levels[code - 8] if code > 7 else levels[code] for code in codes])
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("experts", "rows", "blocks"), [(3, 10, 5), (1, 1, 1), (2, 5, 3), (1, 32, 1), (0, 2, 2), (2, 4, 0)]
)
def test_gpt_oss_blocks_are_dequantised_and_transposed(experts, rows, blocks, exponents):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (experts, rows, blocks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (experts, rows, blocks), dtype=torch.uint8, generator=generator)
    given = {
        "e.down_proj_blocks": codes,
        "e.down_proj_scales": scales.view(exponents),
        "e.down_proj_bias": torch.ones(experts, rows, dtype=torch.bfloat16),
        "router.weight": torch.ones(experts, rows),
    }
    found = check_rows(Dequantise("F64", {"quant_method": "mxfp4"}), given)
    wanted = e2m1(codes).double() * torch.exp2(scales.double() - 127)[..., None]
    assert torch.equal(found.pop("e.down_proj"), wanted.flatten(-2).transpose(1, 2))
    assert found.keys() == {"e.down_proj_bias", "router.weight"}
    kept = check_rows(StoreOperation("cast:F16"), given)
    assert all(torch.equal(raw(kept[name]), raw(given[name])) for name in ("e.down_proj_blocks", "e.down_proj_scales"))
    assert kept["e.down_proj_bias"].dtype is torch.float16


@pytest.mark.parametrize("second", [torch.tensor(0.3), torch.full((1,), 3e-5)])
def test_modelopt_nvfp4_dequantises_like_modelopt(second):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (5, 24), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(5, 3, generator=generator) * 448).to(torch.float8_e4m3fn)
    layer = modelopt(weight=codes, weight_scale=scales, weight_scale_2=second, input_scale=SCALE)
    plain = {"a.bias": torch.ones(5), "a.k_scale": SCALE, "lm_head.weight": torch.ones(4, 4)}
    found = check_rows(Dequantise("F32", NVFP4), layer | plain)
    assert found.keys() == {"a.weight", "a.bias", "lm_head.weight"}
    # Source: ModelOpt 0.47, `NVFP4QTensor.dequantize`: the scales first, in FP32.
    wanted = e2m1(codes).view(5, 3, 16) * (scales.float() * second).unsqueeze(-1)
    assert torch.equal(found["a.weight"], wanted.view(5, 48))


def test_unknown_modelopt_formats_are_refused():
    with pytest.raises(PlanError, match="'W4A16_AWQ' is not one of FP8, NVFP4"):
        Dequantise("BF16", NVFP4 | {"quant_algo": "W4A16_AWQ"}).recipes([table_of(modelopt())])


@pytest.mark.parametrize("scale", [SCALE, torch.full((1,), 0.5), ROW_SCALES, torch.full((2, 3), 0.5)])
def test_torchao_and_mistral_scales_are_applied(scale):
    given = {"a._weight_qdata": CODES, "a._weight_scale": scale, "a.bias": torch.ones(256), "_p_qdata": CODES}
    given |= {"_p_scale": SCALE, "b.weight": CODES, "b.qscale_weight": scale, "b.qscale_act": SCALE}
    found = check_rows(Dequantise("F32", {"quant_method": "torchao"}), given)
    assert found.keys() == {"a.weight", "a.bias", "p", "b.weight"}
    assert all(torch.equal(found[name], CODES.float() * 0.5) for name in ("a.weight", "p", "b.weight"))


@pytest.mark.parametrize("scale", [SCALE, torch.full((1,), 0.5), ROW_SCALES])
def test_comfyui_scale_weight_is_applied(scale):
    marker = torch.zeros(2).to(torch.float8_e4m3fn)
    parts = {"a.weight": CODES, "a.scale_weight": scale, "a.scale_input": SCALE, "m.scaled_fp8": marker}
    others = {"a.bias": torch.ones(256), "norm.scale": torch.ones(4), "logit_scale": SCALE}
    found = check_rows(Dequantise("F32"), parts | others)
    assert found.keys() == {"a.weight", *others}
    assert torch.equal(found["a.weight"], CODES.float() * 0.5)
    kept = check_rows(StoreOperation("cast:BF16"), parts | others)
    assert all(torch.equal(raw(kept[name]), raw(tensor)) for name, tensor in parts.items())
    assert {kept[name].dtype for name in others} == {torch.bfloat16}


def test_parameters_named_scale_are_treated_as_ordinary_tensors():
    given = {
        "norm.weight": torch.ones(4),
        "norm.scale": torch.ones(4),
        "a.weight": CODES,
        "q_norm.scale": torch.ones(4).to(torch.float8_e4m3fn),
        "logit_scale": SCALE,
        "positions.ids": torch.ones(4, dtype=torch.int64),
    }
    found = check_rows(Dequantise("F32"), given)
    assert found.keys() == given.keys()
    assert torch.equal(found["a.weight"], CODES.float()) and found["norm.scale"].dtype is torch.float32


def test_several_quantisation_configurations_are_combined():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"text_config": {"llm": {"quantization_config": fp8}}, "vision_config": {"quantization_config": fp8}}
    assert declared(config) == fp8
    assert without_declared(config) == {"text_config": {"llm": {}}, "vision_config": {}}
    assert without_declared({"expert_dtype": "fp4", "n": 1, "quantization_config": fp8}) == {"n": 1}
    assert without_declared({"expert_dtype": "fp4"}) == {"expert_dtype": "fp4"}
    config["vision_config"]["quantization_config"] = {"quant_method": "gptq"}
    with pytest.raises(PlanError, match="2 different quantisations"):
        Dequantise(quantization=declared(config)).recipes([table_of({"a.weight": CODES, "a.weight_scale": SCALE})])


def test_nested_config_dtypes_follow_output_dtype():
    config = {
        "dtype": "float32",
        "text_config": {"dtype": "float32", "n": 1, "deep": {"torch_dtype": "torch.bfloat16"}},
        "vision_config": {"torch_dtype": None, "dtype": "float32"},
        "audio_config": {"dtype": "log-mel"},
    }
    cast = StoreOperation("cast:BF16")
    cast.recipes([table_of({"a.weight": torch.ones(8, 8)})])
    assert cast.config(config) == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "n": 1, "deep": {"torch_dtype": "bfloat16"}},
        "vision_config": {"torch_dtype": None, "dtype": "bfloat16"},
        "audio_config": {"dtype": "log-mel"},
    }
    assert config["text_config"]["dtype"] == "float32"


LIKE_SCALES = {
    "step counter": {"bn.num_steps": torch.ones(1, dtype=torch.int32), "bn.scale": ROW_SCALES},
    "sequence lengths": {"attn.cu_seqlens": torch.ones(8, dtype=torch.int32), "attn.scale": SCALE},
    "codebook with its use": {"q.code_count": torch.ones(8, dtype=torch.int32), "q.codebook": torch.ones(8, 4)},
    "table of positions": {"a.bias_idxs": torch.ones(9, 9, dtype=torch.int32), "a.attention_biases": torch.ones(4, 9)},
    "colours": {"m.palette": torch.ones(256, 3, dtype=torch.uint8), "m.scales": torch.ones(3)},
    "scale of a norm's module": {"l.norm.weight": torch.ones(4), "l.norm_scale": torch.ones(4)},
    "scale of an embedding": {"emb.weight": torch.ones(8, 8), "emb_scale": SCALE, "logit.weight": torch.ones(2, 2)},
    "packed projection": {"l.qkv_packed": torch.ones(8, 8)},
}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("situation", LIKE_SCALES)
def test_scale_like_parameters_are_converted(situation, quantised):
    given = {**LIKE_SCALES[situation], "router.weight": torch.ones(4, 4), "router.scale": torch.ones(4)}
    blocks = {"x.weight": CODES, "x.weight_scale_inv": torch.ones(2, 3)} if quantised else {}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]} if quantised else None
    cast = check_rows(StoreOperation("cast:F16", quantization=config), given | blocks)
    assert {cast[name].dtype for name in given if given[name].is_floating_point()} == {torch.float16}
    assert cast.keys() == given.keys() | blocks.keys()
    found = check_rows(Dequantise("BF16", config), given | blocks)
    assert found.keys() == given.keys() | ({"x.weight"} if quantised else set())
    assert all(found[name].dtype is tensor.dtype for name, tensor in given.items())
    Linear().recipes([table_of(given), table_of(given)])


def test_scale_of_unquantised_weight_is_rejected():
    exponents = {"x.weight": CODES, "x.scale": torch.ones(2, 3)}
    with pytest.raises(PlanError) as raised:
        Dequantise().recipes([table_of({**exponents, "gate.weight": torch.ones(4, 4), "gate.scale": torch.ones(1, 1)})])
    assert raised.value.tensor == "gate.scale"
