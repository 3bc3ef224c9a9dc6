"""Quantise many tensors in a few kernel launches, from their memory into send buffers.

On the CPU, the reference code in `quantize` processes the tensors one by one. The kernels are in `quantize_triton`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from penstock.cuda.kernel_cache import Launch, device_context
from penstock.errors import PlanError
from penstock.transform.formats import WHOLE, Format, outputs
from penstock.transform.quantize import dtype_of, quantise, whole_scale
from penstock.types import I64, Box, DType

_WIDTH = 16
"""Size of the widest load in bytes. Groups of this many columns (twice as many if two columns share a byte) are either
inside the tensor or outside."""

NATIVE = (8, 9)
"""Minimum compute capability that rounds to E4M3. Source: PTX ISA, `cvt` to .e4m3x2."""

_COLUMNS = 11
"""Number of columns in a launch's table. See `quantize_triton`."""

_STRIP = (4, 1024)
_WIDE_BLOCK = (128, 128)
_TILE = (32, 128)
_FLAT = (1, 4096)
"""Rows and columns of a tile for whole rows, for square blocks, for blocks within a row and casts, and for casts
without rows. 4,096 elements are sixteen 16-byte loads for each lane of 4 warps."""


class KernelJob(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A tensor, or a shard whose edges cut no block, with its output tensors."""

    source: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    """Outputs in the order of `formats.outputs`, with any row stride and contiguous rows. A shard without the tensor's
    first element may omit the scale for the whole tensor."""
    amax: torch.Tensor | None = None
    """Largest magnitude of the whole tensor as one float32 on the device, for a shard whose format needs it."""


class _Key(NamedTuple):
    """Properties that all matrices of a launch share."""

    dtype: DType
    wide: bool
    """All addresses, pitches and lengths are multiples of 16 bytes."""
    flat: bool
    """Each matrix is one row."""
    measured: bool
    """The largest magnitude of the whole tensor must be measured first."""


class _LaunchTiles(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Tiles of one launch."""

    key: _Key
    table: torch.Tensor
    num_matrices: int
    num_tiles: int


class Fusion(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Jobs that are laid out for the kernels, to be run whenever the sources have changed.

    A `Fusion` holds the sources and outputs, and a device table of about 100 bytes per matrix and 8 per tile.
    """

    form: Format
    jobs: tuple[KernelJob, ...]
    groups: tuple[_LaunchTiles, ...]
    peaks: torch.Tensor
    """int32 for each job whose amax is measured."""

    def run(self) -> None:
        """Fill every output from the current values of its source.

        On the CPU the outputs are complete when `run` returns. On a device this is asynchronous on the current stream,
        with one launch for each kind of source (dtype, alignment) and one more where whole tensors are measured.
        """
        if not self.groups:
            for job in self.jobs:
                for out, part in zip(job.outputs, quantise(self.form, job.source, amax=job.amax), strict=False):
                    out.copy_(part)
            return
        device = self.groups[0].table.device
        with device_context(device):
            if self.form.scaling == "nv":
                # The kernels compute the maximum with the old value, so reset it.
                self.peaks.zero_()
                # All tiles of a tensor must be measured before its first code is rounded.
                for group in (group for group in self.groups if group.key.measured):
                    _launch("measure_tiles", group, TILE_ROWS=_TILE[0], TILE_COLS=_TILE[1])
            for group in self.groups:
                self._launch(group)
            self._wholes()

    def _launch(self, group: _LaunchTiles) -> None:
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
            NATIVE=has_native_codes(device),
        )

    def _wholes(self) -> None:
        """Store the scales for whole tensors, one element per tensor."""
        jobs = [job for job in self.jobs if len(job.outputs) > 2 and job.outputs[2].numel()]
        if not jobs:
            return
        row = {id(job): i for i, job in enumerate(job for job in self.jobs if job.amax is None)}
        measured = self.peaks.view(torch.float32)
        amax = torch.stack([measured[row[id(job)]] if job.amax is None else job.amax.reshape(()).abs() for job in jobs])
        top = torch.where(amax.isfinite(), whole_scale(amax), math.nan)
        # Copying thousands of scales one by one would require a launch for each.
        torch._foreach_copy_([job.outputs[2] for job in jobs], list(top.unsqueeze(1).unbind()))


def has_native_codes(device: torch.device) -> bool:
    """Return whether the device has instructions that round to FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE


def fuse(form: Format, jobs: Iterable[KernelJob]) -> Fusion:
    """Lay out jobs with one format on one device.

    The table of a `Fusion` is copied from pinned memory on the current stream. A different stream must wait for the
    copy of the table before it runs the returned `Fusion`.

    Raises:
        PlanError: the format does not accept a source, an output does not match the format, or the devices differ.
        MissingExtra: Triton is not installed and the jobs are on a device.
    """
    jobs = tuple(jobs)
    for number, job in enumerate(jobs):
        _check(form, number, job, jobs[0].source.device)
    device = jobs[0].source.device if jobs else torch.device("cpu")
    if device.type != "cuda":
        return Fusion(form=form, jobs=jobs, groups=(), peaks=torch.empty(0, dtype=torch.int32))
    return lay_out(form, jobs, device)


def lay_out(form: Format, jobs: tuple[KernelJob, ...], device: torch.device) -> Fusion:
    """Lay out checked jobs for the kernels. On the CPU this works only under Triton's interpreter."""
    # Each job without an amax gets a slot into which the kernels write the measured amax.
    num_peaks = sum(job.amax is None for job in jobs) if form.scaling == "nv" else 0
    peaks = torch.empty(num_peaks, dtype=torch.int32, device=device)
    entries: dict[_Key, list[tuple[int, ...]]] = {}
    peak_at = iter(range(peaks.data_ptr(), peaks.data_ptr() + 4 * num_peaks, 4))
    for job in jobs:
        at = 0
        if form.scaling == "nv":
            at = next(peak_at) if job.amax is None else job.amax.data_ptr()
        dtype = dtype_of(job.source)
        # Group the matrices by key, so that thousands of tensors of one kind share a launch.
        for entry in _matrices(form, job, at):
            flat = form.scaling == "none" and entry[3] == 1
            measured = form.scaling == "nv" and job.amax is None
            key = _Key(dtype=dtype, wide=_wide(dtype, entry), flat=flat, measured=measured)
            entries.setdefault(key, []).append(entry)
    groups = tuple(_group(form, key, np.array(rows, np.int64), device) for key, rows in entries.items())
    return Fusion(form=form, jobs=jobs, groups=groups, peaks=peaks)


def _check(form: Format, number: int, job: KernelJob, device: torch.device) -> None:
    shape = tuple(job.source.shape)
    want = outputs(form, f"job {number}", dtype_of(job.source), shape, Box.full(shape))
    if form.global_suffix and len(job.outputs) == 2:
        want = want[:2]
    actual = [(tuple(out.shape), dtype_of(out)) for out in job.outputs]
    if actual != [(part.shape, part.dtype) for part in want]:
        expected = ", ".join(f"{part.dtype} {list(part.shape)}" for part in want)
        fault = f"outputs {actual} do not match {expected}, which {form.tag} stores for {list(shape)}"
        raise PlanError(f"job {number}: {fault}")
    # Check the devices, because the kernels use raw addresses, which would fault on a different device.
    tensors = (*job.outputs, *(() if job.amax is None else (job.amax,)))
    if any(tensor.device != device for tensor in (job.source, *tensors)):
        raise PlanError(f"job {number}: its tensors are not all on {device}")
    if job.amax is not None and (job.amax.dtype is not torch.float32 or job.amax.numel() != 1):
        raise PlanError(f"job {number}: amax must be one float32, not {job.amax.dtype} {list(job.amax.shape)}")
    if any(out.numel() and out.shape[-1] > 1 and out.stride(-1) != 1 for out in job.outputs if out.ndim):
        raise PlanError(f"job {number}: an output's last dim is not contiguous")


def _matrices(form: Format, job: KernelJob, peak: int) -> Iterator[tuple[int, ...]]:
    """Yield a table entry for each matrix, which spans the last two dims."""
    source, out = job.source, job.outputs[0]
    if not source.numel():
        return
    size = source.element_size()
    # Treat contiguous tensors of a cast as one row, because a cast has no blocks.
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
        skipped = sum(i * s for i, s in zip(index, scales.stride(), strict=False))
        yield *places, scales.data_ptr() + scales.element_size() * skipped, scales.stride(-2), peak


def _wide(dtype: DType, entry: tuple[int, ...]) -> bool:
    """Return whether loads and stores of 16 bytes are possible. See `quantise_tiles`."""
    src, row_stride, col_stride, _, cols, out, out_pitch = entry[:7]
    at = src % _WIDTH or out % _WIDTH or (row_stride * dtype.bits // 8) % _WIDTH
    return col_stride == 1 and not (at or cols % (2 * _WIDTH) or out_pitch % _WIDTH)


def _tile(form: Format, flat: bool) -> tuple[int, int]:
    """Return the rows and columns of a program's tile, which cuts no block."""
    if flat:
        return _FLAT
    if form.block[1] == WHOLE:
        return _STRIP
    return _WIDE_BLOCK if form.block[0] > 1 else _TILE


def _group(form: Format, key: _Key, entries: I64, device: torch.device) -> _LaunchTiles:
    """Return the launch, whose table lists the columns and first tile of each matrix, and the matrix of each tile."""
    tile_rows, tile_cols = _tile(form, key.flat)
    across = 1 if form.block[1] == WHOLE else -(-entries[:, 4] // tile_cols)
    tiles = -(-entries[:, 3] // tile_rows) * across
    stop = np.cumsum(tiles)
    # Use pinned memory, because a copy from pageable memory would wait for the device.
    host = torch.empty(_COLUMNS * len(entries) + int(stop[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    columns = host.numpy()
    columns[: 10 * len(entries)] = entries.T.reshape(-1)
    columns[10 * len(entries) : _COLUMNS * len(entries)] = stop - tiles
    columns[_COLUMNS * len(entries) :] = np.repeat(np.arange(len(entries)), tiles)
    table = host.to(device, non_blocking=True)
    return _LaunchTiles(key=key, table=table, num_matrices=len(entries), num_tiles=int(stop[-1]))


def _launch(name: str, group: _LaunchTiles, *, num_warps: int = 4, **constants: int | str) -> None:
    arguments = group.table, group.num_matrices, _COLUMNS * group.num_matrices
    constants |= {"SOURCE": str(group.key.dtype), "WIDE": group.key.wide}
    Launch("penstock.transform.quantize_triton", name, group.num_tiles, arguments, constants, num_warps=num_warps).run()
