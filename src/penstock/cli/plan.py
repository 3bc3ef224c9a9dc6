"""`penstock plan`: what would be read or moved, from headers and shapes alone; nothing is.

In: a weight set, or a model and how both sides hold it. Out: the plan in numbers; with `--explain` in words.
Not here: planning (`plan.schedule`, `plan.sync`), how long a load or a sync would take (`simulate`, `load --dry-run`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from penstock.cli.options import Format, FormatOption, MemoryBytes, Names, Operations, TaskBytes, To, Uri
from penstock.cli.output import bytes_text, write_fields, write_json, write_lines
from penstock.cli.simulate import (
    BucketBytes,
    ClusterOption,
    Fp8,
    Model,
    PictureOption,
    RatesOption,
    Receivers,
    SeedOption,
    Shards,
    Tp,
    Trainers,
    WholeExperts,
    both_sides,
    read_cluster,
    write_prediction,
)
from penstock.config import Settings, parse_bytes

app = typer.Typer(help="Show a plan.", no_args_is_help=True, rich_markup_mode=None)

Explain = Annotated[bool, typer.Option("--explain", help="Also in words: reads, or who gives what to whom.")]


@app.callback()
def plan() -> None:
    """Show a plan."""


@app.command("load")
def plan_load(
    uri: Uri,
    names: Names = None,
    memory_bytes: MemoryBytes = None,
    explain: Explain = False,
    format: FormatOption = Format.human,
) -> None:
    """The reads of a load, from the headers."""
    from penstock.plan import schedule
    from penstock.storage.weight_set import open_weights

    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    settings = Settings.read(memory_bytes=budget)
    with open_weights(uri, settings=settings, names=names) as weights:
        found = schedule.plan_load(
            weights.manifest.tensors,
            file_nbytes=[file.nbytes for file in weights.manifest.files],
            chunk_bytes=min(settings.chunk_bytes, settings.memory_bytes),
        )
    read_bytes = int(found.read_nbytes.sum())
    facts: dict[str, object] = {
        "uri": uri,
        "num_tensors": len(found.table),
        "nbytes": found.nbytes,
        "num_reads": found.num_reads,
        "read_bytes": read_bytes,
        "max_read_nbytes": found.max_read_nbytes,
    }
    human: dict[str, object] = {
        "uri": uri,
        "tensors": len(found.table),
        "bytes": bytes_text(found.nbytes),
        "reads": f"{found.num_reads}, {bytes_text(read_bytes)}; the largest {bytes_text(found.max_read_nbytes)}",
    }
    _write(facts, human, found.explain() if explain else "", format)


@app.command("sync")
def plan_sync(
    model: Model,
    trainers: Trainers = 256,
    receivers: Receivers = 128,
    shards: Shards = 32,
    tp: Tp = 8,
    whole_experts: WholeExperts = False,
    fp8: Fp8 = False,
    bucket_bytes: BucketBytes = "256M",
    explain: Explain = False,
    format: FormatOption = Format.human,
) -> None:
    """What each rank of made-up sides would give and take."""
    from penstock.plan import sync

    sides = both_sides(model, trainers, receivers, shards=shards, tp=tp, whole_experts=whole_experts, fp8=fp8)
    found = sync.plan_sync(*sides, bucket_bytes=parse_bytes(bucket_bytes))
    facts: dict[str, object] = {
        "key": found.key,
        "num_tensors": found.num_tensors,
        "num_sources": len(found.sources),
        "num_receivers": len(found.receivers),
        "nbytes": found.nbytes,
        "num_buckets": found.num_buckets,
        "bucket_bytes": found.bucket_bytes,
    }
    human: dict[str, object] = {
        "tensors": found.num_tensors,
        "ranks": f"{len(found.sources)} -> {len(found.receivers)}",
        "bytes": f"{bytes_text(found.nbytes)} in {found.num_buckets} buckets",
        "key": found.key,
    }
    _write(facts, human, found.explain() if explain else "", format)


@app.command("convert")
def plan_convert(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="What is read.")],
    to: To = None,
    op: Operations = None,
    task_bytes: TaskBytes = "64M",
    workers: Annotated[int, typer.Option("--workers", min=1, help="One a GPU; they fill nodes of the cluster.")] = 1,
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = Format.human,
) -> None:
    """How long a conversion would take, by stage: its own tasks, from the headers, on a described cluster."""
    from penstock.jobs import convert
    from penstock.plan.simulate_convert import simulate_convert

    job = convert.plan(sources, to=to, operations=list(op or ()), task_bytes=task_bytes)
    described, speeds = read_cluster(cluster, rates)
    if workers < described.gpus_per_node:
        described = msgspec.structs.replace(described, num_nodes=1, gpus_per_node=workers)
    else:
        described = described.with_gpus(workers)
    found = simulate_convert(job.read_bytes.sum(axis=1), job.tasks.out_bytes, described, speeds, seed=seed)
    write_prediction(found, described.name, format, picture)


def _write(facts: dict[str, object], human: dict[str, object], explained: str, format: Format) -> None:
    if format is Format.json:
        write_json(facts | ({"explain": explained} if explained else {}))
        return
    write_fields(human)
    if explained:
        write_lines("", explained)
