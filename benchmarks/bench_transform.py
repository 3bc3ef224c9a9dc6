"""Transforms on a CUDA device: GB/s of source bytes, beside the device's own copy, plain torch and torch.compile.

    python benchmarks/bench_transform.py [--source-bytes 4G] [--samples 10] [--json]

The limit is what a device copy of the same run moves, read and written bytes together; a format's share of it counts
what it reads once and what it stores. Source and outputs are far larger than the L2 cache. Each figure is the median of
CUDA-event times with the launches queued behind a pause; the plain versions are one tensor after another, as a script
would, for large tensors of the same bytes and for a hundredth of the small ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from penstock.transform.formats import Format, format_of, outputs
from penstock.transform.fuse import KernelJob, fuse
from penstock.transform.quantize import quantise, torch_dtype
from penstock.types import Box, DType

PAUSE_CYCLES = 6_000_000
"""GPU clock cycles a sample waits before its first kernel: 3 ms, longer than Python takes to queue a fusion."""

TAGS = (
    "cast:F8_E4M3",
    "cast:F32",
    "fp8-block128",
    "fp8-block128-e8m0",
    "fp8-block1x128",
    "fp8-channel",
    "mxfp8",
    "nvfp4",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured case, in GB/s of source bytes."""

    tag: str
    tensors: str
    gb_per_s: float
    low: float
    high: float
    of_limit: float
    launch_us: float
    eager_gb_per_s: float | None
    compiled_gb_per_s: float | None


def device_seconds(call: Callable[[], object], samples: int) -> tuple[list[float], float]:
    """Device time of each sample, and the host's median time to post one."""
    spent, posts = [], []
    for _ in range(samples + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        began = time.perf_counter()
        call()
        posts.append(time.perf_counter() - began)
        stop.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(stop) / 1e3)
    return spent[2:], statistics.median(posts[2:])


def jobs_of(form: Format, sources: Sequence[torch.Tensor]) -> list[KernelJob]:
    jobs = []
    for source in sources:
        shape = tuple(source.shape)
        parts = outputs(form, "", DType.BF16, shape, Box.full(shape))
        made = tuple(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device=source.device) for part in parts)
        jobs.append(KernelJob(source=source, outputs=made))
    return jobs


def plainly(form: Format, jobs: Sequence[KernelJob], compiled: bool, samples: int) -> float | None:
    """GB/s of one tensor after another through `quantise` and copied into place; None where it does not run."""

    def step(source: torch.Tensor, *outs: torch.Tensor) -> None:
        for out, part in zip(outs, quantise(form, source), strict=True):
            out.copy_(part)

    if compiled:
        step = torch.compile(step, dynamic=False)
    try:
        seconds, _ = device_seconds(lambda: [step(job.source, *job.outputs) for job in jobs], samples)
    except (torch._dynamo.exc.BackendCompilerFailed, torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        print(f"{form.tag}: torch.compile: {str(error).splitlines()[0]}")
        return None
    return sum(job.source.nbytes for job in jobs) / statistics.median(seconds) / 1e9


def measured(
    tag: str, name: str, sources: Sequence[torch.Tensor], limit: float, samples: int, plain: int, compiled: bool
) -> Row:
    form = format_of(tag)
    jobs = jobs_of(form, sources)
    fusion = fuse(form, jobs)
    seconds, post = device_seconds(fusion.run, samples)
    shape = tuple(sources[0].shape)
    stored = outputs(form, "", DType.BF16, shape, Box.full(shape))
    output_bytes = sum(math.prod(part.shape) * part.dtype.bits // 8 for part in stored)
    nbytes = sum(source.nbytes for source in sources)
    moved = nbytes + len(sources) * output_bytes
    median = statistics.median(seconds)
    return Row(
        tag=tag,
        tensors=name,
        gb_per_s=nbytes / median / 1e9,
        low=nbytes / max(seconds) / 1e9,
        high=nbytes / min(seconds) / 1e9,
        of_limit=moved / median / 1e9 / limit,
        launch_us=post * 1e6,
        eager_gb_per_s=plainly(form, jobs[:plain], False, 2),
        compiled_gb_per_s=plainly(form, jobs[:plain], True, 2) if compiled else None,
    )


def main() -> None:
    from penstock.config import parse_bytes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source-bytes", type=parse_bytes, default=4 << 30)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="torch.compile of the plain version too (minutes)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = torch.empty(args.source_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    half = data.numel() // 2
    seconds, _ = device_seconds(lambda: data[:half].copy_(data[half : 2 * half]), args.samples)
    limit = 4 * half / statistics.median(seconds) / 1e9
    large = list(data.view(-1, 8192, 8192)) if data.numel() >= 8192 * 8192 else [data.view(-1, 1024)]
    count = min(30_000, data.numel() // (256 * 256))
    small = list(data[: count * 256 * 256].view(-1, 256, 256))
    rows = []
    for name, sources, plain in (
        (f"{len(large)} of {list(large[0].shape)}", large, 4),
        (f"{count:,} of [256, 256]", small, 300),
    ):
        for tag in TAGS:
            compiled = args.compile and sources is large and tag in ("fp8-block128", "mxfp8")
            rows.append(measured(tag, name, sources, limit, args.samples, plain, compiled))
            if args.json:
                print(json.dumps(asdict(rows[-1])), flush=True)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"\n{where}; device copy, read + written: {limit:,.0f} GB/s; median of {args.samples}\n")
    print("| tag | tensors | GB/s of source | range | of the limit | host us | plain torch | compiled |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        plain_text = ["" if v is None else f"{v:,.0f}" for v in (row.eager_gb_per_s, row.compiled_gb_per_s)]
        print(
            f"| `{row.tag}` | {row.tensors} | {row.gb_per_s:,.0f} | {row.low:,.0f}-{row.high:,.0f} |"
            f" {row.of_limit:.0%} | {row.launch_us:,.0f} | {' | '.join(plain_text)} |"
        )


if __name__ == "__main__":
    main()
