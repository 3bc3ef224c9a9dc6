"""`penstock plan` and `penstock simulate`: show plans, and predict their duration on a described cluster.

Only headers are read and no weights are moved, so the cluster need not exist.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.cli.terminal import (
    FormatOption,
    MemoryBytes,
    Names,
    OutputFormat,
    Uri,
    examples,
    option,
    write_columns,
    write_fields,
    write_json,
    write_lines,
)
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError, DestinationError
from penstock.report import bytes_text, plain
from penstock.types import MIB
from penstock_convert.command import Operations, RatesOption, TaskBytes, To, read_file, read_rates
from penstock_convert.plan.cluster import CLUSTERS, Cluster, Rates, from_json
from penstock_tools.machine import STORAGE_GB_PER_S, slowed

if TYPE_CHECKING:
    from penstock.plan.layout import Layout
    from penstock.plan.sync import SyncPlan
    from penstock_convert.plan.simulate import Prediction
    from penstock_tools.shapes import Shape

app = typer.Typer(help="Show a plan.", no_args_is_help=True, rich_markup_mode=None)
simulate_app = typer.Typer(
    help="Predict a duration on a described cluster.", no_args_is_help=True, rich_markup_mode=None
)

Explain = Annotated[
    bool, typer.Option("--explain", help="Also list the plan: every read, or what each rank sends to each other rank.")
]
ClusterOption = Annotated[
    str,
    typer.Option("--cluster", metavar="NAME|FILE", help=f"{', '.join(CLUSTERS)}, or a JSON file."),
]
PythonOption = Annotated[
    float,
    typer.Option(
        "--python-slowdown",
        metavar="TIMES",
        help="How many times slower Python is on these hosts than on the host where the rates were measured.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Seed for random choices: slow and failing nodes, and the order.")
]
PictureOption = Annotated[Path | None, option("--picture", "FILE", "Write the timeline and the link loads as SVG.")]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="kimi-k2, or a weight set whose headers are read.", show_default=False),
]
Trainers = Annotated[int, typer.Option("--trainers", min=1, help="Number of ranks that publish.")]
Receivers = Annotated[int, typer.Option("--receivers", min=1, help="Number of ranks that receive.")]
Shards = Annotated[
    int, typer.Option("--shards", min=1, help="Number of trainer ranks that rows are cut over. The rest are replicas.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Number of receivers in a tensor-parallel group.")]
WholeExperts = Annotated[
    bool,
    typer.Option("--whole-experts", help="Spread whole experts over all receivers. Default: cut each over a group."),
]
Fp8 = Annotated[bool, typer.Option("--fp8", help="Send projections as FP8 in blocks of 128, quantised at the source.")]
BucketBytes = Annotated[
    str, typer.Option("--bucket-bytes", metavar="BYTES", help="Maximum bytes for one receiver in a bucket.")
]


@app.callback()
def plan() -> None:
    """Show a plan."""


@app.command("load", epilog=examples("penstock plan load llama --explain"))
def plan_load(
    uri: Uri,
    names: Names = None,
    memory_bytes: MemoryBytes = None,
    explain: Explain = False,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Show the reads that a load would make."""
    from penstock.plan import schedule
    from penstock.storage.weight_set import open_weights

    # Use the settings of a real load, because a smaller memory limit leads to smaller reads.
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    settings = Settings.read(memory_bytes=budget)
    with open_weights(uri, settings=settings, names=names) as weights:
        plan = schedule.plan_load(
            weights.manifest.tensors,
            file_nbytes=[file.nbytes for file in weights.manifest.files],
            chunk_bytes=min(settings.chunk_bytes, settings.memory_bytes),
        )
    read_bytes = int(plan.read_nbytes.sum())
    facts: dict[str, object] = {
        "uri": uri,
        "num_tensors": len(plan.table),
        "nbytes": plan.nbytes,
        "num_reads": plan.num_reads,
        "read_bytes": read_bytes,
        "max_read_nbytes": plan.max_read_nbytes,
    }
    human: dict[str, object] = {
        "uri": uri,
        "tensors": len(plan.table),
        "bytes": bytes_text(plan.nbytes),
        "reads": f"{plan.num_reads}, {bytes_text(read_bytes)}; the largest {bytes_text(plan.max_read_nbytes)}",
    }
    _write(facts, human, plan.explain() if explain else "", format)


