"""The plan of a sync, made from layouts alone: how long it takes, and how much memory.

    python -m benchmarks.bench_plan                        a trillion parameters, 256 ranks to 128
    python -m benchmarks.bench_plan --scale 2              512 ranks to 256
    python -m benchmarks.bench_plan --layers 6 --experts 16

The model has the shapes of Kimi-K2: 61 layers, multi-head latent attention, 384 experts in all but the first layer.
Trainer: experts over `ep` groups and each expert's rows over the rest of its group (FSDP2), the other tensors over 32
ranks, in as many replicas as there are (HSDP); or over all ranks. Receivers: tensor parallel in groups of 8 and experts
over the groups, each expert's rows or columns over its group; or experts whole, over all ranks.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np

from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import plan_key, plan_sync
from penstock.types import MIB
from penstock_tools.shapes import kimi_k2, receiver_layouts, trainer_layouts


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--trainers", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=128)
    parser.add_argument("--scale", type=int, default=1, help="times as many ranks on both sides, and experts' groups")
    parser.add_argument("--shards", type=int, default=32, help="of tensors that are no experts; trainers: no replicas")
    parser.add_argument("--whole-experts", action="store_true", help="receivers hold whole experts, over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    num_trainers, num_receivers = args.trainers * args.scale, args.receivers * args.scale
    model = list(kimi_k2(args.layers, args.experts))
    tp = min(8, num_receivers)
    held = trainer_layouts(model, num_trainers, shards=args.shards)
    wanted = receiver_layouts(model, num_receivers, tp=tp, whole_experts=args.whole_experts)
    told = [encode(one) for one in held], [encode(one) for one in wanted]
    del model, held, wanted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: dict[str, list[float]] = {name: [] for name in ("decode_s", "key_s", "plan_s", "plan_cpu_s", "parts_s")}
    for _ in range(args.rounds):
        start = time.perf_counter()
        holdings, wants = ([decode(raw, Layout) for raw in one] for one in told)
        decoded = time.perf_counter()
        plan_key(holdings, wants)
        keyed = time.perf_counter()
        used = time.process_time()
        plan = plan_sync(holdings, wants)
        planned, used = time.perf_counter(), time.process_time() - used
        num_segments = max_segments = 0
        for r in range(num_receivers):
            part = plan.part(r)
            num_segments += len(part.row)
            max_segments = max(max_segments, len(part.row))
        done = time.perf_counter()
        for name, took in zip(
            times, (decoded - start, keyed - decoded, planned - keyed, used, done - planned), strict=True
        ):
            times[name].append(took)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    links = plan.link_bytes()
    given, taken = links.sum(axis=0), links.sum(axis=1)
    result: dict[str, object] = {
        "tensors": plan.num_tensors,
        "rows": sum(len(one.names) for one in (*holdings, *wants)),
        "segments": num_segments,
        "most_segments_of_a_receiver": max_segments,
        "buckets": plan.num_buckets,
        "gb": round(plan.nbytes / 1e9, 1),
        "told_mb": round(sum(map(len, (*told[0], *told[1]))) / 1e6, 1),
        "patterns": len(plan.strip_first) - 1,
        "strips": len(plan.strip_run),
        "plan_mb": round(len(encode(plan)) / 1e6, 1),
        "peak_mib": round(peak * 1024 / MIB),
        "layouts_mib": round(before * 1024 / MIB),
        "most_given_over_mean": round(float(given.max() / given.mean()), 3),
        "most_taken_over_mean": round(float(taken.max() / taken.mean()), 3),
        **{name: round(float(np.median(took)), 3) for name, took in times.items()},
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<28} {value}")
    return result


if __name__ == "__main__":
    main()
