"""File -> CPU memory beside the peers, cold and warm; with --source, FileSource beside bare system calls.

    python -m benchmarks.bench_files [--total-gb 2.3] [--reps 5] [--dir DIR] [--cases a,b] [--source] [--json]

Each measurement is a fresh process; imports are not timed; the time includes touching every page of every tensor.
Cases are shuffled anew in every repetition. Cold: the files are evicted and found absent just before. With --settle-s
that pause follows: a virtual machine gives free pages back to its host meanwhile, and a cold start pays for getting
them again. Warm: evicted, read once by plain buffered reads, found wholly present. The limit of cold is the best of
direct I/O at several queue depths into reused memory in huge pages; the limit of warm is one stride over a mapping of
the same cached file.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.load.loaders import LOADERS, Call

from penstock.storage.files import FileSource
from penstock.storage.local import num_pages, resident_pages
from penstock.storage.mapped import MappedFile

MIB = 1 << 20
LIMITS = ("limit: 1 x 8 MiB", "limit: 2 x 8 MiB", "limit: 4 x 8 MiB", "limit: 8 x 4 MiB", "limit: map and touch")
CASES = ("penstock", "mapped", "safetensors", "safetensors-clone", "runai", "fastsafetensors")


def huge(nbytes: int) -> memoryview:
    """Anonymous memory in huge pages where the kernel grants them, every page touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[::4096] = 1
    return memoryview(memory)


def in_threads(num_threads: int, jobs: Sequence[Any], run: Callable[[int, Any], object]) -> None:
    """`run(thread, job)` for all jobs, by `num_threads` threads that take the next one each."""
    rest, lock = iter(jobs), threading.Lock()

    def work(index: int) -> None:
        while True:
            with lock:
                job = next(rest, None)
            if job is None:
                return
            run(index, job)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def clone(call: Call) -> dict[str, Any]:
    from safetensors import safe_open

    out = {}
    for path in call.files:
        with safe_open(path, framework="pt", device="cpu") as file:
            out |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return out


def mapped(call: Call, num_threads: int = 2, chunk_bytes: int = 8 * MIB) -> dict[str, Any]:
    """MappedFile alone: a view a tensor, the file prefetched by two threads unless that would be for nothing."""
    from penstock.storage.safetensors import read_header

    out = {}
    for path in call.files:
        source = FileSource.open(path)
        table, file = read_header(source).tensors, MappedFile.open(path)
        for name, start, nbytes in zip(table.names, table.offset.tolist(), table.nbytes.tolist(), strict=True):
            out[name] = file.view(start, nbytes)
        prefetch = file.prefetch
        if file.is_ready():
            continue
        in_threads(num_threads, range(0, file.nbytes, chunk_bytes), lambda _, at, go=prefetch: go(at, chunk_bytes))
        source.close()
    return out


def touch(tensors: dict[str, Any]) -> int:
    """Read one byte of every 4 KiB of every tensor."""
    total = 0
    for tensor in tensors.values():
        if not isinstance(tensor, memoryview):
            import torch

            tensor = tensor.contiguous().view(torch.uint8).flatten().numpy()
        total += int(np.asarray(tensor)[::4096].max(initial=0))
    return total


def child(case: str, directory: str) -> None:
    """Measure one case in this process; print seconds, CPU seconds and how far memory rose."""
    call = Call(directory=directory, files=tuple(sorted(map(str, Path(directory).glob("*.safetensors")))), device="cpu")
    if case.startswith("limit"):
        run = limit(case, call)
    elif case in {"mapped", "safetensors-clone"}:
        import safetensors.torch  # noqa: F401

        from penstock.storage import safetensors as _  # noqa: F401

        loader = mapped if case == "mapped" else clone
        run = lambda: touch(loader(call))  # noqa: E731
    else:
        loader_ = LOADERS[case]
        lazily = ("penstock.loader.load",) if case == "penstock" else ()
        for module in ("torch", *loader_.modules, *lazily):
            __import__(module)
        run = lambda: touch(loader_.run(call))  # noqa: E731
    before = os.times()
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    after = os.times()
    cpu_s = after.user + after.system - before.user - before.system
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}))