@app.command("sync", epilog=examples("penstock plan sync llama --trainers 4 --receivers 2 --tp 2 --shards 4"))
def plan_sync(
    context: typer.Context,
    model: Model,
    trainers: Trainers = 256,
    receivers: Receivers = 128,
    shards: Shards = 32,
    tp: Tp = 8,
    whole_experts: WholeExperts = False,
    fp8: Fp8 = False,
    bucket_bytes: BucketBytes = "256M",
    explain: Explain = False,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Show what each rank would send and receive."""
    from penstock.plan import sync

    _check_groups(context, receivers, tp)
    sides = both_sides(model, trainers, receivers, shards=shards, tp=tp, whole_experts=whole_experts, fp8=fp8)
    plan = sync.plan_sync(*sides, bucket_bytes=parse_bytes(bucket_bytes))
    facts: dict[str, object] = {
        "key": plan.key,
        "num_tensors": plan.num_tensors,
        "num_sources": len(plan.sources),
        "num_receivers": len(plan.receivers),
        "nbytes": plan.nbytes,
        "num_buckets": plan.num_buckets,
        "bucket_bytes": plan.bucket_bytes,
    }
    human: dict[str, object] = {
        "tensors": plan.num_tensors,
        "ranks": f"{len(plan.sources)} -> {len(plan.receivers)}",
        "bytes": f"{bytes_text(plan.nbytes)} in {plan.num_buckets} buckets",
        "key": plan.key,
    }
    _write(facts, human, explain_sync(plan) if explain else "", format)


def explain_sync(plan: SyncPlan, limit: int = 20) -> str:
    """Return a description of a sync's plan: totals, the busiest members, and the first `limit` receivers."""
    links = plan.link_bytes()
    received, sent = links.sum(axis=1), links.sum(axis=0)
    lines = [
        f"{plan.num_tensors} tensors, {len(plan.sources)} sources -> {len(plan.receivers)} receivers, "
        f"{plan.nbytes} bytes in {plan.num_buckets} buckets",
        f"plan {plan.key}",
    ]
    if plan.unwanted:
        examples = ", ".join(plan.unwanted[:3]) + (", ..." if len(plan.unwanted) > 3 else "")
        lines.append(f"held but not wanted: {len(plan.unwanted)} ({examples})")
    for word, members, amounts in (("sends", plan.sources, sent), ("receives", plan.receivers, received)):
        if len(amounts):
            most = int(amounts.argmax())
            lines.append(f"{members[most]} {word} most, {amounts[most]} bytes; mean {int(amounts.mean())}")
    for r, name in enumerate(plan.receivers[:limit]):
        lines.append(f"{name}: {received[r]} bytes from {int((links[r] > 0).sum())} sources")
    if len(plan.receivers) > limit:
        lines.append(f"... and {len(plan.receivers) - limit} more")
    return "\n".join(lines)


@app.command("convert", epilog=examples("penstock plan convert llama --to fp8-block128 --workers 8"))
def plan_convert(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Sources of the conversion.")],
    to: To = None,
    op: Operations = None,
    task_bytes: TaskBytes = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Number of workers, one for each GPU on as many nodes as needed.")
    ] = 1,
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Predict a conversion from its headers.

    The simulation places the conversion's tasks on a described cluster, stage by stage.
    """
    from penstock_convert.plan.simulate_convert import simulate_convert
    from penstock_convert.report import compute_gb_per_s
    from penstock_convert.request import plan

    job = plan(sources, to=to, operations=list(op or ()), task_bytes=task_bytes)
    described, speeds = read_cluster(cluster, rates)
    # If there are fewer workers than GPUs in a node, the workers share all of the node's links and disks.
    if workers < described.gpus_per_node:
        described = msgspec.structs.replace(described, num_nodes=1, gpus_per_node=workers)
    else:
        described = described.with_gpus(workers)
    prediction = simulate_convert(
        job.read_bytes.sum(axis=1),
        job.tasks.out_bytes,
        described,
        speeds,
        seed=seed,
        compute_gb_per_s=compute_gb_per_s(job.operation, speeds),
    )
    write_prediction(prediction, described.name, format, picture)


def _write(facts: dict[str, object], human: dict[str, object], explained: str, format: OutputFormat) -> None:
    if format is OutputFormat.json:
        write_json(facts | ({"explain": explained} if explained else {}))
        return
    write_fields(human)
    if explained:
        write_lines("", explained)


@simulate_app.callback()
def simulate() -> None:
    """Predict a duration on a described cluster."""


@simulate_app.command("sync", epilog=examples("penstock simulate sync kimi-k2 --cluster h200 --picture sync.svg"))
def simulate_sync(
    context: typer.Context,
    model: Model,
    trainers: Trainers = 256,
    receivers: Receivers = 128,
    shards: Shards = 32,
    tp: Tp = 8,
    whole_experts: WholeExperts = False,
    fp8: Fp8 = False,
    direct: Annotated[
        bool, typer.Option("--direct", help="Receive into live memory, without a flip at the end.")
    ] = False,
    arena: Annotated[
        bool, typer.Option("--arena", help="Targets are in arenas, so a flip exchanges memory instead of copying.")
    ] = False,
    one_node: Annotated[
        bool,
        typer.Option(
            "--one-node", help="Put receivers on the GPUs next to the trainers, on the same nodes if they fit."
        ),
    ] = False,
    bucket_bytes: BucketBytes = "256M",
    watermark_bytes: Annotated[
        str,
        typer.Option(
            "--watermark-bytes", metavar="BYTES", help="Maximum bytes that a receiver has requested but not verified."
        ),
    ] = "16G",
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    python_slowdown: PythonOption = 1.0,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Predict a sync for described ranks. The simulation runs the plan that a real sync would use."""
    from penstock.plan.sync import plan_sync
    from penstock_tools import simulate_sync as simulation
    from penstock_tools.simulate_sync import transformed_bytes

    watermark = parse_bytes(watermark_bytes)
    if watermark < MIB:
        raise ConfigError(f"--watermark-bytes {watermark_bytes} is too small", hint="use 1M or more")
    described, speeds = read_cluster(cluster, rates)
    speeds = slowed(speeds, python_slowdown)
    _check_groups(context, receivers, tp)
    layouts, wanted = both_sides(model, trainers, receivers, shards=shards, tp=tp, whole_experts=whole_experts, fp8=fp8)
    plan = plan_sync(layouts, wanted, bucket_bytes=parse_bytes(bucket_bytes))
    prediction = simulation.simulate_sync(
        plan,
        described,
        speeds,
        transformed=transformed_bytes(plan, layouts, wanted),
        watermark_bytes=watermark,
        staged=not direct,
        in_arenas=arena,
        one_node=one_node,
        seed=seed,
    )
    write_prediction(prediction, described.name, format, picture)


@simulate_app.command("fetch", epilog=examples("penstock simulate fetch --bytes 128G --nodes 4 --parts 8"))
def simulate_fetch(
    total_bytes: Annotated[str, typer.Option("--bytes", metavar="BYTES", help="Size of the weights.")] = "128G",
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="Number of nodes in the cluster. All their GPUs take part.")
    ] = 1,
    parts: Annotated[
        int,
        typer.Option(
            "--parts", min=1, help="Ranks in a replica, each with a part of the weights. 8 is TP8. 1: all on each GPU."
        ),
    ] = 1,
    holders: Annotated[
        int, typer.Option("--holders", min=0, help="Replicas that are complete at the start. With 0, storage is read.")
    ] = 1,
    storage_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--storage-gb-per-s",
            metavar="GB",
            min=0.001,
            help="Rate at which a node reads storage. Default: the cluster's, or 3.4.",
            show_default=False,
        ),
    ] = None,
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    python_slowdown: PythonOption = 1.0,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Predict how long it takes to fill a fleet.

    The simulation uses the chains of members that a real fetch would use, from holders or from storage.
    """
    from penstock_tools import simulate_fetch as simulation

    described, speeds = read_cluster(cluster, rates)
    speeds = slowed(speeds, python_slowdown)
    described = msgspec.structs.replace(described, num_nodes=nodes)
    fleet = simulation.SimulatedFleet(nbytes=parse_bytes(total_bytes), parts=parts, holders=holders)
    is_assumed = storage_gb_per_s is None and not (described.node_storage_gb_per_s or described.storage_gb_per_s)
    if storage_gb_per_s is not None or is_assumed:
        described = msgspec.structs.replace(described, node_storage_gb_per_s=storage_gb_per_s or STORAGE_GB_PER_S)
    prediction = simulation.simulate_fetch(fleet, described, speeds, seed=seed)
    if is_assumed and not holders:
        note = f"node_storage_gb_per_s: assumed {STORAGE_GB_PER_S}, a local disk. Set it with --storage-gb-per-s"
        prediction = dataclasses.replace(prediction, assumed=(*prediction.assumed, note))
    write_prediction(prediction, described.name, format, picture)


@simulate_app.command("convert", epilog=examples("penstock simulate convert --tasks 1000 --nodes 2"))
def simulate_convert(
    num_tasks: Annotated[
        int, typer.Option("--tasks", min=1, help="Number of tasks. Each has up to --task-bytes in and out.")
    ] = 10000,
    task_bytes: Annotated[
        str, typer.Option("--task-bytes", metavar="BYTES", help="Number of bytes in and out of one task.")
    ] = "64M",
    shrink: Annotated[float, typer.Option("--shrink", help="Input bytes per output byte. 2 is BF16 to FP8.")] = 2.0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes, with one worker for each GPU.")] = 1,
    cluster: ClusterOption = "h200",
    rates: RatesOption = None,
    seed: SeedOption = 0,
    picture: PictureOption = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Predict how long a conversion takes.

    The simulation places tasks on the cluster's workers as the real scheduler does.
    """
    import numpy as np

    from penstock_convert.plan import simulate_convert as simulation

    # This check also rejects NaN.
    if not 0 < shrink < math.inf:
        raise ConfigError(
            f"--shrink {shrink} is not a finite number above 0", hint="use the input bytes per output byte"
        )
    described, speeds = read_cluster(cluster, rates)
    described = msgspec.structs.replace(described, num_nodes=nodes)
    whole = parse_bytes(task_bytes)
    if whole < 2:
        raise ConfigError(
            f"--task-bytes {task_bytes} is too small", hint="use 2 or more, because a task has an input and an output"
        )
    # Real tasks end at tensor boundaries, so few of them have the maximum size.
    size = np.random.default_rng(seed).integers(max(1, whole // 2), whole, num_tasks, endpoint=True)
    out_bytes = np.maximum(1, size / (1 + shrink)).astype(np.int64)
    prediction = simulation.simulate_convert(size - out_bytes, out_bytes, described, speeds, seed=seed)
    write_prediction(prediction, described.name, format, picture)


def _check_groups(context: typer.Context, receivers: int, tp: int) -> None:
    """Raise ConfigError if a group is larger than the number of receivers."""
    source = context.get_parameter_source("tp")
    # The default group size is for large fleets. With fewer receivers there is one group.
    if tp > receivers and source is not None and source.name == "COMMANDLINE":
        message = f"--tp {tp} is more than the {receivers} receivers"
        raise ConfigError(message, hint=f"use a divisor of {receivers} as --tp, or more receivers")


def both_sides(
    model: str, trainers: int, receivers: int, *, shards: int, tp: int, whole_experts: bool, fp8: bool
) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts of a sync's publishers and subscribers for these options."""
    from penstock_tools.shapes import receiver_layouts, trainer_layouts

    shapes = read_shapes(model)
    layouts = trainer_layouts(shapes, trainers, shards=shards, fp8=fp8)
    return layouts, receiver_layouts(shapes, receivers, tp=tp, whole_experts=whole_experts, fp8=fp8)


def read_cluster(cluster: str, rates: Path | None) -> tuple[Cluster, Rates]:
    """Return a described cluster and the rates of its stages. `cluster` is a known name or the path of a file.

    Any other text raises ConfigError.
    """
    known = CLUSTERS.get(cluster)
    hint = f"known names: {', '.join(CLUSTERS)}"
    described = known[0] if known else from_json(read_file(Path(cluster), hint=hint), Cluster)
    described.check()
    # A cluster from a file has no rates. Use the rates of the H200, which have the most measurements.
    if rates is None:
        return described, known[1] if known else CLUSTERS["h200"][1]
    return described, read_rates(rates)


def read_shapes(model: str) -> list[Shape]:
    """Return the tensors of a model. `model` is a known name, or a weight set whose headers are read."""
    from penstock_tools.shapes import kimi_k2, shape_of

    if model == "kimi-k2":
        return list(kimi_k2())
    import penstock

    table = penstock.inspect(model).manifest.tensors
    return [shape_of(name, shape) for name, shape in zip(table.names, table.shapes, strict=True)]


# Maximum number of lines for failures and for assumptions. A large cluster could have one for every rank.
_LISTED = 8


def write_prediction(prediction: Prediction, cluster: str, format: OutputFormat, picture: Path | None) -> None:
    """Write a prediction to stdout, and its picture to a file."""
    if picture is not None:
        from penstock_tools.picture import svg

        try:
            picture.write_text(svg(prediction), encoding="utf-8")
        except OSError as error:
            raise DestinationError(f"cannot write the picture: {error.strerror}", uri=str(picture)) from error
    if format is OutputFormat.json:
        write_json({**plain(prediction), "of_limit": prediction.of_limit, "cluster": cluster})
        return
    times = f"first {prediction.first_s:.3f} s, median {prediction.median_s:.3f} s, last {prediction.predicted_s:.3f} s"
    write_fields(
        {
            prediction.kind: prediction.what,
            "cluster": cluster,
            "bytes": f"{bytes_text(prediction.moved_bytes)} to {prediction.num_receivers} receivers",
            "predicted": f"{prediction.predicted_s:.3f} s",
            "limit": f"{prediction.limit_s:.3f} s by the wire alone; {prediction.of_limit:.0%} of that rate",
            "receivers": times,
            "bottleneck": prediction.bottleneck,
        }
    )
    write_lines("")
    stages = [[stage.name, stage.member, f"{stage.busy_s:.4f}", stage.detail] for stage in prediction.stages]
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
        for load in prediction.links
    ]
    write_columns(header, rows)
    for title, lines in (("died", prediction.failed), ("assumed, not measured", prediction.assumed)):
        if lines:
            write_lines("", title, *(f"  {line}" for line in lines[:_LISTED]))
        if len(lines) > _LISTED:
            write_lines(f"  ... and {len(lines) - _LISTED} more")


def add(commands: typer.Typer) -> None:
    """Add `penstock plan`."""
    commands.add_typer(app, name="plan")


def add_simulate(commands: typer.Typer) -> None:
    """Add `penstock simulate`."""
    commands.add_typer(simulate_app, name="simulate")
