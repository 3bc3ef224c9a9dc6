"""transformers models that Penstock fills give the same logits as with `from_pretrained`, bit for bit."""

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from tests.support.tiny_models import save_mixtral  # noqa: E402 - after what it needs

from penstock.errors import ConfigError, NotFound  # noqa: E402
from penstock_hf.transformers import from_pretrained  # noqa: E402

pytestmark = pytest.mark.engines


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([[1, 5, 9, 200, 17, 33, 2, 8]])).logits


def assert_same_model(mine: Any, true: Any) -> None:
    assert not mine.training
    assert mine.dtype == true.dtype
    theirs = {**dict(true.named_parameters()), **dict(true.named_buffers())}
    ours = {**dict(mine.named_parameters()), **dict(mine.named_buffers())}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(logits(mine), logits(true))


@pytest.mark.parametrize("which", ["llama", "sharded_llama", "tied_llama"])
@pytest.mark.parametrize("model_class", [transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM])
def test_causal_model_is_loaded(
    which: str, model_class: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    directory: Path = request.getfixturevalue(which)
    caplog.set_level(logging.INFO, "penstock")
    mine = from_pretrained(model_class, str(directory))
    assert "filled in place" in caplog.text
    assert_same_model(mine, model_class.from_pretrained(directory))
    assert mine.generation_config.to_dict() == model_class.from_pretrained(directory).generation_config.to_dict()


def test_tied_weights_stay_tied(tied_llama: Path) -> None:
    model = from_pretrained(transformers.LlamaForCausalLM, str(tied_llama))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_request_for_different_dtype_falls_back_to_transformers(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    mine = from_pretrained(transformers.LlamaForCausalLM, str(llama), dtype=torch.bfloat16)
    assert "loaded by transformers" in caplog.text
    assert_same_model(mine, transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16))


def test_separately_saved_experts_are_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_mixtral(tmp_path)
    caplog.set_level(logging.INFO, "penstock")
    mine = from_pretrained(transformers.AutoModelForCausalLM, str(tmp_path))
    assert "merged or split" in caplog.text
    assert_same_model(mine, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_base_model_loads_from_checkpoint_with_head(llama: Path) -> None:
    mine = from_pretrained(transformers.LlamaModel, str(llama))
    true = transformers.LlamaModel.from_pretrained(llama)
    for name, tensor in true.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor)


def test_penstock_and_transformers_models_generate_same_tokens(llama: Path) -> None:
    prompt = torch.tensor([[1, 5, 9, 200, 17, 33, 2, 8]])
    mine = from_pretrained(transformers.AutoModelForCausalLM, str(llama))
    true = transformers.AutoModelForCausalLM.from_pretrained(llama)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(mine.generate(prompt, **arguments), true.generate(prompt, **arguments))


def test_missing_model_raises_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        from_pretrained(transformers.AutoModelForCausalLM, str(tmp_path))


def test_config_without_matching_model_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="AutoModelForSpeechSeq2Seq"):
        from_pretrained(transformers.AutoModelForSpeechSeq2Seq, str(llama))


def test_quantised_model_is_loaded_by_transformers(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.AutoConfig.from_pretrained(llama)
    # transformers does not know this quantiser. It warns, and loads the model unchanged.
    config.quantization_config = {"quant_method": "bitsandbytes"}
    caplog.set_level(logging.INFO, "penstock")
    mine = from_pretrained(transformers.AutoModelForCausalLM, str(llama), config=config)
    assert "it is quantised" in caplog.text
    assert_same_model(mine, transformers.AutoModelForCausalLM.from_pretrained(llama, config=config))


def test_transformers_fallback_rejects_penstock_load_options(llama: Path) -> None:
    with pytest.raises(ConfigError, match="verify=True"):
        from_pretrained(transformers.LlamaForCausalLM, str(llama), dtype=torch.bfloat16, verify=True)


def test_model_in_object_store_is_loaded(llama: Path, s3_llama: str, s3_options: dict[str, str]) -> None:
    mine = from_pretrained(transformers.AutoModelForCausalLM, s3_llama, storage_options=s3_options)
    assert_same_model(mine, transformers.AutoModelForCausalLM.from_pretrained(llama))
    cast = from_pretrained(
        transformers.AutoModelForCausalLM, s3_llama, storage_options=s3_options, dtype=torch.bfloat16
    )
    assert_same_model(cast, transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16))
    with pytest.raises(NotFound, match=r"config\.json"):
        from_pretrained(transformers.AutoModelForCausalLM, f"{s3_llama}/none", storage_options=s3_options)
