"""What an engine needs of a checkpoint of many experts: its loader recorded, and the rows for the planner.

    python -m benchmarks.bench_record               30,000 expert tensors, of which the engine holds half; 5 runs
    python -m benchmarks.bench_record --small       300

This is done once, before the first version that a subscriber installs. Seconds are of the calling thread's processor.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from benchmarks.sync_model import Served, shapes_of

from penstock.sync.receive.target import requirements_for
from penstock.types import DType, TensorTable


def table_of(shapes: dict[str, tuple[int, ...]]) -> TensorTable:
    """Return the table of a checkpoint of BF16 in one file."""
    nbytes = np.array([2 * int(np.prod(shape)) for shape in shapes.values()], np.int64)
    return TensorTable(
        names=tuple(shapes),
        dtypes=(DType.BF16,) * len(shapes),
        shapes=tuple(shapes.values()),
        file_index=np.zeros(len(shapes), np.int64),
        offset=np.cumsum(nbytes) - nbytes,
        nbytes=nbytes,
    )


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="300 tensors")
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args(arguments)
    shapes = shapes_of("moe", 2 << 30, small=asked.small)
    model, table = Served(shapes, 0, 2, "cpu"), table_of(shapes)
    taken: list[float] = []
    for _ in range(asked.runs):
        begun_s = time.thread_time()
        wanted = requirements_for(model, table, None, strict=True)
        taken.append(time.thread_time() - begun_s)
    print(
        f"{len(table)} tensors, {len(wanted.rows)} rows: {statistics.median(taken):.2f} s of a core "
        f"({min(taken):.2f}-{max(taken):.2f}, n = {len(taken)})"
    )
    return taken


if __name__ == "__main__":
    main()
