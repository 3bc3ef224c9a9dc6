"""Two commits in turns on one machine: `python -m benchmarks.ab OLD NEW [--rows load,sync] [--n 6]`.

In: two commits, or directories with trees. Out: for each row the medians, the spread and the ratio new / old; exit 1
where a row is slower by more than 3 % twice.
Not here: the rows themselves (`ab_rows`).

Each commit gets a git worktree below a temporary directory. Runs go old, new, new, old, so that a drift of the machine
meets both alike. Every run is a new process with PYTHONPATH at the sources of its tree, `src/` or `packages/*/src/`. A
row that is slower by more than `LIMIT` is measured again with as many runs, and is lost if it is slower again. The rows
that need a device run where CUDA is present, all of them in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ab_rows import DEVICE_ROWS, ROWS
from scripts.source_roots import ROOT, source_roots

LIMIT = 1.03
"""Largest ratio of the medians, new / old."""
ELSEWHERE = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
"""What both trees import beside their own sources: on a machine without an index, packages in a directory."""
TIMEOUT_S = 300.0
"""Longest run of one row in one process."""
LARGE_MIB, NUM_SMALL = 256, 4000
"""Of the large checkpoint, and tensors of the small one. The medium one has an eighth of the large one."""


@contextmanager
def worktree(commit: str, path: Path) -> Iterator[Path]:
    """Check out a commit in a worktree of its own, and remove it in the end; a directory is used as it is."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def write_data(directory: Path, *, large_mib: int = LARGE_MIB, num_small: int = NUM_SMALL) -> None:
    """Write two checkpoints of large tensors in two files each, and one of small tensors, by safetensors itself."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    for name in ("large", "medium", "small"):
        (directory / name).mkdir()
    for name, mib in (("large", large_mib), ("medium", large_mib // 8)):
        for file in range(2):
            numbers = range(file, max(2, mib // 16), 2)
            tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(2048, 4096).bfloat16() for n in numbers}
            save_file(tensors, directory / name / f"model-{file}.safetensors")
    small = {f"model.layers.{n}.norm.weight": torch.randn(64, 64).bfloat16() for n in range(num_small)}
    save_file(small, directory / "small" / "model.safetensors")


def run(rows: Sequence[str], tree: Path, data: Path) -> dict[str, float]:
    """Return the seconds of each row, measured in a new process that imports `tree`."""
    roots = source_roots(tree)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, roots), *ELSEWHERE]), "PENSTOCK_PROGRESS": "0"}
    command = [sys.executable, str(ROOT / "benchmarks" / "ab_rows.py"), ",".join(rows), str(data)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    if not any(Path(result["file"]).is_relative_to(root) for root in roots):
        raise SystemExit(f"{', '.join(rows)}: measured {result['file']}, which is not in {tree}")
    seconds: dict[str, float] = result["seconds"]
    return seconds


def measure(rows: Sequence[str], trees: Sequence[Path], data: Path, n: int) -> dict[str, tuple[float, str]]:
    """Run rows `n` times in each tree, in turns. Return for each row the ratio of the medians, and a line."""
    seconds: dict[str, tuple[list[float], list[float]]] = {row: ([], []) for row in rows}
    for turn in range(n):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            for row, taken in run(rows, trees[side], data).items():
                seconds[row][side].append(taken)
    found = {}
    for row, sides in seconds.items():
        old, new = map(statistics.median, sides)
        shown = "  ".join(
            f"{word} {statistics.median(times) * 1e3:8.1f} ms ({min(times) * 1e3:.1f}-{max(times) * 1e3:.1f})"
            for word, times in zip(("old", "new"), sides, strict=True)
        )
        found[row] = new / old, f"{row:<16} {shown}  ratio {new / old:.3f}  n {n}"
    return found


def compare(rows: Sequence[str], trees: Sequence[Path], data: Path, n: int) -> list[str]:
    """Print each row; return those that are slower than the limit twice."""
    lost = []
    on_device = [row for row in rows if row in DEVICE_ROWS]
    for group in [*([row] for row in rows if row not in on_device), *([on_device] if on_device else [])]:
        slower = []
        for row, (ratio, line) in measure(group, trees, data, n).items():
            print(line, flush=True)
            slower += [row] * (ratio > LIMIT)
        if slower:
            for row, (ratio, line) in measure(slower, trees, data, n).items():
                print(f"{line}  (again)", flush=True)
                lost += [row] * (ratio > LIMIT)
    return lost


def has_cuda() -> bool:
    """Return whether torch sees a device, without a CUDA context in this process."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> int:
    """Compare two commits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument(
        "--rows", default="", help=f"of {', '.join([*ROWS, *DEVICE_ROWS])}; by default all that can run"
    )
    parser.add_argument("--n", type=int, default=6, help="runs of each row in each tree")
    parser.add_argument("--large-mib", type=int, default=LARGE_MIB, help="of the large checkpoint")
    parser.add_argument("--directory", default="/dev/shm", help="for checkpoints")
    args = parser.parse_args()
    rows = args.rows.split(",") if args.rows else [*ROWS, *(DEVICE_ROWS if has_cuda() else ())]
    if unknown := [row for row in rows if row not in ROWS | DEVICE_ROWS]:
        parser.error(f"no such rows: {', '.join(unknown)}")
    with (
        tempfile.TemporaryDirectory(prefix="ab-") as home,
        tempfile.TemporaryDirectory(prefix="ab-", dir=args.directory) as data,
        worktree(args.old, Path(home) / "old") as old,
        worktree(args.new, Path(home) / "new") as new,
    ):
        write_data(Path(data), large_mib=args.large_mib)
        lost = compare(rows, (old, new), Path(data), args.n)
    if lost:
        print(f"slower than {LIMIT} twice: {', '.join(lost)}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
