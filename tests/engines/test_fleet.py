"""A second vLLM replica and a transformers model start from a running member, and generate the same text."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.vllm_engines import EngineProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.fixture
def runtime() -> Iterator[str]:
    """Yield a directory for this test's hub. Its name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        yield directory


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_second_vllm_replica_receives_weights_from_first(llama: Path, tmp_path: Path, runtime: str) -> None:
    options = {"model": str(llama), "load_format": "penstock", "model_loader_extra_config": {"fleet": "llama"}}
    # A process stays a member of the fleet when its engine has ended.
    with EngineProcess(tmp_path / "1", PENSTOCK_RUNTIME_DIR=runtime) as one:
        first = one.start(**options)
        assert len(set(first.tokens)) > 4, first.error
        names = [name for journey, name in first.phases if journey == "engine"]
        steps = ["init device", "load model", "load weights", "process weights"]
        assert names == ["start", *steps, "profile memory", "allocate cache", "warm up"]
        assert {"discover", "move", "commit"} <= {name for journey, name in first.phases if journey == "fetch"}
        assert "MB by storage" in first.log or "GB by storage" in first.log
        with EngineProcess(tmp_path / "2", PENSTOCK_RUNTIME_DIR=runtime) as two:
            second = two.start(**options)
            assert second.same(first), second.error
            paths = next(line for line in second.log.splitlines() if "paths: " in line)
            assert " <- " in paths
            assert "storage" not in paths
            assert two.start(model=str(llama), load_format="auto").same(first)


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
