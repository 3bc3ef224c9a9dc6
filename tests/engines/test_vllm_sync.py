"""vLLM takes new weights from a publisher over its own HTTP routes: its tokens are a fresh engine's, and only then.

The engine that is updated has two workers, each with its half of the heads; the fresh ones have one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPT = [1, *range(7, 300, 4)]
"""More than two blocks of the cache, so that keys and values of old weights would be found there."""
NUM_TOKENS = 24

WEIGHTS = """
import torch, transformers

def weights(directory, version):
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    change(model, version)
    return model

def change(model, version):
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
"""

FRESH = (
    WEIGHTS
    + """
import json, sys, tempfile

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    directory, prompt, num_tokens, versions = json.loads(sys.argv[1])
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
    for version in versions:
        with tempfile.TemporaryDirectory() as changed:
            weights(directory, version).save_pretrained(changed)
            llm = LLM(
                model=changed, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=192, seed=0
            )
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy)
        print("TOKENS", version, json.dumps(list(answer.outputs[0].token_ids)), flush=True)
        del llm
"""
)

TRAINER = (
    WEIGHTS
    + """
import os, signal, sys

import penstock as ps
from penstock.sync.local_version import LocalVersion

if __name__ == "__main__":
    model = weights(sys.argv[1], 0)
    with ps.publisher("policy", model, connection=ps.ConnectionSettings(stall_s=10.0)) as publisher:
        print("LATEST", publisher.latest, flush=True)
        for line in sys.stdin:
            verb, version = line.split()
            if verb == "die":  # when a receiver has read, and asks what it should have read
                LocalVersion.digests = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            change(model, int(version))
            print(verb, publisher.publish(int(version)).summary(), flush=True)
"""
)


@pytest.fixture(scope="module")
def fresh(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Of each version the tokens of an engine that was started with it."""
    directory = tmp_path_factory.mktemp("fresh")
    script = directory / "fresh.py"
    script.write_text(FRESH)
    arguments = json.dumps([str(llama), PROMPT, NUM_TOKENS, [1, 2, 4]])
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, str(script), arguments], env=environ, capture_output=True, text=True, timeout=600
    )
    said = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert len(said) == 3, done.stderr[-4000:]
    return {int(version): json.loads(tokens) for _, version, tokens in said}


class Server:
    """`vllm serve` in processes of its own, and its routes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.log = process, log
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def post(self, path: str, **body: Any) -> Any:
        """The answer; AssertionError where the route says no."""
        status, answer = self.ask(path, **body)
        assert status == 200, (path, status, answer, self.log.read_text()[-4000:])
        return answer

    def ask(self, path: str, **body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._url}{path}", data, {"content-type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def tokens(self) -> list[int]:
        found = self.post(
            "/v1/completions",
            model="policy",
            prompt=PROMPT,
            max_tokens=NUM_TOKENS,
            temperature=0,
            ignore_eos=False,
            return_token_ids=True,
        )
        tokens: list[int] = found["choices"][0]["token_ids"]
        return tokens

    def wait_up(self) -> None:
        deadline = time.monotonic() + 480
        while True:
            with contextlib.suppress(OSError):
                self.get("/is_paused")
                return
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def runtime() -> Iterator[str]:
    """A directory for the hub, its name short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        yield directory


