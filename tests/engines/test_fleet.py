"""A second vLLM replica and a transformers model start from a running member, and generate the same text."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

ENGINE = """
import json, sys

from vllm import LLM, SamplingParams

from penstock.phases import boot_record

if __name__ == "__main__":
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=128, seed=0,
        **json.loads(sys.argv[1]),
    )
    greedy = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 200, 17, 33, 2, 8]}], greedy)
    boot = boot_record().snapshot()  # None without Penstock's load format
    print("PHASES", json.dumps([[phase.journey, phase.name] for phase in boot.phases] if boot else []))
    print("TOKENS", json.dumps(list(answer.outputs[0].token_ids)), flush=True)
    sys.stdin.read()
"""


@contextmanager
def replica(directory: Path, runtime: str, **arguments: Any) -> Iterator[tuple[list[int], str]]:
    """Yield the tokens of a vLLM process that has generated and still serves, and its log until then."""
    directory.mkdir()
    script, log = directory / "engine.py", directory / "log"
    script.write_text(ENGINE)
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_LOGGING_LEVEL": "INFO",
        "PENSTOCK_RUNTIME_DIR": runtime,
    }
    command = [sys.executable, str(script), json.dumps(arguments)]
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, text=True
        )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("TOKENS "):
                break
        logged = "".join(said) + log.read_text()
        assert said and said[-1].startswith("TOKENS "), logged[-4000:]
        yield json.loads(said[-1].removeprefix("TOKENS ")), logged
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def runtime() -> Iterator[str]:
    """Yield a directory for this test's hub. Its name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        yield directory


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_second_vllm_replica_receives_weights_from_first(llama: Path, tmp_path: Path, runtime: str) -> None:
    arguments = {"model": str(llama), "load_format": "penstock", "model_loader_extra_config": {"fleet": "llama"}}
    with replica(tmp_path / "1", runtime, **arguments) as (first, log):
        assert len(set(first)) > 4
        phases = json.loads(next(line for line in log.splitlines() if line.startswith("PHASES "))[7:])
        names = [name for journey, name in phases if journey == "engine"]
        steps = ["init device", "load model", "load weights", "process weights"]
        assert names == ["start", *steps, "profile memory", "allocate cache", "warm up"]
        assert {"discover", "move", "commit"} <= {name for journey, name in phases if journey == "fetch"}
        assert "MB by storage" in log or "GB by storage" in log
        with replica(tmp_path / "2", runtime, **arguments) as (second, log):
            assert second == first
            paths = next(line for line in log.splitlines() if "paths: " in line)
            assert " <- " in paths
            assert "storage" not in paths
    with replica(tmp_path / "auto", runtime, model=str(llama), load_format="auto") as (true, _):
        assert first == true


def test_fetched_model_generates_same_text_as_loaded_model(runtime: str) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "fetch_transformers.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PENSTOCK_RUNTIME_DIR": runtime},
    )
    assert done.returncode == 0, done.stderr
    assert "equal: True; read from storage by the second: 0 bytes" in done.stdout
