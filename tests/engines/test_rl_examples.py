"""The RL example with a real vLLM server, which is killed once, as a rank of the trainer is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
RUN = Path(__file__).resolve().parents[2] / "examples" / "rl" / "run.py"


def test_an_engine_and_a_trainer_come_back(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, str(RUN), "torchrun_grpo", "--task", "even", "--steps", "40", "--ranks", "2", "1"]
    command += ["--kill", "engine@10", "trainer@20"]
    environ = {**os.environ, "PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "log-probabilities equal in 40 steps" in done.stdout and "after one update" in done.stdout
