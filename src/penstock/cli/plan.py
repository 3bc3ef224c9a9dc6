"""`penstock plan`: what would be read or moved, from headers and shapes alone; nothing is.

In: a weight set, or a model and how both sides hold it. Out: the plan in numbers; with `--explain` in words.
Not here: planning (`plan.schedule`, `plan.sync`), how long a load or a sync would take (`simulate`, `load --dry-run`).

`penstock simulate`: how long a fetch, a sync or a conversion would take on a cluster that is described, not there.

In: a described cluster, a model's shapes. Out: the prediction on stdout, and as a picture.
Not here: the simulations (`plan.simulate_*`), measuring rates (`calibrate`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.cli.terminal import (
    Format,
    FormatOption,
    MemoryBytes,
    Names,
    Operations,
    TaskBytes,
    To,
    Uri,
    bytes_text,
    given,
    write_columns,
    write_fields,
    write_json,
    write_lines,
)
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError, DestinationError
from penstock.plan.cluster import CLUSTERS, Cluster, Rates, from_json
from penstock.report import plain
from penstock.types import MIB

if TYPE_CHECKING:
    from penstock.plan.layout import Layout
    from penstock.plan.shapes import Shape
    from penstock.plan.simulate import Prediction


simulate_app = typer.Typer(help="Predict, on a described cluster.", no_args_is_help=True, rich_markup_mode=None)

_LISTED = 8


@simulate_app.callback()
def simulate() -> None:
    """Predict, on a described cluster."""


ClusterOption = Annotated[
    str,
    typer.Option("--cluster", metavar="NAME|FILE", help=f"{', '.join(CLUSTERS)}, or a file of JSON."),
]
RatesOption = Annotated[Path | None, given("--rates", "FILE", "Of the stages, as `doctor --calibrate` writes them.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of who is slow, who fails, who comes first.")]
PictureOption = Annotated[Path | None, given("--picture", "FILE", "Write the timeline and the links' load as SVG.")]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="kimi-k2, or a weight set whose headers are read.", show_default=False),
]
Trainers = Annotated[int, typer.Option("--trainers", min=1, help="Ranks that publish.")]
Receivers = Annotated[int, typer.Option("--receivers", min=1, help="Ranks that receive.")]
Shards = Annotated[
    int, typer.Option("--shards", min=1, help="Ranks over which a trainer cuts rows; more are replicas.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Receivers of a tensor-parallel group.")]
WholeExperts = Annotated[
    bool, typer.Option("--whole-experts", help="Receivers hold experts whole, over all ranks; else cut over a group.")
]
Fp8 = Annotated[bool, typer.Option("--fp8", help="Projections go as FP8 in blocks of 128, quantised at the source.")]
BucketBytes = Annotated[str, typer.Option("--bucket-bytes", metavar="BYTES", help="Most a receiver takes in a bucket.")]


def both_sides(
    model: str, trainers: int, receivers: int, *, shards: int, tp: int, whole_experts: bool, fp8: bool
) -> tuple[list[Layout], list[Layout]]:
    """Return what each rank of a sync holds, and what each wants, as the options describe them."""
    from penstock.plan.shapes import receiver_layouts, trainer_layouts

    shapes = read_shapes(model)
    held = trainer_layouts(shapes, trainers, shards=shards, fp8=fp8)
    return held, receiver_layouts(shapes, receivers, tp=tp, whole_experts=whole_experts, fp8=fp8)


@simulate_app.command("sync")
def simulate_sync(
    model: Model,
    trainers: Trainers = 256,
    receivers: Receivers = 128,
    shards: Shards = 32,
    tp: Tp = 8,
    whole_experts: WholeExperts = False,
    fp8: Fp8 = False,
    direct: Annotated[bool, typer.Option("--direct", help="Into live memory: no flip at the end.")] = False,
    one_node: Annotated[
        bool, typer.Option("--one-node", help="Receivers may share a node with trainers: they take the next GPUs.")
    ] = False,
    bucket_bytes: BucketBytes = "256M",
    watermark_bytes: Annotated[
        str, typer.Option("--watermark-bytes", metavar="BYTES", help="Most a receiver has asked for, not verified.")
    ] = "16G",
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = Format.human,
) -> None:
    """Predict a sync: the planner's own plan of made-up ranks, run over the cluster."""
    from penstock.plan import simulate_sync as simulation
    from penstock.plan.simulate_sync import transformed_bytes
    from penstock.plan.sync import plan_sync

    watermark = parse_bytes(watermark_bytes)
    if watermark < MIB:
        raise ConfigError(f"--watermark-bytes {watermark_bytes}: a receiver asks for 1 MiB at least")
    described, speeds = read_cluster(cluster, rates)
    held, wanted = both_sides(model, trainers, receivers, shards=shards, tp=tp, whole_experts=whole_experts, fp8=fp8)
    plan = plan_sync(held, wanted, bucket_bytes=parse_bytes(bucket_bytes))
    found = simulation.simulate_sync(
        plan,
        described,
        speeds,
        transformed=transformed_bytes(plan, held, wanted),
        watermark_bytes=watermark,
        staged=not direct,
        one_node=one_node,
        seed=seed,
    )
    write_prediction(found, described.name, format, picture)


