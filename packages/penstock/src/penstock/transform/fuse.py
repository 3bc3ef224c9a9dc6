"""Quantisation of many tensors at once, from their own memory into the buffers they are sent from, in a few launches.

In: pairs of a source view and the tensors of its format, wherever these lie. Out: those are filled, at each `run`.
Not here: the computation (`quantize`), the kernels (`quantize_triton`), which boxes (`formats`).

    30,000 expert tensors --table of addresses, shapes, pitches--> tiles --a launch or two--> codes, scales

On the CPU the reference runs, tensor by tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from penstock.cuda.kernel_cache import device_context, launch
from penstock.errors import PlanError
from penstock.transform.formats import WHOLE, Format, outputs
from penstock.transform.quantize import dtype_of, quantise, whole_scale
from penstock.types import I64, Box, DType

_WIDTH = 16
"""Bytes of the widest load, and the columns that lie inside together; twice as many where two columns are a byte."""

_NATIVE = (8, 9)
"""Compute capability from which on the processor rounds to E4M3. Source: PTX ISA, `cvt` to .e4m3x2."""

_COLUMNS = 11
"""Columns of a launch's table: see `quantize_triton`."""

_STRIP = (4, 1024)
_WIDE_BLOCK = (128, 128)
_TILE = (32, 128)
_FLAT = (1, 4096)
"""Rows and columns of a tile: of whole rows, of square blocks, of blocks within a row and casts, of casts without rows.
4,096 elements are sixteen 16-byte loads in each of 4 warps' lanes, 16,384 the same in 8 twice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelJob:
    """A tensor, or a shard of it that cuts no block: its source and the places of its parts."""

    source: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    """In the order of `formats.outputs`; any strides between rows, none within. A shard that does not begin the tensor
    may leave out the tensor's own scale."""
    amax: torch.Tensor | None = None
    """The whole tensor's largest magnitude, one float32 on the device, for a format that needs it of a shard."""


