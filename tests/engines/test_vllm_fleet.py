"""Two vLLM servers act as one client of vLLM's trainer interface. Both install a version, or neither does.

One server has two workers, and the other has one. After each version their log-probabilities equal the trainer's.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.device import NUM_WORKERS
from tests.engines.vllm_server import Server, serving

import penstock as ps

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
pytest.importorskip("vllm")

PROMPT = [1, *range(7, 100, 4)]
ROUNDING = 1e-4
"""Limit for differences between float32 log-probabilities of two implementations, which are about 1e-6. Those of other
weights differ by 0.1 and more."""


@pytest.fixture
def servers(llama: Path, runtime: str, tmp_path: Path) -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for name, num_workers in (("pair", NUM_WORKERS), ("single", 1)):
            (tmp_path / name).mkdir()
            found[name] = stack.enter_context(serving(llama, runtime, tmp_path / name, num_workers=num_workers))
        yield found


def test_all_servers_commit_version_atomically(
    servers: dict[str, Server], llama: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from penstock_vllm.servers import FleetClient
    from penstock_vllm.trainer import PenstockTrainerInitInfo

    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
    model = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    served = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    clients = {name: HTTPVLLMWeightSyncClient(server.url, timeout=60) for name, server in servers.items()}

    def change(version: int) -> None:
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)

    def compare(*names: str) -> None:
        for name in names:
            difference = servers[name].log_prob_difference(served, PROMPT, 12)
            assert difference < ROUNDING, (name, difference)

    compare("pair", "single")
    info = PenstockTrainerInitInfo(name="policy", rank=0, stall_s=10.0)
    client = FleetClient(clients)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    change(1)
    engine.send_weights(1)
    assert servers["pair"].log_prob_difference(served, PROMPT, 12) > 100 * ROUNDING
    served.load_state_dict(model.state_dict())
    compare("pair", "single")

    # A server that has lost its subscription subscribes again.
    servers["single"].post("/shutdown_weight_transfer_engine")
    change(2)
    engine.send_weights(2)
    served.load_state_dict(model.state_dict())
    compare("pair", "single")

    # One server is gone. The other has received the version, and must not install it.
    os.killpg(servers["single"].process.pid, signal.SIGKILL)
    servers["single"].process.wait(timeout=60)
    change(3)
    with pytest.raises(ps.VersionRefused, match="withdrawn from all 2 servers: single: "):
        engine.send_weights(3)
    compare("pair")
    engine.shutdown()
    client.close()
