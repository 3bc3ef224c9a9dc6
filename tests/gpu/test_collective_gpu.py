"""The collective broadcast over NCCL: a holding, bit for bit; a lost rank ends the others within the deadline."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from penstock.errors import DestinationError
from penstock.hub.identity import Identity
from penstock.memory.arena import Arena, needed_bytes
from penstock.peer.local_weights import LocalWeights
from penstock.peer.weight_layout import layout_of_tensors
from penstock.testing.ranks import run_ranks
from penstock.transport.collective import CollectiveTransport

pytestmark = pytest.mark.gpus(2)
STALL_S = 5.0
BOUND_S = 4 * STALL_S
SHAPES = {"embed": (1000, 1031), "empty": (0,), "norm": (7,), "up": (3000, 8192), "down": (8192, 3000)}


def weights(seed: int) -> tuple[Arena, dict[str, torch.Tensor]]:
    """In one arena, as a fetch puts them."""
    chance = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=chance).to(torch.bfloat16) for name, shape in SHAPES.items()}
    nbytes = [tensor.nbytes for tensor in made.values()]
    arena = Arena.allocate(needed_bytes(nbytes), torch.device("cuda", torch.cuda.current_device()))
    runs = zip(arena.place(nbytes), made.items(), strict=True)
    placed = {
        name: arena.bytes_at(at, tensor.nbytes).view(tensor.dtype).view(tensor.shape) for at, (name, tensor) in runs
    }
    for name, tensor in made.items():
        placed[name].copy_(tensor)
    torch.cuda.synchronize()
    return arena, placed


def digested(tensors: dict[str, torch.Tensor]) -> bytes:
    line, rows = layout_of_tensors(tensors)
    holding = LocalWeights(Identity(model="m", layout=line.digest), line, rows)
    return holding.digest(np.arange(line.chunks.num_chunks)).tobytes()


def body(rank: int, world_size: int, fault: str) -> object:
    root, seen = 0, 0
    device = torch.device("cuda", rank)
    wire = CollectiveTransport(dist.group.WORLD, device, stall_s=STALL_S)
    arena, tensors = weights(seed=rank)
    before = digested(tensors)
    regions = [arena.bytes_at(0, arena.nbytes)] if fault != "tensors" else list(tensors.values())

    def arrived(index: int, nbytes: int) -> None:
        nonlocal seen
        seen += 1
        if rank == 1 and fault == "dies":
            os._exit(9)
        if rank == 1 and fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)

    failed = DestinationError("no room") if rank == 1 and fault == "fails" else None
    began = time.monotonic()
    try:
        for _ in range(20 if fault in {"dies", "stops"} else 1):
            wire.broadcast(regions, root=root, arrived=arrived, failed=failed)
    finally:
        assert time.monotonic() - began < BOUND_S
    torch.cuda.synchronize()
    assert seen
    return (digested(tensors), before != digested(tensors))


@pytest.mark.parametrize("what", ["arena", "tensors"])
def test_every_rank_has_the_roots_holding_to_the_bit(what: str) -> None:
    found = run_ranks(body, 2, what, backend="nccl", timeout_s=120)
    assert [one.ended for one in found] == ["returned", "returned"], found
    (root, root_changed), (other, other_changed) = (one.value for one in found)
    assert root == other
    assert (root_changed, other_changed) == (False, True)


def test_a_rank_that_cannot_take_part_tells_the_others() -> None:
    found = run_ranks(body, 2, "fails", backend="nccl", timeout_s=120)
    assert [one.error for one in found] == ["PeerLost", "DestinationError"]
    assert not any(one.mutated for one in found)


@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_a_lost_rank_ends_the_others_within_the_deadline(fault: str) -> None:
    found = run_ranks(body, 2, fault, backend="nccl", timeout_s=BOUND_S + 60)
    assert found[0].error == "PeerLost", found
    assert found[0].seconds < BOUND_S
    assert found[1].ended in {"died", "hung"}
