"""Layouts of matrices and random parts between them, with a naive copy in numpy as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.support.shards import shard_box

from penstock.memory.arena import Arena
from penstock.plan.layout import Form, Layout
from penstock.plan.sync import ReceiverPlan, plan_sync
from penstock.sync.local_version import LocalVersion
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Memory
from penstock.types import Box, DType


def arena(nbytes: int) -> Memory:
    """Memory that every transport of a host reaches."""
    made = Arena.allocate(max(nbytes, 1))
    return Memory(address=made.address, nbytes=nbytes, owner=made)


def content(memory: Memory) -> np.ndarray:
    assert isinstance(memory.owner, Arena)
    return memory.owner.bytes_at(0, memory.nbytes).numpy()


def layout(member: str, tensors: Sequence[tuple[str, tuple[int, ...], Box]], num_regions: int = 1) -> Layout:
    """Pack float32 shards one after the other, over alternating regions."""
    forms, sizes, where = [], [0] * num_regions, []
    for i, (_, shape, box) in enumerate(tensors):
        form = Form(dtype=DType.F32, shape=shape, box=box)
        forms.append(form)
        where.append((i % num_regions, sizes[i % num_regions]))
        sizes[i % num_regions] += form.span_bytes
    first = np.cumsum([0, *sizes])
    return Layout(
        member=member,
        regions=tuple(sizes),
        forms=tuple(forms),
        names=tuple(name for name, _, _ in tensors),
        form=np.arange(len(forms)),
        offset=np.array([first[region] + at for region, at in where], np.int64),
    )


def sharded(side: str, shapes: Sequence[tuple[int, int]], dim: int, world_size: int, num_regions: int) -> list[Layout]:
    return [
        layout(
            f"{side}{rank}",
            [(f"layers.{i}.w", shape, shard_box(shape, dim, rank, world_size)) for i, shape in enumerate(shapes)],
            num_regions,
        )
        for rank in range(world_size)
    ]


def held(one: Layout, links: PeerLinks, seed: int = 0, pack_bytes: int = 0) -> LocalVersion:
    """Return a rank with random bytes in memory and no version."""
    memories = [arena(nbytes) for nbytes in one.regions]
    chance = np.random.default_rng([seed, sum(one.member.encode())])
    for memory in memories:
        content(memory)[:] = chance.integers(0, 256, memory.nbytes, np.uint8)
    return LocalVersion(one, memories, links, pack_bytes=pack_bytes)


def naive(part: ReceiverPlan, sources: Sequence[np.ndarray], out: np.ndarray) -> np.ndarray:
    """Return the expected memory of the receiver, copied run by run."""
    for i in range(len(part.source)):
        for row in range(int(part.num_rows[i])):
            src = int(part.src[i] + row * part.src_pitch[i])
            dst = int(part.dst[i] + row * part.dst_pitch[i])
            run = int(part.run_bytes[i])
            out[dst : dst + run] = sources[int(part.source[i])][src : src + run]
    return out


def whole(one: LocalVersion) -> np.ndarray:
    return np.concatenate([content(memory) for memory in one.regions.memories])


def parts(holdings: Sequence[Layout], wants: Sequence[Layout], bucket_bytes: int) -> list[ReceiverPlan]:
    plan = plan_sync(holdings, wants, bucket_bytes=bucket_bytes)
    return [plan.part(i) for i in range(len(wants))]
