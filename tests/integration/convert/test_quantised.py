"""Quantised checkpoints from other writers through `convert`: read, merged or refused, and loaded by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("compressed_tensors")

from penstock.errors import FormatError, PlanError  # noqa: E402 - after what it needs
from penstock_convert.convert import convert  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("launcher_fork_servers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

FP8 = torch.float8_e4m3fn
PROMPT = torch.tensor([[1, 5, 9, 200, 17, 33, 2, 8]])


def write_llama(directory: Path, *, tied: bool = False, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def logits(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(PROMPT).logits.float()


def convert_into(sources: Any, into: Path, *words: dict[str, object], to: str | None = None) -> Path:
    convert(sources, into, operations=words, to=to, devices="cpu", workers=1)
    return into


def rewrite(source: Path, into: Path, quantise: Any, quantization: dict[str, object], **beside: str) -> Path:
    """Write a copy whose linear weights are stored by `quantise(name, weight) -> tensors`, under that configuration."""
    shutil.copytree(source, into)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(into / "model.safetensors").items():
        tensors |= quantise(name, tensor) if "_proj" in name else {name: tensor}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return into


def blocks(weight: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and BF16 scales, in blocks that divide the weight."""
    cut = weight.float().unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    scales = (cut.abs().amax((1, 3)) / 448).bfloat16()
    return (cut / scales[:, None, :, None].float()).clamp(-448, 448).flatten(2).flatten(0, 1).to(FP8), scales


def qwen3(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scales = blocks(weight, 64, 64)
    return {name: codes, f"{name}_scale_inv": scales}


QWEN3 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 64]}
"""Use the layout of Qwen3-FP8 with blocks small enough that a small model has several."""


