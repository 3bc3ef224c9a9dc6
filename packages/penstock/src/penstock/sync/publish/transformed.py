"""A publisher's tagged tensors, which are quantised or cast into separate memory in addition to the parameters.

A rank owns the blocks that begin in its shard. A block that crosses the edge of the shard is quantised in a boundary
buffer, with elements from other ranks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch

from penstock.cuda.events import record_events
from penstock.errors import PlanError
from penstock.loader.tensor import torch_dtype
from penstock.memory.arena import Arena, needed_bytes
from penstock.plan.intersect import common_box
from penstock.plan.sync import layer_order
from penstock.sync.publish.fill import fill
from penstock.sync.recording.layout import cut
from penstock.sync.shards import ShardRow, row_of
from penstock.transform.formats import Format, FormatOutput, alignment, fault, foreign, format_of, outputs, owned
from penstock.transform.fuse import Fusion, KernelJob, fuse
from penstock.transform.select import reasons
from penstock.types import I64, MIB, Box, DType

Transforms = str | Mapping[str, Sequence[str]]
"""A tag for the weights that checkpoints store in that format, or patterns of tensor names for each tag."""

BATCH_BYTES = 512 * MIB
"""Size of a batch's codes in bytes. A batch takes 0.6 ms at 1.9 TB/s of source, which hides the tenths of a
millisecond of Python. Source: benchmarks/results/h200_202611/transform.md."""


class Chosen(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A row of this rank that is also offered in an additional format."""

    row: ShardRow
    form: Format
    owned: Box


class _Batch(msgspec.Struct, frozen=True, eq=False):
    """Rows that are quantised together."""

    rows: I64
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    fusions: tuple[Fusion, ...]

    def queue(self) -> list[torch.cuda.Event]:
        for to, of in self.copies:
            to.copy_(of)
        for fusion in self.fusions:
            fusion.run()
        devices = {job.source.device for fusion in self.fusions for job in fusion.jobs[:1]}
        return record_events(sorted(str(device) for device in devices if device.type == "cuda"))


def choose(transforms: Transforms, rows: Sequence[ShardRow]) -> tuple[Chosen, ...]:
    """Choose rows and formats only by names, dtypes and shapes, so that all ranks make the same choice."""
    patterns_of = {transforms: None} if isinstance(transforms, str) else dict(transforms)
    chosen = []
    for tag, patterns in patterns_of.items():
        form = format_of(tag)
        plain = [row for row in rows if not row.form.tag]
        kept_plain = _reasons_plain(form, plain, patterns)
        for row in plain:
            if not kept_plain[row.name]:
                shape, box = row.form.shape, row.form.box
                if form.global_suffix and box != Box.full(shape):
                    # The scale depends on the maximum over all ranks, but ranks exchange only elements.
                    message = f"{tag} has one scale for the whole tensor, but this rank has only a part of it"
                    raise PlanError(message, tensor=row.name, hint="gather the tensor, or use another format")
                chosen.append(Chosen(row=row, form=form, owned=owned(form, shape, box)))
    return tuple(chosen)


def _reasons_plain(form: Format, rows: Sequence[ShardRow], patterns: Sequence[str] | None) -> dict[str, str]:
    specs = [(row.name, row.form.dtype, row.form.shape) for row in rows]
    if form.scaling != "none":
        return reasons(form, specs, only=patterns or ("*.weight",))

    def reason(name: str, dtype: DType, shape: tuple[int, ...]) -> str:
        if dtype is form.values:
            return "it has this dtype already"
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns or ("*",)):
            return "its name matches no pattern"
        return fault(form, dtype, shape) or ""

    return {name: reason(name, dtype, shape) for name, dtype, shape in specs}


class Transformed:
    """Memory for the codes and scales of the chosen rows. Each publish fills this memory from the parameters."""

    def __init__(self, chosen: Sequence[Chosen], *, bucket_bytes: int = BATCH_BYTES) -> None:
        mine, parts, boundary = _lay_out(chosen)
        tensors, buffers = _allocate(_specs(parts)), _allocate(_boundary_specs(boundary))
        self.nbytes, self.boundary_bytes = required_bytes(chosen)
        self.rows = tuple(
            row_of(part.name, tensor, part.shape, part.box.start, tag=choice.form.tag)
            for (choice, part), tensor in zip(parts, tensors, strict=True)
        )
        # The key is the choice and not the row's name, because a row may be chosen in several formats.
        by_chosen: dict[int, list[tuple[Box, torch.Tensor]]] = {}
        for (choice, edge), buffer in zip(boundary, buffers, strict=True):
            by_chosen.setdefault(id(choice), []).append((edge, buffer))
        self.wants = tuple(
            row_of(choice.row.name, cut(buffer, _from(box, edge)), choice.row.form.shape, box.start)
            for choice in mine
            for edge, buffer in by_chosen.get(id(choice), ())
            for box in foreign(choice.row.form.box, edge)
        )
        self._batches = tuple(_batches(mine, tensors, by_chosen, bucket_bytes))
        for device in {
            job.source.device for batch in self._batches for fusion in batch.fusions for job in fusion.jobs[:1]
        }:
            if device.type == "cuda":
                # The kernels' tables were copied on the current stream. Wait, because `fill` may use another stream.
                torch.cuda.synchronize(device)

    def fill(self, ready: Callable[[I64], None], *, stall_s: float = 30.0) -> None:
        """Quantise the current parameters, layer by layer. The boundary buffers must already be filled."""
        batches = ((batch.rows, batch.queue) for batch in self._batches)
        fill(batches, ready, stall_s=stall_s, work="batch of quantising")


