"""Quantised checkpoints of other writers through `convert`: read, merged or refused, and loaded by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("compressed_tensors")

from penstock.errors import PlanError  # noqa: E402 - after what it needs
from penstock.jobs.convert import convert  # noqa: E402

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


def made(sources: Any, into: Path, *words: dict[str, object], to: str | None = None) -> Path:
    convert(sources, into, operations=words, to=to, devices="cpu", workers=1)
    return into


def rewrite(source: Path, into: Path, quantise: Any, quantization: dict[str, object], **beside: str) -> Path:
    """A copy whose linear weights are stored by `quantise(name, weight) -> tensors`, under that configuration."""
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
"""As Qwen3-FP8 has it, in blocks that a small model has several of."""


def by_compressed_tensors(preset: str) -> tuple[Any, dict[str, object]]:
    """How llm-compressor stores a weight under one of its presets, by its own library."""
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
    """The weights as compressed-tensors decompresses them."""
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


def test_fp8_with_scales_in_bf16_is_dequantised_as_transformers_does(llama: Path, tmp_path: Path) -> None:
    source = rewrite(llama, tmp_path / "qwen3", qwen3, QWEN3)
    result = made(source, tmp_path / "out", {"op": "dequantise"})
    assert "quantization_config" not in json.loads((result / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(result / "model.safetensors").values()} == {torch.bfloat16}
    assert torch.equal(logits(result), logits(source))
    assert (logits(result) - logits(llama)).abs().max() < 0.5


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4A16", "MXFP4A16", "INT8"])
def test_what_llm_compressor_writes_is_dequantised_as_its_library_does(
    preset: str, llama: Path, tmp_path: Path
) -> None:
    quantise, said = by_compressed_tensors(preset)
    source = rewrite(llama, tmp_path / preset, quantise, said)
    result = made(source, tmp_path / "out", {"op": "dequantise"})
    found, wanted = load_file(result / "model.safetensors"), reference(source, said)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype is torch.bfloat16
        # Theirs may be computed in BF16 and rounded twice.
        assert torch.allclose(tensor.float(), wanted[name].float(), rtol=2**-6, atol=0), name
    assert "quantization_config" not in json.loads((result / "config.json").read_text())


def test_a_quantisation_that_is_not_read_is_refused_before_anything_is_made(llama: Path, tmp_path: Path) -> None:
    def gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        module = name.removesuffix(".weight")
        ints = torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)
        return {f"{module}.qweight": ints, f"{module}.scales": weight[:1].half().contiguous()}

    source = rewrite(llama, tmp_path / "gptq", gptq, {"quant_method": "gptq", "bits": 4})
    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(PlanError, match="'gptq'"):
        made(source, tmp_path / "out", {"op": "dequantise"})
    with pytest.raises(PlanError, match="'gptq'"):
        made([source, other], tmp_path / "out", {"op": "average"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="not there, or in no known layout"):
        made(source, tmp_path / "out", {"op": "dequantise"})
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("op", [{"op": "average"}, {"op": "slerp", "t": 0.5}, {"op": "ties", "density": 0.5}])
def test_quantised_sources_are_merged_by_their_values(op: dict[str, object], llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    sources = [rewrite(one, tmp_path / f"{one.name}-fp8", qwen3, QWEN3) for one in (llama, other)]
    plain = [made(one, tmp_path / f"{one.name}-plain", {"op": "dequantise"}) for one in sources]
    wanted = load_file(made(plain, tmp_path / "wanted", op) / "model.safetensors")
    for given in (sources, [sources[0], plain[1]], [plain[0], sources[1]]):
        result = made(given, tmp_path / "out", op)
        found = load_file(result / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert "quantization_config" not in json.loads((result / "config.json").read_text())
        assert logits(result).isfinite().all()
        shutil.rmtree(result)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("to", ["fp8-block128", "fp8-channel", "mxfp8", "nvfp4"])
def test_a_result_loads_in_transformers_and_computes_with_its_values(tied: bool, to: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama", tied=tied)
    stored = made(source, tmp_path / "stored", to=to)
    plain = made(stored, tmp_path / "plain", {"op": "dequantise"})
    found = logits(stored)
    assert found.isfinite().all()
    assert (found - logits(source)).abs().max() < (2.5 if to == "nvfp4" else 0.7)
    # Without the quantisation of activations that the configuration asks for, it is its values alone; of rows, rounded
    # twice by compressed-tensors, which takes their scales in BF16.
    config = json.loads((stored / "config.json").read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = None
    (stored / "config.json").write_text(json.dumps(config))
    assert (logits(stored) - logits(plain)).abs().max() < (0.1 if to == "fp8-channel" else 0.02)


def test_gpt2_is_refused_where_it_would_be_stored_along_its_inputs(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for to in ("fp8-block128", "fp8-channel"):
        with pytest.raises(PlanError, match="Conv1D"):
            made(tmp_path / "gpt2", tmp_path / "out", to=to)


def test_blocks_that_the_edge_cuts_are_those_that_compressed_tensors_reads(tmp_path: Path) -> None:
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
    stored = made(tmp_path / "source", tmp_path / "stored", to="fp8-block128")
    plain = load_file(made(stored, tmp_path / "plain", {"op": "dequantise"}) / "model.safetensors")
    reader = FP8BlockDequantizer(ignore=["model.norm"])
    wanted = reader.process(load_file(stored / "model.safetensors"))
    assert torch.equal(plain[f"{name}.weight"], wanted[f"{name}.weight"])
    error = (plain[f"{name}.weight"].float() - source[f"{name}.weight"].float()).abs().max()
    assert error <= source[f"{name}.weight"].abs().max() / 16  # half a step of E4M3's largest binade
