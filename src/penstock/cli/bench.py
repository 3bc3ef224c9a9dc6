"""`penstock bench`, and `bench load`: the same load several times, beside safetensors' own where that can read it.

In: a URI, a device, a count. Out: median, best and worst of each on stdout.
Not here: the repository's benchmarks with their peers, limits and fresh processes (`benchmarks/`), `bench fetch`.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.bench_fetch import bench_fetch
from penstock.cli.installed import importable
from penstock.cli.options import Device, Format, FormatOption, MemoryBytes, Names, Uri
from penstock.cli.output import note, write_columns, write_json
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure on this machine."""


app.command("fetch")(bench_fetch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The times of one loader. Seconds; decimal GB/s of the median."""

    loader: str
    nbytes: int
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    verified: bool
    """Whether the loads compared the bytes with digests."""
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What one load brought, and how."""

    nbytes: int
    verified: bool
    path: str


@app.command("load")
def bench_load(
    uri: Uri,
    device: Device = "cpu",
    names: Names = None,
    memory_bytes: MemoryBytes = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Loads of each loader.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Ask the kernel to drop local files from memory first.")] = False,
    format: FormatOption = Format.human,
) -> None:
    """Load again and again: Penstock, and safetensors when it is installed and the files are local."""
    from penstock import api
    from penstock.storage.locate import look

    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    look(uri)
    files = _local_files(uri)
    if cold and not files:
        raise ConfigError("--cold is for local files", uri=uri)
    before = (lambda: drop_cached(files)) if cold else (lambda: None)

    load = api.load  # imports torch, which is not to be timed

    def penstock_load(verify: bool | None = None) -> Loaded:
        weights = load(uri, device=device, names=names, verify=verify, memory_bytes=budget, progress=False)
        touch(weights.values())
        path = ",".join(sorted({file.path for file in weights.report.files}))
        return Loaded(nbytes=weights.report.nbytes, verified=weights.report.verified, path=path)

    if importable("safetensors"):
        from safetensors.torch import load_file

    def safetensors_load() -> Loaded:
        weights = [load_file(file, device=device) for file in files]
        touch(tensor for tensors in weights for tensor in tensors.values())
        nbytes = sum(tensor.nbytes for tensors in weights for tensor in tensors.values())
        return Loaded(nbytes=nbytes, verified=False, path="mmap")

    rows = [_measure("penstock", penstock_load, repeat=repeat, before=before)]
    if not files or names:
        note("safetensors is left out: it reads whole local files only")
    elif not importable("safetensors"):
        note("safetensors is left out: it is not installed")
    else:
        if rows[0].verified:  # safetensors compares nothing, so it is measured beside a load that compares nothing
            note("penstock verifies against the manifest, safetensors does not: compare it with the row verify=False")
            unverified = partial(penstock_load, verify=False)
            rows.append(_measure("penstock, verify=False", unverified, repeat=repeat, before=before))
        rows.append(_measure("safetensors", safetensors_load, repeat=repeat, before=before))
    if format is Format.json:
        write_json(rows)
        return
    cells = [
        [
            r.loader,
            f"{r.gb_per_s:.2f}",
            f"{r.median_s:.3f}",
            f"{r.best_s:.3f}",
            f"{r.worst_s:.3f}",
            "yes" if r.verified else "no",
            r.path,
        ]
        for r in rows
    ]
    write_columns(["loader", "GB/s", "median s", "best s", "worst s", "verified", "path"], cells)


def _measure(loader: str, load: Callable[[], Loaded], *, repeat: int, before: Callable[[], None]) -> Rate:
    times, loaded = [], Loaded(nbytes=0, verified=False, path="")
    for _ in range(repeat):
        before()
        begin = time.perf_counter()
        loaded = load()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return Rate(
        loader=loader,
        nbytes=loaded.nbytes,
        median_s=median,
        best_s=min(times),
        worst_s=max(times),
        gb_per_s=loaded.nbytes / median / 1e9,
        verified=loaded.verified,
        path=loaded.path,
    )


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read a byte of every page, so that mapped memory counts as loaded; wait for the device."""
    import torch

    on_device = False
    for tensor in tensors:
        if tensor.device.type == "cpu":
            if tensor.numel():
                int(tensor.view(-1).view(torch.uint8)[::4096].max())
        else:
            on_device = True
    if on_device:
        torch.cuda.synchronize()


def drop_cached(files: Sequence[str]) -> None:
    """Ask the kernel to forget the pages of these files; what is mapped still, or not yet written, it would keep."""
    gc.collect()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _local_files(uri: str) -> list[str]:
    """Return the files behind a URI when they are local; none otherwise."""
    from penstock.storage import is_remote, local_path
    from penstock.storage.locate import resolve

    if is_remote(uri):
        return []
    return [local_path(file) for _, file in resolve(uri, settings=Settings.read()).files]
