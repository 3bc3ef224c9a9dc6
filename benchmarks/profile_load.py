"""A profile of one load: the time of each stage, beside the rate of that stage alone on this machine.

In: a checkpoint directory (or a size: one is written), a device. Out: tables on stdout.
Not here: comparison with peers (`benchmarks/load`).

    load twice, traced -> per executor: steps, busy, covered, idle | allocation | ring | copies | reads | digest kernel
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import checkpoints, limits

MIB = 1 << 20
GB = 10**9


def clocked(call: Callable[[], Any]) -> float:
    """Seconds of `call`."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans was open."""
    total, reach = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reach))
        reach = max(reach, stop)
    return total


def executor_table(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each executor from Chrome-trace events; gaps are seconds without a step."""
    rooms = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        return ["(the trace holds no span)"]
    first = min(event["ts"] for event in spans)
    wall = (max(event["ts"] + event["dur"] for event in spans) - first) / 1e6
    lines = [f"spans cover {wall:.3f} s from the first step to the last"]
    for pid, room in rooms.items():
        mine = [event for event in spans if event["pid"] == pid]
        times = sorted(event["dur"] / 1e3 for event in mine)
        at = [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in mine]
        covered = covered_s(at)
        moved = sum(event.get("args", {}).get("bytes", 0) for event in mine)
        lines += [
            f"  {room:8s} {len({e['tid'] for e in mine}):2d} threads, {len(mine):6d} steps from"
            f" {min(a for a, _ in at) - first / 1e6:.3f} to {max(b for _, b in at) - first / 1e6:.3f} s;"
            f" busy {sum(times) / 1e3:.3f} s, covered {covered:.3f} s ({covered / wall:.0%})",
            f"           {moved / GB / max(covered, 1e-9):.1f} GB/s while covered;"
            f" a step: mean {sum(times) / len(times):.2f},"
            f" p50 {times[len(times) // 2]:.2f}, p95 {times[len(times) * 95 // 100]:.2f} ms",
        ]
    return lines


def profile_load(directory: str, device: str, options: dict[str, Any], *, with_profiler: bool) -> None:
    """Loads twice in this process, traced; prints report, executors, and the caller's own thread by function."""
    import penstock

    nbytes = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
    for attempt in ("first load in the process", "second load"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler = cProfile.Profile() if with_profiler else None
            if profiler is not None:
                profiler.enable()
            start = time.perf_counter()
            settings = penstock.ReadSettings(trace=file.name, **options)
            weights = penstock.load(directory, device=device, settings=settings)
            limits.synchronize(device)
            seconds = time.perf_counter() - start
            if profiler is not None:
                profiler.disable()
            traced = json.loads(Path(file.name).read_bytes() or b'{"traceEvents": []}')
        print(f"\n{attempt} {options or ''}: {seconds:.3f} s, {nbytes / seconds / GB:.1f} GB/s")
        print(weights.report.summary())
        print("\n".join(executor_table(traced["traceEvents"])))
        if profiler is not None:
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
            print("\n".join(line for line in text.getvalue().splitlines()[4:] if line.strip()))
        print(f"dropping the tensors: {clocked(weights.clear):.3f} s")


def allocation(device: str, total_bytes: int) -> None:
    """Device memory in one piece, a tensor at a time, and from torch's cache."""
    import torch

    sizes = [2 * rows * columns for rows, columns in ((4096, 4096), (1024, 4096), (14336, 4096)) for _ in range(3)]
    sizes = sizes * max(1, total_bytes // sum(sizes))
    slabs = [2 * MIB] * (total_bytes // (2 * MIB))

    def pieces(lengths: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(n, dtype=torch.uint8, device=device) for n in lengths]

    def fresh(lengths: Sequence[int]) -> float:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return clocked(lambda: pieces(lengths))

    whole = fresh([sum(sizes)])
    split = clocked(lambda: pieces(sizes))
    print(f"\nallocation of {sum(sizes) / GB:.1f} GB in one piece: {whole:.4f} s")
    print(f"  then {len(sizes)} tensors out of that piece: {split:.4f} s")
    print(
        f"  a tensor at a time, fresh: {fresh(sizes):.4f} s; {len(slabs)} slabs of 2 MiB, fresh: {fresh(slabs):.4f} s"
    )
    fresh([sum(slabs)])
    print(f"  {len(slabs)} slabs of 2 MiB out of one cached piece: {clocked(lambda: pieces(slabs)):.4f} s")
    torch.cuda.empty_cache()


def ring(device: str, nbytes: int) -> None:
    """Touching and registering a staging ring: in one go, by threads, with huge pages; and giving it back."""
    import torch

    print(f"\nring of {nbytes // MIB} MiB:")
    for huge in (False, True):
        for threads in (1, 4, 12):
            made = limits.Ring(nbytes, register=True, huge=huge, touch_threads=threads)
            address = made.tensor.data_ptr()
            gone = clocked(lambda a=address: torch.cuda.cudart().cudaHostUnregister(a))
            took = f"touch {made.touch_s:.4f} s, register {made.register_s:.4f} s, unregister {gone:.4f} s"
            print(f"  huge={huge!s:5} touched by {threads:2d} threads: {took}")
    for threads in (4, 12):
        by_buffer(limits.Ring(nbytes, register=False, huge=True, touch_threads=threads), nbytes, threads)


def by_buffer(made: limits.Ring, nbytes: int, threads: int) -> None:
    """Registers a touched ring in buffers of 8 MiB, several threads at once; unregisters them from one."""
    import torch

    step, cudart, base = 8 * MIB, torch.cuda.cudart(), made.tensor.data_ptr()
    parts = [range(base + i * step, base + nbytes, threads * step) for i in range(threads)]

    def pin(part: range) -> None:
        for address in part:
            cudart.cudaHostRegister(address, step, 1)

    pinned = clocked(lambda: limits.in_threads([lambda part=part: pin(part) for part in parts]))
    freed = clocked(lambda: [cudart.cudaHostUnregister(address) for part in parts for address in part])
    print(f"  buffers of 8 MiB, registered by {threads} threads {pinned:.4f} s, unregistered by one {freed:.4f} s")


def copies(device: str, total_bytes: int) -> None:
    """Host-to-device rate by chunk, one issuing thread, an event a chunk; and what the calls cost that thread."""
    import torch

    source = limits.Ring(256 * MIB, register=True).tensor
    target = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    print("\ncopies from a registered ring, one thread, an event each:")
    for chunk in (MIB // 4, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB):
        rounds = max(1, min(total_bytes, 4000 * chunk) // source.numel())
        spans = [(at, at + chunk) for at in range(0, source.numel(), chunk)]
        stream = torch.cuda.Stream(device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(stream):
            for _ in range(rounds):
                for a, b in spans:
                    target[a:b].copy_(source[a:b], non_blocking=True)
                    torch.cuda.Event().record(stream)
        issued = time.perf_counter() - start
        stream.synchronize()
        seconds = time.perf_counter() - start
        rate = rounds * source.numel() / seconds / GB
        print(
            f"  {chunk / MIB:5.2f} MiB: {rate:5.1f} GB/s; issuing {issued / rounds / len(spans) * 1e6:6.1f} us a chunk"
        )


def reads(files: Sequence[str], *, cuda: bool) -> None:
    """Page-cache reads into one registered ring by threads and chunk, no copies."""
    buffer = limits.Ring(2 * 16 * 16 * MIB, register=cuda, huge=True, touch_threads=4)
    print("\nreads into a registered ring, GB/s:        " + "".join(f"{c:>8d} MiB" for c in (4, 8, 16)))
    for threads in (4, 8, 12, 16):
        rates = [limits.read(files, threads=threads, chunk_bytes=c * MIB, ring=buffer) for c in (4, 8, 16)]
        print(f"  {threads:2d} threads                               " + "".join(f"{rate:12.1f}" for rate in rates))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", nargs="?", help="a checkpoint; without it one is written to --shm-dir and removed")
    parser.add_argument("--total-gb", type=float, default=14.0)
    parser.add_argument("--moe-tensors", type=int, default=0, help="write this many tensors of 64 KiB instead")
    parser.add_argument("--shm-dir", default="/dev/shm")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="passed to penstock.load")
    parser.add_argument("--only", default="load,alloc,ring,h2d,read,digest")
    parser.add_argument("--cprofile", action="store_true", help="also where the calling thread spends its time")
    arguments = parser.parse_args(argv)
    only, device, written = arguments.only.split(","), arguments.device, None
    cuda, total_bytes = device.startswith("cuda"), int(arguments.total_gb * GB)
    if arguments.directory is None:
        tensors = checkpoints.moe_shapes(arguments.moe_tensors)
        shapes = tensors if arguments.moe_tensors else checkpoints.dense_shapes(total_bytes)
        written = f"{arguments.shm_dir}/penstock-profile-{os.getpid()}"
        took = clocked(lambda: checkpoints.write(written, shapes))
        print(f"wrote {written} in {took:.1f} s")
    directory = arguments.directory or written
    files = sorted(str(path) for path in Path(directory).glob("*.safetensors"))
    options = {name: json.loads(value) for name, value in (item.split("=", 1) for item in arguments.option)}
    try:
        sections: dict[str, Callable[[], None]] = {
            "load": lambda: profile_load(directory, device, options, with_profiler=arguments.cprofile),
            "read": lambda: reads(files, cuda=cuda),
        }
        if cuda:
            import torch

            torch.zeros(1, device=device)
            sections |= {
                "alloc": lambda: allocation(device, total_bytes),
                "ring": lambda: ring(device, 256 * MIB),
                "h2d": lambda: copies(device, 8 * GB),
                "digest": lambda: print(f"\ndigest kernel alone: {limits.digest_kernel(device):.0f} GB/s"),
            }
        for name in (name for name in only if name in sections):
            try:
                sections[name]()
            except Exception as error:
                print(f"\n{name}: FAILED {type(error).__name__}: {error}")
                if name == only[-1]:
                    raise
    finally:
        if written is not None:
            shutil.rmtree(written, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
