"""Memory tiers: how fast blocks move between them, beside what the link gives and beside a fresh load; a keeper's swap.

    python -m benchmarks.bench_tiers [--total-gb 1] [--reps 3] [--dir DIR]...            host arena <-> file
    python -m benchmarks.bench_tiers --device cuda:0 --total-gb 60 --load-gb 6 --dir /dev/shm   pinned host <-> GPU
    ... --keeper --models 12 --dir DIR      models of that size, room for one: `attach` of those that rest, by turns
    ... --keeper --models 12 --largest-gb 64 --total-gb 2    one of them is larger; the others take turns with it

A block moves down and up `reps` times by the calls that the keeper makes; the first way down, on which new memory is
touched and pinned, is told apart. The limit of a link is measured in the same run: 256 MiB copies for the GPU, for a
file direct reads and writes of 16 MiB by 8 threads, reads into new shared memory. Bytes are digested before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from benchmarks.bench_files import huge
from benchmarks.load import limits
from tests.support.keeper import KeeperProcess

import penstock as ps
from penstock.cache.tier_disk import SpillTier
from penstock.digest.leaf import LEAF_BYTES, leaf_digests
from penstock.engine.place import CudaRegistrar
from penstock.memory.arena import Arena
from penstock.memory.tier import PIECE_BYTES, HostRoom, Room, TierBlock
from penstock.memory.tier_cuda import CudaRoom, CudaTier
from penstock.memory.tier_host import POOL_BUFFER_BYTES, ArenaTier, PoolTier
from penstock.memory.tiers import Level, Tiers
from penstock.testing.checkpoints import write_llama
from penstock.types import GB

THREADS = 8
PAUSE_S = 0.5
"""After which the driver has cleared what a block left on a device; until then copies are half as fast."""


def fill(room: Room) -> None:
    """Bytes of chance, so that no two leaves are equal."""
    if isinstance(room, CudaRoom):
        assert room.arena is not None
        room.arena.bytes_at(0, room.nbytes // 8 * 8).view(torch.int64).random_()
        torch.cuda.synchronize()
    elif isinstance(room, HostRoom):
        chance = np.random.default_rng(0).integers(0, 255, PIECE_BYTES, np.uint8)
        for view in room.views():
            for at in range(0, len(view), PIECE_BYTES):
                piece = np.frombuffer(view, np.uint8)[at : at + PIECE_BYTES]
                piece[:] = chance[: len(piece)]
                piece[:8] = np.frombuffer(at.to_bytes(8, "little"), np.uint8)[: len(piece)]


def digests(room: Room) -> bytes:
    """Return the digests of all leaves of a room on the fastest tier."""
    starts = range(0, room.nbytes, LEAF_BYTES)
    if isinstance(room, CudaRoom):
        from penstock.digest.cuda import leaf_digests_cuda

        assert room.arena is not None
        at = np.fromiter(starts, np.int64, len(starts))
        nbytes = np.minimum(room.nbytes - at, LEAF_BYTES)
        return (
            leaf_digests_cuda(room.arena.address + at, nbytes, torch.device(room.arena.device)).cpu().numpy().tobytes()
        )
    assert isinstance(room, HostRoom)
    out = np.zeros(len(starts), np.uint64)
    leaf_digests(room.views()[0], LEAF_BYTES, out)
    return out.tobytes()


def file_limits(directory: Path, nbytes: int) -> dict[str, float]:
    """GB/s of a file, past the page cache where it can be, 16 MiB by 8 threads: written, read, read into new memory."""
    present, path = huge(THREADS * PIECE_BYTES), directory / "limit"
    rates = {}
    try:
        for what in ("host -> disk", "disk -> host", "disk -> present"):
            begun = time.perf_counter()
            memory = Arena.allocate(nbytes).bytes_at(0, nbytes).numpy().data if what == "disk -> host" else present
            call, flags = (os.pwritev, os.O_RDWR | os.O_CREAT) if what == "host -> disk" else (os.preadv, os.O_RDONLY)
            try:
                fd = os.open(path, flags | os.O_DIRECT)
            except OSError:  # not on this file system
                fd = os.open(path, flags)
            if call is os.pwritev:
                os.posix_fallocate(fd, 0, nbytes)

            def one(at: int, fd: int = fd, memory: memoryview = memory, call: Callable[..., int] = call) -> None:
                slot = at % len(memory)
                call(fd, [memory[slot : slot + min(PIECE_BYTES, nbytes - at)]], at)

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(one, range(0, nbytes, PIECE_BYTES)))
            os.fdatasync(fd)
            rates[what] = nbytes / GB / (time.perf_counter() - begun)
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)
    return rates


def moves(levels: Sequence[Level], nbytes: int, reps: int, pause_s: float) -> Iterator[tuple[str, float]]:
    """(what, GB/s) of each way a block went between the first two tiers; it comes back after a pause, and at once."""
    down, up = (f"{levels[a].tier.name} -> {levels[b].tier.name}" for a, b in ((0, 1), (1, 0)))
    with Tiers(levels, stall_s=120) as tiers:
        block = TierBlock("bench", 0, nbytes)
        tiers.put(block, fill, again=False)
        with tiers.pin(block) as room:
            wanted = digests(room)
        calls = [(down, tiers.demote, 0.0), (up, tiers.promote, pause_s)]
        if pause_s:
            calls += [(down, tiers.demote, 0.0), (f"{up}, at once", tiers.promote, 0.0)]
        for rep in range(reps + 1):
            for number, (what, call, wait_s) in enumerate(calls):
                time.sleep(wait_s)
                begun = time.perf_counter()
                call(block)
                rate = nbytes / GB / (time.perf_counter() - begun)
                yield f"{what}, first" if not rep and not number else what, rate
        with tiers.pin(block) as room:
            assert digests(room) == wanted, "bytes changed"


def fresh_load(directory: Path, device: str, nbytes: int, reps: int) -> list[float]:
    """GB/s of `penstock.load` of a checkpoint in `directory` into memory of its own; the best a file of it gives."""
    checkpoint = directory / "fresh"
    write_llama(checkpoint, total_bytes=nbytes, fp8=False, shards=4)
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    rates = []
    for _ in range(reps):
        begun = time.perf_counter()
        weights = ps.load(checkpoint, device=device, settings=ps.ReadSettings(copy=True))
        if device != "cpu":
            torch.cuda.synchronize()
        rates.append(total / GB / (time.perf_counter() - begun))
        del weights
    shutil.rmtree(checkpoint)
    return rates


def below(directory: Path, device: str, nbytes: int) -> list[str]:
    """Return a keeper's options for the tier below its device."""
    return ["--disk", str(directory / "spill")] if device == "cpu" else ["--host-bytes", str(nbytes)]


