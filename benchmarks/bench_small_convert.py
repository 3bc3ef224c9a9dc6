"""Small conversions on the CPU in a program that has imported torch, beside plain scripts in the same process.

    python -m benchmarks.bench_small_convert [--mib 256] [--reps 5]

Rows: BF16 -> FP8 in blocks of 128, a copy, and the mean of two checkpoints. Sources and results are in /dev/shm. The
times are without imports, and with the first call. Not here: large conversions in fresh processes (`bench_convert`).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import penstock as ps

ROWS, COLUMNS = 2048, 8192
BLOCK = 128


def write(directory: Path, mib: int, seed: int) -> Path:
    """Write a checkpoint of about `mib` MiB of BF16 in two files."""
    directory.mkdir()
    torch.manual_seed(seed)
    num = max(1, mib * 2**20 // (2 * 2 * ROWS * COLUMNS))
    for file in range(2):
        layers = range(file * num, (file + 1) * num)
        tensors = {
            f"model.layers.{layer}.mlp.up_proj.weight": torch.randn(ROWS, COLUMNS).bfloat16() for layer in layers
        }
        save_file(tensors, directory / f"model-{file}.safetensors")
    return directory


def quantise(source: Path, into: Path) -> None:
    """Quantise to FP8 in blocks of 128, as a plain script does."""
    into.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        made = {}
        for name, weight in load_file(path).items():
            blocks = weight.float().view(ROWS // BLOCK, BLOCK, COLUMNS // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
            made[name] = (blocks / scale).to(torch.float8_e4m3fn).view(weight.shape)
            made[f"{name}_scale_inv"] = scale.view(blocks.shape[0], blocks.shape[2])
        save_file(made, into / path.name)


def merge(sources: Sequence[Path], into: Path) -> None:
    """Write the mean of checkpoints, as a plain script does."""
    into.mkdir()
    for path in sorted(sources[0].glob("*.safetensors")):
        parts = [load_file(source / path.name) for source in sources]
        made = {
            name: (torch.stack([part[name].float() for part in parts]).sum(0) / len(parts)).to(weight.dtype)
            for name, weight in parts[0].items()
        }
        save_file(made, into / path.name)


def measure(work: str, case: str, reps: int, into: Path, convert: Callable[[], object]) -> None:
    """Print the seconds of some conversions."""
    times = []
    for _ in range(reps):
        shutil.rmtree(into, ignore_errors=True)
        begun = time.perf_counter()
        convert()
        times.append(time.perf_counter() - begun)
    print(
        f"{work:<6} {case:<9} median {statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}), n = {reps}"
    )


def main() -> None:
    """Measure all kinds by both ways, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of one checkpoint")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        sources = [write(Path(directory) / name, args.mib, seed) for seed, name in enumerate(("a", "b"))]
        into = Path(directory) / "out"
        measure("FP8", "script", args.reps, into, lambda: quantise(sources[0], into))
        measure("FP8", "penstock", args.reps, into, lambda: ps.convert(sources[0], into, to="fp8-block128"))
        measure("copy", "script", args.reps, into, lambda: shutil.copytree(sources[0], into))
        measure("copy", "penstock", args.reps, into, lambda: ps.convert(sources[0], into, operations="copy"))
        measure("merge", "script", args.reps, into, lambda: merge(sources, into))
        measure("merge", "penstock", args.reps, into, lambda: ps.convert(sources, into, operations="linear"))


if __name__ == "__main__":
    main()
