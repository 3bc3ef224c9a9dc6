"""verl's own workers and manager send versions with `checkpoint_engine.backend: penstock`, on the CPU.

The trainer is verl's ActorRolloutRefWorker with its FSDP engine, on two ranks. The receivers are its rollout workers
with an adapter that keeps digests, or a real vLLM server of verl's class, whose workers receive by themselves. One test
runs verl's own trainer (`examples/rl/verl_grpo.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engines.trl_syncs import write_model

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "rl"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def experts(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose sizes are not multiples of the ranks, and whose experts transformers packs."""
    directory = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=33,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        pad_token_id=0,
        dtype="float32",
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    for file in (*dense.glob("tokenizer*"), *dense.glob("*.jinja")):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def run(program: str, runtime: str, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Run a program with verl's workers. Return what it printed, by the first word of each line."""
    environ = {
        **os.environ,
        "PENSTOCK_RUNTIME_DIR": runtime,
        # The CPU's platform, and the name under which verl's FSDP engine is registered.
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": f"{runtime}/cache",
    }
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    said: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("STEP", "KILLED"):
            said.setdefault(word, []).append(json.loads(rest))
    return said


def assert_three_versions(steps: list[Mapping[str, Any]], *, is_sharded: bool) -> None:
    assert [step["penstock/version"] for step in steps] == [0, 1, 2]
    assert all(step["same"] == [True, True] for step in steps), steps
    assert all(step["penstock/sharded"] == is_sharded for step in steps), steps


@pytest.mark.small
def test_unsupported_verl_release_is_refused(runtime: str) -> None:
    code = "import verl; verl.__version__ = '0.8.0'; import penstock_rl.verl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "ConfigError: Penstock supports verl 0.9, not 0.8.0" in done.stderr, done.stderr[-2000:]


def test_engine_keeps_weights_if_trainer_dies_during_read(experts: Path, runtime: str) -> None:
    said = run("verl_syncs.py", runtime, str(experts), json.dumps({"killed": "trainer", "stall_s": 5}))
    assert_three_versions(said["STEP"], is_sharded=True)
    # These are the checkpoint's names, with separate experts, although the module has 25 packed tensors.
    assert said["STEP"][0]["tensors"] == 51
    (end,) = said["KILLED"]
    assert end["untouched"] == [True, True], end
    assert end["trainers"] == ["PeerLost", "killed"], end
    assert all(error in ("PeerLost", "SourceStalled", "StaleDescriptor") for error in end["receivers"]), end


def test_killed_receiver_leaves_other_receivers_unchanged(dense: Path, runtime: str) -> None:
    # The model has adapters, which verl merges while it gathers.
    lora = {"lora_rank": 8, "lora": {"merge": True}}
    said = run("verl_syncs.py", runtime, str(dense), json.dumps({"killed": "receiver", "stall_s": 5, "actor": lora}))
    assert_three_versions(said["STEP"], is_sharded=False)
    (end,) = said["KILLED"]
    assert end["untouched"] == [True], end
    assert end["receivers"] == ["PeerLost", "killed"], end


def test_vllm_server_log_probabilities_match_trainer_for_each_version(dense: Path, runtime: str) -> None:
    steps = run("verl_vllm_syncs.py", runtime, str(dense))["STEP"]
    assert [step["penstock/version"] for step in steps] == [0, 1, 2]
    assert all(step["difference"] < 1e-4 and step["tokens"] > 0 for step in steps), steps


# Ten processes import verl and vLLM one after the other, which takes 200 s of a core. `make test` needs DRILLS=all.
@pytest.mark.slow
def test_verl_trainer_and_engine_log_probabilities_match(runtime: str, tmp_path: Path) -> None:
    told = train(runtime, tmp_path, "--steps", "6")
    assert "log-probabilities equal in 6 steps" in told


def test_verl_trainer_resumes_after_engine_is_killed(runtime: str, tmp_path: Path) -> None:
    told = train(runtime, tmp_path, "--steps", "16", "--kill", "engine@4")
    assert "log-probabilities equal in 16 steps" in told
    assert "verl resumed with 2 ranks from its checkpoint of step 3" in told


def train(runtime: str, work: Path, *options: str) -> str:
    """Run verl's own trainer, which checks each step's log-probabilities and the reward. Return what it prints."""
    pytest.importorskip("transfer_queue")
    command = [sys.executable, str(EXAMPLES / "verl_grpo.py"), "--task", "even", "--rise", "0.05", "--work", str(work)]
    environ = {**os.environ, "PENSTOCK_RUNTIME_DIR": runtime}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=1700, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    return done.stdout