class _Key(NamedTuple):
    """The properties that the matrices of a launch have in common."""

    dtype: DType
    wide: bool
    """All addresses, pitches and lengths are multiples of 16 bytes."""
    flat: bool
    """Each matrix is one row."""
    measured: bool
    """The largest magnitude of the whole tensor must be measured first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """The tiles of one launch."""

    key: _Key
    table: torch.Tensor
    num_matrices: int
    num_tiles: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fusion:
    """Jobs laid out for the kernels, to be run as often as the sources change.

    Ownership: holds the sources and outputs, and a device table of some 100 bytes a matrix and 8 a tile.
    """

    form: Format
    jobs: tuple[KernelJob, ...]
    groups: tuple[_Group, ...]
    peaks: torch.Tensor
    """int32, one for each job that has its amax measured."""

    def run(self) -> None:
        """Fill every output by the current values of its source.

        Order: asynchronous on the current stream of the jobs' device; on the CPU done when it returns.
        Cost: on a device one launch for each kind of source (dtype, alignment), one more where whole tensors are
            measured; no synchronisation.
        """
        if not self.groups:
            for job in self.jobs:
                for out, part in zip(job.outputs, quantise(self.form, job.source, amax=job.amax), strict=False):
                    out.copy_(part)
            return
        device = self.groups[0].table.device
        with device_context(device):
            if self.form.scaling == "nv":
                # At each run: the kernels take maxima into it, and a peak of the run before could be larger.
                self.peaks.zero_()
                # A launch of its own: every tile of a tensor must be measured before the first of its codes is rounded.
                for group in (group for group in self.groups if group.key.measured):
                    _launch("measure_tiles", group, TILE_ROWS=_TILE[0], TILE_COLS=_TILE[1])
            for group in self.groups:
                self._launch(group)
            self._wholes()

    def _launch(self, group: _Group) -> None:
        rows, cols = _tile(self.form, group.key.flat)
        if self.form.scaling == "none":
            _launch("cast_tiles", group, TARGET=str(self.form.values), TILE_ROWS=rows, TILE_COLS=cols)
            return
        device = group.table.device
        _launch(
            "quantise_tiles",
            group,
            num_warps=8 if rows * cols > 4096 else 4,
            SCALING=self.form.scaling,
            BYTES=self.form.scales.bits == 8,
            TILE_ROWS=rows,
            TILE_COLS=cols,
            BLOCK_ROWS=self.form.block[0],
            BLOCK_COLS=self.form.block[1] or cols,
            STRIP=self.form.block[1] == WHOLE,
            NATIVE=device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE,
        )

    def _wholes(self) -> None:
        """Store the scales that tensors have as a whole: a few elements, by torch."""
        jobs = [job for job in self.jobs if len(job.outputs) > 2 and job.outputs[2].numel()]
        if not jobs:
            return
        row = {id(job): i for i, job in enumerate(job for job in self.jobs if job.amax is None)}
        measured = self.peaks.view(torch.float32)
        amax = torch.stack([measured[row[id(job)]] if job.amax is None else job.amax.reshape(()).abs() for job in jobs])
        top = torch.where(amax.isfinite(), whole_scale(amax), math.nan)
        # One call for all: copies of thousands of scales, one by one, would be a launch each.
        torch._foreach_copy_([job.outputs[2] for job in jobs], list(top.unsqueeze(1).unbind()))


def fuse(form: Format, jobs: Iterable[KernelJob]) -> Fusion:
    """Lay out jobs of one format and device.

    Raises:
        PlanError: a source is not what the format takes, an output is not what it stores, or devices differ.
        MissingExtra: on a device, Triton is not installed.

    Cost: Python per job; one copy of the table from pinned memory on the current stream, which must be passed before
        another stream runs it.
    """
    jobs = tuple(jobs)
    for number, job in enumerate(jobs):
        _check(form, number, job, jobs[0].source.device)
    device = jobs[0].source.device if jobs else torch.device("cpu")
    if device.type != "cuda":
        return Fusion(form=form, jobs=jobs, groups=(), peaks=torch.empty(0, dtype=torch.int32))
    return lay_out(form, jobs, device)


def lay_out(form: Format, jobs: tuple[KernelJob, ...], device: torch.device) -> Fusion:
    """Lay out checked jobs for the kernels; on the CPU only under Triton's interpreter."""
    # Jobs whose amax is given take it from there; the others get a place each, which the kernels measure into.
    num_peaks = sum(job.amax is None for job in jobs) if form.scaling == "nv" else 0
    # Set to zero by each run.
    peaks = torch.empty(num_peaks, dtype=torch.int32, device=device)
    entries: dict[_Key, list[tuple[int, ...]]] = {}
    peak_at = iter(range(peaks.data_ptr(), peaks.data_ptr() + 4 * num_peaks, 4))
    for job in jobs:
        at = 0
        if form.scaling == "nv":
            at = next(peak_at) if job.amax is None else job.amax.data_ptr()
        dtype = dtype_of(job.source)
        # By kind and not by job: thousands of tensors of one kind are one launch.
        for entry in _matrices(form, job, at):
            flat = form.scaling == "none" and entry[3] == 1
            measured = form.scaling == "nv" and job.amax is None
            key = _Key(dtype=dtype, wide=_wide(dtype, entry), flat=flat, measured=measured)
            entries.setdefault(key, []).append(entry)
    groups = tuple(_group(form, key, np.array(rows, np.int64), device) for key, rows in entries.items())
    return Fusion(form=form, jobs=jobs, groups=groups, peaks=peaks)


def _check(form: Format, number: int, job: KernelJob, device: torch.device) -> None:
    """Raise PlanError unless a job's tensors are what the format takes and stores, on this device."""
    shape = tuple(job.source.shape)
    want = outputs(form, f"job {number}", dtype_of(job.source), shape, Box.full(shape))
    if form.global_suffix and len(job.outputs) == 2:
        want = want[:2]
    actual = [(tuple(out.shape), dtype_of(out)) for out in job.outputs]
    if actual != [(part.shape, part.dtype) for part in want]:
        expected = ", ".join(f"{part.dtype} {list(part.shape)}" for part in want)
        raise PlanError(f"job {number}: outputs {actual} are not {expected}, which {form.tag} stores of {list(shape)}")
    # All on one device: the kernels get raw addresses, and those of another device would fault there.
    others = (*job.outputs, *(() if job.amax is None else (job.amax,)))
    if any(tensor.device != device for tensor in (job.source, *others)):
        raise PlanError(f"job {number}: its tensors are not all on {device}")
    if job.amax is not None and (job.amax.dtype is not torch.float32 or job.amax.numel() != 1):
        raise PlanError(f"job {number}: amax is one float32, not {job.amax.dtype} {list(job.amax.shape)}")
    if any(out.numel() and out.shape[-1] > 1 and out.stride(-1) != 1 for out in job.outputs if out.ndim):
        raise PlanError(f"job {number}: an output's last dim is not contiguous")


