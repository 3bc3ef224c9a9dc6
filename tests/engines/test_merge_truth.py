"""Merged models have the tensors of mergekit and the logits of PEFT, in transformers and in vLLM."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("compressed_tensors")

from safetensors.torch import load_file  # noqa: E402 - after what it needs
from tests.engines.tiny import MODELS, PROMPT, transformers_logits, vllm_logprobs, write  # noqa: E402

from penstock_convert.convert import convert  # noqa: E402

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("launcher_fork_servers"),
]
needs_mergekit = pytest.mark.skipif(importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed")
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

MERGES: dict[str, tuple[int, dict[str, object], dict[str, Any]]] = {
    "linear": (
        3,
        {"op": "linear", "weights": [0.5, 1.0, 0.25]},
        {"merge_method": "linear", "inputs": [{"weight": 0.5}, {"weight": 1.0}, {"weight": 0.25}]},
    ),
    "slerp": (
        2,
        {"op": "slerp", "t": 0.3},
        {"merge_method": "slerp", "inputs": [{}, {}], "parameters": {"t": 0.3}},
    ),
    "ties": (
        3,
        {"op": "ties", "density": 0.4, "weights": [1.0, 0.5], "scale": 0.8},
        {
            "merge_method": "ties",
            "inputs": [None, {"weight": 1.0, "density": 0.4}, {"weight": 0.5, "density": 0.4}],
            "parameters": {"normalize": True, "lambda": 0.8},
        },
    ),
}
"""For each merge: the number of sources, our operation, and mergekit's configuration (None is the base)."""


def tensors(directory: Path) -> dict[str, Any]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def merge(sources: Sequence[Path], destination: Path, *operations: dict[str, object]) -> Path:
    convert(list(sources), destination, operations=operations, devices="cpu", workers=1)
    return destination


def merge_by_mergekit(sources: Sequence[Path], destination: Path, options: dict[str, Any]) -> Path:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    inputs = zip(sources, options["inputs"], strict=True)
    config: dict[str, Any] = {
        "merge_method": options["merge_method"],
        "models": [{"model": str(path), "parameters": said} for path, said in inputs if said is not None],
        "parameters": options.get("parameters", {}),
    }
    if config["merge_method"] != "linear":
        config["base_model"] = str(sources[0])
    quiet = MergeOptions(quiet=True, copy_tokenizer=False, write_model_card=False)
    run_merge(MergeConfiguration.model_validate(config), str(destination), quiet)
    return destination


def merge_by_functions_of_mergekit(kind: str, values: Sequence[Any]) -> Any:
    """Return one merged tensor, for tensors that mergekit does not merge separately."""
    from mergekit.merge_methods.generalized_task_arithmetic import get_mask
    from mergekit.merge_methods.slerp import slerp
    from mergekit.sparsify import SparsificationMethod, sparsify

    _, _, options = MERGES[kind]
    if kind == "slerp":
        return slerp(torch.tensor([options["parameters"]["t"]]), values[0][None], values[1][None])[0]
    said = [parameters for parameters in options["inputs"] if parameters is not None]
    weights = torch.tensor([parameters["weight"] for parameters in said]).view(-1, *[1] * values[0].ndim)
    if kind == "linear":
        return (torch.stack(list(values)) * weights).sum(0) / weights.sum()
    method = SparsificationMethod.magnitude
    trimmed = [sparsify(value - values[0], said[0]["density"], method) for value in values[1:]]
    changes = torch.stack(trimmed) * weights
    mask = get_mask(changes)
    share = (weights * mask).sum(0)
    merged = (changes * mask).sum(0) / share.where(share != 0, 1.0)
    return values[0] + options["parameters"]["lambda"] * merged


