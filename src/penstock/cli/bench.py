"""`penstock bench`, and `bench load`: the same load several times, beside safetensors' own where that can read it.

In: a URI, a device, a count. Out: median, best and worst of each on stdout.
Not here: the repository's benchmarks with their peers, limits and fresh processes (`benchmarks/`), `bench fetch`.

`penstock bench fetch`: a holder and receivers on this host, each a process, and the copy that they cannot beat.

In: a size, a device, a count. Out: time, rate and path of each receiver on stdout, beside the limit of this machine.
Not here: the repository's benchmark with its peers (`benchmarks/bench_fetch.py`).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import (
    Device,
    Format,
    FormatOption,
    MemoryBytes,
    Names,
    Uri,
    importable,
    note,
    write_columns,
    write_json,
)
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError, PeerLost, PenstockError, SourceStalled
from penstock.types import GB, MIB

if TYPE_CHECKING:
    import torch


MODEL = "penstock-bench"
TENSOR_BYTES = 64 * MIB
"""Of most tensors: a large model's matrices are of tens of MB."""
DEADLINE_S = 300.0
"""Of one step of another process: starting, filling its memory, one fetch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRate:
    """The fetches of one receiver, or the limit. Seconds from the call to committed; decimal GB/s of the median."""

    who: str
    device: str
    nbytes: int
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    path: str


def bench_fetch(
    device: Device = "cpu",
    total_gb: Annotated[float, typer.Option("--total-gb", min=0.001, help="Weights, in decimal GB.")] = 1.0,
    receivers: Annotated[int, typer.Option("--receivers", min=1, help="Processes that fetch at once.")] = 2,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Fetches of each receiver.")] = 3,
    format: FormatOption = Format.human,
) -> None:
    """Fetch generated weights from one process into others of this host: seconds, GB/s, path, and the limit."""
    from penstock.loader.session import resolve_device

    resolve_device(device)
    nbytes = int(total_gb * GB)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        private_hub(directory) as hub,
        _child(_hold, hub, nbytes, device) as holder,
        _children(receivers, hub, device) as fetchers,
    ):
        told = [_report_of(pipe) for pipe in (holder, *fetchers)]
        rounds = []
        for _ in range(repeat):
            for pipe in fetchers:
                pipe.send("fetch")
            rounds.append([_report_of(pipe) for pipe in fetchers])
    rows = [
        _rate(f"receiver {i}", told[i + 1], [turn[i]["wall_s"] for turn in rounds], turns[-1]["path"], nbytes=nbytes)
        for i, turns in enumerate(zip(*rounds, strict=True))
    ]
    rows.append(_limit(device, nbytes, repeat))
    if format is Format.json:
        write_json(rows)
        return
    cells = [
        [r.who, r.device, f"{r.gb_per_s:.2f}", f"{r.median_s:.3f}", f"{r.best_s:.3f}", f"{r.worst_s:.3f}", r.path]
        for r in rows
    ]
    write_columns(["who", "device", "GB/s", "median s", "best s", "worst s", "path"], cells)


def _rate(who: str, device: str, times: list[float], path: str, *, nbytes: int) -> FetchRate:
    median = statistics.median(times)
    return FetchRate(
        who=who,
        device=device,
        nbytes=nbytes,
        median_s=median,
        best_s=min(times),
        worst_s=max(times),
        gb_per_s=nbytes / median / GB,
        path=path,
    )


@contextmanager
def private_hub(directory: str) -> Iterator[str]:
    """A hub of this run alone."""
    from penstock.hub.auth import Auth
    from penstock.hub.directory import Directory
    from penstock.hub.server import HubThread, bind
    from penstock.hub.store import MemoryStore

    url = f"unix://{directory}/hub.sock"
    hub = HubThread(Directory(MemoryStore(), beat_s=0.5, ttl_s=30.0, fresh=True), bind(url, Auth()))
    hub.start()
    try:
        yield url
    finally:
        hub.stop()


@contextmanager
def _child(body: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process of its own, for the block; what it raises, `_report_of` raises."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=body, args=(there, *arguments), daemon=True)
    with _unheard():
        process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _unheard() -> Iterator[None]:
    """Who is started within does not hear of Ctrl-C: it ends with its pipe, as this process lets go of it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _children(count: int, hub: str, device: str, number: int = 1) -> Iterator[list[Connection]]:
    """Receivers, each on the next device where there are several."""
    if not count:
        yield []
        return
    with _child(_receive, hub, device, number) as first, _children(count - 1, hub, device, number + 1) as rest:
        yield [first, *rest]


