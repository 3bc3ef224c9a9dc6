"""A conversion of a million tasks on a thousand workers: planned from headers, then placed task by task.

    python -m benchmarks.bench_tasks                        the merge of three models of Kimi-K2's shapes
    python -m benchmarks.bench_tasks --op fp8-block128      one source, in a block format
    python -m benchmarks.bench_tasks --layers 4 --experts 8 --tasks 1000 --workers 16

Planning is `job.plan_job`, which each process of a job calls. `task_bytes` gives the number of tasks.
Placing is the project's own `Placement` driven by `simulate_convert`: nodes of eight GPUs, one in fifty 5 times slower.
One thread; the peak is the process's, with all that the plan is made of.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import msgspec
import numpy as np

from penstock.digest.leaf import LEAF_BYTES, num_leaves
from penstock.types import GB, MIB, DType, FileEntry, Manifest
from penstock_convert.job import plan_job
from penstock_convert.operations.spec import OperationSpec, operation_of
from penstock_convert.plan.cluster import CLUSTERS
from penstock_convert.plan.simulate_convert import simulate_convert
from penstock_convert.plan.tasks import Spec, lay_out
from penstock_tools.shapes import kimi_k2


def manifest_of(layers: int, experts: int) -> Manifest:
    """A digested checkpoint of Kimi-K2's shapes."""
    shapes = kimi_k2(layers, experts)
    files = lay_out([Spec(name=one.name, dtype=DType.BF16, shape=one.shape) for one in shapes], shard_bytes=5 * GB)
    leaves = np.zeros(int(num_leaves(files.table.nbytes, LEAF_BYTES).sum()), np.uint64)
    entries = tuple(FileEntry(name=f"{i}.safetensors", nbytes=body) for i, body in enumerate(files.body_nbytes))
    return Manifest(files=entries, tensors=files.table, leaf_bytes=LEAF_BYTES, leaves=leaves, revision="w1-0")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="linear", help="linear (of three), or a format")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="about so many")
    parser.add_argument("--workers", type=int, default=1000)
    args = parser.parse_args(arguments)
    manifest = manifest_of(args.layers, args.experts)
    word: OperationSpec = {"op": "linear"} if args.op == "linear" else {"op": "store", "format": args.op}
    sources = [manifest] * (3 if args.op == "linear" else 1)
    operation = operation_of([word])
    touched = sum(sum(one.nbytes(0, one.num_rows)) for one in operation.recipes([one.tensors for one in sources]))
    began, used = time.perf_counter(), time.process_time()
    job = plan_job(operation, sources, task_bytes=touched // args.tasks)
    planned, plan_cpu_s = time.perf_counter(), time.process_time() - used
    used = time.process_time()
    cluster, rates = CLUSTERS["h200"]
    cluster = msgspec.structs.replace(cluster.with_gpus(args.workers), straggler_share=0.02, straggler_slowdown=5.0)
    found = simulate_convert(job.tasks.in_bytes, job.tasks.out_bytes, cluster, rates)
    placed, place_cpu_s = time.perf_counter(), time.process_time() - used
    told = {
        "tensors": len(manifest.tensors),
        "tasks": len(job.tasks),
        "workers": cluster.num_gpus,
        "moved_gb": round(int(job.tasks.cost.sum()) / GB, 1),
        "plan_s": round(planned - began, 2),
        "plan_cpu_s": round(plan_cpu_s, 2),
        "place_s": round(placed - planned, 2),
        "place_cpu_s": round(place_cpu_s, 2),
        "both_s": round(placed - began, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB),
        "what": found.what,
        "predicted_s": round(found.predicted_s, 3),
        "limit_s": round(found.limit_s, 3),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