@needs_mergekit
@pytest.mark.parametrize("kind", MERGES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_merges_match_mergekit_tensors_and_logits(name: str, tied: bool, kind: str, tmp_path: Path) -> None:
    num_sources, operation, options = MERGES[kind]
    # Use FP32, because mergekit's `ties` computes in the sources' dtype, and Penstock always in FP32.
    sources = [write(name, tmp_path / f"{i}", tied=tied, seed=i, dtype="float32") for i in range(num_sources)]
    merged = merge(sources, tmp_path / "merged", operation)
    reference = merge_by_mergekit(sources, tmp_path / "reference", options)
    ours, theirs = tensors(merged), tensors(reference)
    assert ours.keys() == tensors(sources[0]).keys()
    # mergekit packs the experts of a layer into one tensor, and computes arcs and trims for all of them together. It
    # leaves out the experts of DeepSeek-V3.
    experts = {tensor for tensor in ours if ".mlp.experts." in tensor}
    assert ours.keys() - theirs.keys() == experts
    given = [tensors(source) for source in sources]
    theirs |= {expert: merge_by_functions_of_mergekit(kind, [of[expert] for of in given]) for expert in experts}
    for tensor, values in ours.items():
        assert torch.allclose(values, theirs[tensor], rtol=1e-5, atol=1e-6), tensor
    assert_loads_whole(merged)
    if not experts or (name == "qwen3_moe" and kind == "linear"):
        assert (transformers_logits(merged) - transformers_logits(reference)).abs().max() < 1e-3


@needs_mergekit
@pytest.mark.parametrize("kind", ["linear", "slerp"])
def test_bf16_merges_match_mergekit_within_one_ulp(kind: str, tmp_path: Path) -> None:
    num_sources, operation, options = MERGES[kind]
    sources = [write("llama", tmp_path / f"{i}", seed=i) for i in range(num_sources)]
    ours = tensors(merge(sources, tmp_path / "merged", operation))
    theirs = tensors(merge_by_mergekit(sources, tmp_path / "reference", options))
    assert ours.keys() == theirs.keys()
    for tensor, values in ours.items():
        assert values.dtype == theirs[tensor].dtype == torch.bfloat16
        assert torch.allclose(values.float(), theirs[tensor].float(), rtol=2**-7, atol=1e-6), tensor


ATTENTION = {
    "llama": ["q_proj", "v_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
    "gemma3": ["q_proj", "v_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj"],
}
ADAPTERS = ("attention", "embedding", "head", "embedding saved", "head saved", "both saved")


def adapter_options(name: str, which: str) -> dict[str, Any]:
    """Return PEFT's options for one row of the matrix."""
    embedding = "wte" if name == "gpt2" else "embed_tokens"
    adapted = {"embedding": [embedding], "head": ["lm_head"]}
    saved = {"embedding saved": [embedding], "head saved": ["lm_head"], "both saved": [embedding, "lm_head"]}
    return {
        "target_modules": [*ATTENTION[name], *adapted.get(which, [])],
        "modules_to_save": saved.get(which),
        "fan_in_fan_out": name == "gpt2",
    }


def train(base: Path, adapter: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Write an adapter with random weights. Return the logits of base and adapter, and those after PEFT's merge.

    PEFT adds to a tied embedding in place, and therefore to the head as well. Its merged logits then differ from those
    that the adapter was trained to give.
    """
    import peft

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | options)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(adapter)
        with torch.no_grad():
            beside = model.eval()(torch.tensor([PROMPT])).logits[0]
            merged = model.merge_and_unload()(torch.tensor([PROMPT])).logits[0]
    return beside, merged


def assert_loads_whole(directory: Path) -> None:
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]


@needs_peft
@pytest.mark.parametrize("which", ADAPTERS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_adapter_model_matches_peft_logits(name: str, tied: bool, which: str, tmp_path: Path) -> None:
    base = write(name, tmp_path / "base", tied=tied, dtype="float32")
    beside, by_peft = train(base, tmp_path / "adapter", adapter_options(name, which))
    merged = merge([base, tmp_path / "adapter"], tmp_path / "merged", {"op": "lora-merge"})
    assert_loads_whole(merged)
    logits = transformers_logits(merged)
    assert (logits - transformers_logits(base)).abs().max() > 0.1, "the adapter changes nothing"
    assert (logits - beside).abs().max() < 1e-3
    if not tied or which not in ("embedding", "head"):
        assert (logits - by_peft).abs().max() < 1e-3


@needs_peft
@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapter_with_trained_biases_matches_peft_logits(name: str, bias: str, tmp_path: Path) -> None:
    more = {"attention_bias": True} if name == "llama" else {}
    base = write(name, tmp_path / "base", tied=True, dtype="float32", **more)
    options = adapter_options(name, "attention") | {"bias": bias}
    beside, by_peft = train(base, tmp_path / "adapter", options)
    merged = merge([base, tmp_path / "adapter"], tmp_path / "merged", {"op": "lora-merge"})
    before, after = tensors(base), tensors(merged)
    assert any(name.endswith(".bias") and not torch.equal(before[name], after[name]) for name in after)
    assert_loads_whole(merged)
    for wanted in (beside, by_peft):
        assert (transformers_logits(merged) - wanted).abs().max() < 1e-3


@needs_peft
@pytest.mark.parametrize("to", ["fp8-block128", "fp8-channel"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_base_is_dequantised_before_merge(name: str, to: str, tmp_path: Path) -> None:
    """`lora-merge` treats an FP8 base like the dequantised one, for which PEFT gives the logits with the adapter."""
    stored = tmp_path / "stored"
    convert(write(name, tmp_path / "base"), stored, to=to, devices="cpu", workers=1)
    plain = merge([stored], tmp_path / "plain", {"op": "dequantise"})
    beside, _ = train(plain, tmp_path / "adapter", adapter_options(name, "attention"))
    merged = merge([stored, tmp_path / "adapter"], tmp_path / "merged", {"op": "lora-merge"})
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    of_plain = tensors(merge([plain, tmp_path / "adapter"], tmp_path / "merged-plain", {"op": "lora-merge"}))
    values = tensors(merged)
    assert values.keys() == of_plain.keys()
    assert {tensor.dtype for tensor in values.values()} <= {torch.bfloat16, torch.float32}
    assert all(torch.equal(tensor, of_plain[name]) for name, tensor in values.items())
    assert_loads_whole(merged)
    # The result is rounded to BF16, but the reference is not.
    logits = transformers_logits(merged, "float32")
    assert (logits - beside).abs().max() < 0.05 * beside.abs().max()


@needs_peft
@needs_vllm
@pytest.mark.timeout(900)
def test_merged_models_match_peft_in_vllm(tmp_path: Path) -> None:
    """Several results run in one engine process, because its start takes most of the time."""
    results, wanted = [], []
    for name, tied, which in (
        ("llama", True, "embedding saved"),
        ("llama", False, "head"),
        ("qwen3_moe", False, "attention"),
        ("gemma3", True, "attention"),
        ("gpt2", True, "attention"),
    ):
        place = tmp_path / f"{name}-{which}"
        place.mkdir()
        base = write(name, place / "base", tied=tied, dtype="float32")
        beside, _ = train(base, place / "adapter", adapter_options(name, which))
        results.append(merge([base, place / "adapter"], place / "merged", {"op": "lora-merge"}))
        wanted.append(beside[-1].log_softmax(-1))
    for kind, (num_sources, operation, _) in MERGES.items():
        sources = [write("llama", tmp_path / kind / f"{i}", seed=i, dtype="float32") for i in range(num_sources)]
        results.append(merge(sources, tmp_path / kind / "merged", operation))
        wanted.append(transformers_logits(results[-1])[-1].log_softmax(-1))
    for logprobs, reference, directory in zip(vllm_logprobs(results, tmp_path), wanted, results, strict=True):
        assert (logprobs - reference).abs().max() < 0.02, directory
