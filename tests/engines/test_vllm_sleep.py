"""An engine that wakes from sleep serves complete weights or nothing, whatever its memory contained.

vLLM's CPU workers ignore `sleep` and `wake_up`, so `poison` destroys the weights while the engine sleeps. On a GPU,
vLLM's own allocator unmaps them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.engines.device import NUM_WORKERS, ON_GPU
from tests.engines.test_vllm_sync import Trainer, trainer
from tests.engines.vllm_engines import LONG_PROMPT as PROMPT
from tests.engines.vllm_server import Server, serving
from tests.engines.vllm_trainers import weights

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 8


class Engine:
    """A server, and the tokens that it should generate with each version of the weights."""

    def __init__(self, server: Server, llama: Path) -> None:
        self.server, self._llama = server, llama
        self._pool = ThreadPoolExecutor(4)

    @cache  # noqa: B019
    def expected(self, version: int | None) -> list[int]:
        """Return the tokens from transformers with a version's weights. None means the weights in the files."""
        told = weights(self._llama, version).generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[int] = told[0, len(PROMPT) :].tolist()
        return tokens

    def tokens(self) -> list[int]:
        found = self.server.post(
            "/v1/completions", model=self.server.model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0,
            ignore_eos=True, return_token_ids=True,
        )  # fmt: skip
        tokens: list[int] = found["choices"][0]["token_ids"]
        return tokens

    def asking(self) -> Future[list[int]]:
        """Send a request, and return a future for its answer."""
        return self._pool.submit(self.tokens)

    def version(self) -> str:
        version: str = self.server.get("/weight_info")["weight_version"]
        return version

    def poison(self) -> None:
        told = self.server.post("/collective_rpc", method="poison")["results"]
        # These are embeddings, norms, and two layers with four packed matrices, on each worker.
        assert [int(count) > 8 for count in told] == [True] * NUM_WORKERS

    def sleep(self, level: int = 2) -> None:
        """Sleep, and destroy the weights."""
        self.server.post(f"/sleep?level={level}")
        assert self.version() == "none"
        if not ON_GPU:
            self.poison()
            if level == 1:
                # Llama has the table of its rotary embedding.
                told = self.server.post("/collective_rpc", method="poison_buffers")["results"]
                assert [int(count) > 0 for count in told] == [True] * NUM_WORKERS
            return
        # vLLM's allocator has unmapped the weights, and at level 1 copied them to the host.
        told = self.server.post("/collective_rpc", method="poison_backups")["results"]
        assert [int(count) > 0 for count in told] == [level == 1] * NUM_WORKERS

    def serves(self, version: int | None, name: str) -> None:
        assert self.version() == name
        assert self.tokens() == self.expected(version)

    def send(self, from_: Trainer, version: int) -> None:
        """Make the engine install a version through vLLM's routes."""
        from_.send("publish", version)
        from_.answer("publish")
        self.server.post("/start_weight_update")
        self.server.post("/update_weights", update_info={"version": version})
        self.server.post("/finish_weight_update", weight_version=str(version))


@pytest.fixture(scope="module")
def engine(llama: Path, runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{ROOT}:{before}"
    try:
        arguments = ["--skip-tokenizer-init", "--worker-extension-cls", "tests.engines.poison.Poison"]
        options: dict[str, object] = {"enable_sleep_mode": True}
        if not ON_GPU:
            # The limit applies to host memory, and vLLM refuses the mode.
            options = {"gpu_memory_utilization": 0.3}
        directory = tmp_path_factory.mktemp("server")
        with serving(llama, runtime, directory, num_workers=NUM_WORKERS, arguments=arguments, **options) as server:
            yield Engine(server, llama)
    finally:
        os.environ["PYTHONPATH"] = before


def test_weights_are_restored_before_first_request_after_wake(
    engine: Engine, llama: Path, runtime: str, tmp_path: Path
) -> None:
    server = engine.server
    assert len({tuple(engine.expected(version)) for version in (None, 1, 2, 5, 6, 7, 8)}) == 7
    # There is no version from a trainer yet, so the engine's own loader restores the weights of the start.
    engine.serves(None, "default")
    engine.sleep()
    assert server.post("/wake_up")["status"] == "awake"
    engine.serves(None, "default")

    server.post("/init_weight_transfer_engine", init_info={"name": "policy", "stall_s": 5.0})
    with trainer(runtime, tmp_path, "module", str(llama), "snapshot") as first:
        first.answer("LATEST")
        for version in (1, 2):
            engine.send(first, version)
            engine.serves(version, str(version))

        # A request that arrives now waits. Only /wake_up lets it through.
        engine.sleep()
        assert server.post("/collective_rpc", method="staging_versions")["results"] == ["-1"] * NUM_WORKERS
        waiting = engine.asking()
        status, said = server.ask("/resume")
        assert (status, "is asleep" in str(said)) == (500, True), said
        assert not waiting.done()
        assert server.post("/wake_up")["status"] == "awake"
        assert waiting.result(60) == engine.expected(2)
        engine.serves(2, "2")

        # The trainer's newest version comes back.
        engine.sleep()
        first.send("publish", 5)
        first.answer("publish")
        server.post("/wake_up")
        engine.serves(5, "5")

        # A trainer sends a version between the tags. It is used, and no other version before it.
        engine.sleep()
        waiting = engine.asking()
        assert server.post("/wake_up?tags=weights")["status"] == "sleeping"
        assert engine.version() == "none"
        engine.send(first, 6)
        assert not waiting.done()
        assert server.post("/wake_up?tags=kv_cache")["status"] == "awake"
        assert waiting.result(60) == engine.expected(6)
        engine.serves(6, "6")

        # No member has a version. The engine keeps sleeping, and wakes with the next trainer.
        engine.sleep()
        waiting = engine.asking()
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait(timeout=60)
        status, said = server.ask("/wake_up")
        assert status == 500, said
        assert engine.version() == "none"
        assert not waiting.done()
    with trainer(runtime, tmp_path, "module", str(llama), "snapshot") as second:
        second.answer("LATEST")
        second.send("publish", 7)
        second.answer("publish")
        assert server.post("/wake_up")["status"] == "awake"
        assert waiting.result(60) == engine.expected(7)
        engine.serves(7, "7")

        # At level 1 the bytes that vLLM copied back must equal the old ones, or they are not used.
        server.post("/sleep?level=1")
        assert engine.version() == "none"
        server.post("/wake_up")
        engine.serves(7, "7")
        assert server.post("/collective_rpc", method="staging_versions")["results"] == ["-1"] * NUM_WORKERS, (
            "not received again"
        )
        engine.sleep(level=1)
        server.post("/wake_up")
        engine.serves(7, "7")
        assert "differ from those before the sleep" in server.log.read_text()

        # A sleep of level 2 follows one of level 1, after which no version was received.
        server.post("/sleep?level=1")
        server.post("/wake_up")
        engine.sleep()
        server.post("/wake_up")
        engine.serves(7, "7")

        # Updates still work. And the test can fail, because destroyed weights give other tokens.
        engine.send(second, 8)
        engine.serves(8, "8")
        engine.poison()
        server.post("/pause")
        server.post("/resume")
        assert engine.tokens() != engine.expected(8)