def by_compressed_tensors(preset: str) -> tuple[Any, dict[str, object]]:
    """Return a weight as llm-compressor stores it under one of its presets, by its own library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    layout = infer_module_format(torch.nn.Linear, scheme)
    layout = getattr(layout, "value", layout)
    weights = scheme.weights

    def quantise(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        strategy, parts = getattr(weights.strategy, "value", weights.strategy), {"weight": weight}
        if strategy == "block":
            rows, cols = weights.block_structure
            padded = functional.pad(weight, (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows))
            cut = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
        elif strategy in ("group", "tensor_group"):
            cut = weight.unflatten(1, (-1, weights.group_size))
        else:
            cut = weight if strategy == "channel" else weight.reshape(1, -1)
        low, high = cut.amin(-1), cut.amax(-1)
        if strategy == "tensor_group":
            parts["weight_global_scale"] = generate_gparam(low.amin().float(), high.amax().float()).reshape(1)
        scale, _ = calculate_qparams(low, high, weights, global_scale=parts.get("weight_global_scale"))
        scale = scale.unsqueeze(-1) if strategy == "channel" else scale
        compressor = BaseCompressor.get_value_from_registry(layout)
        parts = compressor.compress({**parts, "weight_scale": scale}, scheme)
        prefix = name.removesuffix("weight")
        return {f"{prefix}{part}": tensor.contiguous() for part, tensor in parts.items()}

    config = QuantizationConfig(config_groups={"group_0": scheme}, format=layout, quantization_status="compressed")
    said = {**json.loads(config.model_dump_json()), "quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    return quantise, said


def reference(directory: Path, said: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights as compressed-tensors decompresses them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(said["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    tensors = load_file(directory / "model.safetensors")
    found = {}
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith("_scale")}
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in modules:
            found[name] = tensor
    for module in modules:
        parts = {name.rpartition(".")[2]: one for name, one in tensors.items() if name.rpartition(".")[0] == module}
        found[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return found


def test_fp8_with_bf16_scales_matches_transformers(llama: Path, tmp_path: Path) -> None:
    source = rewrite(llama, tmp_path / "qwen3", qwen3, QWEN3)
    result = convert_into(source, tmp_path / "out", {"op": "dequantise"})
    assert "quantization_config" not in json.loads((result / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(result / "model.safetensors").values()} == {torch.bfloat16}
    assert torch.equal(logits(result), logits(source))
    assert (logits(result) - logits(llama)).abs().max() < 0.5


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4A16", "MXFP4A16", "INT8"])
def test_dequantised_llm_compressor_model_matches_compressed_tensors(preset: str, llama: Path, tmp_path: Path) -> None:
    quantise, said = by_compressed_tensors(preset)
    source = rewrite(llama, tmp_path / preset, quantise, said)
    result = convert_into(source, tmp_path / "out", {"op": "dequantise"})
    found, wanted = load_file(result / "model.safetensors"), reference(source, said)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype is torch.bfloat16
        # Their values may be computed in BF16 and rounded twice.
        assert torch.allclose(tensor.float(), wanted[name].float(), rtol=2**-6, atol=0), name
    assert "quantization_config" not in json.loads((result / "config.json").read_text())


def test_unknown_quantisation_is_refused_before_writing(llama: Path, tmp_path: Path) -> None:
    def gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        module = name.removesuffix(".weight")
        ints = torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)
        return {f"{module}.qweight": ints, f"{module}.scales": weight[:1].half().contiguous()}

    source = rewrite(llama, tmp_path / "gptq", gptq, {"quant_method": "gptq", "bits": 4})
    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(PlanError, match="'gptq'"):
        convert_into(source, tmp_path / "out", {"op": "dequantise"})
    with pytest.raises(PlanError, match="'gptq'"):
        convert_into([source, other], tmp_path / "out", {"op": "average"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="missing or have an unknown layout"):
        convert_into(source, tmp_path / "out", {"op": "dequantise"})
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("op", [{"op": "average"}, {"op": "slerp", "t": 0.5}, {"op": "ties", "density": 0.5}])
def test_quantised_sources_are_dequantised_before_merge(op: dict[str, object], llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    sources = [rewrite(one, tmp_path / f"{one.name}-fp8", qwen3, QWEN3) for one in (llama, other)]
    plain = [convert_into(one, tmp_path / f"{one.name}-plain", {"op": "dequantise"}) for one in sources]
    wanted = load_file(convert_into(plain, tmp_path / "wanted", op) / "model.safetensors")
    for given in (sources, [sources[0], plain[1]], [plain[0], sources[1]]):
        result = convert_into(given, tmp_path / "out", op)
        found = load_file(result / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert "quantization_config" not in json.loads((result / "config.json").read_text())
        assert logits(result).isfinite().all()
        shutil.rmtree(result)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("to", ["fp8-block128", "fp8-channel", "mxfp8", "nvfp4"])
def test_quantised_output_loads_in_transformers(tied: bool, to: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama", tied=tied)
    stored = convert_into(source, tmp_path / "stored", to=to)
    plain = convert_into(stored, tmp_path / "plain", {"op": "dequantise"})
    found = logits(stored)
    assert found.isfinite().all()
    assert (found - logits(source)).abs().max() < (2.5 if to == "nvfp4" else 0.7)
    # Without the configured quantisation of activations, compare the values only. compressed-tensors rounds rows twice,
    # because it converts their scales to BF16.
    config = json.loads((stored / "config.json").read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = None
    (stored / "config.json").write_text(json.dumps(config))
    assert (logits(stored) - logits(plain)).abs().max() < (0.1 if to == "fp8-channel" else 0.02)


def test_gpt2_with_input_major_weights_is_rejected(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for to in ("fp8-block128", "fp8-channel"):
        with pytest.raises(PlanError, match="Conv1D"):
            convert_into(tmp_path / "gpt2", tmp_path / "out", to=to)


def test_partial_edge_blocks_match_compressed_tensors(tmp_path: Path) -> None:
    """DeepSeek-V3's kv_a_proj_with_mqa, here of 192 rows: two blocks, the second of 64 rows.

    Where transformers has no GPU for FP8 it takes them for two blocks of 96 rows (it divides the rows by those of the
    scales): its logits were off by 0.2 for this weight alone.
    """
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    torch.manual_seed(0)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    source = {f"{name}.weight": torch.randn(192, 256).bfloat16(), "model.norm.weight": torch.ones(256)}
    (tmp_path / "source").mkdir()
    save_file(source, tmp_path / "source" / "model.safetensors")
    stored = convert_into(tmp_path / "source", tmp_path / "stored", to="fp8-block128")
    plain = load_file(convert_into(stored, tmp_path / "plain", {"op": "dequantise"}) / "model.safetensors")
    reader = FP8BlockDequantizer(ignore=["model.norm"])
    wanted = reader.process(load_file(stored / "model.safetensors"))
    assert torch.equal(plain[f"{name}.weight"], wanted[f"{name}.weight"])
    error = (plain[f"{name}.weight"].float() - source[f"{name}.weight"].float()).abs().max()
    assert error <= source[f"{name}.weight"].abs().max() / 16  # half a step of E4M3's largest binade


def nvfp4_by_modelopt(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """ModelOpt stores the format of compressed-tensors with other names, and the inverse of the global scale."""
    quantise, _ = by_compressed_tensors("NVFP4A16")
    parts = {part.rpartition(".")[2]: tensor for part, tensor in quantise(name, weight).items()}
    # Use a power of two, whose inverse is exact in both.
    second = torch.exp2(torch.floor(torch.log2(1 / parts["weight_global_scale"]))).reshape(())
    stored = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"], "weight_scale_2": second}
    return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in stored.items()}


@pytest.mark.parametrize("declared_in", ["config.json", "hf_quant_config.json", ""])
def test_dequantised_modelopt_nvfp4_matches_compressed_tensors(declared_in: str, llama: Path, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    source = rewrite(llama, tmp_path / "modelopt", nvfp4_by_modelopt, said)
    config = json.loads((source / "config.json").read_text())
    if declared_in != "config.json":
        del config["quantization_config"]
        (source / "config.json").write_text(json.dumps(config))
    if declared_in == "hf_quant_config.json":
        (source / declared_in).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    report = convert(source, tmp_path / "out", operations="dequantise", devices="cpu", workers=1)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert [Path(left).name for left in report.left_out] == ["hf_quant_config.json"] * (
        declared_in == "hf_quant_config.json"
    )
    theirs = ModelOptNvfp4Converter(targets=[r"re:.*_proj"], ignore=[]).process(load_file(source / "model.safetensors"))
    save_file(theirs, tmp_path / "model.safetensors")
    _, ours = by_compressed_tensors("NVFP4A16")
    wanted, found = reference(tmp_path, ours), load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor.float(), wanted[name].float(), rtol=2**-6, atol=0), name


def write_gpt_oss(directory: Path) -> Path:
    """Return a model whose experts are MXFP4, as in OpenAI's models."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
        dtype="bfloat16",
    )
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, cols = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, cols, rows // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 123, (experts, cols, rows // 32), dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    described = json.loads((directory / "config.json").read_text()) | {"quantization_config": said}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def test_dequantised_gpt_oss_matches_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = write_gpt_oss(tmp_path / "gpt-oss")
    result = convert_into(source, tmp_path / "out", {"op": "dequantise"})
    stored, found = load_file(source / "model.safetensors"), load_file(result / "model.safetensors")
    experts = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(experts) == 2
    for name in experts:
        wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(found[name], wanted) and found[name].dtype is wanted.dtype, name
    assert "quantization_config" not in json.loads((result / "config.json").read_text())
    assert torch.equal(logits(result), logits(source))