@simulate_app.command("fetch")
def simulate_fetch(
    total_bytes: Annotated[str, typer.Option("--bytes", metavar="BYTES", help="Of the weights.")] = "128G",
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="Nodes of the cluster; all of their GPUs take part.")
    ] = 1,
    parts: Annotated[
        int,
        typer.Option("--parts", min=1, help="Ranks of a replica, each with its part: 8 is TP8; 1: all on each GPU."),
    ] = 1,
    holders: Annotated[
        int, typer.Option("--holders", min=0, help="Replicas that are whole at the start; 0: storage is read.")
    ] = 1,
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = Format.human,
) -> None:
    """Predict how a fleet fills: the relay's own chains over the cluster, from holders or from storage."""
    from penstock.plan import simulate_fetch as simulation

    described, speeds = read_cluster(cluster, rates)
    described = msgspec.structs.replace(described, num_nodes=nodes)
    fleet = simulation.Fleet(nbytes=parse_bytes(total_bytes), parts=parts, holders=holders)
    found = simulation.simulate_fetch(fleet, described, speeds, seed=seed)
    write_prediction(found, described.name, format, picture)


@simulate_app.command("convert")
def simulate_convert(
    num_tasks: Annotated[
        int, typer.Option("--tasks", min=1, help="How many, of up to --task-bytes in and out.")
    ] = 10000,
    task_bytes: Annotated[str, typer.Option("--task-bytes", metavar="BYTES", help="In and out of one task.")] = "64M",
    shrink: Annotated[float, typer.Option("--shrink", help="Bytes in for one out: 2 is BF16 to FP8.")] = 2.0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the cluster; a worker for each GPU.")] = 1,
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = Format.human,
) -> None:
    """Predict how long a conversion takes: the scheduler's own placement of tasks over the cluster's workers."""
    import numpy as np

    from penstock.plan import simulate_convert as simulation

    if not 0 < shrink < math.inf:
        raise ConfigError(f"--shrink {shrink}: bytes in for one out are a number above 0")
    described, speeds = read_cluster(cluster, rates)
    described = msgspec.structs.replace(described, num_nodes=nodes)
    whole = parse_bytes(task_bytes)
    if whole < 2:
        raise ConfigError(f"--task-bytes {task_bytes}: a task has a byte in and one out")
    size = np.random.default_rng(seed).integers(max(1, whole // 2), whole, num_tasks, endpoint=True)
    given = np.maximum(1, size / (1 + shrink)).astype(np.int64)
    found = simulation.simulate_convert(size - given, given, described, speeds, seed=seed)
    write_prediction(found, described.name, format, picture)


def read_cluster(cluster: str, rates: Path | None) -> tuple[Cluster, Rates]:
    """Return a described cluster by name or from a file, and the rates of its stages. ConfigError: neither."""
    known = CLUSTERS.get(cluster)
    hint = f"names known: {', '.join(CLUSTERS)}"
    described = known[0] if known else from_json(_read(Path(cluster), hint), Cluster)
    described.check()
    if rates is None:
        return described, known[1] if known else CLUSTERS["h200"][1]
    return described, read_rates(rates)


def read_rates(path: Path) -> Rates:
    """Return the rates of a machine's stages from a file. ConfigError: they cannot be read."""
    speeds = from_json(_read(path, "penstock doctor --calibrate FILE writes it"), Rates)
    speeds.check()
    return speeds


def _read(path: Path, hint: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=hint) from error


def read_shapes(model: str) -> list[Shape]:
    """Tensors of a model known by name, or of a weight set's headers."""
    from penstock.plan.shapes import kimi_k2, shape_of

    if model == "kimi-k2":
        return list(kimi_k2())
    from penstock import api

    table = api.inspect(model).manifest.tensors
    return [shape_of(name, shape) for name, shape in zip(table.names, table.shapes, strict=True)]


def write_prediction(found: Prediction, cluster: str, format: Format, picture: Path | None) -> None:
    """The prediction on stdout, and its picture."""
    if picture is not None:
        from penstock.plan.simulate import svg

        try:
            picture.write_text(svg(found), encoding="utf-8")
        except OSError as error:
            raise DestinationError(f"the picture cannot be written: {error.strerror}", uri=str(picture)) from error
    if format is Format.json:
        write_json({**plain(found), "of_limit": found.of_limit, "cluster": cluster})
        return
    times = f"first {found.first_s:.3f} s, median {found.median_s:.3f} s, last {found.predicted_s:.3f} s"
    write_fields(
        {
            found.kind: found.what,
            "cluster": cluster,
            "bytes": f"{bytes_text(found.moved_bytes)} to {found.num_receivers} receivers",
            "predicted": f"{found.predicted_s:.3f} s",
            "limit": f"{found.limit_s:.3f} s, the wire alone; {found.of_limit:.0%} of it reached",
            "receivers": times,
            "bottleneck": found.bottleneck,
        }
    )
    write_lines("")
    stages = [[one.name, one.member, f"{one.busy_s:.4f}", one.detail] for one in found.stages]
    write_columns(["stage", "busiest", "busy s", ""], stages)
    write_lines("")
    header = ["link", "in use", "busiest", "all", "busy s", "mean load"]
    rows: list[list[object]] = [
        [
            load.name,
            load.num_used,
            bytes_text(load.most_bytes),
            bytes_text(load.total_bytes),
            f"{load.busiest_s:.4f}",
            f"{sum(load.load) / len(load.load):.0%}",
        ]
        for load in found.links
    ]
    write_columns(header, rows)
    for title, lines in (("died", found.failed), ("assumed, not measured", found.assumed)):
        if lines:
            write_lines("", title, *(f"  {line}" for line in lines[:_LISTED]))
        if len(lines) > _LISTED:
            write_lines(f"  ... and {len(lines) - _LISTED} more")


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
