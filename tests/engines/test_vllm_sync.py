"""vLLM takes new weights from a publisher through its own HTTP routes, and then generates a new engine's tokens.

The updated engine has two workers if possible, each with half of the heads. The new engines have one worker. Trainers
publish with `penstock.publisher`, or through vLLM's own interface for trainers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.device import NUM_WORKERS
from tests.engines.vllm_engines import LONG_PROMPT as PROMPT
from tests.engines.vllm_engines import NUM_TOKENS, Answer
from tests.engines.vllm_server import Server, serving

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROGRAM = Path(__file__).with_name("vllm_trainers.py")


@pytest.fixture(scope="module")
def server(
    llama: Path, runtime: str, fresh: dict[int, Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start the server after `fresh`, so that only one engine runs at a time."""
    with serving(llama, runtime, tmp_path_factory.mktemp("server"), num_workers=NUM_WORKERS) as server:
        yield server


class Trainer:
    """A process that publishes a transformers model, or ranks under torchrun. Torchrun passes their lines on."""

    def __init__(self, runtime: str, directory: Path, *arguments: str, num_ranks: int = 1) -> None:
        self.log = directory / "trainer.log"
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        with self.log.open("wb") as written:
            self.process = subprocess.Popen(
                [sys.executable, *(ranks if num_ranks > 1 else []), str(PROGRAM), *arguments],
                env={**os.environ, "PENSTOCK_RUNTIME_DIR": runtime, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
                start_new_session=True,
            )

    def send(self, verb: str, version: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {version}\n")
        self.process.stdin.flush()

    def answer(self, verb: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(verb), (line, self.log.read_text()[-4000:])
        return line.removeprefix(verb).strip()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def trainer(runtime: str, directory: Path, *arguments: str, num_ranks: int = 1) -> Iterator[Trainer]:
    """Start `vllm_trainers.py` with arguments, and end it with the block."""
    made = Trainer(runtime, directory, *arguments, num_ranks=num_ranks)
    try:
        yield made
    finally:
        made.close()


def test_tokens_change_only_after_weight_update(
    server: Server, llama: Path, runtime: str, fresh: dict[int, Answer], tmp_path: Path
) -> None:
    old = server.tokens(PROMPT, NUM_TOKENS)
    assert tuple(old) not in {answer.tokens for answer in fresh.values()}
    status, said = server.ask("/start_weight_update")
    assert (status, "not subscribed to a sync" in said) == (500, True), said
    server.post("/init_weight_transfer_engine", init_info={"name": "policy", "stall_s": 10.0})

    with trainer(runtime, tmp_path, "module", str(llama), "live") as first:
        first.answer("LATEST")
        first.send("publish", 1)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 1})
        assert f"{NUM_WORKERS} committed" in first.answer("publish")
        assert server.tokens(PROMPT, NUM_TOKENS) == old  # received, but not installed
        server.post("/pause")
        server.post("/finish_weight_update", weight_version="1")
        server.post("/resume")
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[1].tokens)
        assert server.get("/weight_info") == {"weight_version": "1"}

        # The next version arrives while the old one serves. Requests and their cached blocks survive the pause.
        first.send("publish", 2)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 2, "background": True})
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[1].tokens)
        server.post("/pause?mode=keep&clear_cache=false")
        server.post("/update_weights", update_info={"version": 2})
        server.post("/finish_weight_update", weight_version="2")
        server.post("/resume")
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[2].tokens)
        assert f"{NUM_WORKERS} committed" in first.answer("publish")

        # A version fails. The route reports it, and the old weights stay.
        first.send("die", 3)
        server.post("/start_weight_update")
        status, said = server.ask("/update_weights", update_info={"version": 3})
        assert (status, "blame: source; destination" in said) == (500, True), said
        assert first.process.wait(timeout=60) == -signal.SIGKILL
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[2].tokens)
        assert server.get("/weight_info") == {"weight_version": "2"}
        assert server.ask("/finish_weight_update", weight_version="3")[0] == 500
        assert server.get("/weight_info") == {"weight_version": "2"}

    with trainer(runtime, tmp_path, "module", str(llama), "live") as second:
        assert int(second.answer("LATEST")) >= 2
        # The trainer is running, so a new subscriber prepares, and receives even its first version in the background.
        server.post("/init_weight_transfer_engine", init_info={"name": "policy", "stall_s": 10.0, "prepare_s": 60.0})
        assert server.log.read_text().count("policy is prepared") == NUM_WORKERS
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 4, "background": True})
        second.send("publish", 4)
        server.post("/update_weights", update_info={"version": 4})
        server.post("/pause?mode=wait")
        server.post("/finish_weight_update", weight_version="4")
        server.post("/resume")
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[4].tokens)
        assert f"{NUM_WORKERS} committed" in second.answer("publish")
    server.post("/shutdown_weight_transfer_engine")
    assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[4].tokens)


def test_route_error_names_invalid_argument(server: Server) -> None:
    wrong = [({}, "'name'"), ({"name": ""}, "'name'"), ({"name": "policy", "memory": "disk"}, "'disk'")]
    wrong.append(({"name": "policy", "prepare_s": -1}, "'prepare_s'"))
    for body, named in (*wrong, ({"name": "policy", "sped": 1}, "'sped'")):
        status, said = server.ask("/init_weight_transfer_engine", init_info=body)
        assert (status, named in said) == (500, True), (body, said)
    assert len(server.tokens(PROMPT, NUM_TOKENS)) == NUM_TOKENS


def test_two_trainer_ranks_update_engine_through_vllm_interface(
    server: Server, llama: Path, runtime: str, fresh: dict[int, Answer], tmp_path: Path
) -> None:
    with trainer(runtime, tmp_path, "ranks", str(llama), "snapshot", server.url, "shards", num_ranks=2) as ranks:
        ranks.send("send", 1)
        assert ranks.answer("send") == "1 sent"
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[1].tokens)
        assert server.get("/weight_info") == {"weight_version": "1"}
        ranks.send("stage", 2)
        assert ranks.answer("stage") == "2 sent"
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[1].tokens)  # received, but not installed
        ranks.send("send", 4)
        assert ranks.answer("send") == "4 sent"
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[4].tokens)
        ranks.send("send", 3)
        assert "is not above 4" in ranks.answer("send")
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[4].tokens)
        # A worker cannot receive. The trainer's error has the reason, and the next version is sent as usual.
        server.post("/shutdown_weight_transfer_engine")
        ranks.send("send", 5)
        assert "not subscribed to a sync" in ranks.answer("send")
        assert server.tokens(PROMPT, NUM_TOKENS) == list(fresh[4].tokens)


@pytest.mark.parametrize(("mode", "gather"), [("live", "shards"), ("snapshot", "gather")])
def test_single_worker_engine_receives_weights_in_every_mode(
    mode: str, gather: str, llama: Path, runtime: str, fresh: dict[int, Answer], tmp_path: Path
) -> None:
    with (
        serving(llama, runtime, tmp_path, num_workers=1) as single,
        trainer(runtime, tmp_path, "ranks", str(llama), mode, single.url, gather, num_ranks=2) as ranks,
    ):
        for version in (1, 2):
            ranks.send("send", version)
            assert ranks.answer("send") == f"{version} sent"
            assert single.tokens(PROMPT, NUM_TOKENS) == list(fresh[version].tokens)