def _report_of(pipe: Connection) -> Any:
    """Return what a process says next. SourceStalled, PeerLost: it does not, or is gone."""
    if not pipe.poll(DEADLINE_S):
        raise SourceStalled(f"a process of the benchmark said nothing for {DEADLINE_S:g} s")
    try:
        said = pipe.recv()
    except EOFError as error:
        raise PeerLost("a process of the benchmark ended", hint="its own message is above") from error
    if isinstance(said, dict) and "error" in said:
        raise PeerLost(f"a process of the benchmark failed: {said['error']}")
    return said


def _hold(pipe: Connection, hub: str, nbytes: int, device: str) -> None:
    """The holder's process: until the pipe is closed."""
    import penstock

    try:
        place = _device(device, 0)
        with penstock.join(MODEL, connection=hub) as fleet:
            fleet.offer(make_weights(nbytes, place))
            pipe.send(place)
            while not pipe.poll(1.0):
                pass
    except BrokenPipeError:
        return  # nobody waits any more
    except PenstockError as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send({"error": str(error)})


def _receive(pipe: Connection, hub: str, device: str, number: int) -> None:
    """A receiver's process: fetches when told, until the pipe is closed."""
    import penstock

    place = _device(device, number)
    try:
        pipe.send(place)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            with penstock.join(MODEL, connection=hub) as fleet:
                tensors: dict[str, torch.Tensor] = {}
                report = fleet.fetch(tensors, device=place)
                most = max(report.nbytes_by_path, key=lambda path: report.nbytes_by_path[path])
                pipe.send({"wall_s": report.wall_s, "path": most})
    except BrokenPipeError:
        return  # nobody waits any more
    except PenstockError as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send({"error": str(error)})


def _device(device: str, number: int) -> str:
    """Return the device of one of the processes: `cuda` is spread over all there are."""
    import torch

    return f"cuda:{number % torch.cuda.device_count()}" if device == "cuda" else device


def make_weights(nbytes: int, device: str) -> dict[str, torch.Tensor]:
    """Random bytes as bfloat16 tensors in one arena: matrices, and among them small ones as norms are."""
    import torch

    from penstock.memory.arena import Arena, needed_bytes

    sizes: list[int] = []
    while sum(sizes) < nbytes:
        sizes += [min(TENSOR_BYTES, -(-(nbytes - sum(sizes)) // 2) * 2), 8192]
    arena = Arena.allocate(needed_bytes(sizes), device)
    whole = arena.bytes_at(0, arena.nbytes)
    for at in range(0, len(whole), GB):
        whole[at : at + GB].random_(0, 256)
    made = {}
    for number, run in enumerate(zip(arena.place(sizes), sizes, strict=True)):
        made[f"layers.{number // 2}.{'norm' if number % 2 else 'weight'}"] = arena.bytes_at(*run).view(torch.bfloat16)
    return made


def _limit(device: str, nbytes: int, repeat: int) -> FetchRate:
    """One copy of the same bytes with nothing else to do: in host memory by one thread, or from device to device."""
    import torch

    nbytes = min(nbytes, GB) if device == "cpu" else nbytes
    source = torch.full((nbytes,), 1, dtype=torch.uint8, device=_device(device, 0))
    into = torch.full((nbytes,), 2, dtype=torch.uint8, device=_device(device, 1))
    times = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeat + 1):
            if device != "cpu":
                torch.cuda.synchronize(source.device)
                torch.cuda.synchronize(into.device)
            begun = time.perf_counter()
            into.copy_(source)
            if device != "cpu":
                torch.cuda.synchronize(into.device)
            times.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    what = "memcpy, one thread" if device == "cpu" else "one copy between the devices"
    return _rate("limit", str(into.device), times[1:], what, nbytes=nbytes)


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
