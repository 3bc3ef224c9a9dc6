"""`from_pretrained(group=)` reads storage once for all ranks, with the results of the original function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tests.support.ranks import run_ranks
from tests.support.servers.http_server import RangeServer
from tests.support.tiny_models import save_llama, save_mixtral

from penstock_hf.transformers import from_pretrained, patched_libraries

ENVIRON = {
    "PENSTOCK_STALL_S": "60",
    # Small chunks give each rank several rounds.
    "PENSTOCK_CHUNK_BYTES": "256K",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # layers.10 comes after layers.9, but before layers.2 in the file.
    sizes = {"vocab_size": 1600, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 11}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return save_llama(tmp_path_factory.mktemp("ranks") / "llama", max_shard_size="10MB", **sizes | heads)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixtral(tmp_path_factory.mktemp("ranks") / "mixtral")


def options_of(kind: str, world_size: int) -> dict[str, Any]:
    from transformers.distributed.configuration_utils import DistributedConfig

    return {
        "plain": {},
        "cast": {"dtype": torch.bfloat16},
        "device_map": {"device_map": {"": "cpu"}},
        "tp": {"tp_plan": "auto"},
        # Some releases of transformers need the size too, and ignore the plan without it.
        "tp_size": {"distributed_config": DistributedConfig(tp_size=world_size)},
        "fsdp": {"distributed_config": DistributedConfig(fsdp_size=world_size)},
    }[kind]


def assert_same(mine: Any, true: Any) -> int:
    """Compare two models bit for bit. Return the bytes of this rank's shards."""
    ours = dict(mine.named_parameters()) | dict(mine.named_buffers())
    theirs = dict(true.named_parameters()) | dict(true.named_buffers())
    assert ours.keys() == theirs.keys()
    assert mine.config.to_dict() == true.config.to_dict()
    nbytes = 0
    for name, tensor in ours.items():
        other = theirs[name]
        assert type(tensor) is type(other), name
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        if isinstance(tensor.data, torch.distributed.tensor.DTensor):
            assert tensor.placements == other.placements
            tensor, other = tensor.to_local(), other.to_local()
            nbytes += tensor.nbytes
        assert torch.equal(tensor, other), name
    return nbytes


Case = tuple[str, str, int]
"""Return a checkpoint, a kind of load, and `memory_bytes`."""


def same_as_stock(rank: int, world_size: int, cases: list[Case]) -> Any:
    answers = []
    for directory, kind, memory_bytes in cases:
        options = options_of(kind, world_size)
        true = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
        with patched_libraries(group=dist.group.WORLD, memory_bytes=memory_bytes) as report:
            mine = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
        (shared,) = report.shared
        answers.append((assert_same(mine, true), shared.read_bytes, shared.read_again_bytes, shared.nbytes))
    return answers


def test_ranks_load_equal_models_from_one_read(llama: Path, mixtral: Path) -> None:
    kinds = ["plain", "cast", "device_map", "tp", "fsdp"]
    cases = [(str(llama), kind, 256 << 20) for kind in kinds]
    cases += [(str(llama), kind, 4 << 20) for kind in ("plain", "tp", "fsdp")]
    cases += [(str(mixtral), kind, 64 << 20) for kind in ("plain", "tp")]
    outcomes = run_ranks(same_as_stock, 2, cases, timeout_s=110, environ=ENVIRON)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * 2, outcomes
    for case, (first, second) in zip(cases, zip(*(outcome.value for outcome in outcomes), strict=True), strict=True):
        nbytes = first[3]
        assert first[1] + second[1] == nbytes, case
        assert first[2] == second[2] == 0, case
        if case[1] in {"tp", "fsdp"} and case[0] == str(llama):
            # Each rank has only its shards.
            assert first[0] < 0.6 * nbytes, case


def over_http(rank: int, world_size: int, url: str, directory: str) -> Any:
    mine = from_pretrained(transformers.AutoModelForCausalLM, url, group=dist.group.WORLD)
    true = transformers.AutoModelForCausalLM.from_pretrained(directory)
    true.config.name_or_path = mine.config.name_or_path
    assert_same(mine, true)
    # A later load without a group is unchanged.
    return type(mine).__name__


@pytest.fixture
def server(llama: Path) -> Iterator[RangeServer]:
    with RangeServer(llama) as server:
        yield server


def test_three_ranks_read_each_byte_once(llama: Path, server: RangeServer) -> None:
    outcomes = run_ranks(over_http, 3, server.url, str(llama), timeout_s=110, environ=ENVIRON)
    assert [(outcome.ended, outcome.value) for outcome in outcomes] == [("returned", "LlamaForCausalLM")] * 3, outcomes
    # Count how often each byte of a body was sent. Every rank reads the headers.
    for path in sorted(llama.glob("*.safetensors")):
        begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        sent = [(s.start, s.stop) for s in server.sent if s.path.endswith(path.name) and s.start >= begin]
        assert sum(stop - start for start, stop in sent) == path.stat().st_size - begin
