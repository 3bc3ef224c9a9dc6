"""Run `vllm serve` in separate processes, with Penstock as the backend for weight transfers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.engines.device import vllm_arguments, vllm_environ
from tests.support.ports import free_ports


class Server:
    """A server of an engine in separate processes, and its routes."""

    ready = "/is_paused"
    """A route that answers when the engine serves."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, model: str) -> None:
        self.process, self.log, self.model = process, log, model
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer. Raise AssertionError if the route reports an error."""
        status, answer = self.ask(path, **body)
        assert status == 200, (path, status, answer, self.errors())
        return answer

    def errors(self) -> str:
        """Return the end of the log, after the first errors of the engine's process, which explain the others."""
        lines = self.log.read_text().splitlines()
        engine = [line for line in lines if "(EngineCore" in line and " ERROR " in line]
        return "\n".join([*engine[:60], *lines[-30:]])

    def ask(self, path: str, **body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def tokens(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens of the most likely answer."""
        tokens: list[int] = self._complete(prompt, num_tokens, ignore_eos=False)["token_ids"]
        return tokens

    def _complete(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> dict[str, Any]:
        """Return the most likely answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0} | options
        answer: dict[str, Any] = self.post("/v1/completions", return_token_ids=True, **body)["choices"][0]
        return answer

    def log_prob_difference(self, model: Any, prompt: Sequence[int], num_tokens: int) -> float:
        """Return the largest difference between the log-probabilities of this server's answer and those of a model.

        Args:
            model: A transformers model with the weights that the server should have.
        """
        import torch

        found = self._complete(prompt, num_tokens, logprobs=0, return_tokens_as_token_ids=True)
        tokens: list[int] = found["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        of_model = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float((of_model - torch.tensor(found["logprobs"]["token_logprobs"])).abs().max())

    def wait_up(self) -> None:
        deadline = time.monotonic() + 480
        while True:
            with contextlib.suppress(OSError):
                self.get(self.ready)
                return
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)


@contextlib.contextmanager
def serving(
    model: Path,
    runtime: str,
    directory: Path,
    *,
    num_workers: int,
    name: str = "policy",
    arguments: Sequence[str] = ("--skip-tokenizer-init",),
    **options: Any,
) -> Iterator[Server]:
    """Run a server for a model, with its log and caches in `directory`. The options are those of `vllm.LLM`."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *arguments]
    usual = {"skip_tokenizer_init": False, "max_model_len": 192, "block_size": 32, "tensor_parallel_size": num_workers}
    command += vllm_arguments(**usual | options)
    command += ["--weight-transfer-config", '{"backend": "penstock"}']
    environ = vllm_environ(
        directory,
        VLLM_SERVER_DEV_MODE="1",
        VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, range(num_workers))),
        PENSTOCK_RUNTIME_DIR=runtime,
    )
    log = directory / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(command, env=environ, stdout=written, stderr=written, start_new_session=True)
    try:
        made = Server(process, port, log, name)
        made.wait_up()
        yield made
    finally:
        process.terminate()  # it removes its shared memory
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
