"""`penstock convert`: convert checkpoints out of core, into files or into a weight cache.

If the destination is `cache:MODEL`, this process keeps the result in memory until SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import (
    DataPort,
    Force,
    FormatOption,
    Listen,
    OutputFormat,
    TokenFile,
    Verify,
    connection_of,
    examples,
    note,
    option,
    write_columns,
    write_fields,
    write_json,
    write_lines,
)
from penstock.config import parse_bytes
from penstock.errors import ConfigError
from penstock.report import bytes_text, plain

if TYPE_CHECKING:
    from penstock.config import ConnectionSettings
    from penstock_convert.job import ConversionJob
    from penstock_convert.plan.cluster import Rates
    from penstock_convert.report import ConvertReport, Predicted
    from penstock_convert.workers.launch import LocalLauncher

_LEAST_TASK_BYTES = 64_000
"""Minimum size of a task in bytes. Smaller tasks read the same leaves several times. With tasks of one byte, a
conversion read 21 GB from a 66 MB model."""


def _task_bytes(value: str | None) -> str | None:
    """Return the value of --task-bytes. Raise ConfigError if the size is too small for a task."""
    if value is not None and parse_bytes(value) < _LEAST_TASK_BYTES:
        message = f"--task-bytes {value} is too small, because every task reads whole leaves of 256 KiB"
        raise ConfigError(message, hint="pass at least 64K, or omit --task-bytes")
    return value


To = Annotated[str | None, option("--to", "FORMAT", "cast:BF16, fp8-block128, mxfp8, ...")]
Operations = Annotated[
    list[str] | None,
    option(
        "--op",
        "OP",
        "average, linear:weights=0.3,0.7, lora-merge, module:function, ...; may be repeated. See docs/convert.",
    ),
]
TaskBytes = Annotated[
    str | None,
    typer.Option(
        "--task-bytes",
        metavar="BYTES",
        help="Maximum input and output bytes of a task. Default: 64M, or up to 128M for large sources.",
        callback=_task_bytes,
        show_default=False,
    ),
]
Devices = Annotated[str, typer.Option("--devices", help="all, cpu, or a list such as cuda:0,cuda:1.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Number of worker processes.", show_default=False)]
WorkerBytes = Annotated[
    str | None, option("--memory-bytes", "BYTES", "Host memory for the tasks of each worker, such as 512M.")
]
ShardBytes = Annotated[str, typer.Option("--shard-bytes", help="Maximum size of a file in the result.")]
Scratch = Annotated[
    Path | None,
    typer.Option(
        "--scratch",
        metavar="DIR",
        help="Local directory for files on their way to an object store.",
        show_default=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a Chrome trace of all workers.", show_default=False),
]
ReportHub = Annotated[
    str | None,
    option("--hub", "URL", "Report progress to this hub. For cache:MODEL, the weight cache's hub."),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Put the workers on this Ray cluster.", show_default=False),
]


def _keep_stdout() -> None:
    """Redirect file descriptor 1 of this process to stderr, but keep the command's own output on stdout."""
    stdout = sys.__stdout__
    # If a test or a notebook has replaced sys.stdout, the command's output does not use file descriptor 1.
    if stdout is None or sys.stdout is not stdout:
        return
    stdout.flush()
    # Native libraries write to the file descriptor instead of `sys.stdout`.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(  # noqa: SIM115 - the interpreter closes it at its end
        descriptor, "w", encoding=stdout.encoding, errors=stdout.errors, buffering=1 if stdout.line_buffering else -1
    )


def _list_ops(is_wanted: bool) -> None:
    if is_wanted:
        from penstock_convert.operations.spec import usages

        write_lines(*usages())
        raise typer.Exit


RatesOption = Annotated[Path | None, option("--rates", "FILE", "Rates of the stages, from `penstock calibrate`.")]


