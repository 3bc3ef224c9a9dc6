"""New device memory in slabs, so that bytes come into the first while others are still allocated.

In: a line's tensors, a device. Out: slab after slab, in the line's order: an arena, its rows, its tensors.
Not here: registering them (`holding`), what is read into them (`fetch`).

A driver takes 1 to 3 ms for a GB that was given back lately, as long as NVLink takes to fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.ticket import Ticket
from penstock.fleet.holding import Holding
from penstock.loader.tensor import as_tensors
from penstock.memory.arena import Arena, needed_bytes
from penstock.transport.choose import Links
from penstock.types import I64, TensorTable

FIRST_BYTES = 1 << 30
"""Of the first slab, before which nothing is read or mapped: 2 ms. Each is twice the last."""
MOST_BYTES = 4 << 30
"""Of a slab, but for a tensor that is larger. While one is allocated (8 ms) nothing may be launched: the reads under
way (3 of 2 GiB, 16 ms) keep the link busy meanwhile. Each is mapped by every reader, in about 1 ms."""
SLABBED = ("cuda",)
"""Kinds of devices whose memory takes time to get; a host's takes it when it is touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Memory of some rows of a line."""

    arena: Arena
    rows: Sequence[torch.Tensor]
    tensors: dict[str, torch.Tensor]


def slabs(table: TensorTable, device: torch.device, is_over: Callable[[], bool], *, is_one: bool) -> Iterator[Slab]:
    """Slabs for the rows of `table`, each allocated when it is asked for.

    Args:
        table: of a line.
        device: where.
        is_over: until then pages of a host's are made present.
        is_one: all in one slab, as where somebody writes to any row from the start.

    Raises:
        DestinationError, DeviceOutOfMemory: as `Arena.allocate`.

    Order: the first is asked for by whose tensors they will be: on a device all belong to its stream of then.
    """
    is_cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if is_cuda else None
    for start, stop in _cuts(table.nbytes) if device.type in SLABBED and not is_one else [(0, len(table))]:
        nbytes = table.nbytes[start:stop].tolist()
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            arena = Arena.allocate(needed_bytes(nbytes), device)
        arena.warm(is_over)
        offsets = arena.place(nbytes)
        rows = [arena.bytes_at(*run) for run in zip(offsets, nbytes, strict=True)]
        whole, dtypes, shapes = arena.bytes_at(0, arena.nbytes), table.dtypes[start:stop], table.shapes[start:stop]
        made = as_tensors(whole, dtypes, shapes, offsets) if rows else []
        yield Slab(arena=arena, rows=rows, tensors=dict(zip(table.names[start:stop], made, strict=True)))


def _cuts(nbytes: I64) -> Iterator[tuple[int, int]]:
    """Ranges of rows, one at least; each ends before the row that would make it too large. All have bytes, if any has:
    once the last byte is there, nothing is left to be made."""
    stops, most, start = np.cumsum(nbytes), FIRST_BYTES, 0
    while start < len(nbytes):
        used = int(stops[start - 1]) if start else 0
        fits, least = np.searchsorted(stops, [used + most, used], side="right").tolist()
        last = min(max(fits - 1, least), len(nbytes) - 1)
        stop = int(np.searchsorted(stops, stops[last], side="right"))
        yield start, stop
        start, most = stop, min(2 * most, MOST_BYTES)
    if not start:
        yield 0, 0


def lay(rest: Iterator[Slab], holding: Holding, made: dict[str, torch.Tensor], links: Links, ticket: Ticket) -> None:
    """Allocate what is left and lay it under the holding, until the fetch of this ticket is over."""
    for slab in rest:
        if ticket.done:
            return
        made |= slab.tensors  # before its bytes can come: the fetch may end with them
        holding.lay(slab.rows, slab.arena, links)
        ticket.wake()
