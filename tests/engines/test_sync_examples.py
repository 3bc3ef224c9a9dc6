"""The examples of sync run as written, with real transformers and Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

DIRECTORY = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Yield an environment for a private hub and Ray's files, in a directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ps-") as runtime:
        yield {**os.environ, "PENSTOCK_RUNTIME_DIR": runtime, "RAY_TMPDIR": runtime, "RAY_AUTH_MODE": "disabled"}


def said_by(name: str, environ: dict[str, str]) -> str:
    command = [sys.executable, str(DIRECTORY / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_fsdp_trainer_syncs_to_tensor_parallel_ranks(environ: dict[str, str]) -> None:
    said = said_by("sync_torchrun.py", environ)
    assert said.count("logits equal to the reference's") == 6
    assert said.count("2 committed") == 3


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_actors_generate_same_tokens_as_trainer(environ: dict[str, str]) -> None:
    said = said_by("sync_ray.py", environ)
    assert said.count("tokens equal to the trainer's: True") == 6
    assert "3 texts in 3 steps" in said
