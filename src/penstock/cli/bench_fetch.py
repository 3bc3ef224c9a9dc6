"""`penstock bench fetch`: a holder and receivers on this host, each a process, and the copy that they cannot beat.

In: a size, a device, a count. Out: time, rate and path of each receiver on stdout, beside the limit of this machine.
Not here: the repository's benchmark with its peers (`benchmarks/bench_fetch.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Device, Format, FormatOption
from penstock.cli.output import write_columns, write_json
from penstock.errors import PeerLost, PenstockError, SourceStalled
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