def larger_swaps(
    directory: Path, device: str, nbytes: int, largest_nbytes: int, reps: int, num_models: int
) -> dict[str, list[float]]:
    """Seconds to attach to a large model that rests while a small one makes room, and the other way round."""
    large, small = directory / "large", directory / "small"
    write_llama(large, total_bytes=largest_nbytes, fp8=False, shards=8)
    write_llama(small, total_bytes=nbytes, fp8=False, shards=1)
    # As they were written, in whole layers.
    largest_nbytes, nbytes = (sum(file.stat().st_size for file in of.glob("*.safetensors")) for of in (large, small))
    names = [f"model-{number}" for number in range(num_models)]
    # Room for the large one, and not for a small one beside it.
    bounds = ["--device", device, "--memory-bytes", str(int(largest_nbytes + 0.9 * nbytes))]
    bounds += below(directory, device, int(1.05 * largest_nbytes + (num_models + 1) * nbytes))
    models = [argument for name in names for argument in ("--model", name)]
    made: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["PENSTOCK_RUNTIME_DIR"] = runtime
        paths = [str(large), *[str(small)] * (num_models - 1)]
        with KeeperProcess([*paths, *models, *bounds], timeout_s=300):
            for verify in (False, True):
                how = ", compared" if verify else ""
                for turn in range(reps * (num_models - 1)):
                    for what, name in (("small", names[1 + turn % (num_models - 1)]), ("large", names[0])):
                        begun = time.perf_counter()
                        with ps.cache.attach(name, timeout_s=60, verify=verify):
                            seconds = time.perf_counter() - begun
                        # The first two move each kind down once, to memory that may not be pinned yet.
                        if verify or turn > 1:
                            made.setdefault(f"attach, swapped back, {what}{how}", []).append(seconds)
    shutil.rmtree(large)
    return made


def keeper_swaps(directory: Path, device: str, nbytes: int, reps: int, num_models: int) -> dict[str, list[float]]:
    """Seconds to attach to models that rest, another making room, and to load one afresh; a budget for one."""
    made: dict[str, list[float]] = {
        "attach, swapped back": [],
        "attach, swapped back, compared": [],
        "attach, on the device": [],
        "fresh load": [],
    }
    checkpoint = directory / "checkpoint"
    write_llama(checkpoint, total_bytes=nbytes, fp8=False, shards=4)
    # Models of one content: each is kept by itself, as models of different ones are.
    names = [f"model-{number}" for number in range(num_models)]
    bounds = ["--device", device, "--memory-bytes", str(int(1.5 * nbytes))]
    bounds += below(directory, device, (num_models + 1) * nbytes)
    models = [argument for name in names for argument in ("--model", name)]
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["PENSTOCK_RUNTIME_DIR"] = runtime
        with KeeperProcess([*[str(checkpoint)] * num_models, *models, *bounds], timeout_s=300):
            ways = (("attach, swapped back", False), ("attach, swapped back, compared", True))
            for what, verify in ways:
                for turn in range(max(2, reps) * num_models):
                    begun = time.perf_counter()
                    with ps.cache.attach(names[turn % num_models], timeout_s=60, verify=verify):
                        made[what].append(time.perf_counter() - begun)
            for _ in range(reps):
                begun = time.perf_counter()
                with ps.cache.attach(names[-1], timeout_s=60, verify=False):
                    made["attach, on the device"].append(time.perf_counter() - begun)
        for _ in range(reps):
            begun = time.perf_counter()
            ps.load(checkpoint, device=device, settings=ps.ReadSettings(copy=True))
            made["fresh load"].append(time.perf_counter() - begun)
    # The first round moves each model down once, to memory that may not be pinned yet.
    made["attach, swapped back"] = made["attach, swapped back"][num_models:]
    shutil.rmtree(checkpoint)
    return made


