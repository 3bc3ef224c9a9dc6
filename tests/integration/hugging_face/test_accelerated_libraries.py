"""diffusers, accelerate, PEFT and sentence-transformers load the same bits inside `patched_libraries()`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from tests.support.hugging_face import serving, use_cache
from tests.support.servers.hugging_face import HuggingFaceServer

from penstock_hf.patched_libraries import patched_libraries

with warnings.catch_warnings():
    # The libraries themselves warn about deprecations at import.
    warnings.simplefilter("ignore")
    import accelerate
    import diffusers
    import peft
    import sentence_transformers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # diffusers passes an argument that huggingface_hub ignores.
    "ignore:The `local_dir_use_symlinks` argument:UserWarning",
)


def saved_pipeline(directory: Path) -> Path:
    """Save a random Stable Diffusion pipeline, whole and as a half-precision variant."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
    )
    text_encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=100
        )
    )
    words = directory / "words"
    words.mkdir(parents=True)
    (words / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "b</w>": 3}))
    (words / "merges.txt").write_text("#version: 0.2\n")
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=transformers.CLIPTokenizer.from_pretrained(words),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    place = directory / "pipeline"
    pipeline.save_pretrained(place)
    pipeline.save_pretrained(place, variant="fp16")
    pipeline.save_pretrained(directory / "pieces", max_shard_size="600KB")
    return directory


def saved_bert(directory: Path) -> Path:
    """Save a random sentence-transformers model."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    bert = directory / "bert"
    transformers.BertModel(config).save_pretrained(bert)
    (bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    transformers.BertTokenizer.from_pretrained(bert).save_pretrained(bert)
    modules = sentence_transformers.sentence_transformer.modules
    words = modules.Transformer(str(bert))
    model = sentence_transformers.SentenceTransformer(modules=[words, modules.Pooling(32), modules.Dense(32, 16)])
    model.save_pretrained(str(directory / "sentences"))
    return directory


def saved_adapter(directory: Path) -> Path:
    torch.manual_seed(0)
    base = tiny_llama()
    base.save_pretrained(directory / "base", max_shard_size="30KB")
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model.save_pretrained(directory / "adapter")
    return directory


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    saved_pipeline(root), saved_bert(root), saved_adapter(root)
    return {f"org/{name}": root / name for name in ("pipeline", "pieces", "sentences", "base", "adapter")}


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    with serving(models, tmp_path / "hf", monkeypatch) as server:
        yield server


def assert_same(mine: torch.nn.Module, true: torch.nn.Module) -> None:
    ours, theirs = mine.state_dict(), true.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    ("name", "options", "num_files"),
    [
        ("org/pipeline", {}, 3),
        ("org/pipeline", {"variant": "fp16", "torch_dtype": torch.float16}, 3),
        ("org/pieces", {"torch_dtype": torch.bfloat16}, None),
    ],
)
def test_pipeline_is_streamed(
    name: str,
    options: dict[str, Any],
    num_files: int | None,
    hub: HuggingFaceServer,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    with patched_libraries() as report:
        mine = diffusers.DiffusionPipeline.from_pretrained(name, **options)
    assert len(report.streamed) == num_files or (num_files is None and len(report.streamed) > 10)
    assert not [path for path in (tmp_path / "hf").rglob("*.safetensors") if path.stat().st_size]
    true = diffusers.DiffusionPipeline.from_pretrained(models[name], **options)
    for part in ("unet", "vae", "text_encoder"):
        assert_same(getattr(mine, part), getattr(true, part))
    assert mine.tokenizer("a b").input_ids == true.tokenizer("a b").input_ids
    # Files that a tokenizer refers to still exist after the block.
    mine.save_pretrained(tmp_path / "again")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "again", torch_dtype=mine.unet.dtype)
    assert_same(again.unet, mine.unet)


def test_pipeline_component_is_streamed(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    with patched_libraries() as report:
        mine = diffusers.UNet2DConditionModel.from_pretrained("org/pieces", subfolder="unet")
    assert all("/unet/" in uri for uri in report.streamed) and len(report.streamed) > 3
    assert_same(mine, diffusers.UNet2DConditionModel.from_pretrained(models["org/pieces"], subfolder="unet"))


def test_single_file_model_is_streamed(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    name = "unet/diffusion_pytorch_model.safetensors"
    load = diffusers.UNet2DConditionModel.from_single_file
    with patched_libraries() as report:
        mine = load(f"https://huggingface.co/org/pipeline/blob/main/{name}", config="org/pipeline", subfolder="unet")
    assert len(report.streamed) == 1 and report.streamed[0].endswith(name)
    assert_same(mine, load(str(models["org/pipeline"] / name), config=str(models["org/pipeline"]), subfolder="unet"))


def test_cached_pipeline_is_not_streamed(hub: HuggingFaceServer) -> None:
    true = diffusers.DiffusionPipeline.from_pretrained("org/pipeline")
    with patched_libraries() as report:
        assert_same(diffusers.DiffusionPipeline.from_pretrained("org/pipeline").unet, true.unet)
    assert not report.streamed and len(report.local) == 3


def test_sentence_transformer_is_streamed(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]
) -> None:
    with patched_libraries() as report:
        mine = sentence_transformers.SentenceTransformer("org/sentences", device="cpu")
    assert len(report.streamed) == 2, "the transformer and the dense layer"
    true = sentence_transformers.SentenceTransformer(str(models["org/sentences"]), device="cpu")
    assert_same(mine, true)
    assert (mine.encode(["a b", "c"]) == true.encode(["a b", "c"])).all()
    use_cache(tmp_path / "other", monkeypatch)
    assert_same(sentence_transformers.SentenceTransformer("org/sentences", device="cpu"), true)


def test_adapters_are_streamed(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    with patched_libraries() as report:
        base = transformers.AutoModelForCausalLM.from_pretrained("org/base")
        mine = peft.PeftModel.from_pretrained(base, "org/adapter")
        mine.load_adapter("org/adapter", adapter_name="second")
        # transformers finds the adapter, and its base model through the adapter's configuration.
        other = transformers.AutoModelForCausalLM.from_pretrained("org/base")
        other.load_adapter("org/adapter")
    assert sum("adapter_model.safetensors" in uri for uri in report.streamed) == 3
    base = transformers.AutoModelForCausalLM.from_pretrained(models["org/base"])
    true = peft.PeftModel.from_pretrained(base, models["org/adapter"])
    true.load_adapter(str(models["org/adapter"]), adapter_name="second")
    assert_same(mine, true)
    base = transformers.AutoModelForCausalLM.from_pretrained(models["org/base"])
    base.load_adapter(str(models["org/adapter"]))
    assert_same(other, base)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"model": "cpu", "lm_head": "disk"}])
def test_checkpoint_dispatched_by_accelerate_is_streamed(
    device_map: dict[str, str], hub: HuggingFaceServer, models: dict[str, Path], tmp_path: Path
) -> None:
    def dispatched(place: str | Path, folder: Path) -> Any:
        with accelerate.init_empty_weights():
            model = tiny_llama()
        return accelerate.load_checkpoint_and_dispatch(
            model, str(place), device_map=dict(device_map), offload_folder=str(folder), dtype=torch.bfloat16
        )

    with patched_libraries() as report:
        mine = dispatched(huggingface_hub.snapshot_download("org/base"), tmp_path / "mine")
    assert len(report.streamed) > 1
    true = dispatched(models["org/base"], tmp_path / "true")
    tokens = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(mine(tokens).logits, true(tokens).logits)
