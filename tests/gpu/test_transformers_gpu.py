"""transformers models loaded by Penstock to a GPU give the logits of `from_pretrained`, bit for bit."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from tests.support.keeper import KeeperProcess  # noqa: E402 - after what it needs
from tests.support.servers.http_server import Faults, RangeServer  # noqa: E402
from tests.support.tiny_models import save_llama  # noqa: E402

import penstock as ps  # noqa: E402
from penstock_hf.transformers import from_pretrained, start_from_pretrained  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def write(directory: Path, *, tied: bool, max_shard_size: str, dtype: str) -> Path:
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    kind = getattr(torch, dtype)
    return save_llama(directory, dtype=kind, max_shard_size=max_shard_size, **sizes | heads)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(1, 65, device="cuda")[None]).logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "4MB"])
@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_on_gpu_matches_transformers_logits(
    tmp_path: Path, dtype: str, max_shard_size: str, tied: bool
) -> None:
    directory = write(tmp_path, tied=tied, max_shard_size=max_shard_size, dtype=dtype)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == (max_shard_size == "4MB")
    true = transformers.AutoModelForCausalLM.from_pretrained(directory).to("cuda")
    mine = from_pretrained(transformers.AutoModelForCausalLM, str(directory), device_map="cuda:0")
    assert {p.device.type for p in (*mine.parameters(), *mine.buffers())} == {"cuda"}
    theirs = {**dict(true.named_parameters()), **dict(true.named_buffers())}
    for name, tensor in (*mine.named_parameters(), *mine.named_buffers()):
        assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(logits(mine), logits(true))


def test_checkpoint_converted_on_load_matches_transformers(tmp_path: Path) -> None:
    directory = write(tmp_path, tied=False, max_shard_size="1GB", dtype="float32")
    true = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to("cuda")
    mine = from_pretrained(transformers.AutoModelForCausalLM, str(directory), device_map="cuda:0", dtype=torch.bfloat16)
    assert torch.equal(logits(mine), logits(true))


def test_model_responds_during_load(tmp_path: Path) -> None:
    directory = write(tmp_path, tied=False, max_shard_size="4MB", dtype="bfloat16")
    ps.manifest(str(directory))
    true = transformers.AutoModelForCausalLM.from_pretrained(directory).to("cuda")
    faults = Faults(total_bytes_per_s=20 << 20)
    with RangeServer(directory, faults=faults) as server:
        auto = transformers.AutoModelForCausalLM
        with start_from_pretrained(auto, server.url, device_map="cuda:0", verify=True) as loading:
            # Use a separate stream, which does not wait for the stream that copies.
            with torch.cuda.stream(torch.cuda.Stream()):
                assert torch.equal(logits(loading.module), logits(true))
            assert loading.wait().verified
    assert {p.device.type for p in loading.module.parameters()} == {"cuda"}


def test_next_process_attaches_processed_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path, tied=True, max_shard_size="1GB", dtype="bfloat16")
    true = transformers.AutoModelForCausalLM.from_pretrained(directory).to("cuda")
    with tempfile.TemporaryDirectory(prefix="pk-") as sockets:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", sockets)
        with KeeperProcess(["--accept", "--device", "cuda:0"], timeout_s=120):
            for _ in range(2):
                model = from_pretrained(
                    transformers.AutoModelForCausalLM, directory, device_map="cuda:0", weight_cache=True
                )
                assert torch.equal(logits(model), logits(true))
            del model
            gc.collect()
