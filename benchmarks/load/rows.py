"""The rows of the speed table: the checkpoint, its storage, the loaders, the limit and the goal.

In: sizes. Out: plain values. The goals are those the project set itself before the first measurement.
Not here: running them (`__main__`), printing them (`report`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.load.loaders import PEERS

MIB = 1 << 20
ALL = ("penstock", *PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`rate`: GB/s; `versus`: times as fast as the best of `peers`; `ceiling`: fraction of the limit;
    `slowdown`: at most this times `peers`; `growth`: bytes of host memory at most; `limit`: GB/s of the limit.
    """

    kind: Literal["rate", "versus", "ceiling", "slowdown", "growth", "limit"]
    value: float
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the speed table."""

    key: str
    title: str
    model: Literal["dense", "group", "moe", "digested"] = "dense"
    place: Literal["shm", "disk"] = "shm"
    cold: bool = False
    world_size: int = 1
    loaders: tuple[str, ...] = ALL
    limits: tuple[str, ...] = ("limit:h2d",)
    """The first one is the ceiling that fractions are of."""
    goals: tuple[Goal, ...] = ()
    cpu_goals: tuple[Goal, ...] = ()
    """Instead of `goals` where the device is the CPU."""
    memory_bytes: int | None = None
    max_reps: int = 99
    timeout_s: float = 60.0
    share: float = 1.0
    """Of the time budget, relative to the other rows asked for."""


_INSTANT = ("instanttensor", "instanttensor-buffered")
_CACHED = (
    Goal(kind="rate", value=52),
    Goal(kind="versus", value=1.1, peers=_INSTANT),
    Goal(kind="versus", value=1.8, peers=("fastsafetensors",)),
    Goal(kind="versus", value=6, peers=("runai",)),
)
_ZERO_COPY = (Goal(kind="versus", value=1.0, peers=PEERS),)
ROWS: dict[str, Row] = {
    row.key: row
    for row in (
        Row(
            key="a",
            title="dense BF16, tmpfs -> one GPU",
            limits=("limit:h2d", "limit:read"),
            goals=_CACHED,
            cpu_goals=_ZERO_COPY,
        ),
        Row(
            key="b",
            title="dense BF16, page cache of a disk -> one GPU",
            place="disk",
            limits=("limit:h2d", "limit:read"),
            goals=_CACHED,
            cpu_goals=_ZERO_COPY,
            share=1.3,
        ),
        Row(
            key="c",
            title="dense BF16, cold disk -> one GPU",
            place="disk",
            cold=True,
            limits=("limit:direct",),
            goals=(Goal(kind="ceiling", value=0.95), Goal(kind="versus", value=1.0, peers=PEERS)),
            cpu_goals=(Goal(kind="versus", value=1.3, peers=PEERS),),
            share=2.0,
        ),
        Row(
            key="d",
            title="dense BF16, tmpfs -> several GPUs, every rank all of it",
            model="group",
            world_size=4,
            loaders=("penstock", "instanttensor", "instanttensor-buffered", "fastsafetensors", "runai"),
            limits=("limit:group-read",),
            goals=(Goal(kind="ceiling", value=0.95), Goal(kind="versus", value=1.15, peers=_INSTANT)),
            timeout_s=90.0,
            share=3.0,
        ),
        Row(
            key="e",
            title="many tensors of 64 KiB (an MoE checkpoint), tmpfs -> one GPU",
            model="moe",
            goals=(Goal(kind="rate", value=30), Goal(kind="versus", value=1.5, peers=PEERS)),
        ),
        Row(
            key="f",
            title="digests checked against not checked, tmpfs -> one GPU",
            model="digested",
            loaders=("penstock-noverify", "penstock-verify"),
            limits=("limit:digest",),
            goals=(
                Goal(kind="slowdown", value=1.02, peers=("penstock-noverify",)),
                Goal(kind="limit", value=2000),
            ),
            share=0.6,
        ),
        Row(
            key="g",
            title="host memory of a load, memory_bytes = 256 MiB",
            memory_bytes=256 * MIB,
            limits=(),
            goals=(Goal(kind="growth", value=256 * MIB + 300e6),),
            max_reps=2,
            share=0.6,
        ),
    )
}
