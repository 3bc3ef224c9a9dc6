"""A small GRPO run under torchrun: the reward rises, and served log-probabilities equal the trainer's at each step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5")

RUN = Path(__file__).resolve().parents[3] / "examples" / "rl" / "run.py"


def test_rl_example_engine_matches_trainer_log_probabilities(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "torchrun_grpo", "--engine", "transformers", "--task", "even", "--steps", "12"]
    environ = {**os.environ, "PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "log-probabilities equal in 12 steps" in done.stdout
