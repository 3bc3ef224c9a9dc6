"""`group=` with all ranks on one device. It gathers through the host, since NCCL needs a device for each rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.support.compare import all_bits, by_safetensors
from tests.support.moe import write_moe
from tests.support.ranks import run_ranks

import penstock
from penstock.cuda.driver import load_driver
from penstock.engine.place import Segment
from penstock.loader.group import _DeviceCopies
from penstock.ranks.collectives import GroupCollectives
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

pytestmark = pytest.mark.gpu


class Done:
    """A completed collective."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


def gather_by_host(self: GroupCollectives, into: torch.Tensor, own: torch.Tensor) -> Done:
    gathered = torch.empty(into.numel(), dtype=into.dtype)
    dist.all_gather_into_tensor(gathered, own.cpu(), group=self.group)
    into.view(-1).copy_(gathered)
    return Done()


def load_rank(rank: int, world_size: int, directory: str, on_own_stream: bool, options: dict[str, Any]) -> Any:
    GroupCollectives.post_gather = gather_by_host  # type: ignore[method-assign]
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        weights = penstock.load(directory, device="cuda:0", group=dist.group.WORLD, **options)
        return all_bits(weights), weights.report.read_bytes


@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["small tensors", "large tensors"])
def test_every_rank_receives_all_tensors(tmp_path: Path, kind: str, world_size: int, on_own_stream: bool) -> None:
    if kind == "small tensors":
        write_moe(tmp_path / "model", num_tensors=3000, shards=2)
    else:
        write_llama(tmp_path / "model", num_layers=4, hidden=2048, shards=3)
    args = (str(tmp_path / "model"), on_own_stream, {"settings": penstock.ReadSettings(memory_bytes=64 * MIB)})
    outcomes = run_ranks(load_rank, world_size, *args, timeout_s=90)
    wanted = by_safetensors(tmp_path / "model")
    assert [outcome.ended for outcome in outcomes] == ["returned"] * world_size, outcomes
    assert all(outcome.value[0] == all_bits(wanted) for outcome in outcomes)
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert total <= sum(outcome.value[1] for outcome in outcomes) <= 1.1 * total


@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
def test_thousands_of_small_pieces_are_copied(tmp_path: Path, on_own_stream: bool) -> None:
    # A scale of 12 bytes follows each tensor, so that pieces do not join across alignment.
    tensors: dict[str, torch.Tensor] = {}
    for number in range(2500):
        tensors[f"{number:05}.weight"] = torch.randn(512, dtype=torch.bfloat16)
        tensors[f"{number:05}.weight_scale"] = torch.randn(3)
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    outcomes = run_ranks(load_rank, 2, str(tmp_path / "model"), on_own_stream, {}, timeout_s=90)
    wanted = all_bits(by_safetensors(tmp_path / "model"))
    assert [outcome.ended for outcome in outcomes] == ["returned"] * 2, outcomes
    assert all(outcome.value[0] == wanted for outcome in outcomes)


@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
def test_python_runs_while_copies_wait_for_stream(on_own_stream: bool) -> None:
    driver, device = load_driver(), torch.device("cuda:0")
    source = torch.randint(0, 256, (4000, 64), dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    rows = np.arange(len(source), dtype=np.uint64) * np.uint64(64)
    columns = (
        np.uint64(into.data_ptr()) + rows,
        np.uint64(source.data_ptr()) + rows,
        np.full(len(rows), 64, np.uint64),
    )
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # the device needs a second or more
    queued = threading.Event()

    def queue() -> None:
        with driver.entered(0):
            driver.copy(*columns, stream.cuda_stream)
        queued.set()

    thread = threading.Thread(target=queue, daemon=True)
    thread.start()
    num_turns = 0
    while not queued.wait(0.01):
        num_turns += 1
    thread.join(30)
    torch.cuda.synchronize()
    assert torch.equal(into, source)
    # On the legacy stream the calls wait for the device. This thread must continue.
    assert num_turns > 20 or on_own_stream


@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
@pytest.mark.parametrize("num_pieces", [1, 8, 9, 200])
def test_device_pieces_are_packed_and_unpacked(num_pieces: int, on_own_stream: bool) -> None:
    device, chance = torch.device("cuda:0"), np.random.default_rng(num_pieces)
    # There are two rounds of three turns, of which the last is empty. Pieces of rank 1 stay unchanged.
    sizes = [chance.integers(1, 5000, num_pieces).tolist() for _ in range(5)]
    pieces: list[list[Segment]] = []
    at = 0
    for turn in sizes:
        pieces.append([])
        for nbytes in turn:
            pieces[-1].append(Segment(0, 0, at, nbytes, 1, nbytes))
            at += nbytes
    source = torch.randint(0, 256, (at,), dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)
    width = max(map(sum, sizes))
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        packing, unpacking = (
            _DeviceCopies(pieces, lambda _, to=to: to, device, may_wait=num_pieces > 9) for to in (source, into)
        )
        for turns in (range(3), range(3, 6)):
            payloads = torch.zeros(3, width, dtype=torch.uint8, device=device)
            for rank, turn in enumerate(turns):
                packing.pack(turn, payloads[rank])
            unpacking.unpack(turns, 1, payloads)
            payloads.record_stream(stream)
    torch.cuda.synchronize()
    wanted = source.clone()
    for turn in (1, 4):
        for piece in pieces[turn]:
            wanted[piece.dst : piece.dst + piece.run] = 0
    assert torch.equal(into, wanted)
