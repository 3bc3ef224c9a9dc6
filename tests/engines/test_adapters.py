"""A trainer publishes only its LoRA adapter, and a real vLLM server has its log-probabilities after each version."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engines.device import NUM_WORKERS, ON_GPU, vllm_environ, vllm_options
from tests.engines.vllm_server import serving

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SCRIPT = Path(__file__).with_name("adapter_syncs.py")
LORA = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16")
ADAPTER_BYTES = 2 * 8 * (4 * 128 + 2 * 64 + 128 * 6 + 2 * 128) * 4
"""Size of the adapter: two layers, rank 8, float32. A is [8, in], and B is [out, 8]."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    written = [sys.executable, str(Path(__file__).with_name("trl_syncs.py")), "model", str(directory)]
    subprocess.run(written, check=True, timeout=300)
    return directory


def run_ranks(runtime: str, *arguments: str) -> list[dict[str, Any]]:
    """Run two ranks, and return what rank 0 prints."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(SCRIPT),
            *arguments,
        ],
        env={**os.environ, "PENSTOCK_RUNTIME_DIR": runtime, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_in_process_vllm_serves_each_adapter_version(model: Path, runtime: str, tmp_path: Path) -> None:
    # vLLM's LoRA kernels for GPUs have no float32. In BF16 the log-probabilities differ by up to 0.04 from float32.
    dtype, rounding = ("bfloat16", 0.1) if ON_GPU else ("float32", 1e-3)
    sizes = {"max_model_len": 192, "max_loras": 2, "max_lora_rank": 16}
    options = vllm_options(model=str(model), dtype=dtype, enable_lora=True, **sizes)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "llm", str(model), json.dumps(options)],
        env=vllm_environ(tmp_path, PENSTOCK_RUNTIME_DIR=runtime, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"version"')]
    assert [seen["loaded"] for seen in said] == [
        ["in-process@1"],
        ["in-process@1", "in-process@2"],
        ["in-process@2", "in-process@3"],
    ]
    assert all(seen["new"] < rounding < seen["other"] for seen in said), said


def test_adapter_sharded_over_two_ranks_is_merged(model: Path, runtime: str) -> None:
    versions = run_ranks(runtime, "merge", str(model))
    assert [seen["version"] for seen in versions] == [1, 2]
    assert all(seen["merged"] < 1e-6 for seen in versions), versions


def test_server_serves_each_adapter_version(
    model: Path, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with serving(model, runtime, tmp_path, num_workers=NUM_WORKERS, name=str(model), arguments=LORA) as server:
        said = run_ranks(runtime, "serve", str(model), server.url)
    *versions, other_base, too_large, closed, moved = said
    assert [seen["version"] for seen in versions] == [1, 2, 3]
    for seen in versions:
        same = max(seen[name] for name in ("new", "pinned", "before", "base"))
        assert same < 1e-3 < 1e-2 < seen["other"], said
        assert seen["nbytes"] <= ADAPTER_BYTES
    assert "BaseMismatch" in other_base["refused"]
    assert "base 2" in other_base["refused"] and "base 1" in other_base["refused"]
    assert "DestinationError" in too_large["refused"] and "max_lora_rank" in too_large["refused"]
    assert (other_base["version"], too_large["version"]) == (3, -1)
    assert max(other_base["kept"], too_large["kept"]) < 1e-3
    assert closed == {"closed": 404}
    # The server's own weights were updated too, and it serves an adapter for the new base.
    assert moved["base"].startswith("base:5 run=") and max(moved["new"], moved["adapter"]) < 1e-3, moved