@pytest.fixture(scope="module")
def server(
    llama: Path, runtime: str, fresh: dict[int, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Started after `fresh`, so that there is one engine at a time."""
    directory = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(llama)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-model-len", "192"]
    command += ["--block-size", "32", "--tensor-parallel-size", "2"]
    command += ["--weight-transfer-config", '{"backend": "penstock"}']
    environ = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_LOGGING_LEVEL": "INFO",
        "PENSTOCK_RUNTIME_DIR": runtime,
    }
    log = directory / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(command, env=environ, stdout=written, stderr=written, start_new_session=True)
    try:
        made = Server(process, port, log)
        made.wait_up()
        yield made
    finally:
        process.terminate()  # it takes its shared memory along
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Trainer:
    """A process that publishes a transformers model."""

    def __init__(self, llama: Path, runtime: str, directory: Path) -> None:
        script, self.log = directory / "trainer.py", directory / "trainer.log"
        script.write_text(TRAINER)
        with self.log.open("wb") as written:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(llama)],
                env={**os.environ, "PENSTOCK_RUNTIME_DIR": runtime},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )
        self.latest = int(self.answer("LATEST").split()[0])

    def tell(self, verb: str, version: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {version}\n")
        self.process.stdin.flush()

    def answer(self, verb: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(verb), (line, self.log.read_text()[-4000:])
        return line.removeprefix(verb).strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def trainer(llama: Path, runtime: str, directory: Path) -> Iterator[Trainer]:
    made = Trainer(llama, runtime, directory)
    try:
        yield made
    finally:
        made.close()


def test_tokens_are_those_of_the_new_weights_and_only_then(
    server: Server, llama: Path, runtime: str, fresh: dict[int, list[int]], tmp_path: Path
) -> None:
    assert len({tuple(tokens) for tokens in fresh.values()}) == 3
    old = server.tokens()
    assert old not in fresh.values()
    status, said = server.ask("/start_weight_update")
    assert (status, "not subscribed to a sync" in said) == (500, True), said
    server.post("/init_weight_transfer_engine", init_info={"name": "policy", "stall_s": 10.0})

    with trainer(llama, runtime, tmp_path) as first:
        first.tell("publish", 1)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 1})
        assert "2 committed" in first.answer("publish")
        assert server.tokens() == old  # received, and not installed
        server.post("/pause")
        server.post("/finish_weight_update", weight_version="1")
        server.post("/resume")
        assert server.tokens() == fresh[1]
        assert server.get("/weight_info") == {"weight_version": "1"}

        # The next is received while the old one serves; requests and their cached blocks are kept over the pause.
        first.tell("publish", 2)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 2, "background": True})
        assert server.tokens() == fresh[1]
        server.post("/pause?mode=keep&clear_cache=false")
        server.post("/update_weights", update_info={"version": 2})
        server.post("/finish_weight_update", weight_version="2")
        server.post("/resume")
        assert server.tokens() == fresh[2]
        assert "2 committed" in first.answer("publish")

        # One that fails: the route says so, and the weights are the old ones.
        first.tell("die", 3)
        server.post("/start_weight_update")
        status, said = server.ask("/update_weights", update_info={"version": 3})
        assert (status, "blame: source; destination" in said) == (500, True), said
        assert first.process.wait(timeout=60) == -signal.SIGKILL
        assert server.tokens() == fresh[2]
        assert server.get("/weight_info") == {"weight_version": "2"}
        assert server.ask("/finish_weight_update", weight_version="3")[0] == 500
        assert server.get("/weight_info") == {"weight_version": "2"}

    with trainer(llama, runtime, tmp_path) as second:
        assert second.latest >= 2
        second.tell("publish", 4)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 4})
        server.post("/pause?mode=wait")
        server.post("/finish_weight_update", weight_version="4")
        server.post("/resume")
        assert server.tokens() == fresh[4]
        assert "2 committed" in second.answer("publish")
    server.post("/shutdown_weight_transfer_engine")
    assert server.tokens() == fresh[4]


def test_what_the_routes_are_told_wrong_is_named(server: Server) -> None:
    wrong = [({}, "'name'"), ({"name": ""}, "'name'"), ({"name": "policy", "memory": "disk"}, "'disk'")]
    for body, named in (*wrong, ({"name": "policy", "sped": 1}, "'sped'")):
        status, said = server.ask("/init_weight_transfer_engine", init_info=body)
        assert (status, named in said) == (500, True), (body, said)
    assert len(server.tokens()) == NUM_TOKENS
