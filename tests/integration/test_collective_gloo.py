"""The collective broadcast over gloo: bytes, and ranks that fail, die, stop or mean something else."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from penstock.errors import DestinationError, PlanError
from penstock.testing.ranks import run_ranks
from penstock.transport import collective
from penstock.transport.collective import CollectiveTransport


def regions(rank: int, root: int) -> list[torch.Tensor]:
    made = [torch.full((n,), 200, dtype=torch.uint8) for n in (1_000_003, 0, 5)]
    made.append(torch.zeros(7, 11, dtype=torch.bfloat16))
    if rank == root:
        made = [torch.arange(one.numel()).to(one.dtype).view(one.shape) for one in made]
    return made


def body(rank: int, world_size: int, fault: str) -> object:
    collective.CHUNK_BYTES = 100_000
    wire = CollectiveTransport(dist.group.WORLD, torch.device("cpu"), stall_s=5.0)
    made, seen = regions(rank, 1), []
    root, failed = 1, None
    if rank == 2 and fault == "fails":
        failed = DestinationError("no room")
    if rank == 2 and fault == "root":
        root = 0
    if rank == 2 and fault == "bytes":
        made[0] = made[0][:-1].clone()
    if rank == 2 and fault == "strided":
        made[0] = torch.zeros(10, 10)[:, ::2]

    def arrived(index: int, nbytes: int) -> None:
        seen.append((index, nbytes))
        if rank == 2 and len(seen) == 3:
            if fault == "dies":
                os._exit(9)
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raises":
                raise DestinationError("disk full")

    began = time.monotonic()
    try:
        wire.broadcast(made, root=root, arrived=arrived, failed=failed)
    finally:
        assert time.monotonic() - began < 20
    assert seen[-2:] == [(2, 5), (3, 154)]
    return all(bool((one == want).all()) for one, want in zip(made, regions(1, 1), strict=True))


def test_every_rank_has_the_roots_bytes() -> None:
    assert [(one.ended, one.value) for one in run_ranks(body, 3, "")] == [("returned", True)] * 3


@pytest.mark.parametrize(("fault", "own"), [("fails", "DestinationError"), ("strided", "PlanError")])
def test_a_rank_that_cannot_take_part_tells_the_others(fault: str, own: str) -> None:
    found = run_ranks(body, 3, fault)
    assert [one.error for one in found] == ["PeerLost", "PeerLost", own]
    assert not any(one.mutated for one in found)


def test_a_rank_that_fails_between_tells_the_others() -> None:
    found = run_ranks(body, 3, "raises")
    assert [one.error for one in found] == ["PeerLost", "PeerLost", "DestinationError"]
    assert [one.mutated for one in found] == [True, False, True]


@pytest.mark.parametrize("fault", ["root", "bytes"])
def test_ranks_that_mean_something_else(fault: str) -> None:
    found = run_ranks(body, 3, fault)
    assert [one.error for one in found] == [PlanError.__name__] * 3
    assert not any(one.mutated for one in found)


@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_a_lost_rank_ends_the_others(fault: str) -> None:
    found = run_ranks(body, 3, fault, timeout_s=25)
    assert [one.error for one in found[:2]] == ["PeerLost", "PeerLost"]
    assert found[2].ended in {"died", "hung"}
