"""Conformance cases for transform kernels, which must return the reference's bits for every value and placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from penstock.transform import formats, fuse, quantize
from penstock.transform.formats import Format
from penstock.types import Box, DType

SMALL = ((1, 16), (3, 32), (129, 144), (2, 3, 5, 32), (16,), (3, 4099), (7, 0))
LARGE = ((128, 128), (40, 400), (300, 1056), (2, 3, 130, 160), (4099, 3), (2000, 4096))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal numbers at scales from 2^-40 to 2^6, with zeros, subnormal and extreme numbers, NaN and inf."""
    chance = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=chance)
    if made.ndim > 1:
        made *= torch.exp2(torch.randint(-40, 7, (*shape[:-1], 1), generator=chance).float())
    made = made.to(dtype)
    flat = made.view(-1)
    if seed % 3 == 0 and flat.numel() > 64:
        odd = [0.0, -0.0, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max, 448.0, -464.0, 61440.0, 2.0**-10, 1.75]
        flat[torch.randperm(flat.numel(), generator=chance)[: len(odd)]] = torch.tensor(odd, dtype=dtype)
    if seed % 3 == 1 and flat.numel() > 4096:
        odd = [torch.nan, torch.inf, -torch.inf]
        flat[torch.randperm(flat.numel(), generator=chance)[: len(odd)]] = torch.tensor(odd, dtype=dtype)
    if seed % 5 == 0 and made.ndim > 1:
        made[..., : made.shape[-2] // 2, :] = 0
    return made


def sources(form: Format, shapes: Sequence[tuple[int, ...]]) -> Iterator[torch.Tensor]:
    """Yield CPU tensors in every dtype and shape of the format: contiguous, transposed, unaligned, and views."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32, *([torch.float64] if form.scaling == "none" else [])]
    for seed, shape in enumerate(shapes):
        for number, dtype in enumerate(dtypes):
            whole = values(shape, dtype, 3 * seed + number)
            views = [whole]
            if len(shape) > 1 and number == seed % len(dtypes):
                larger = values((*shape[:-1], shape[-1] + 19), dtype, seed)
                views += [whole.transpose(-1, -2), larger[..., 3 : 3 + shape[-1]], larger[..., ::2]]
            for view in views:
                if formats.fault(form, quantize.dtype_of(view), tuple(view.shape)) is None:
                    yield view


def check_kernels(form: Format, device: torch.device, shapes: Sequence[tuple[int, ...]] = SMALL) -> int:
    """Compare the kernels' outputs with the reference bit for bit. Return the number of jobs."""
    jobs, expected = [], []
    for number, source in enumerate(sources(form, shapes)):
        amax = None
        if form.global_suffix and number % 3 == 0:
            amax = torch.tensor([float(number)]).to(device)
        expected.append(quantize.quantise(form, source, amax=None if amax is None else amax.cpu()))
        shape = tuple(source.shape)
        parts = formats.outputs(form, "", quantize.dtype_of(source), shape, Box.full(shape))
        outs = tuple(_place(part.shape, part.dtype, number, device) for part in parts)
        # Copy the storage and then apply the strides, because a copy of the view would be contiguous.
        base = torch.empty(source.untyped_storage().nbytes() // source.element_size(), dtype=source.dtype)
        base.copy_(torch.as_strided(source, base.shape, (1,), 0))
        moved = torch.as_strided(base.to(device), source.shape, source.stride(), source.storage_offset())
        jobs.append(fuse.KernelJob(source=moved, outputs=outs, amax=amax))
    for job in jobs:
        fuse.fuse(form, [job])  # its checks
    fusion = fuse.lay_out(form, tuple(jobs), device)
    for _ in range(2):
        fusion.run()
        for number, (job, references) in enumerate(zip(jobs, expected, strict=True)):
            for got, reference in zip(job.outputs, references, strict=True):
                same = _bytes(got) == _bytes(reference)
                assert same.all(), (
                    f"{form.tag}, job {number}, {job.source.dtype} {job.source.shape}: {same.sum()} alike"
                )
    return len(jobs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().reshape(-1).contiguous().view(torch.uint8)


def _place(shape: tuple[int, ...], dtype: DType, number: int, device: torch.device) -> torch.Tensor:
    """Return memory for an output. Every second output is a view of a larger tensor."""
    if number % 2 == 0 or len(shape) < 2:
        return torch.empty(shape, dtype=quantize.torch_dtype(dtype), device=device)
    return torch.empty((*shape[:-1], shape[-1] + 5), dtype=quantize.torch_dtype(dtype), device=device)[..., : shape[-1]]
