"""`penstock bench`: measure loads of a weight set, and fetches between processes on this host.

`bench load` repeats a load in this process, and measures safetensors too if it can read the files. `bench fetch` starts
a holder and receivers in separate processes with a private hub, and measures a plain copy as their limit. The processes
communicate through pipes. The repository's `benchmarks/` compare Penstock with other tools, each in a new process.
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
    FormatOption,
    MemoryBytes,
    Names,
    OutputFormat,
    Uri,
    examples,
    importable,
    note,
    write_columns,
    write_json,
)
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError, PeerLost, PenstockError, SourceStalled
from penstock.report import bytes_text
from penstock.types import GB, MIB

if TYPE_CHECKING:
    import torch

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRate:
    """One loader's times in seconds, and its rate in decimal GB/s at the median time."""

    loader: str
    nbytes: int
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    verified: bool
    """Whether the loads verified the bytes against digests."""
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of one load: the number of bytes, whether they were verified, and their I/O path."""

    nbytes: int
    verified: bool
    path: str


@app.command("load", epilog=examples("penstock bench load llama --repeat 3 --cold"))
def bench_load(
    uri: Uri,
    device: Device = "cpu",
    names: Names = None,
    memory_bytes: MemoryBytes = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of loads with each loader.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Ask the kernel to drop local files from memory first.")] = False,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Measure loads, and compare them with safetensors.

    safetensors is measured if it is installed and the files are local.
    """
    import penstock
    from penstock.storage.locate import require_local

    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    require_local(uri)
    files = local_files(uri)
    if cold and not files:
        raise ConfigError("--cold works only for local files", uri=uri)
    before = (lambda: drop_cached(files)) if cold else (lambda: None)

    # The first use of `penstock.load` imports torch, and that must not count towards the first load's time.
    load, settings = penstock.load, penstock.ReadSettings(memory_bytes=budget)

    def penstock_load(verify: bool | None = None) -> Loaded:
        weights = load(uri, device=device, names=names, verify=verify, progress=False, settings=settings)
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

    rates = [_measure("penstock", penstock_load, repeat=repeat, before=before)]
    if not files or names:
        note("safetensors is left out, because it reads only whole local files")
    elif not importable("safetensors"):
        note("safetensors is left out, because it is not installed")
    else:
        if rates[0].verified:
            # safetensors does not verify digests, so also measure a load without verification.
            note("penstock verifies against the manifest and safetensors does not, so compare it with verify=False")
            unverified = partial(penstock_load, verify=False)
            rates.append(_measure("penstock, verify=False", unverified, repeat=repeat, before=before))
        rates.append(_measure("safetensors", safetensors_load, repeat=repeat, before=before))
    if format is OutputFormat.json:
        write_json(rates)
        return
    header = ["loader", "GB/s", "median s", "best s", "worst s", "verified", "path"]
    write_columns(header, [[rate.loader, *_times(rate), "yes" if rate.verified else "no", rate.path] for rate in rates])


def _measure(loader: str, load: Callable[[], Loaded], *, repeat: int, before: Callable[[], None]) -> LoadRate:
    """Time repeated loads. `before` prepares each load and is not timed."""
    from penstock.loader.progress import Progress

    times, loaded = [], Loaded(nbytes=0, verified=False, path="")
    with Progress(None, loader, unit="loads", is_live=False) as shown:
        for _ in range(repeat):
            before()
            begun = time.perf_counter()
            loaded = load()
            times.append(time.perf_counter() - begun)
            shown(len(times), repeat)
    median = statistics.median(times)
    return LoadRate(
        loader=loader,
        nbytes=loaded.nbytes,
        median_s=median,
        best_s=min(times),
        worst_s=max(times),
        gb_per_s=loaded.nbytes / median / GB,
        verified=loaded.verified,
        path=loaded.path,
    )


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read a byte in every page, so that the time includes page faults in mapped files, and wait for the device."""
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
    """Ask the kernel to drop the pages of these files from its cache."""
    # The previous load's tensors may still map the files. The kernel keeps pages that are mapped or not yet written
    # back.
    gc.collect()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def local_files(uri: str) -> list[str]:
    """Return the paths of a URI's files if they are local, and an empty list otherwise."""
    from penstock.storage import is_remote, local_path
    from penstock.storage.locate import resolve

    if is_remote(uri):
        return []
    return [local_path(file) for _, file in resolve(uri, settings=Settings.read()).files]


