"""A publisher's tensors under tags: quantised or cast into memory of their own, beside the parameters.

In: a rank's rows, and which of them are offered as what. Out: rows of codes and scales, filled bucket after bucket.
Not here: formats (`transform`), how foreign elements come (`boundary_exchange`), when (`publisher`).

    row [100, 300) of blocks of 128 owns [128, 384):  [128, 256) from where it lies
                                                      [256, 384) from a seam: ours, and [300, 384) of other ranks
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.errors import DestinationError, PlanError
from penstock.loader.tensor import torch_dtype
from penstock.memory.arena import Arena, needed_bytes
from penstock.plan.balance import layer_order
from penstock.sync.recording.layout import cut
from penstock.sync.recording.stride_map import meet
from penstock.sync.shards import Row, row_of
from penstock.transform.formats import Format, format_of
from penstock.transform.fuse import Fusion, Job, fuse
from penstock.transform.geometry import Output, alignment, fault, foreign, outputs, owned
from penstock.transform.select import reasons
from penstock.types import I64, MIB, Box, DType

Transforms = str | Mapping[str, Sequence[str]]
"""A tag, for the weights that checkpoints have so; or tags, and for each the patterns of the names it is for."""

LOT_BYTES = 512 * MIB
"""Of codes, quantised at once: 0.6 ms at 1.9 TB/s of source (benchmarks/results/h200_202611/transform.md), so that the
interpreter's tenths of a millisecond for each are hidden."""

