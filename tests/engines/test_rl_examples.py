"""The RL examples run with a real vLLM server. The server and a trainer rank are killed once each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1300)]
RUN = Path(__file__).resolve().parents[2] / "examples" / "rl" / "run.py"


@pytest.mark.parametrize("program", ["torchrun_grpo", "trl_grpo"])
def test_killed_engine_and_trainer_recover(program: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if program == "trl_grpo":
        pytest.importorskip("trl")
    told = _run(program, tmp_path, "--steps", "40", "--ranks", "2", "1", "--kill", "engine@10", "trainer@20")
    assert "log-probabilities equal in 40 steps" in told and "after one update" in told


# TRL's rollout worker and Penstock's transfer for TRL import vLLM.
@pytest.mark.small
def test_trl_learns_through_server_without_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("trl")
    told = _run("trl_grpo", tmp_path, "--engine", "transformers", "--steps", "12", "--rise", "0.1")
    assert "log-probabilities equal in 12 steps" in told


def _run(program: str, tmp_path: Path, *options: str) -> str:
    """Run an example to its end, and return what it prints."""
    command = [sys.executable, str(RUN), program, "--task", "even", *options]
    environ = {**os.environ, "PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout
