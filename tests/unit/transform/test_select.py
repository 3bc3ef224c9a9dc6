"""Which tensors are quantised, and what the config says of the others."""

from __future__ import annotations

import pytest

from penstock.errors import PlanError
from penstock.transform.geometry import FORMATS, format_of
from penstock.transform.select import quantization_config, select
from penstock.types import DType

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


def test_linear_weights_are_and_the_rest_says_why() -> None:
    chosen = select(format_of("mxfp8"), MODEL)
    assert [name.rsplit(".", 2)[1] for name in chosen.names] == ["q_proj", "gate_proj"]
    assert chosen.kept["model.layers.0.mlp.gate.weight"] == "its name is like *.gate.weight"
    assert "divisible by 32" in chosen.kept["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(chosen.modules_kept())
    assert len(select(format_of("fp8-block128"), MODEL).names) == 3
    assert len(select(format_of("fp8-block128"), MODEL, keep=(), only=("*",)).names) == 6
    with pytest.raises(PlanError, match="no tensor is left"):
        select(format_of("fp8-block128"), MODEL, only=("nothing",))


@pytest.mark.parametrize("tag", [tag for tag in sorted(FORMATS) if not tag.startswith("cast")])
def test_the_config_names_what_is_kept(tag: str) -> None:
    form = format_of(tag)
    chosen = select(form, MODEL)
    said = quantization_config(form, chosen)
    kept = said["modules_to_not_convert" if said["quant_method"] == "fp8" else "ignore"]
    assert "lm_head" in kept
    assert "model.layers.0.self_attn.q_proj" not in kept
    assert said.get("scale_fmt") == ("ue8m0" if "e8m0" in tag else None)


def test_a_cast_has_none() -> None:
    form = format_of("cast:F16")
    with pytest.raises(PlanError, match="dtype is the tensors' own"):
        quantization_config(form, select(form, MODEL))