def _matrices(form: Format, job: KernelJob, peak: int) -> Iterator[tuple[int, ...]]:
    """Yield the table's entries: the last two dims, for each element of the others; one row for a contiguous cast."""
    source, out = job.source, job.outputs[0]
    if not source.numel():
        return
    size = source.element_size()
    # A cast has no blocks, so the shape does not matter: a single long row has no edges within it.
    if form.scaling == "none" and source.is_contiguous() and out.is_contiguous():
        yield source.data_ptr(), 0, 1, 1, source.numel(), out.data_ptr(), 0, 0, 0, 0
        return
    while source.ndim < 2:
        source, out = source.unsqueeze(0), out.unsqueeze(0)
    scales = job.outputs[1] if len(job.outputs) > 1 else None
    rows, cols = source.shape[-2:]
    for index in itertools.product(*map(range, source.shape[:-2])):
        src_at = source.data_ptr() + size * sum(i * s for i, s in zip(index, source.stride(), strict=False))
        out_at = out.data_ptr() + out.element_size() * sum(i * s for i, s in zip(index, out.stride(), strict=False))
        places = (src_at, source.stride(-2), source.stride(-1), rows, cols, out_at, out.stride(-2))
        if scales is None:
            yield *places, 0, 0, 0
            continue
        # The scales have strides of their own over the outer dims.
        skipped = sum(i * s for i, s in zip(index, scales.stride(), strict=False))
        yield *places, scales.data_ptr() + scales.element_size() * skipped, scales.stride(-2), peak


def _wide(dtype: DType, entry: tuple[int, ...]) -> bool:
    """Return whether loads and stores of 16 bytes are possible: see `quantise_tiles`."""
    src, row_stride, col_stride, _, cols, out, out_pitch = entry[:7]
    at = src % _WIDTH or out % _WIDTH or (row_stride * dtype.bits // 8) % _WIDTH
    return col_stride == 1 and not (at or cols % (2 * _WIDTH) or out_pitch % _WIDTH)


def _tile(form: Format, flat: bool) -> tuple[int, int]:
    """Return rows and columns of a program's tile, which cuts no block."""
    if flat:
        return _FLAT
    if form.block[1] == WHOLE:
        return _STRIP
    return _WIDE_BLOCK if form.block[0] > 1 else _TILE


def _group(form: Format, key: _Key, entries: I64, device: torch.device) -> _Group:
    """Return the launch of these matrices: their columns, the first tile of each, and the matrix of each tile."""
    tile_rows, tile_cols = _tile(form, key.flat)
    across = 1 if form.block[1] == WHOLE else -(-entries[:, 4] // tile_cols)
    tiles = -(-entries[:, 3] // tile_rows) * across
    stop = np.cumsum(tiles)
    # Pinned: a copy from pageable memory would make the call wait for the device.
    host = torch.empty(_COLUMNS * len(entries) + int(stop[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    columns = host.numpy()
    columns[: 10 * len(entries)] = entries.T.reshape(-1)
    columns[10 * len(entries) : _COLUMNS * len(entries)] = stop - tiles
    columns[_COLUMNS * len(entries) :] = np.repeat(np.arange(len(entries)), tiles)
    table = host.to(device, non_blocking=True)
    return _Group(key=key, table=table, num_matrices=len(entries), num_tiles=int(stop[-1]))


def _launch(name: str, group: _Group, *, num_warps: int = 4, **constants: int | str) -> None:
    arguments = group.table, group.num_matrices, _COLUMNS * group.num_matrices
    constants |= {"SOURCE": str(group.key.dtype), "WIDE": group.key.wide}
    launch("penstock.transform.quantize_triton", name, group.num_tiles, arguments, constants, num_warps=num_warps)