def convert(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC... DST", help="Sources, and the destination: a directory, an object store, or cache:MODEL."
        ),
    ],
    to: To = None,
    op: Operations = None,
    verify: Verify = None,
    devices: Devices = "all",
    workers: Workers = None,
    memory_bytes: WorkerBytes = None,
    task_bytes: TaskBytes = None,
    shard_bytes: ShardBytes = "5000000000",
    scratch: Scratch = None,
    trace: Trace = None,
    force: Force = False,
    ray: Ray = None,
    rates: RatesOption = None,
    hub: ReportHub = None,
    token_file: TokenFile = None,
    listen: Listen = None,
    data_port: DataPort = 0,
    list_ops: Annotated[
        bool,
        typer.Option("--list-ops", callback=_list_ops, is_eager=True, help="List the operations for --op and exit."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and convert nothing.")] = False,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Convert or merge checkpoints, out of core.

    The command changes formats and shards, merges checkpoints, and runs your own functions. To resume an interrupted
    conversion, run the same command again.
    """
    if len(places) < 2:
        raise ConfigError(
            "a conversion needs sources and a destination", hint="run `penstock convert SRC DST --to cast:BF16`"
        )
    # Refuse --listen instead of ignoring it, because the user expects that a fleet can fetch the result.
    if listen is not None and not places[-1].startswith("cache:"):
        message = f"--listen requires a destination cache:MODEL, not {places[-1]!r}"
        raise ConfigError(message, hint="omit --listen")
    if token_file is not None and hub is None and not places[-1].startswith("cache:"):
        message = "--token-file requires --hub or a destination cache:MODEL"
        raise ConfigError(message, hint="pass --hub URL, or omit --token-file")
    connection = connection_of(hub, token_file, listen, data_port)
    words = list(op or ())
    speeds = None if rates is None else read_rates(rates)
    if dry_run:
        # This process does not know the devices of a Ray cluster.
        named = [] if ray is not None else devices.split(",")
        sizes = {"task_bytes": task_bytes, "memory_bytes": memory_bytes}
        request = {"to": to, "operations": words, "verify": verify, **sizes}
        _predict(places, named, workers, speeds, format, shard_bytes, request)
        return
    from penstock_convert.workers.launch import LocalLauncher

    launcher = None
    if ray is not None:
        # With RAY_LOG_TO_STDERR, threads in Ray's native code log to file descriptor 1.
        _keep_stdout()
    elif to is not None or workers is not None or not _is_copy(words):
        launcher = LocalLauncher(devices.split(","), workers)
        # Launch the workers now, so that they start up while this process imports the remaining modules.
        launcher.begin()
    from penstock_convert.result import SCHEME

    settings: dict[str, Any] = {"num_workers": workers, "memory_bytes": memory_bytes, "task_bytes": task_bytes}
    settings |= {"scratch": scratch, "ray": ray, "rates": speeds, "trace": trace}
    # Ignore PENSTOCK_HUB, which may be set for an engine and must not make this process report its conversions.
    if hub is not None:
        from penstock_convert.job_reporter import HubReporter

        settings["observer"] = HubReporter(connection)
    run = partial(
        _run,
        launcher,
        settings,
        places[:-1],
        to=to,
        operations=words,
        verify=verify,
        devices=devices.split(","),
        shard_bytes=shard_bytes,
        replace=force,
    )
    if places[-1].startswith(SCHEME):
        _keep(run, places[-1].removeprefix(SCHEME), connection, format)
    else:
        write_report(run(destination=places[-1]), format)


def _is_copy(words: list[str]) -> bool:
    # Import `is_copy` only here, so that the workers start before this process imports more modules.
    from penstock_convert.operations.spec import is_copy

    return is_copy(words)


def _predict(
    places: Sequence[str],
    devices: Sequence[str],
    workers: int | None,
    rates: Rates | None,
    format: OutputFormat,
    shard_bytes: str,
    request: Mapping[str, Any],
) -> None:
    """Plan a conversion to the last URI in `places`, and write the plan and the predicted time to stdout.

    Args:
        devices: devices on this host. Empty if this process does not know the devices.
    """
    from penstock_convert.report import predict
    from penstock_convert.request import plan
    from penstock_convert.result import ONE_FILE, SCHEME
    from penstock_convert.workers.launch import devices_of

    # A weight cache has no files, so plan its memory like one file.
    shards = ONE_FILE if places[-1].startswith(SCHEME) else shard_bytes
    job = plan(places[:-1], shard_bytes=shards, **request)
    where = devices_of(devices, workers) if devices else ()
    _write_plan(job, predict(job, frozenset(), places, where, rates), format)


def _run(launcher: LocalLauncher | None, settings: dict[str, Any], sources: list[str], **options: Any) -> ConvertReport:
    """Run `penstock.convert` with a launcher and with `settings` as its `WorkerSettings`, and close the launcher."""
    from penstock_convert.convert import WorkerSettings
    from penstock_convert.convert import convert as run

    with launcher or nullcontext():
        return run(sources, workers=WorkerSettings(launcher=launcher, **settings), **options)


def _keep(run: Callable[..., ConvertReport], model: str, connection: ConnectionSettings, format: OutputFormat) -> None:
    """Convert into a weight cache, and keep the result until SIGTERM."""
    import penstock

    with penstock.cache.WeightCache(connection=connection) as cache:
        write_report(run(destination=cache.into(model)), format)
        # Scripts wait for the report before they start engines, and stdout is buffered if it is a pipe.
        sys.stdout.flush()
        total = bytes_text(sum(resident.nbytes for resident in cache.models()))
        # Print the note after the signal handlers are installed, because a script that reads the note may send a signal
        # immediately.
        cache.serve(ready=partial(note, f"keeping {model}: {total} on {cache.device}. Stop with SIGTERM or Ctrl-C."))


_EXECUTORS = ("fetch", "compute", "send")


def write_report(report: ConvertReport, format: OutputFormat) -> None:
    """Write the report of a conversion to stdout."""
    if format is OutputFormat.json:
        # The JSON of a report contains only its fields, so add its properties.
        derived = {name: getattr(report, name) for name in ("gb_per_s", "utilisation", "off_by")}
        write_json({**plain(report), **derived})
        return
    write_lines(f"{report.uri}  {report.revision}")
    write_fields(
        {
            "operation": report.operation,
            "tensors": f"{report.num_tensors}, {bytes_text(report.nbytes)}",
            "sources": f"{'verified' if report.verified else 'not verified'}: {report.why}; "
            f"{bytes_text(report.verified_bytes)} of {bytes_text(report.read_bytes)} compared",
            "tasks": _tasks(report),
            "read": _read(report),
            "time": f"{report.wall_s:.2f} s, with {report.phases['start']:.2f} s to start and "
            f"{report.phases['end']:.2f} s to end; {report.gb_per_s:.2f} GB/s read",
            "moving": _moving(report),
            "busy": ", ".join(f"{name} {share:.2f}" for name, share in report.utilisation.items())
            + f" threads of each of {report.num_workers} workers",
            "memory": f"at most {bytes_text(report.peak_bytes)} of host memory in each worker",
        }
    )
    for text in report.left_out_by_reason():
        note(f"left out {text}")
    rows = [
        [
            worker.worker,
            worker.device,
            worker.num_tasks,
            *(f"{worker.busy_s.get(name, 0.0):.2f}" for name in _EXECUTORS),
            worker.end,
        ]
        for worker in report.workers
    ]
    write_columns(["worker", "device", "tasks", *(f"{name} s" for name in _EXECUTORS), "end"], rows)


def _tasks(report: ConvertReport) -> str:
    """Describe the number of tasks, and the number of tasks that were reassigned because workers were lost."""
    lost = sum(worker.end != "finished" for worker in report.workers)
    parts = [f"{report.num_tasks}, including {report.num_resumed} from an earlier run"]
    if lost:
        moved = f"{report.num_stolen} reassigned, {report.num_twice} duplicated"
        parts.append(f"{moved}, {lost} {'worker was' if lost == 1 else 'workers were'} lost")
    return ", ".join(parts)


def _read(report: ConvertReport) -> str:
    """Describe where the bytes came from, and why more bytes were read than the tasks require."""
    parts = [f"{bytes_text(report.fetched_bytes)} from the sources, {bytes_text(report.held_bytes)} from caches"]
    # Idle workers run other workers' last tasks again, so that a slow worker does not delay the conversion.
    if report.num_twice and report.fetched_bytes > report.read_bytes:
        tasks = "1 task" if report.num_twice == 1 else f"{report.num_twice} tasks"
        parts.append(
            f"{bytes_text(report.read_bytes)} are needed, because idle workers repeated {tasks} to finish sooner"
        )
    return "; ".join(parts)


def _moving(report: ConvertReport) -> str:
    """Describe the predicted and the measured time of the transfer."""
    took = f"took {report.phases['move']:.2f} s"
    if report.predicted_s is None or report.off_by is None:
        return f"{took}, without a prediction: {report.predicted_by}"
    off = f"{abs(report.off_by):.0%} {'over' if report.off_by >= 0 else 'under'}".replace("%", " %")
    return f"predicted {report.predicted_s:.2f} s, {took} ({off}), from {report.predicted_by}"


def _write_plan(job: ConversionJob, predicted: Predicted, format: OutputFormat) -> None:
    seconds, by = predicted
    facts: dict[str, int | str] = {
        "operation": job.operation.name,
        "job": job.key,
        "num_tensors": len(job.files.table),
        "num_files": len(job.files.body_nbytes),
        "nbytes": int(job.files.table.nbytes.sum()),
        "read_bytes": int(job.read_bytes.sum()),
        "num_tasks": len(job.tasks),
        "largest_task_bytes": int(job.memory_bytes.max(initial=0)),
    }
    if format is OutputFormat.json:
        write_json({**facts, "predicted_s": seconds, "predicted_by": by})
        return
    texts = {name.removeprefix("num_"): bytes_text(int(v)) if "bytes" in name else v for name, v in facts.items()}
    write_fields({**texts, "predicted": f"no: {by}" if seconds is None else f"{seconds:.2f} s, from {by}"})


def read_rates(path: Path) -> Rates:
    """Read the rates of a machine's stages from a file. Raise ConfigError if the file cannot be read."""
    from penstock_convert.plan.cluster import Rates, from_json

    speeds = from_json(read_file(path, hint="create it with penstock calibrate FILE (package penstock-tools)"), Rates)
    speeds.check()
    return speeds


def read_file(path: Path, *, hint: str) -> bytes:
    """Return the contents of a file that the user named. Raise ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=hint) from error


def add(commands: typer.Typer) -> None:
    """Add `penstock convert`."""
    epilog = examples(
        "penstock convert llama llama-fp8 --to fp8-block128",
        "penstock convert a b merged --op 'linear:weights=0.3,0.7'",
        "penstock convert --list-ops",
    )
    commands.command("convert", epilog=epilog)(convert)
