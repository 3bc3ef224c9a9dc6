"""TRL's AsyncGRPOTrainer sends versions in its own step, and a real vLLM server then has its log-probabilities."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.vllm_server import serving

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]

SCRIPT = Path(__file__).with_name("trl_syncs.py")


@pytest.mark.parametrize(("num_ranks", "options"), [(2, []), (1, ["--whole"]), (2, ["--lora"])])
def test_server_receives_weights_of_each_version(
    num_ranks: int, options: list[str], runtime: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    subprocess.run([sys.executable, str(SCRIPT), "model", str(model)], check=True, timeout=300)
    environ = {**os.environ, "PENSTOCK_RUNTIME_DIR": runtime, "OMP_NUM_THREADS": "1"}
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with serving(model, runtime, tmp_path, num_workers=1, name=str(model), arguments=()) as server:
        command = [sys.executable, *ranks, str(SCRIPT), "sync", str(model), server.url, *options]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-8000:]
        assert server.get("/weight_info") == {"weight_version": "2"}
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"version"')]
    assert [version["version"] for version in said] == [1, 2, 3]
    assert all(version["difference"] < 1e-4 for version in said), said