def test_mistral_config_describes_converted_format(llama: Path, tmp_path: Path) -> None:
    def mistral(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = blocks(weight, *weight.shape)
        parts = {"weight": codes, "qscale_weight": scale.float().reshape(()), "qscale_act": torch.tensor(1.0)}
        return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}

    source = rewrite(llama, tmp_path / "mistral", mistral, {})
    (source / "config.json").unlink()
    told = {"dim": 128, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    (source / "params.json").write_text(json.dumps(told))
    convert_into(source, tmp_path / "copy", {"op": "copy"})
    assert json.loads((tmp_path / "copy/params.json").read_text()) == told
    result = convert_into(source, tmp_path / "out", {"op": "dequantise"})
    assert json.loads((result / "params.json").read_text()) == {"dim": 128}
    stored, found = load_file(source / "model.safetensors"), load_file(result / "model.safetensors")
    assert not [name for name in found if "qscale" in name]
    for name in [name for name in found if "_proj" in name]:
        scale = stored[f"{name.removesuffix('weight')}qscale_weight"]
        assert torch.equal(found[name], (stored[name].float() * scale).bfloat16())
    told["quantization"] = {"qformat_weight": "int4"}
    (source / "params.json").write_text(json.dumps(told))
    with pytest.raises(PlanError, match=r"of params\.json"):
        convert_into(source, tmp_path / "refused", {"op": "dequantise"})
    (source / "params.json").write_text("{")
    with pytest.raises(FormatError, match=r"repair params\.json of this source"):
        convert_into(source, tmp_path / "refused", {"op": "dequantise"})


def test_torchao_metadata_describes_converted_tensors(tmp_path: Path) -> None:
    def described(kind: str) -> str:
        return json.dumps({"_type": kind, "_data": {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}})

    source = tmp_path / "torchao"
    source.mkdir()
    index = {}
    for part, layer in enumerate(("a", "b"), 1):
        tensors = {
            f"{layer}._weight_qdata": torch.full((48, 64), 3.0).to(FP8),
            f"{layer}._weight_scale": torch.full((48, 1), 0.3),
            f"{layer}.bias": torch.ones(48, dtype=torch.bfloat16),
        }
        names = {f"{layer}.weight": described("Float8Tensor"), f"{layer}.bias": described("Tensor")}
        metadata = {**names, "tensor_names": json.dumps(list(names)), "format": "pt"}
        save_file(tensors, source / f"model-0000{part}-of-00002.safetensors", metadata=metadata)
        index |= dict.fromkeys(tensors, f"model-0000{part}-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    wanted = {"a.weight", "a.bias", "b.weight", "b.bias"}
    convert_into(source, tmp_path / "copy", {"op": "copy"})
    with safe_open(tmp_path / "copy/model.safetensors", "pt") as file:
        found = file.metadata()
    assert set(json.loads(found.pop("tensor_names"))) == wanted and found.keys() == {*wanted, "format"}
    convert_into(source, tmp_path / "out", {"op": "dequantise"})
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == wanted
        assert torch.equal(file.get_tensor("a.weight"), torch.full((48, 64), 3.0 * torch.tensor(0.3)).bfloat16())
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"torch_dtype": "bfloat16"}
