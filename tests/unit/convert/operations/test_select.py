"""Which tensors are quantised, and what the config says of the others."""

from __future__ import annotations

import pytest

from penstock.errors import PlanError
from penstock.transform.formats import FORMATS, format_of
from penstock.types import DType
from penstock_convert.operations.select import quantization_config, select

MODEL = [
    ("model.embed_tokens.weight", DType.BF16, (1000, 64)),
    ("model.layers.0.self_attn.q_proj.weight", DType.BF16, (64, 64)),
    ("model.layers.0.self_attn.q_proj.bias", DType.BF16, (64,)),
    ("model.layers.0.mlp.gate.weight", DType.BF16, (8, 64)),
    ("model.layers.0.mlp.gate.e_score_correction_bias", DType.F32, (8,)),
    ("model.layers.0.mlp.experts.0.gate_proj.weight", DType.BF16, (64, 64)),
    ("model.layers.0.mlp.experts.0.down_proj.weight", DType.BF16, (64, 40)),
    ("model.layers.0.input_layernorm.weight", DType.BF16, (64,)),
    ("lm_head.weight", DType.BF16, (1000, 64)),
]


def test_unselected_weights_are_listed_with_reason() -> None:
    chosen = select(format_of("mxfp8"), MODEL)
    assert [name.rsplit(".", 2)[1] for name in chosen.names] == ["q_proj", "gate_proj"]
    assert chosen.kept["model.layers.0.mlp.gate.weight"] == "its name matches *.gate.weight"
    assert "divisible by 32" in chosen.kept["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(chosen.modules_kept())
    assert len(select(format_of("fp8-block128"), MODEL).names) == 3
    assert len(select(format_of("fp8-block128"), MODEL, keep=(), only=("*",)).names) == 6
    with pytest.raises(PlanError, match="no tensor is left"):
        select(format_of("fp8-block128"), MODEL, only=("nothing",))


@pytest.mark.parametrize("tag", [tag for tag in sorted(FORMATS) if not tag.startswith("cast")])
def test_config_lists_unquantised_modules(tag: str) -> None:
    form = format_of(tag)
    chosen = select(form, MODEL)
    said = quantization_config(form, chosen)
    kept = said["modules_to_not_convert" if said["quant_method"] == "fp8" else "ignore"]
    assert "lm_head" in kept
    assert "model.layers.0.self_attn.q_proj" not in kept
    assert said.get("scale_fmt") == ("ue8m0" if "e8m0" in tag else None)


def test_config_of_cast_model_has_no_quantization_config() -> None:
    form = format_of("cast:F16")
    with pytest.raises(PlanError, match="needs no quantization_config"):
        quantization_config(form, select(form, MODEL))


def test_output_layers_and_embeddings_stay_unquantised() -> None:
    names = [
        "wte.weight",
        "transformer.wpe.weight",
        "model.layers.3.shared_head.head.weight",
        "model.mtp.0.head.weight",
        "output.weight",
        "language_model.output.weight",
        "score.weight",
        "model.score.weight",
        "classifier.weight",
        "model.classifier.dense.weight",
        "qa_outputs.weight",
    ]
    linear = ["encoder.layer.0.output.dense.weight", "model.layers.0.mlp.head_proj.weight"]
    chosen = select(format_of("fp8-channel"), [(name, DType.BF16, (64, 64)) for name in (*names, *linear)])
    assert list(chosen.names) == linear
    assert {name.removesuffix(".weight") for name in names} <= set(chosen.modules_kept())


@pytest.mark.parametrize("tag", ["fp8-block128", "fp8-channel", "mxfp8", "nvfp4"])
def test_config_lists_tied_output_layer_as_unquantised(tag: str) -> None:
    form = format_of(tag)
    said = quantization_config(form, select(form, MODEL[:-1]))
    assert "lm_head" in said["modules_to_not_convert" if said["quant_method"] == "fp8" else "ignore"]
    quantised = select(form, MODEL, keep=("*embed*", "*.gate.weight"))
    assert "lm_head.weight" in quantised.names and "lm_head" not in quantised.modules_kept()


def test_unquantised_expert_stack_is_listed_by_module() -> None:
    experts = ("model.layers.0.mlp.experts.gate_up_proj", DType.BF16, (4, 128, 64))
    kept = select(format_of("fp8-block128"), [*MODEL, experts]).modules_kept()
    assert "model.layers.0.mlp.experts" in kept


def test_transposed_weights_are_not_quantised() -> None:
    """GPT-2's Conv1D: [in, out]. Its square attn.c_proj is known by mlp.c_proj, whose bias tells."""
    model = [
        ("h.0.attn.c_attn.weight", DType.BF16, (64, 192)),
        ("h.0.attn.c_attn.bias", DType.BF16, (192,)),
        ("h.0.attn.c_proj.weight", DType.BF16, (64, 64)),
        ("h.0.attn.c_proj.bias", DType.BF16, (64,)),
        ("h.0.mlp.c_proj.weight", DType.BF16, (256, 64)),
        ("h.0.mlp.c_proj.bias", DType.BF16, (64,)),
    ]
    with pytest.raises(PlanError, match=r"Conv1D\), which no engine reads quantised \(3 tensors\)"):
        select(format_of("fp8-block128"), model)
    linear = [(name, dtype, shape[::-1]) for name, dtype, shape in model]
    assert len(select(format_of("fp8-block128"), linear).names) == 3  # StarCoder's: the same names, [out, in]
