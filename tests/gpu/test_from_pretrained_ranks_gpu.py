"""`from_pretrained(group=)` over NCCL: each GPU gets the stock result from one read of the storage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import torch.distributed as dist  # noqa: E402
from tests.integration.hugging_face.test_from_pretrained_ranks import ENVIRON, assert_same, options_of  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.tiny_models import save_llama, save_mixtral  # noqa: E402

import penstock  # noqa: E402
from penstock_hf.transformers import from_pretrained, patched_libraries  # noqa: E402

pytestmark = pytest.mark.gpus(2)
WORLDS = [2, pytest.param(4, marks=pytest.mark.gpus(4))]
Case = tuple[str, str, int]
"""A checkpoint, a kind of load, and `memory_bytes`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    sizes = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 11}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    llama = save_llama(root / "llama", dtype=torch.bfloat16, max_shard_size="100MB", **sizes | heads)
    return {"llama": llama, "mixtral": save_mixtral(root / "mixtral")}


def on_devices(rank: int, world_size: int, cases: list[Case]) -> Any:
    # torchrun sets this, and transformers selects the device of a rank by it.
    os.environ["LOCAL_RANK"] = str(rank)
    answers = []
    for directory, kind, memory_bytes in cases:
        options = options_of(kind, world_size)
        if kind in {"plain", "cast"}:
            options["device_map"] = {"": rank}
        true = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
        with patched_libraries(group=dist.group.WORLD, memory_bytes=memory_bytes) as report:
            mine = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
        (shared,) = report.shared
        assert_same(mine, true)
        assert {parameter.device for parameter in mine.parameters()} == {torch.device("cuda", rank)}, kind
        answers.append((shared.read_bytes, shared.read_again_bytes, shared.nbytes))
        del mine, true
    return answers


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_load_equal_models_from_one_read(models: dict[str, Path], world_size: int) -> None:
    llama, mixtral = str(models["llama"]), str(models["mixtral"])
    cases = [(llama, kind, 256 << 20) for kind in ("plain", "cast", "tp_size", "fsdp")]
    # The window is smaller than two tensors.
    cases += [(llama, kind, 64 << 20) for kind in ("plain", "tp_size", "fsdp")]
    cases += [(mixtral, kind, 64 << 20) for kind in ("plain", "tp_size")]
    outcomes = run_ranks(on_devices, world_size, cases, backend="nccl", timeout_s=200, environ=ENVIRON)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * world_size, outcomes
    for case, answers in zip(cases, zip(*(outcome.value for outcome in outcomes), strict=True), strict=True):
        assert sum(answer[0] for answer in answers) == answers[0][2], case
        assert [answer[1] for answer in answers] == [0] * world_size, case


def truncated_on_one_rank(rank: int, world_size: int, directories: list[str]) -> Any:
    from_pretrained(transformers.AutoModelForCausalLM, directories[rank], group=dist.group.WORLD, device_map={"": rank})


def test_unreadable_file_on_one_rank_fails_all_ranks(models: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "llama"
    shutil.copytree(models["llama"], broken)
    last = sorted(broken.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 100_000)
    directories = [str(models["llama"]), str(broken)]
    environ = ENVIRON | {"PENSTOCK_STALL_S": "5"}
    outcomes = run_ranks(truncated_on_one_rank, 2, directories, backend="nccl", timeout_s=100, environ=environ)
    assert [outcome.ended for outcome in outcomes] == ["raised"] * 2, outcomes
    for outcome in outcomes:
        assert issubclass(getattr(penstock.errors, outcome.error, Exception), penstock.PenstockError), outcome
        assert outcome.seconds < 40