_NAP_S = 0.0001


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chosen:
    """A row of this rank that is also offered in another format."""

    row: Row
    form: Format
    owned: Box
    """The blocks that are ours to give; empty: others give them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Lot:
    """The rows that are quantised at once."""

    rows: I64
    """Numbers of the rows that are whole then."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """From our parameters into seams."""
    fusions: tuple[Fusion, ...]

    def run(self) -> None:
        """Queue it."""
        for to, of in self.copies:
            to.copy_(of)
        for fusion in self.fusions:
            fusion.run()


def choose(transforms: Transforms, rows: Sequence[Row]) -> tuple[Chosen, ...]:
    """Choose the rows and formats to offer, by names, dtypes and shapes alone, so that all ranks choose alike.

    A cast takes every tensor whose name is asked for and whose dtype is another; a block format linear weights alone
    (`transform.select`).

    Raises:
        ConfigError: a tag that is none. PlanError: a scale for a whole tensor of which this rank holds a part.
    """
    asked = {transforms: None} if isinstance(transforms, str) else dict(transforms)
    found = []
    for tag, patterns in asked.items():
        form = format_of(tag)
        plain = [row for row in rows if not row.form.tag]
        kept = _kept(form, plain, patterns)
        for row in plain:
            if not kept[row.name]:
                shape, box = row.form.shape, row.form.box
                if form.global_suffix and box != Box.full(shape):
                    message = f"{tag} has one scale for the whole tensor, of which this rank holds a part"
                    raise PlanError(message, tensor=row.name, hint="gather it, or take another format")
                found.append(Chosen(row=row, form=form, owned=owned(form, shape, box)))
    return tuple(found)


def _kept(form: Format, rows: Sequence[Row], patterns: Sequence[str] | None) -> dict[str, str]:
    """Return why each row is not offered in a format; an empty reason: it is."""
    specs = [(row.name, row.form.dtype, row.form.shape) for row in rows]
    if form.scaling != "none":
        return reasons(form, specs, only=patterns or ("*.weight",))

    def reason(name: str, dtype: DType, shape: tuple[int, ...]) -> str:
        if dtype is form.values:
            return "it is that already"
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns or ("*",)):
            return "its name is none of those asked for"
        return fault(form, dtype, shape) or ""

    return {name: reason(name, dtype, shape) for name, dtype, shape in specs}


class Transformed:
    """The memory of what was chosen; filled at each publish.

    Attributes:
        rows: codes and scales, under their tags.
        wants: rows in the seams, of elements that other ranks hold.
        nbytes: of codes and scales.
        seam_bytes: of blocks that reach beyond what we hold, in the parameters' dtype.

    Args:
        chosen: of `choose`.
        bucket_bytes: what is filled at once, at least.

    Raises:
        DeviceOutOfMemory, DestinationError: there is no room.
        MissingExtra: on a device, Triton is not installed.

    Ownership: holds views of the parameters.
    """

    def __init__(self, chosen: Sequence[Chosen], *, bucket_bytes: int = LOT_BYTES) -> None:
        mine, parts, boundary_exchange = _laid(chosen)
        tensors = _allocate(_specs(parts))
        buffers = _allocate(
            [(one.row.tensor.device, one.row.tensor.dtype, edge.shape) for one, edge in boundary_exchange]
        )
        self.nbytes, self.seam_bytes = room(chosen)
        self.rows = tuple(
            row_of(part.name, tensor, part.shape, part.box.start, tag=one.form.tag)
            for (one, part), tensor in zip(parts, tensors, strict=True)
        )
        by_chosen: dict[int, list[tuple[Box, torch.Tensor]]] = {}
        for (one, edge), buffer in zip(boundary_exchange, buffers, strict=True):
            by_chosen.setdefault(id(one), []).append((edge, buffer))
        self.wants = tuple(want for one in mine for want in _wants(one, by_chosen.get(id(one), ())))
        self._lots = tuple(_lots(mine, tensors, by_chosen, bucket_bytes))
        for device in {job.source.device for lot in self._lots for fusion in lot.fusions for job in fusion.jobs[:1]}:
            if device.type == "cuda":  # the kernels' tables are there: another stream may run them
                torch.cuda.synchronize(device)

    def fill(self, ready: Callable[[I64], None], *, stall_s: float = 30.0) -> None:
        """Quantise everything as it is now, layer after layer.

        Args:
            ready: told the numbers of rows as they are whole, or queued on the current stream.

        Raises:
            DestinationError: the device got on with nothing for `stall_s`.

        Order: after the seams' foreign elements came, and what the current stream has queued.
        """
        before: tuple[_Lot, list[torch.cuda.Event]] | None = None
        for lot in self._lots:
            lot.run()
            events = _events(lot)
            if before is not None:  # one lot is queued behind the one that is waited for
                _wait(before[1], stall_s)
                ready(before[0].rows)
            before = lot, events
        if before is not None:
            _wait(before[1], stall_s)
            ready(before[0].rows)


def room(chosen: Sequence[Chosen]) -> tuple[int, int]:
    """Bytes of the codes and scales of what was chosen, and of its seams."""
    _, parts, boundary_exchange = _laid(chosen)
    buffers = [(one.row.tensor.device, one.row.tensor.dtype, edge.shape) for one, edge in boundary_exchange]
    return _room(_specs(parts)), _room(buffers)


_Spec = tuple[torch.device, torch.dtype, tuple[int, ...]]


def _laid(
    chosen: Sequence[Chosen],
) -> tuple[list[Chosen], list[tuple[Chosen, Output]], list[tuple[Chosen, Box]]]:
    """Return the rows that own blocks, by layer; the stored parts of each; and its boundary blocks."""
    mine = [one for one in chosen if one.owned.num_elements]
    mine = [mine[i] for i in layer_order([one.row.name for one in mine])[0].tolist()]
    parts = [(one, part) for one in mine for part in _outputs(one, one.owned)]
    return mine, parts, [(one, edge) for one in mine for edge in _boundary_exchange(one)]


def _outputs(one: Chosen, box: Box) -> tuple[Output, ...]:
    return outputs(one.form, one.row.name, one.row.form.dtype, one.row.form.shape, box)


def _specs(parts: Sequence[tuple[Chosen, Output]]) -> list[_Spec]:
    return [(one.row.tensor.device, torch_dtype(part.dtype), part.box.shape) for one, part in parts]


def _nbytes(spec: _Spec) -> int:
    return spec[1].itemsize * math.prod(spec[2])


def _room(specs: Sequence[_Spec]) -> int:
    """Bytes of the arenas for tensors."""
    devices = dict.fromkeys(device for device, _, _ in specs)
    return sum(needed_bytes(_nbytes(spec) for spec in specs if spec[0] == device) for device in devices)


def _allocate(specs: Sequence[_Spec]) -> list[torch.Tensor]:
    """Memory for tensors: one arena a device."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(specs)
    for device in dict.fromkeys(device for device, _, _ in specs):
        here = [i for i, spec in enumerate(specs) if spec[0] == device]
        nbytes = [_nbytes(specs[i]) for i in here]
        arena = Arena.allocate(needed_bytes(nbytes), device)
        for i, length, offset in zip(here, nbytes, arena.place(nbytes), strict=True):
            found[i] = arena.bytes_at(offset, length).view(specs[i][1]).view(specs[i][2])
    return found


