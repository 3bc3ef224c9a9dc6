"""A GGUF file opened, loaded and converted, beside the format's own package.

    python -m benchmarks.bench_gguf --gib 1 --out benchmarks/results/cpu2_202611

The file is made by `gguf.GGUFWriter`: 3/4 Q8_0, 1/4 F16, and a tokenizer of 128,000 tokens and 280,000 merges. Each run
is a fresh process; the time begins after imports and ends when every byte of every tensor was read once, for
conversions when the result is there. Cold: the file was dropped from the page cache. Stock is `gguf.GGUFReader` (views
of its mapping, or copies of them as torch tensors), over HTTP after a download to the same disk, and for conversions a
script with `gguf.quants`, safetensors and `gguf.GGUFWriter`. The limit is `readinto` of the whole file by one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers.http_server import RangeServer

from penstock.types import GIB

WIDTH, ROWS = 4096, 4096
TOKENS, MERGES = 128_000, 280_000
ROWS_OF = {
    "open": ("opened", "warm"),
    "load": ("mapped", "warm cold"),
    "copy": ("copied", "warm cold"),
    "http": ("from HTTP", "warm"),
    "dequantise": ("Q8_0 to BF16 safetensors", "warm"),
    "quantise": ("BF16 safetensors to Q8_0 GGUF", "warm"),
}


def write(directory: Path, gib: float) -> None:
    """Write `model.gguf`, and the same number of elements as BF16 in `bf16/model.safetensors`."""
    import gguf
    import torch
    from safetensors.torch import save_file

    dice = np.random.default_rng(7)
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_token_list([f"token {i}" for i in range(TOKENS)])
    writer.add_token_merges([f"to ken{i}" for i in range(MERGES)])
    row_bytes = WIDTH // 32 * 34
    count = max(4, int(gib * GIB / (ROWS * (3 * row_bytes + 2 * WIDTH) / 4)))
    (directory / "bf16").mkdir()
    values = {}
    for i in range(count):
        if i % 4 == 3:
            writer.add_tensor(f"blk.{i}.weight", dice.standard_normal((ROWS, WIDTH), np.float32).astype(np.float16))
            continue
        blocks = dice.integers(0, 256, (ROWS, row_bytes), np.uint8)
        blocks.reshape(-1, 34)[:, :2] = np.full(1, 0.01, np.float16).view(np.uint8)
        writer.add_tensor(f"blk.{i}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        if i % 2 == 0:
            values[f"blk.{i}.weight"] = torch.from_numpy(dice.standard_normal((ROWS, WIDTH), np.float32)).bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(values, directory / "bf16" / "model.safetensors")


def run(kind: str, who: str, source: str, scratch: Path) -> None:
    """Do one thing once, in this process; print the seconds and what it made."""
    import gguf
    import torch
    from gguf import quants
    from safetensors.torch import load_file, save_file

    import penstock as ps

    _ = ps.load, ps.convert, ps.inspect

    def stock_tensors(path: str, *, copy: bool) -> dict[str, torch.Tensor]:
        arrays = {entry.name: entry.data for entry in gguf.GGUFReader(path, "c").tensors}
        return {name: torch.from_numpy(array.copy() if copy else array) for name, array in arrays.items()}

    def stock_http() -> dict[str, torch.Tensor]:
        with urllib.request.urlopen(source) as answer, (scratch / "m.gguf").open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
        return stock_tensors(str(scratch / "m.gguf"), copy=False)

    def stock_dequantise() -> int:
        tensors = {}
        for entry in gguf.GGUFReader(source).tensors:
            if entry.tensor_type is gguf.GGMLQuantizationType.Q8_0:
                values = torch.from_numpy(quants.dequantize(entry.data, entry.tensor_type))
                tensors[entry.name] = values.bfloat16()
            else:
                tensors[entry.name] = torch.from_numpy(entry.data.copy())
        (scratch / "out").mkdir()
        save_file(tensors, scratch / "out" / "model.safetensors")
        return digest(scratch / "out" / "model.safetensors")

    def stock_quantise() -> int:
        kind = gguf.GGMLQuantizationType.Q8_0
        (scratch / "out").mkdir()
        writer = gguf.GGUFWriter(scratch / "out" / "model.gguf", "llama")
        for name, tensor in load_file(f"{source}/model.safetensors").items():
            writer.add_tensor(name, quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return digest(scratch / "out" / "model.gguf")

    def ours_converted(**options: Any) -> int:
        ps.convert(source, scratch / "out", devices="cpu", **options)
        (made,) = [*(scratch / "out").glob("model.*")]
        return digest(made)

    def digest(path: Path) -> int:
        return sum_of(dict(ps.load(path)))

    both: dict[str, dict[str, Callable[[], Any]]] = {
        "open": {
            "penstock": lambda: ps.inspect(source).num_tensors,
            "stock": lambda: len(gguf.GGUFReader(source).tensors),
        },
        "load": {"penstock": lambda: ps.load(source), "stock": lambda: stock_tensors(source, copy=False)},
        "copy": {
            "penstock": lambda: ps.load(source, settings=ps.ReadSettings(copy=True)),
            "stock": lambda: stock_tensors(source, copy=True),
        },
        "http": {"penstock": lambda: ps.load(source), "stock": stock_http},
        "dequantise": {
            "penstock": lambda: ours_converted(operations="dequantise:to=BF16"),
            "stock": stock_dequantise,
        },
        "quantise": {"penstock": lambda: ours_converted(to="gguf:Q8_0"), "stock": stock_quantise},
    }
    began = time.monotonic()
    made = both[kind][who]()
    total = made if isinstance(made, int) else sum_of(made)
    print(json.dumps({"seconds": time.monotonic() - began, "total": total}))


def sum_of(tensors: dict[str, Any]) -> int:
    """Return a sum over all bytes."""
    import torch

    return sum(int(t.contiguous().reshape(-1).view(torch.uint8).view(torch.int64).sum()) for t in tensors.values())


def limit(path: Path, *, cold: bool) -> float:
    """Return the seconds of one thread that reads the file into memory that it has touched."""
    buffer = bytearray(16 << 20)
    if cold:
        drop(path)
    began = time.monotonic()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.monotonic() - began


def drop(path: Path) -> None:
    """Drop a file, which is on the disk, from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def measure(directory: Path, gib: float, runs: int, kinds: list[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of each kind when it is done; in it the sides take turns."""
    with RangeServer(directory) as server:
        for kind in kinds:
            for state in ROWS_OF[kind][1].split():
                sources = {"http": f"{server.url}/model.gguf", "quantise": str(directory / "bf16")}
                source = sources.get(kind, str(directory / "model.gguf"))
                for who, values in once_each(directory, kind, state, source, runs).items():
                    yield {
                        "row": f"{who}, {ROWS_OF[kind][0]}, {state}",
                        "gib": gib,
                        "file_bytes": (directory / "model.gguf").stat().st_size,
                        "median_s": round(statistics.median(values), 3),
                        "spread_s": [round(min(values), 3), round(max(values), 3)],
                        "n": len(values),
                    }


def once_each(directory: Path, kind: str, state: str, source: str, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run of both sides, and of the limit where the row is of reading the file."""
    path = directory / "model.gguf"
    seconds: dict[str, list[float]] = {}
    for _ in range(runs):
        totals = set()
        if kind in {"load", "copy"}:
            seconds.setdefault("limit", []).append(limit(path, cold=state == "cold"))
        for who in ("penstock", "stock"):
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                if state == "cold":
                    drop(path)
                command = [sys.executable, "-m", "benchmarks.bench_gguf", "--run", kind, who, source, scratch]
                done = subprocess.run(command, stdout=-1, text=True, timeout=900, check=True)
            answer = json.loads(done.stdout.splitlines()[-1])
            totals.add(answer["total"])
            seconds.setdefault(who, []).append(answer["seconds"])
        if len(totals) != 1:
            raise SystemExit(f"{kind}: the two sides made different bytes")
    return seconds


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=list(ROWS_OF), choices=list(ROWS_OF))
    parser.add_argument("--dir", type=Path, help="where the files are made; default: a temporary directory")
    parser.add_argument("--out", type=Path, help="directory: rows are appended to gguf.jsonl")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run[0], args.run[1], args.run[2], Path(args.run[3]))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=args.dir) as directory:
        write(Path(directory), args.gib)
        for row in measure(Path(directory), args.gib, args.runs, args.kinds):
            print(json.dumps(row), flush=True)
            if args.out:
                with (args.out / "gguf.jsonl").open("a") as file:
                    print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