def required_bytes(chosen: Sequence[Chosen]) -> tuple[int, int]:
    """Return the size of the codes and scales of the chosen rows, and of their boundary buffers, in bytes."""
    _, parts, boundary = _lay_out(chosen)
    return _arena_bytes(_specs(parts)), _arena_bytes(_boundary_specs(boundary))


_Spec = tuple[torch.device, torch.dtype, tuple[int, ...]]


def _lay_out(
    chosen: Sequence[Chosen],
) -> tuple[list[Chosen], list[tuple[Chosen, FormatOutput]], list[tuple[Chosen, Box]]]:
    mine = [choice for choice in chosen if choice.owned.num_elements]
    mine = [mine[i] for i in layer_order([choice.row.name for choice in mine])[0].tolist()]
    parts = [(choice, part) for choice in mine for part in _outputs(choice, choice.owned)]
    return mine, parts, [(choice, edge) for choice in mine for edge in _boundary_blocks(choice)]


def _outputs(choice: Chosen, box: Box) -> tuple[FormatOutput, ...]:
    return outputs(choice.form, choice.row.name, choice.row.form.dtype, choice.row.form.shape, box)


def _specs(parts: Sequence[tuple[Chosen, FormatOutput]]) -> list[_Spec]:
    return [(choice.row.tensor.device, torch_dtype(part.dtype), part.box.shape) for choice, part in parts]


def _boundary_specs(boundary: Sequence[tuple[Chosen, Box]]) -> list[_Spec]:
    return [(choice.row.tensor.device, choice.row.tensor.dtype, edge.shape) for choice, edge in boundary]


def _nbytes(spec: _Spec) -> int:
    return spec[1].itemsize * math.prod(spec[2])


def _arena_bytes(specs: Sequence[_Spec]) -> int:
    devices = dict.fromkeys(device for device, _, _ in specs)
    return sum(needed_bytes(_nbytes(spec) for spec in specs if spec[0] == device) for device in devices)


def _allocate(specs: Sequence[_Spec]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [torch.empty(0)] * len(specs)
    for device in dict.fromkeys(device for device, _, _ in specs):
        here = [i for i, spec in enumerate(specs) if spec[0] == device]
        nbytes = [_nbytes(specs[i]) for i in here]
        arena = Arena.allocate(needed_bytes(nbytes), device)
        for i, length, offset in zip(here, nbytes, arena.place(nbytes), strict=True):
            tensors[i] = arena.bytes_at(offset, length).view(specs[i][1]).view(specs[i][2])
    return tensors


def _inside(choice: Chosen) -> Box:
    box, shape = choice.row.form.box, choice.row.form.shape
    step = alignment(choice.form, shape)
    ends = zip(choice.owned.start, box.stop, step, shape, strict=True)
    stop = tuple(max(a, b if b == n else b // s * s) for a, b, s, n in ends)
    return Box(start=choice.owned.start, stop=stop)


def _boundary_blocks(choice: Chosen) -> tuple[Box, ...]:
    inside = _inside(choice)
    return foreign(inside, choice.owned) if inside.num_elements else (choice.owned,)


def _from(box: Box, outer: Box) -> Box:
    moved = (tuple(a - b for a, b in zip(end, outer.start, strict=True)) for end in (box.start, box.stop))
    return Box(start=next(moved), stop=next(moved))


def _batches(
    mine: Sequence[Chosen],
    tensors: Sequence[torch.Tensor],
    boundary: Mapping[int, Sequence[tuple[Box, torch.Tensor]]],
    bucket_bytes: int,
) -> Iterator[_Batch]:
    rows: list[int] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    jobs: dict[tuple[str, torch.device], list[KernelJob]] = {}
    forms = {choice.form.tag: choice.form for choice in mine}
    nbytes = first = 0

    def batch() -> _Batch:
        fusions = tuple(fuse(forms[tag], queued) for (tag, _), queued in jobs.items())
        return _Batch(np.array(rows, np.int64), tuple(copies), fusions)

    for choice in mine:
        # The outputs are codes and, depending on the format, scales and the tensor's global scale.
        count = 1 if choice.form.scaling == "none" else 3 if choice.form.global_suffix else 2
        outs = tensors[first : first + count]
        key = choice.form.tag, choice.row.tensor.device
        box = choice.row.form.box
        if (inside := _inside(choice)).num_elements:
            jobs.setdefault(key, []).append(_job(choice, inside, cut(choice.row.tensor, _from(inside, box)), outs))
        for edge, buffer in boundary.get(id(choice), ()):
            jobs.setdefault(key, []).append(_job(choice, edge, buffer, outs))
            if common := common_box(edge, box):
                copies.append((cut(buffer, _from(common, edge)), cut(choice.row.tensor, _from(common, box))))
        rows += range(first, first + count)
        first += count
        nbytes += sum(out.nbytes for out in outs)
        if nbytes >= bucket_bytes:
            yield batch()
            rows, copies, jobs, nbytes = [], [], {}, 0
    if rows:
        yield batch()


def _job(choice: Chosen, box: Box, source: torch.Tensor, outs: Sequence[torch.Tensor]) -> KernelJob:
    whole = _outputs(choice, choice.owned)
    parts = _outputs(choice, box)
    places = tuple(cut(out, _from(part.box, all_of.box)) for out, part, all_of in zip(outs, parts, whole, strict=True))
    return KernelJob(source=source, outputs=places)