def _inside(one: Chosen) -> Box:
    """The blocks that we both own and hold whole."""
    held, shape = one.row.form.box, one.row.form.shape
    step = alignment(one.form, shape)
    ends = zip(one.owned.start, held.stop, step, shape, strict=True)
    stop = tuple(max(a, b if b == n else b // s * s) for a, b, s, n in ends)
    return Box(start=one.owned.start, stop=stop)


def _boundary_exchange(one: Chosen) -> tuple[Box, ...]:
    """The other blocks that we own: boxes that cut none."""
    inside = _inside(one)
    return foreign(inside, one.owned) if inside.num_elements else (one.owned,)


def _wants(one: Chosen, boundary_exchange: Iterable[tuple[Box, torch.Tensor]]) -> Iterator[Row]:
    for edge, buffer in boundary_exchange:
        for box in foreign(one.row.form.box, edge):
            yield row_of(one.row.name, cut(buffer, _from(box, edge)), one.row.form.shape, box.start)


def _from(box: Box, outer: Box) -> Box:
    """A box as it lies in one around it."""
    moved = (tuple(a - b for a, b in zip(end, outer.start, strict=True)) for end in (box.start, box.stop))
    return Box(start=next(moved), stop=next(moved))


def _lots(
    mine: Sequence[Chosen],
    tensors: Sequence[torch.Tensor],
    boundary_exchange: Mapping[int, Sequence[tuple[Box, torch.Tensor]]],
    bucket_bytes: int,
) -> Iterator[_Lot]:
    """Cut the chosen rows, in order, into lots of about equal bytes."""
    rows: list[int] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    jobs: dict[tuple[str, torch.device], list[Job]] = {}
    forms = {one.form.tag: one.form for one in mine}
    nbytes = first = 0

    def lot() -> _Lot:
        fusions = tuple(fuse(forms[tag], found) for (tag, _), found in jobs.items())
        return _Lot(np.array(rows, np.int64), tuple(copies), fusions)

    for one in mine:
        count = 1 if one.form.scaling == "none" else 3 if one.form.global_suffix else 2
        outs = tensors[first : first + count]
        key = one.form.tag, one.row.tensor.device
        box = one.row.form.box
        if (inside := _inside(one)).num_elements:
            jobs.setdefault(key, []).append(_job(one, inside, cut(one.row.tensor, _from(inside, box)), outs))
        for edge, buffer in boundary_exchange.get(id(one), ()):
            jobs.setdefault(key, []).append(_job(one, edge, buffer, outs))
            if common := meet(edge, box):
                copies.append((cut(buffer, _from(common, edge)), cut(one.row.tensor, _from(common, box))))
        rows += range(first, first + count)
        first += count
        nbytes += sum(out.nbytes for out in outs)
        if nbytes >= bucket_bytes:
            yield lot()
            rows, copies, jobs, nbytes = [], [], {}, 0
    if rows:
        yield lot()


def _job(one: Chosen, box: Box, source: torch.Tensor, outs: Sequence[torch.Tensor]) -> Job:
    """A box that cuts no block, from where its elements are to its place in what we own."""
    name, dtype, shape = one.row.name, one.row.form.dtype, one.row.form.shape
    whole, parts = (outputs(one.form, name, dtype, shape, some) for some in (one.owned, box))
    places = tuple(cut(out, _from(part.box, all_of.box)) for out, part, all_of in zip(outs, parts, whole, strict=True))
    return Job(source=source, outputs=places)


def _events(lot: _Lot) -> list[torch.cuda.Event]:
    """Record one event per device, after the work that was queued."""
    found = []
    devices = {job.source.device for fusion in lot.fusions for job in fusion.jobs[:1]}
    for device in sorted(str(device) for device in devices if device.type == "cuda"):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        found.append(event)
    return found


def _wait(events: Iterable[torch.cuda.Event], stall_s: float) -> None:
    deadline = time.monotonic() + stall_s
    for event in events:
        while not event.query():
            if time.monotonic() > deadline:
                raise DestinationError(f"a device quantised nothing for {stall_s:g} s")
            time.sleep(_NAP_S)
