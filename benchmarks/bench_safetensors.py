"""safetensors files read by an unmodified program, with and without Penstock under its safetensors.

    python -m benchmarks.bench_safetensors --out benchmarks/results/cpu2_202611

Two files: a checkpoint of tensors of 8 MiB, and one of many tensors of 4 KiB. Each is read by
`safetensors.torch.load_file` and tensor by tensor by `safetensors.safe_open`: from a local disk, in the page cache and
not, and from a network volume (`tests.support.servers.network_volume`: FUSE, with latency and bandwidth), not in the
page cache. 1,000 local files of one small tensor show the cost of choosing the reader of a file. Both kinds run in turn
in one process. The time ends when a byte of every page of every tensor was read, so that mapping alone is no load.

Stock cannot read a URI: its row downloads the file with one request to a directory and reads it from there.
`penstock.load` of the same URI is the other measure of that row.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers.network_volume import NetworkVolume, refusal

from penstock.testing.http_server import Faults, RangeServer

_SMALL_BYTES = 4096
_LARGE_BYTES = 8 << 20
_NUM_FILES = 1_000
_PLACES = ("local", "volume", "http")


def write_files(directory: Path, mib: int, num_small: int) -> None:
    """Write both files, and have them on the disk."""
    import torch
    from safetensors.torch import save_file

    data = torch.from_numpy(np.random.default_rng(7).integers(0, 256, mib << 20, np.uint8))
    large = {f"layers.{at:04}.weight": part.clone() for at, part in enumerate(data.split(_LARGE_BYTES))}
    save_file(large, directory / "checkpoint.safetensors")
    save_file(
        {f"blocks.{at:06}.lora": data[:_SMALL_BYTES].clone() for at in range(num_small)},
        directory / "small.safetensors",
    )
    (directory / "files").mkdir()
    for at in range(_NUM_FILES):
        save_file({"weight": data[:_SMALL_BYTES].clone()}, directory / "files" / f"{at}.safetensors")
    os.sync()


def load_file(place: str) -> dict[str, Any]:
    """Read a file whole."""
    import safetensors.torch

    return safetensors.torch.load_file(place)


def each_tensor(place: str) -> dict[str, Any]:
    """Read a file tensor by tensor, as most loops over a checkpoint do."""
    import safetensors

    with safetensors.safe_open(place, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.offset_keys()}


def each_file(place: str) -> dict[str, Any]:
    """Read the one tensor of each file of a directory."""
    import safetensors

    tensors = {}
    for path in os.listdir(place):
        with safetensors.safe_open(os.path.join(place, path), framework="pt") as file:
            tensors[path] = file.get_tensor("weight")
    return tensors


def downloaded(read: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Return a function that reads a URI by way of a directory, as a program without Penstock would."""

    def run(uri: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
            path, _ = urllib.request.urlretrieve(uri, Path(directory, "file.safetensors"))
            return read(str(path))

    return run


def load(uri: str) -> dict[str, Any]:
    """Read a file by `penstock.load`."""
    import penstock as ps

    return dict(ps.load(uri, "cpu"))


def timed(read: Callable[[str], dict[str, Any]], place: str, under: contextlib.AbstractContextManager[Any]) -> float:
    """Return the seconds until every page of every tensor was touched."""
    gc.collect()
    with under:
        began = time.perf_counter()
        tensors = read(place)
        for tensor in tensors.values():
            tensor.view(-1)[::4096].sum()
        return time.perf_counter() - began


def evict(path: Path) -> None:
    """Drop a local file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def compare(
    row: str,
    ways: dict[str, Callable[[], float]],
    runs: int,
    before: Callable[[], None] = lambda: None,
) -> dict[str, object]:
    """Return a row: the median and the spread of each way, all run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(runs + 1):
        for name, way in ways.items():
            before()
            elapsed = way()
            # The first turn imports what the others find.
            if turn:
                seconds[name].append(elapsed)
    found: dict[str, object] = {"row": row, "n": runs}
    for name, values in seconds.items():
        found[name] = {
            "median_s": round(statistics.median(values), 4),
            "spread_s": [round(min(values), 4), round(max(values), 4)],
        }
    stock = statistics.median(seconds["stock"])
    found["penstock / stock"] = round(statistics.median(seconds["penstock"]) / stock, 2)
    return found


def rows(
    directory: Path, *, places: list[str], runs: int, latency_s: float, bytes_per_s: float
) -> Iterator[dict[str, object]]:
    """Measure every file in these places by both calls."""
    from penstock_hf.safetensors import installed

    def pair(read: Callable[[str], dict[str, Any]], place: str) -> dict[str, Callable[[], float]]:
        return {
            "stock": lambda: timed(read, place, contextlib.nullcontext()),
            "penstock": lambda: timed(read, place, installed()),
        }

    for path in sorted(directory.glob("*.safetensors")) if "local" in places else ():
        for read in (load_file, each_tensor):
            label = f"{path.stem}, {read.__name__}"
            path.read_bytes()
            yield compare(f"{label}, local, cached", pair(read, str(path)), runs)
            yield compare(f"{label}, local, cold", pair(read, str(path)), runs, before=lambda path=path: evict(path))
    if "local" in places:
        row = f"{_NUM_FILES} files of one tensor, local, cached"
        yield compare(row, pair(each_file, str(directory / "files")), runs)
    if "volume" in places and refusal():
        yield {"row": f"network volume: not measured, {refusal()}"}
    elif "volume" in places:
        with tempfile.TemporaryDirectory(prefix="penstock-volume-") as mount_point:
            volume = NetworkVolume(directory, Path(mount_point), latency_s=latency_s, bytes_per_s=bytes_per_s)
            with volume as mounted:
                for path in sorted(mounted.glob("*.safetensors")):
                    for read in (load_file, each_tensor):
                        found = compare(
                            f"{path.stem}, {read.__name__}, network volume",
                            pair(read, str(path)),
                            runs,
                            before=volume.drop_caches,
                        )
                        yield found | {"limit_s": round(path.stat().st_size / bytes_per_s, 4) if bytes_per_s else 0}
    if "http" not in places:
        return
    with RangeServer(directory) as server:
        if bytes_per_s:
            server.faults = Faults(total_bytes_per_s=int(bytes_per_s))
        for path in sorted(directory.glob("*.safetensors")):
            uri = f"{server.url}/{path.name}"
            for read in (load_file, each_tensor):
                ways = {
                    "stock": lambda read=read, uri=uri: timed(downloaded(read), uri, contextlib.nullcontext()),
                    "penstock": lambda read=read, uri=uri: timed(read, uri, installed()),
                    "penstock.load": lambda uri=uri: timed(load, uri, contextlib.nullcontext()),
                }
                found = compare(f"{path.stem}, {read.__name__}, http", ways, runs)
                yield found | {"limit_s": round(path.stat().st_size / bytes_per_s, 4) if bytes_per_s else 0}


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the checkpoint")
    parser.add_argument("--tensors", type=int, default=30_000, help="tensors of 4 KiB in the other file")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--places", nargs="*", default=list(_PLACES), choices=_PLACES)
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of a request to the volume")
    parser.add_argument("--mb-per-s", type=float, default=300.0, help="of the volume and of the server; 0: no limit")
    parser.add_argument("--out", type=Path, help="directory: rows are appended to safetensors.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        directory = Path(name)
        write_files(directory, args.mib, args.tensors)
        bounds = {"runs": args.runs, "latency_s": args.latency_ms / 1e3, "bytes_per_s": args.mb_per_s * 1e6}
        for row in rows(directory, places=args.places, **bounds):
            print(json.dumps(row), flush=True)
            if args.out:
                with (args.out / "safetensors.jsonl").open("a") as file:
                    print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
