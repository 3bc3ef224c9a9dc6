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
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from penstock.plan.columns import decode, encode
from penstock.plan.layout import Form, Layout
from penstock.plan.sync import plan_key, plan_sync
from penstock.types import MIB, Box, DType

HIDDEN, HEADS, Q_RANK, KV_RANK, ROPE, NOPE, EXPERT, DENSE, VOCAB = 7168, 64, 1536, 512, 64, 128, 2048, 18432, 163840


def tensors(num_layers: int, num_experts: int) -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    """(name, shape, the dim that tensor parallelism splits, expert number or -1)."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN), 0, -1
    for layer in range(num_layers):
        p = f"model.layers.{layer}."
        yield p + "input_layernorm.weight", (HIDDEN,), None, -1
        yield p + "post_attention_layernorm.weight", (HIDDEN,), None, -1
        yield p + "self_attn.q_a_proj.weight", (Q_RANK, HIDDEN), None, -1
        yield p + "self_attn.q_a_layernorm.weight", (Q_RANK,), None, -1
        yield p + "self_attn.q_b_proj.weight", (HEADS * (NOPE + ROPE), Q_RANK), 0, -1
        yield p + "self_attn.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, HIDDEN), None, -1
        yield p + "self_attn.kv_a_layernorm.weight", (KV_RANK,), None, -1
        yield p + "self_attn.kv_b_proj.weight", (HEADS * 2 * NOPE, KV_RANK), 0, -1
        yield p + "self_attn.o_proj.weight", (HIDDEN, HEADS * NOPE), 1, -1
        rows = DENSE if layer == 0 else EXPERT
        mlp = p + ("mlp." if layer == 0 else "mlp.shared_experts.")
        yield mlp + "gate_proj.weight", (rows, HIDDEN), 0, -1
        yield mlp + "up_proj.weight", (rows, HIDDEN), 0, -1
        yield mlp + "down_proj.weight", (HIDDEN, rows), 1, -1
        if layer == 0:
            continue
        yield p + "mlp.gate.weight", (num_experts, HIDDEN), None, -1
        yield p + "mlp.gate.e_score_correction_bias", (num_experts,), None, -1
        for e in range(num_experts):
            yield p + f"mlp.experts.{e}.gate_proj.weight", (EXPERT, HIDDEN), 0, e
            yield p + f"mlp.experts.{e}.up_proj.weight", (EXPERT, HIDDEN), 0, e
            yield p + f"mlp.experts.{e}.down_proj.weight", (HIDDEN, EXPERT), 1, e
    yield "model.norm.weight", (HIDDEN,), None, -1
    yield "lm_head.weight", (VOCAB, HIDDEN), 0, -1


@cache
def form(shape: tuple[int, ...], dim: int | None, part: int, of: int) -> Form | None:
    """The part-th of `of` along a dim, as torch's chunk cuts it; None where that is nothing."""
    if dim is None or of == 1:
        return Form(dtype=DType.BF16, shape=shape, box=Box.full(shape))
    step = -(-shape[dim] // of)
    a, b = min(part * step, shape[dim]), min((part + 1) * step, shape[dim])
    if a == b:
        return None
    start = tuple(a if d == dim else 0 for d in range(len(shape)))
    stop = tuple(b if d == dim else n for d, n in enumerate(shape))
    return Form(dtype=DType.BF16, shape=shape, box=Box(start=start, stop=stop))


def layout(member: str, rows: Sequence[tuple[str, Form]]) -> Layout:
    """These rows, one after the other in one region."""
    forms = {one: i for i, one in enumerate({one for _, one in rows})}
    sizes = np.array([one.span_bytes for one in forms], np.int64)
    index = np.array([forms[one] for _, one in rows], np.int64)
    aligned = -(-sizes[index] // 256) * 256
    return Layout(
        member=member,
        address="0" * 32,
        regions=(int(aligned.sum()),),
        forms=tuple(forms),
        names=tuple(name for name, _ in rows),
        form=index,
        offset=np.cumsum(aligned) - aligned,
    )


def side(word: str, model: Sequence[tuple[str, tuple[int, ...], int | None, int]], num_ranks: int, how) -> list[bytes]:
    """Each rank's layout as it would be told: `how(rank, dim, expert)` gives (dim, part, of), or None for nothing."""
    layouts = []
    for rank in range(num_ranks):
        rows = []
        for name, shape, dim, expert in model:
            cut = how(rank, dim, expert)
            one = form(shape, *cut) if cut else None
            if one is not None:
                rows.append((name, one))
        layouts.append(encode(layout(f"{word}-{rank}", rows)))
    return layouts


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
    ep, tp = max(num_trainers // 4, 1), min(8, num_receivers)
    per_group = num_trainers // ep
    model = list(tensors(args.layers, args.experts))

    def trains(rank: int, dim: int | None, expert: int) -> tuple[int, int, int] | None:
        if expert < 0:
            return 0, rank % args.shards, args.shards
        return (0, rank % per_group, per_group) if expert * ep // args.experts == rank // per_group else None

    def infers(rank: int, dim: int | None, expert: int) -> tuple[int | None, int, int] | None:
        if expert >= 0 and args.whole_experts:
            return (0, 0, 1) if expert * num_receivers // args.experts == rank else None
        if expert >= 0 and expert * (num_receivers // tp) // args.experts != rank // tp:
            return None
        return dim, rank % tp, tp

    told = side("trainer", model, num_trainers, trains), side("engine", model, num_receivers, infers)
    del model
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