MODEL = "penstock-bench"
TENSOR_BYTES = 64 * MIB
"""Size of most generated tensors in bytes. A large model's matrices have tens of MB."""
DEADLINE_S = 300.0
"""Deadline in seconds for one step of a child process, such as its start or a fetch. The deadline is sufficient for
tens of GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRate:
    """Times of one receiver's fetches or of the plain copies: seconds from call to commit, and median decimal GB/s."""

    who: str
    device: str
    nbytes: int
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    path: str


@app.command("fetch", epilog=examples("penstock bench fetch --total-gb 4 --receivers 2 --device cuda"))
def bench_fetch(
    device: Device = "cpu",
    total_gb: Annotated[float, typer.Option("--total-gb", min=0.001, help="Size of the weights in decimal GB.")] = 1.0,
    receivers: Annotated[int, typer.Option("--receivers", min=1, help="Number of processes that fetch at once.")] = 2,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of fetches by each receiver.")] = 3,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Measure fetches between processes on this host.

    The weights are generated. Prints the seconds, GB/s and path of each receiver. The time of a plain copy of the same
    bytes shows the fastest possible fetch.
    """
    from penstock.loader.progress import Progress
    from penstock.loader.session import resolve_device

    # Report an invalid device once here with a hint, instead of in each process.
    resolve_device(device)
    nbytes = int(total_gb * GB)
    with (
        Progress(None, "fetch", unit="fetches", is_live=False) as shown,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        private_hub(directory) as hub,
        _child(_hold, hub, nbytes, device) as holder,
        _children(receivers, hub, device) as fetchers,
    ):
        shown.state(f"filling {bytes_text(nbytes)} of memory")
        _answer_of(holder)
        shown.state("starting the receivers")
        devices = [_answer_of(pipe) for pipe in fetchers]
        rounds: list[list[dict[str, Any]]] = []
        shown.state("fetching", 0, repeat * receivers)
        for number in range(repeat):
            # Send all requests before reading the first reply, so that the receivers fetch at the same time.
            for pipe in fetchers:
                pipe.send("fetch")
            rounds.append([_answer_of(pipe) for pipe in fetchers])
            shown((number + 1) * receivers, repeat * receivers)
    rates = [
        _rate(f"receiver {i}", devices[i], [turn[i]["wall_s"] for turn in rounds], turns[-1]["path"], nbytes=nbytes)
        for i, turns in enumerate(zip(*rounds, strict=True))
    ]
    rates.append(_limit(device, nbytes, repeat))
    if format is OutputFormat.json:
        write_json(rates)
        return
    header = ["who", "device", "GB/s", "median s", "best s", "worst s", "path"]
    write_columns(header, [[rate.who, rate.device, *_times(rate), rate.path] for rate in rates])


def _times(rate: LoadRate | FetchRate) -> list[str]:
    return [f"{rate.gb_per_s:.2f}", *(f"{seconds:.3f}" for seconds in (rate.median_s, rate.best_s, rate.worst_s))]


def _rate(who: str, device: str, times: list[float], path: str, *, nbytes: int) -> FetchRate:
    """Return a row for the results table from the times that the fetches took."""
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


def _limit(device: str, nbytes: int, repeat: int) -> FetchRate:
    """Measure a plain copy of the same bytes, in host memory with one thread or between two devices."""
    import torch

    # 1 GB exceeds every cache and is sufficient. The source and the target of the copy take 1 GB each.
    nbytes = min(nbytes, GB) if device == "cpu" else nbytes
    source = torch.full((nbytes,), 1, dtype=torch.uint8, device=_device(device, 0))
    target = torch.full((nbytes,), 2, dtype=torch.uint8, device=_device(device, 1))
    times = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeat + 1):
            if device != "cpu":
                torch.cuda.synchronize(source.device)
                torch.cuda.synchronize(target.device)
            begun = time.perf_counter()
            target.copy_(source)
            if device != "cpu":
                torch.cuda.synchronize(target.device)
            times.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    path = "memcpy, one thread" if device == "cpu" else "one copy between the devices"
    # The first copy is a warm-up, because it faults the pages in or opens peer access between the devices.
    return _rate("limit", str(target.device), times[1:], path, nbytes=nbytes)


@contextmanager
def private_hub(directory: str) -> Iterator[str]:
    """Run a hub only for this benchmark, and yield its URL."""
    from penstock_hub.auth import Auth
    from penstock_hub.directory import Directory
    from penstock_hub.server import HubThread, bind
    from penstock_hub.store import MemoryStore

    url = f"unix://{directory}/hub.sock"
    hub = HubThread(Directory(MemoryStore(), beat_s=0.5, ttl_s=30.0, fresh=True), bind(url, Auth()))
    hub.start()
    try:
        yield url
    finally:
        hub.stop()


@contextmanager
def _child(body: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a separate process, and yield the pipe to the process.

    `_answer_of` raises the function's errors.
    """
    # Do not fork. A forked child would lack torch's threads, and could not use CUDA if this process has used it.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=body, args=(there, *arguments), daemon=True)
    with _sigint_ignored():
        process.start()
    # Close this process's copy of the child's end of the pipe. While this copy is open, reads do not detect that the
    # child exited.
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
def _sigint_ignored() -> Iterator[None]:
    """Make processes that are started inside the context ignore SIGINT."""
    # Ctrl-C in a terminal also signals the children. The children exit anyway when this process closes their pipes, and
    # their tracebacks would bury this process's message.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _children(count: int, hub: str, device: str, number: int = 1) -> Iterator[list[Connection]]:
    """Run receiver processes, spread over the devices, and yield the pipes to them."""
    if not count:
        yield []
        return
    with _child(_receive, hub, device, number) as first, _children(count - 1, hub, device, number + 1) as rest:
        yield [first, *rest]


def _answer_of(pipe: Connection) -> Any:
    """Return the next reply from a process.

    Raises:
        SourceStalled: the process sent nothing for `DEADLINE_S`.
        PeerLost: the process exited, or it sent an error.
    """
    if not pipe.poll(DEADLINE_S):
        raise SourceStalled(f"a benchmark process sent nothing for {DEADLINE_S:g} s")
    try:
        answer = pipe.recv()
    except EOFError as error:
        raise PeerLost("a benchmark process exited", hint="see the error that the process printed above") from error
    if isinstance(answer, dict) and "error" in answer:
        raise PeerLost(f"a benchmark process failed: {answer['error']}")
    return answer


def _hold(pipe: Connection, hub: str, nbytes: int, device: str) -> None:
    """Offer generated weights until the pipe is closed. Runs in the holder's process."""
    import penstock

    with _reported(pipe):
        place = _device(device, 0)
        with penstock.join(MODEL, connection=hub) as fleet:
            fleet.offer(make_weights(nbytes, place))
            pipe.send(place)
            while not pipe.poll(1.0):
                pass


def _receive(pipe: Connection, hub: str, device: str, number: int) -> None:
    """Fetch the weights on each request until the pipe is closed. Runs in a receiver's process."""
    import penstock

    place = _device(device, number)
    with _reported(pipe):
        pipe.send(place)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            # Use a new member for each fetch, because a member that has the weights would not read them again.
            with penstock.join(MODEL, connection=hub) as fleet:
                tensors: dict[str, torch.Tensor] = {}
                report = fleet.fetch(tensors, device=place, progress=False)
                most = max(report.nbytes_by_path, key=lambda path: report.nbytes_by_path[path])
                pipe.send({"wall_s": report.wall_s, "path": most})


@contextmanager
def _reported(pipe: Connection) -> Iterator[None]:
    """Send an error that is raised inside the context to the benchmark's process, unless that process has exited."""
    try:
        yield
    except BrokenPipeError:
        return
    except PenstockError as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send({"error": str(error)})


def _device(device: str, number: int) -> str:
    """Return the device for a process. For `cuda`, the processes are spread over all devices."""
    import torch

    return f"cuda:{number % torch.cuda.device_count()}" if device == "cuda" else device


def make_weights(nbytes: int, device: str) -> dict[str, torch.Tensor]:
    """Return random bytes as bfloat16 tensors in one arena. A small tensor, as for a norm, follows each matrix."""
    import torch

    from penstock.memory.arena import Arena, needed_bytes

    sizes: list[int] = []
    while sum(sizes) < nbytes:
        sizes += [min(TENSOR_BYTES, -(-(nbytes - sum(sizes)) // 2) * 2), 8192]
    arena = Arena.allocate(needed_bytes(sizes), device)
    whole = arena.bytes_at(0, arena.nbytes)
    for at in range(0, len(whole), GB):
        whole[at : at + GB].random_(0, 256)
    tensors = {}
    for number, run in enumerate(zip(arena.place(sizes), sizes, strict=True)):
        name = f"layers.{number // 2}.{'norm' if number % 2 else 'weight'}"
        tensors[name] = arena.bytes_at(*run).view(torch.bfloat16)
    return tensors


def add(commands: typer.Typer) -> None:
    """Add `penstock bench`."""
    commands.add_typer(app, name="bench")