def show(rows: dict[str, list[float]], bounds: dict[str, float], unit: str = "GB/s") -> None:
    """Print a table."""
    print(f"\n| what | n | median {unit} | min - max | limit | of the limit |\n|---|---|---|---|---|---|")
    for what, values in rows.items():
        bound = bounds.get(what)
        limit = "" if bound is None else f"{bound:.2f}"
        share = "" if bound is None else f"{statistics.median(values) / bound:.2f}"
        spread = f"{min(values):.2f} - {max(values):.2f}"
        print(f"| {what} | {len(values)} | {statistics.median(values):.2f} | {spread} | {limit} | {share} |")


def measure(
    levels: Callable[[], Sequence[Level]], nbytes: int, reps: int, pause_s: float = 0.0
) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    for what, rate in moves(levels(), nbytes, reps, pause_s):
        rows.setdefault(what, []).append(rate)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-gb", type=float, default=1.0)
    parser.add_argument("--load-gb", type=float, help="of the fresh load; default: --total-gb")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dir", type=Path, action="append", default=[])
    parser.add_argument("--keeper", action="store_true")
    parser.add_argument("--models", type=int, default=2, help="models of the keeper, one of which is resident")
    parser.add_argument("--largest-gb", type=float, default=0.0, help="one of the keeper's models has this size")
    arguments = parser.parse_args()
    nbytes, reps = int(arguments.total_gb * GB) // 4096 * 4096, arguments.reps
    load_nbytes = int((arguments.load_gb or arguments.total_gb) * GB)
    where = arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(arguments.device)
    cores, versions = os.cpu_count(), f"Linux {platform.release()}, torch {torch.__version__}"
    print(f"{nbytes / GB:.3f} GB on {where}; {cores} cores, {versions}")
    if arguments.device != "cpu" and not arguments.keeper:
        device = torch.device(arguments.device)
        rate = limits.h2d(arguments.device)
        host = -(-nbytes // POOL_BUFFER_BYTES) * POOL_BUFFER_BYTES

        def levels() -> Sequence[Level]:
            pool = PoolTier.open(max(host, 2 * POOL_BUFFER_BYTES), registrar=CudaRegistrar(device), stall_s=120)
            return [Level(tier=CudaTier(device, stall_s=120), budget_bytes=nbytes), Level(tier=pool, budget_bytes=host)]

        show(measure(levels, nbytes, reps, PAUSE_S), {"host -> gpu": rate, "host -> gpu, at once": rate})
    for directory in arguments.dir or [Path(tempfile.gettempdir())]:
        with contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            rows: dict[str, list[float]]
            print(f"\n{directory}")
            if arguments.keeper:
                if arguments.device != "cpu":
                    rate = limits.h2d(arguments.device)
                    moved_gb = arguments.largest_gb or load_nbytes / GB
                    print(f"limit of one way: {rate:.1f} GB/s, {moved_gb / rate:.3f} s")
                if arguments.largest_gb:
                    largest = int(arguments.largest_gb * GB)
                    rows = larger_swaps(place, arguments.device, load_nbytes, largest, reps, arguments.models)
                else:
                    rows = keeper_swaps(place, arguments.device, load_nbytes, reps, arguments.models)
                show(rows, {}, "s")
                continue
            rows = {}
            bounds: dict[str, float] = {}
            if arguments.device == "cpu":
                rates = [file_limits(place, nbytes) for _ in range(reps)]
                bounds = {what: max(one[what] for one in rates) for what in rates[0]}
                print(f"\nreads into memory that is present: {bounds.pop('disk -> present'):.2f} GB/s")
                tiers = [Level(tier=ArenaTier()), Level(tier=SpillTier.open(place))]
                rows = measure(lambda tiers=tiers: tiers, nbytes, reps)  # type: ignore[misc]
            rows["fresh load"] = fresh_load(place, arguments.device, load_nbytes, reps)
            show(rows, bounds)


if __name__ == "__main__":
    main()