def limit(case: str, call: Call) -> Callable[[], object]:
    """Measure bare system calls on the disk or the page cache; memory is allocated before the clock starts."""
    if "map" in case:
        files = [MappedFile.open(path) for path in call.files]
        return lambda: [np.asarray(file.view(0, file.nbytes))[::4096].max() for file in files]
    num_threads, _, size, _ = case.removeprefix("limit: ").split()
    chunk_bytes = int(size) * MIB
    buffers = [huge(chunk_bytes) for _ in range(int(num_threads))]
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in call.files]
    jobs = [(fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size, chunk_bytes)]
    return lambda: in_threads(len(buffers), jobs, lambda i, job: os.preadv(job[0], [buffers[i]], job[1]))


def cached_fraction(files: Sequence[str]) -> float:
    found = [0, 0]
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        nbytes = os.fstat(fd).st_size
        found[0] += resident_pages(fd, 0, nbytes) or 0
        found[1] += num_pages(0, nbytes)
        os.close(fd)
    return found[0] / found[1]


def evict(files: Sequence[str]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fill(files: Sequence[str]) -> None:
    evict(files)
    buffer = bytearray(MIB)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(directory: str, cases: Sequence[str], reps: int, settle_s: float) -> list[dict[str, Any]]:
    files = sorted(map(str, Path(directory).glob("*.safetensors")))
    samples: list[dict[str, Any]] = []
    order = random.Random(1)
    for rep in range(reps):
        for state in ("cold", "warm"):
            todo = [c for c in (*cases, *LIMITS) if c not in LIMITS or ("map" in c) == (state == "warm")]
            order.shuffle(todo)
            if state == "warm":
                fill(files)
            for case in todo:
                if state == "cold":
                    evict(files)
                    time.sleep(settle_s)
                at = cached_fraction(files)
                command = [sys.executable, "-m", "benchmarks.bench_files", "--child", case, "--dir", directory]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                sample = {"rep": rep, "state": state, "case": case, "cached_before": at}
                if done.returncode:
                    sample["error"] = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"
                else:
                    sample |= json.loads(done.stdout.splitlines()[-1])
                samples.append(sample)
                print(json.dumps(sample), file=sys.stderr, flush=True)
    return samples


def page(samples: Sequence[dict[str, Any]], nbytes: int) -> str:
    """The samples as Markdown tables, one a state of the cache."""
    lines = []
    for state in ("cold", "warm"):
        rates: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for sample in samples:
            if sample["state"] == state and "seconds" in sample:
                rates.setdefault(sample["case"], []).append(nbytes / 1e9 / sample["seconds"])
                cpu.setdefault(sample["case"], []).append(sample["cpu_s"])
        middle = {case: statistics.median(found) for case, found in rates.items()}
        ceiling = max((rate for case, rate in middle.items() if case in LIMITS), default=float("nan"))
        ours = {"penstock", "mapped", *LIMITS}
        best_peer = max((rate for case, rate in middle.items() if case not in ours), default=float("nan"))
        lines += [f"## {state}", "", "| case | n | median GB/s | min - max | CPU s | of the limit | to the best peer |"]
        lines.append("|---|---|---|---|---|---|---|")
        for case, rate in sorted(middle.items(), key=lambda item: -item[1]):
            spread = f"{min(rates[case]):.2f} - {max(rates[case]):.2f}"
            row = [case, len(rates[case]), f"{rate:.2f}", spread, f"{statistics.median(cpu[case]):.2f}"]
            lines.append(
                "| " + " | ".join(map(str, [*row, f"{rate / ceiling:.2f}", f"{rate / best_peer:.2f}x"])) + " |"
            )
        lines.append("")
    failed = {sample["case"]: sample["error"] for sample in samples if "error" in sample}
    return "\n".join([*lines, *(f"- {case} failed: {error}" for case, error in failed.items())])


def bench_source(directory: str) -> str:
    """FileSource beside os.preadv: rate from the page cache by threads, cold rate, microseconds a call."""
    path = sorted(map(str, Path(directory).glob("*.safetensors")))[0]
    nbytes = os.path.getsize(path)
    lines = ["| what | os.preadv | FileSource | ratio |", "|---|---|---|---|"]
    source = FileSource.open(path)
    plain, direct = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY | os.O_DIRECT)
    chunk_bytes = min(8 * MIB, nbytes // 4096 * 4096)

    def rate(num_threads: int, read: Callable[[int, memoryview], object]) -> float:
        buffers = [huge(chunk_bytes) for _ in range(num_threads)]
        starts = range(0, nbytes - chunk_bytes + 1, chunk_bytes)
        began = time.perf_counter()
        in_threads(num_threads, starts, lambda i, at: read(at, buffers[i]))
        return len(starts) * chunk_bytes / 1e9 / (time.perf_counter() - began)

    def both(what: str, unit: str, bare: Callable[[], float], ours: Callable[[], float], n: int = 5) -> None:
        found = [(bare(), ours()) for _ in range(n)]
        a, b = (statistics.median(side) for side in zip(*found, strict=True))
        lines.append(f"| {what} | {a:.2f} {unit} | {b:.2f} {unit} | {b / a:.2f} |")

    fill([path])
    for num_threads in (1, 2, 12):
        both(
            f"page cache, {num_threads} x {chunk_bytes // MIB} MiB",
            "GB/s",
            lambda n=num_threads: rate(n, lambda at, buffer: os.preadv(plain, [buffer], at)),  # type: ignore[misc]
            lambda n=num_threads: rate(n, lambda at, buffer: source.readv(at, [buffer])),  # type: ignore[misc]
        )

    def cold(read: Callable[[int, memoryview], object]) -> float:
        evict([path])
        return rate(4, read)

    def ours_cold() -> float:
        fresh = FileSource.open(path)
        return cold(lambda at, buffer: fresh.readv(at, [buffer]))

    both("absent, 4 x 8 MiB", "GB/s", lambda: cold(lambda at, buffer: os.preadv(direct, [buffer], at)), ours_cold)
    page_ = huge(4096)

    def each(read: Callable[[int], object], calls: int = 20_000) -> float:
        began = time.perf_counter()
        for i in range(calls):
            read(i % 64 * 4096 % max(nbytes - 4096, 1))
        return (time.perf_counter() - began) / calls * 1e6

    fill([path])
    both(
        "one call of 4 KiB",
        "us",
        lambda: each(lambda at: os.preadv(plain, [page_], at)),
        lambda: each(lambda at: source.readv(at, [page_])),
    )
    return "\n".join(lines)


def machine() -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} absent"

    packages = ("torch", "numpy", "safetensors", "runai-model-streamer", "fastsafetensors")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    system = f"{os.cpu_count()} cores {model}, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{system}; {', '.join(map(of, packages))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-gb", type=float, default=2.3)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=0.0, help="pause between eviction and measurement")
    parser.add_argument("--dir", default=None, help="where the checkpoint is, or is to be written")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--source", action="store_true", help="FileSource beside bare system calls, instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.dir)
        return
    from penstock.testing.checkpoints import write_llama

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        directory = args.dir or scratch
        if not list(Path(directory).glob("*.safetensors")):
            write_llama(directory, total_bytes=int(args.total_gb * 1e9), fp8=False, shards=1)
        nbytes = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
        if args.source:
            print(bench_source(directory))
            return
        samples = measure(directory, args.cases.split(","), args.reps, args.settle_s)
    if args.json:
        print(json.dumps({"machine": machine(), "nbytes": nbytes, "samples": samples}, indent=1))
    else:
        print(f"{machine()}; {nbytes / 1e9:.2f} GB\n\n{page(samples, nbytes)}")


if __name__ == "__main__":
    main()
