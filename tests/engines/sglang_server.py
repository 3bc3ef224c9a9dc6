"""Run SGLang's server in separate processes, on the GPU if there is one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.device import ON_GPU
from tests.engines.sglang_loads import environment
from tests.engines.vllm_server import Server
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("sglang_launch.py")


def device_arguments(*, memory_saver: bool) -> list[str]:
    """Return the arguments of a server for a tiny model. The memory saver is for GPUs."""
    shared = ["--skip-tokenizer-init", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    shared += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--random-seed", "0"]
    if memory_saver and ON_GPU:
        shared.append("--enable-memory-saver")
    if ON_GPU:
        # CUDA graphs are on, for batches of up to 8. In BF16 a request has the same tokens alone and in a batch only if
        # the kernels do not depend on the batch.
        device = ["--device", "cuda", "--attention-backend", "triton", "--dtype", "bfloat16"]
        device += [
            "--enable-deterministic-inference",
            "--cuda-graph-max-bs-decode",
            "8",
            "--cuda-graph-max-bs-prefill",
            "64",
        ]
        return [*shared, *device, "--mem-fraction-static", "0.08"]
    device = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    return [*shared, *device, "--mem-fraction-static", "0.1", "--disable-overlap-schedule"]


def request(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy request."""
    options = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": options, "return_logprob": True}


def answer(said: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the tokens of a response, and their log-probabilities."""
    return said["output_ids"], [step[0] for step in said["meta_info"]["output_token_logprobs"]]


class SglangServer(Server):
    """SGLang's server, and its routes."""

    ready = "/model_info"

    def generate(self, prompt: list[int], num_tokens: int = 16) -> tuple[list[int], list[float]]:
        """Return the most likely tokens, and their log-probabilities."""
        return answer(self.post("/generate", **request(prompt, num_tokens)))

    def update(self, path: str, load_format: str) -> None:
        """Load new weights from a path."""
        said = self.post("/update_weights_from_disk", model_path=path, load_format=load_format)
        assert said["success"], said


@contextlib.contextmanager
def serving(
    model: Path, runtime: str, directory: Path, *arguments: str, memory_saver: bool = False, **environ: str
) -> Iterator[SglangServer]:
    """Run a server for a model, with its log and caches in `directory`."""
    directory.mkdir(exist_ok=True)
    (port,) = free_ports(1)
    command = [sys.executable, str(PROGRAM), "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += [*device_arguments(memory_saver=memory_saver), "--log-level", "info", *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ,
        **environment(directory, "http://127.0.0.1:9"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PENSTOCK_RUNTIME_DIR": runtime,
        **environ,
    }
    log = directory / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(command, env=environ, stdout=written, stderr=written, start_new_session=True)
    try:
        made = SglangServer(process, port, log, "")
        made.wait_up()
        yield made
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
