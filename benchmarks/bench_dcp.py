"""torch.distributed.checkpoint through Penstock, beside torch's own readers and writers.

    python -m benchmarks.bench_dcp --mib 1024 --ranks 2 --runs 3 --out benchmarks/results/cpu2_202611

Ranks are processes of one gloo group; a time is from a barrier to the next: that of the slowest rank. In each row the
tools take turns, one warm-up of each first. Cold files were written, synced and dropped from the page cache. Over HTTP
the server is a `RangeServer` in a process of its own: on loopback without a limit, and with a bandwidth for each
connection and a latency for each request, as object stores have. fsspec needs aiohttp for it. Torch's reader
of Hugging Face checkpoints takes a local directory only: its row over HTTP is fsspec's download by rank 0 to an empty
directory, and then the reader. The limits over HTTP are plain range requests by each rank, on as many connections as
Penstock opens: for its share of the bytes in 8 MiB each, and one for each part of a tensor. Memory is the largest
resident set of a rank during a run, less that before it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.client
import json
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_HF, _OWN = "Hugging Face", "DCP's format"
_LINKS = {
    "HTTP": (0, 0.0),
    "HTTP, 85 MB/s a connection, 10 ms": (85_000_000, 0.01),
    "HTTP, 200 MB/s a connection, 5 ms": (200_000_000, 0.005),
}
"""Bytes per second of a connection, 0: no limit; seconds before each answer."""

_LIMIT_RANGE_BYTES = 8 << 20

Act = Callable[[int], Any]
"""One run of a tool; its argument is the number of the run."""


def main() -> None:
    """Write the checkpoints, run all rows, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saved-by", type=int, default=4, help="ranks that write the checkpoint in DCP's format")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", default="", help="only rows whose name this regex finds")
    parser.add_argument("--folder", help="where checkpoints are written; default: the system's temporary directory")
    parser.add_argument("--out", type=Path, help="directory: rows are appended to dcp.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=args.folder) as folder:
        place = Path(folder)
        list(_ranks(_prepare, args.saved_by, place, args.mib))
        with contextlib.ExitStack() as servers:
            urls = {
                name: servers.enter_context(_served(place, *link))
                for name, link in _LINKS.items()
                if any(re.search(args.rows, f"{kind}, {name}") for kind in (_HF, _OWN))
            }
            for row in _ranks(_measure, args.ranks, place, urls, args.runs, args.rows):
                row = {"mib": args.mib, "ranks": args.ranks, **row}
                print(json.dumps(row), flush=True)
                if args.out:
                    with (args.out / "dcp.jsonl").open("a") as file:
                        print(json.dumps(row), file=file)


def _ranks(body: Callable[..., Any], count: int, place: Path, *args: Any) -> Iterator[Any]:
    """Run a generator on every rank; yield what rank 0 yields."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)
        jobs = [
            context.Process(target=_rank, args=(body, rank, count, f"{folder}/store", there, place, *args))
            for rank in range(count)
        ]
        for job in jobs:
            job.start()
        there.close()
        try:
            # Rank 0 ends the pipe with None, or by its death.
            while (value := here.recv()) is not None:
                yield value
        finally:
            for job in jobs:
                job.join(60)
                job.kill()


def _rank(body: Callable[..., Any], rank: int, count: int, store: str, pipe: Any, *args: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    for value in body(rank, count, *args):
        if rank == 0:
            pipe.send(value)
    if rank == 0:
        pipe.send(None)
    dist.destroy_process_group()


def _serve(place: Path, bytes_per_s: int, latency_s: float, pipe: Any) -> None:
    from tests.support.servers.http_server import Faults, RangeServer

    faults = Faults(slow_bytes_per_s=bytes_per_s or None, latency_s=latency_s)
    with RangeServer(place, faults=faults) as server:
        pipe.send(server.url)
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def _served(place: Path, bytes_per_s: int, latency_s: float) -> Iterator[str]:
    """Serve a directory by a process of its own, whose interpreter no reader waits for."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(place, bytes_per_s, latency_s, there))
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(10)
        process.kill()


def _state(rank: int, count: int, shapes: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return an empty sharded state: along `dim` where that divides, else replicated."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (count,))
    state = {}
    for name, (dtype, shape) in shapes.items():
        is_cut = len(shape) > dim and shape[dim] % count == 0
        local = list(shape)
        if is_cut:
            local[dim] //= count
        placements = [Shard(dim) if is_cut else Replicate()]
        # Touched: the first write to new memory is not the tool's time.
        state[name] = DTensor.from_local(torch.zeros(local, dtype=dtype), mesh, placements, run_check=False)
    return state


def _shapes(place: Path) -> dict[str, Any]:
    from penstock_dcp import CheckpointReader

    with contextlib.closing(CheckpointReader(place / "hf")) as reader:
        items = reader.read_metadata().state_dict_metadata.items()
        return {name: (item.properties.dtype, tuple(item.size)) for name, item in items}


def _prepare(rank: int, count: int, place: Path, mib: int) -> Iterator[None]:
    """Write a checkpoint of Hugging Face, and one in DCP's format by these ranks."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from penstock.testing.checkpoints import write_llama
    from penstock_dcp import CheckpointReader

    if rank == 0:
        write_llama(place / "hf", total_bytes=mib << 20, fp8=False, shards=4)
    dist.barrier()
    state = _state(rank, count, _shapes(place), 0)
    dcp.load(state, storage_reader=CheckpointReader(place / "hf"))
    dcp.save(state, checkpoint_id=place / "own")
    os.sync()
    yield from ()


def _drop(place: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in place.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _memory(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10


def _measure(rank: int, count: int, place: Path, urls: dict[str, str], runs: int, only: str) -> Iterator[Any]:
    import torch
    import torch.distributed as dist

    shapes = _shapes(place)
    own_sums: dict[str, float] = {}

    def timed(act: Act, number: int) -> tuple[float, int, Any]:
        # A full collection takes 0.2 s in a process with torch: no tool pays for what another left.
        gc.collect()
        # So that the high-water mark is of this run.
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        dist.barrier()
        begun = time.monotonic()
        extra = act(number)
        dist.barrier()
        seconds = time.monotonic() - begun
        most = torch.tensor([_memory("VmHWM") - before])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return seconds, int(most), extra

    def row(
        name: str, tools: dict[str, Act], *, before: Callable[[], None] = lambda: None, after: Act | None = None
    ) -> Iterator[Any]:
        if not re.search(only, name):
            return
        times: dict[str, list[float]] = {tool: [] for tool in tools}
        memory: dict[str, int] = dict.fromkeys(tools, 0)
        extras: dict[str, list[float]] = {tool: [] for tool in tools}
        for number in range(runs + 1):
            for tool, act in tools.items():
                dist.barrier()
                if rank == 0:
                    before()
                seconds, most, extra = timed(act, number)
                if rank == 0 and after is not None:
                    after(number)
                if number:
                    times[tool].append(seconds)
                    memory[tool] = max(memory[tool], most)
                    if isinstance(extra, float):
                        extras[tool].append(extra)
        for tool in tools:
            entry = {
                "row": name,
                "tool": tool,
                "median_s": round(statistics.median(times[tool]), 3),
                "spread_s": [round(min(times[tool]), 3), round(max(times[tool]), 3)],
                "n": len(times[tool]),
                "memory_mib": memory[tool] >> 20,
            }
            if extras[tool]:
                entry["blocked_s"] = round(statistics.median(extras[tool]), 3)
            yield entry

    yield from _reads(rank, count, place, urls, shapes, row, own_sums)
    yield from _saves(rank, count, place, shapes, row)


def _reads(
    rank: int, count: int, place: Path, urls: dict[str, str], shapes: dict[str, Any], row: Any, sums: dict[str, float]
) -> Iterator[Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    from penstock_dcp import CheckpointReader

    states = {dim: _state(rank, count, shapes, dim) for dim in (0, 1)}

    def load(make: Callable[[], Any], dim: int = 0) -> Act:
        def act(number: int) -> None:
            dcp.load(states[dim], storage_reader=make())
            if number == 0:
                # After the warm-up: every tool has loaded the same.
                total = sum(float(t.to_local().float().abs().sum()) for t in states[dim].values())
                assert abs(sums.setdefault(str(dim), total) - total) <= 1e-3 * total, (make, dim)
                for tensor in states[dim].values():
                    tensor.to_local().zero_()

        return act

    def shares(kind: str) -> Iterator[tuple[str, int, int]]:
        """Yield this rank's share of each file, as ranges."""
        for file in sorted((place / kind).iterdir()):
            size = file.stat().st_size
            start, stop = size * rank // count, size * (rank + 1) // count
            for at in range(start, stop, _LIMIT_RANGE_BYTES):
                yield file.name, at, min(stop, at + _LIMIT_RANGE_BYTES)

    def parts() -> Iterator[tuple[str, int, int]]:
        """Yield the rows of each tensor that this rank needs, as ranges."""
        for file in sorted((place / "hf").glob("*.safetensors")):
            raw = file.read_bytes()
            body = 8 + int.from_bytes(raw[:8], "little")
            for name, entry in json.loads(raw[8:body]).items():
                if name != "__metadata__":
                    start, stop = (body + at for at in entry["data_offsets"])
                    if entry["shape"][0] % count == 0:
                        size = (stop - start) // count
                        start, stop = start + size * rank, start + size * (rank + 1)
                    yield file.name, start, stop

    # As large as the rank's share: a small buffer would stay in the processor's cache.
    needed = [list(shares("hf")), list(shares("own")), list(parts())]
    buffer = memoryview(bytearray(max(sum(stop - at for _, at, stop in ranges) for ranges in needed)))

    def raw(kind: str) -> Act:
        def act(number: int) -> None:
            done = 0
            for name, start, stop in shares(kind):
                fd = os.open(place / kind / name, os.O_RDONLY)
                done += os.preadv(fd, [buffer[done : done + stop - start]], start)
                os.close(fd)

        return act

    def raw_http(url: str, kind: str, ranges: list[tuple[str, int, int]]) -> Act:
        from penstock.config import REMOTE_FETCH_THREADS as FETCH_THREADS

        def fetch(some: list[tuple[str, int, int]], at: int) -> None:
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
            for name, start, stop in some:
                connection.request("GET", f"/{kind}/{name}", headers={"Range": f"bytes={start}-{stop - 1}"})
                answer = connection.getresponse()
                while got := answer.readinto(buffer[at : at + stop - start]):
                    start, at = start + got, at + got
            connection.close()

        def act(number: int) -> None:
            step = -(-len(ranges) // FETCH_THREADS)
            with ThreadPoolExecutor(FETCH_THREADS) as pool:
                jobs = [
                    pool.submit(fetch, ranges[i : i + step], sum(stop - at for _, at, stop in ranges[:i]))
                    for i in range(0, len(ranges), step)
                ]
            for job in jobs:
                job.result()

        return act

    def downloaded(url: str) -> Act:
        target = place / "downloaded"

        def act(number: int) -> None:
            import fsspec

            if rank == 0:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                names = [file.name for file in (place / "hf").iterdir()]
                fsspec.filesystem("http").get([f"{url}/hf/{n}" for n in names], [str(target / n) for n in names])
            dist.barrier()
            load(lambda: HuggingFaceStorageReader(str(target)))(number)

        return act

    for link, url in urls.items():
        tools = {
            "torch": downloaded(url),
            "penstock": load(lambda u=url: CheckpointReader(f"{u}/hf")),
            "limit: requests of 8 MiB": raw_http(url, "hf", needed[0]),
            "limit: a request for each part": raw_http(url, "hf", needed[2]),
        }
        yield from row(f"{_HF}, {link}", tools)
        own = {
            "torch": load(lambda u=url: FsspecReader(f"{u}/own")),
            "penstock": load(lambda u=url: CheckpointReader(f"{u}/own")),
            "limit: requests of 8 MiB": raw_http(url, "own", needed[1]),
        }
        yield from row(f"{_OWN}, {link}", own)

    stock_own = lambda: dcp.FileSystemReader(place / "own")  # noqa: E731
    stock_hf = lambda: HuggingFaceStorageReader(str(place / "hf"))  # noqa: E731
    threads_hf = lambda: HuggingFaceStorageReader(str(place / "hf"), thread_count=4)  # noqa: E731
    for state, before in (("warm", lambda kind: None), ("cold", lambda kind: _drop(place / kind))):
        for dim, layout in ((0, ""), (1, ", to columns")):
            hf = {
                "torch": load(stock_hf, dim),
                "torch, 4 threads": load(threads_hf, dim),
                "penstock": load(lambda: CheckpointReader(place / "hf"), dim),
                "limit: pread": raw("hf"),
            }
            yield from row(f"{_HF}, {state}{layout}", hf, before=lambda b=before: b("hf"))
            own = {
                "torch": load(stock_own, dim),
                "penstock": load(lambda: CheckpointReader(place / "own"), dim),
                "limit: pread": raw("own"),
            }
            yield from row(f"{_OWN}, {state}{layout}", own, before=lambda b=before: b("own"))


def _saves(rank: int, count: int, place: Path, shapes: dict[str, Any], row: Any) -> Iterator[Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    from penstock_dcp import CheckpointReader, CheckpointWriter

    state = _state(rank, count, shapes, 0)
    dcp.load(state, storage_reader=CheckpointReader(place / "hf"))
    target = place / "saved"
    group = dist.new_group(backend="gloo")

    def save(make: Callable[[], Any]) -> Act:
        return lambda number: dcp.save(state, storage_writer=make(), process_group=group) and None

    def save_later(make: Callable[[], Any]) -> Act:
        # Kept: what a writer stages into is reused by the next save.
        writer = make()

        def act(number: int) -> float:
            begun = time.monotonic()
            saved = dcp.async_save(state, checkpoint_id=target, storage_writer=writer, process_group=group)
            blocked = time.monotonic() - begun
            getattr(saved, "upload_completion", saved).result()
            return blocked

        return act

    def remove(number: int) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(place / "saved-consolidated", ignore_errors=True)

    def raw(number: int) -> None:
        nbytes = sum(tensor.to_local().nbytes for tensor in state.values())
        data = memoryview(bytes(8 << 20))
        if rank == 0:
            target.mkdir()
        dist.barrier()
        with open(target / str(rank), "wb", buffering=0) as file:
            for _ in range(0, nbytes, len(data)):
                file.write(data)
            os.fsync(file.fileno())

    consolidated = lambda: HuggingFaceStorageWriter(  # noqa: E731
        str(target), save_distributed=True, enable_consolidation=True, thread_count_consolidation=2
    )
    tools = {
        "torch, DCP's format": save(lambda: dcp.FileSystemWriter(target)),
        "torch, safetensors": save(consolidated),
        "penstock": save(lambda: CheckpointWriter(target)),
        "limit: write": raw,
    }
    yield from row("save", tools, after=remove)
    later = {
        "torch": save_later(lambda: dcp.FileSystemWriter(target)),
        "penstock": save_later(lambda: CheckpointWriter(target)),
        "penstock, staging_bytes=32M": save_later(lambda: CheckpointWriter(target, staging_bytes="32M")),
    }
    yield from row("save later", later, after=remove)


if __name__ == "__main__":
    main()
