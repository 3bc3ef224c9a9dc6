"""A restarted server gets the version that the trainer published before, and the trainer publishes no new one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import free_ports

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "rl"
PROMPT = [1, 9, 12, 3]


@pytest.fixture
def at(tmp_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the examples' server, always at the same port."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from vllm_routes import Client

    (port,) = free_ports(1)

    @contextlib.contextmanager
    def serve() -> Iterator[Client]:
        command = [sys.executable, str(EXAMPLES / "transformers_server.py"), str(EXAMPLES / "tiny_llama")]
        process = subprocess.Popen([*command, "--port", str(port)], env=dict(os.environ))
        try:
            client = Client(f"http://127.0.0.1:{port}", "policy")
            client.wait_up(120)
            yield client
        finally:
            process.kill()
            process.wait()

    return port, serve


def test_stage_again_sends_published_version_to_restarted_server(at: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from penstock_vllm.trainer import PenstockTrainerEngine, PenstockTrainerInitInfo

    port, serve = at
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(EXAMPLES / "tiny_llama"))
    routes = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{port}")
    info = PenstockTrainerInitInfo(name="policy", rank=0, stall_s=30.0)
    with serve() as client:
        engine = PenstockTrainerEngine.trainer_init(info, client=routes, source=model)
        engine.send_weights()
        assert client.weight_version() == str(engine.version)
    published = engine.report
    with torch.no_grad():
        tokens = torch.tensor([[*PROMPT, 7, 8]])
        mine = model(tokens).logits.log_softmax(-1)
        # The trainer's current weights differ from the published ones.
        for parameter in model.parameters():
            parameter.zero_()
    with serve() as client:
        assert client.weight_version() == "default"
        engine.stage_again()
        engine.commit()
        assert client.weight_version() == str(engine.version) == "0"
        assert engine.report is published
        (completion,), (served,) = client.sample([PROMPT], 1)
        assert served[0] == pytest.approx(float(mine[0, len(PROMPT) - 1, completion[0]]), abs=1e-5)
    engine.shutdown()


def test_stage_again_rejects_unpublished_and_live_versions(at: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    import penstock as ps
    from penstock_vllm.trainer import PenstockTrainerEngine, PenstockTrainerInitInfo

    port, serve = at
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(EXAMPLES / "tiny_llama"))
    routes = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{port}")
    info = PenstockTrainerInitInfo(name="policy", rank=0, stall_s=30.0, mode="live")
    with serve():
        engine = PenstockTrainerEngine.trainer_init(info, client=routes, source=model)
        with pytest.raises(ps.errors.ConfigError, match="no version was published"):
            engine.stage_again()
        engine.send_weights()
        with pytest.raises(ps.errors.ConfigError, match="published live"):
            engine.stage_again()
    engine.shutdown()
