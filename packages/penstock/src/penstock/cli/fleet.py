"""`penstock status`, `why`, `drain`, `cache` and `fetch`: commands that use a fleet."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from penstock.cli import terminal
from penstock.errors import ConfigError, NotFound, printable
from penstock.hub.summary import failure_lines
from penstock.report import bytes_text, plain

if TYPE_CHECKING:
    import penstock
    from penstock.hub.job_state import JobState
    from penstock.hub.messages import HoldingState, MemberStatus, Status

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name in the fleet.", show_default=False)]
_HEADER = ["member", "host", "model", "key", "revision", "state", "tier", "chunks", "bytes"]
_HEADER += ["readers", "rate", "from", "why", "silent"]
_SPARE = ("key", "host", "readers", "tier", "why", "silent", "revision", "bytes", "from", "rate")
"""Columns to omit on a narrow terminal, in this order."""
_JOB_HEADER = ["conversion", "process", "phase", "tasks", "bytes", "rate", "left", "workers", "late", "moved", "error"]
_SPARE_OF_JOB = ("moved", "workers", "late", "process", "rate", "bytes", "error")
_SYNC_HEADER = ["member", "host", "sync", "rank", "version", "epoch", "state", "fleet", "bytes", "from", "silent"]
_SPARE_OF_SYNC = ("epoch", "host", "silent", "bytes", "from", "version")


def status(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Only members that have or fetch this model.", show_default=False),
    ] = None,
    hub: terminal.Hub = None,
    token_file: terminal.TokenFile = None,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch", metavar="SECONDS", min=0.1, help="Repeat at this interval until Ctrl-C.", show_default=False
        ),
    ] = None,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """List the fleet's members, models and progress.

    A narrow terminal shows fewer columns. A pipe and --format json receive all columns.
    """
    import penstock

    connection = terminal.connection_of(hub, token_file)
    if watch is None:
        _show(penstock.hub.status(model, connection=connection), model, format)
        return
    from penstock.hub.client import HubClient, resolve_connection

    connection = resolve_connection(connection)
    # Use one client, which keeps its connection and retries while the hub is unavailable.
    with HubClient.connect(connection.hub, connection.token) as client, contextlib.suppress(KeyboardInterrupt):
        if format is terminal.OutputFormat.human and sys.stdout.isatty():
            _redraw(lambda: client.status(model), model, watch)
        while True:
            _show(client.status(model), model, format)
            sys.stdout.flush()
            time.sleep(watch)
            if format is terminal.OutputFormat.human:
                terminal.write_lines("")


def _redraw(ask: Callable[[], Status], model: str | None, every_s: float) -> NoReturn:
    """Show the members on the full screen until Ctrl-C, and leave the last state on the terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    fleet, console = ask(), Console()

    def screen() -> Text:
        head = f"{time.strftime('%H:%M:%S')}, every {every_s:g} s. Stop with Ctrl-C."
        lines = [head, "", *_lines(fleet, model, console.width)]
        # The last line states how many lines are hidden, because the screen does not scroll.
        if (excess := len(lines) - console.height) > 0:
            lines[console.height - 1 :] = [f"... and {excess + 1} more lines"]
        return Text("\n".join(lines), no_wrap=True, overflow="crop")

    try:
        # Redraw several times a second, so that the table follows the size of the window.
        with Live(get_renderable=screen, console=console, screen=True, refresh_per_second=4):
            while True:
                time.sleep(every_s)
                fleet = ask()
    finally:
        terminal.write_lines(*_lines(fleet, model, terminal.terminal_width()))


def _show(fleet: Status, model: str | None, format: terminal.OutputFormat) -> None:
    if format is terminal.OutputFormat.json:
        import msgspec

        terminal.write_json(msgspec.to_builtins(fleet))
    else:
        terminal.write_lines(*_lines(fleet, model, terminal.terminal_width()))


def _lines(fleet: Status, model: str | None, width: int | None) -> list[str]:
    """Return lines of at most this width: tables of weights, syncs and conversions, then the lost members."""
    # List the failures of processes that are no longer members. The fleet page shows the failures of live members.
    live = {member.member for member in fleet.members}
    failures = [failure for failure in fleet.to_dict()["failures"] if failure["member"] not in live]
    lost = [terminal.cut(printable(line), width) for line in failure_lines(failures)]
    if not fleet.members and not fleet.jobs:
        return ["no members" if model is None else f"no member has or fetches {model}", *lost]
    weights = [row for member in fleet.members for row in _rows(member, model)]
    syncs = [row for member in fleet.members for row in _sync_rows(member)]
    lines = terminal.columns(_HEADER, weights, width=width, spare=_SPARE) if weights else []
    if weights and syncs:
        lines.append("")
    lines += terminal.columns(_SYNC_HEADER, syncs, width=width, spare=_SPARE_OF_SYNC) if syncs else []
    if lines and fleet.jobs:
        lines.append("")
    jobs = [_job_row(job.state) for job in fleet.jobs]
    lines += terminal.columns(_JOB_HEADER, jobs, width=width, spare=_SPARE_OF_JOB) if jobs else []
    return [*lines, "", *lost] if lost else lines


def _rows(member: MemberStatus, model: str | None) -> list[list[object]]:
    """Return a table row for each set of weights. A member without weights or syncs also has a row."""
    who = _who(member)
    # Show the time since a member's last heartbeat, because the hub removes a member without heartbeats after a TTL.
    silent = f"{member.silent_s:.1f} s" + (f", {member.complaints} complaints" if member.complaints else "")
    rows: list[list[object]] = []
    # The hub lists all weights of a member, not only those of the requested model.
    for holding in member.holdings:
        if model is None or holding.identity.model == model:
            rows.append([who, member.host[:8], *_cells(holding, member.boot), silent])
    if member.syncs:
        return rows
    standing = member.boot if member.boot not in {"", "ready"} else "idle"
    return rows or [[who, member.host[:8], "", "", "", standing, "", "", "", "", "", "", "", silent]]


def _who(member: MemberStatus) -> str:
    # Format a member's name as in `why` and in reported paths.
    return f"{member.member[:8]} {member.name}"


def _sync_rows(member: MemberStatus) -> list[list[object]]:
    return [
        [
            _who(member),
            member.host[:8],
            state.name,
            f"{state.side} {state.rank}/{state.world_size}",
            "" if state.version < 0 else state.version,
            state.epoch[:8],
            state.state,
            state.fleet,
            bytes_text(state.nbytes),
            state.path,
            f"{member.silent_s:.1f} s",
        ]
        for state in member.syncs
    ]


def _job_row(job: JobState) -> list[object]:
    return [
        job.name,
        job.process,
        job.phase,
        f"{job.num_done}/{job.num_tasks}",
        f"{bytes_text(job.done_bytes)} of {bytes_text(job.total_bytes)}",
        f"{job.gb_per_s:.2f} GB/s",
        f"{job.eta_s:.0f} s" if job.eta_s > 0 else "",
        job.num_workers,
        job.num_late,
        f"{job.num_reassigned} reassigned, {job.num_duplicated} duplicated",
        "" if job.error is None else f"{job.error.error}: {job.error.message}",
    ]


def _cells(holding: HoldingState, boot: str) -> list[object]:
    """Return the table cells for one set of weights. `boot` describes the startup of the member's process."""
    num_have = sum(stop - start for start, stop in holding.have)
    share = "" if num_have == holding.num_chunks else f" ({num_have / max(1, holding.num_chunks):.0%})"
    readers = f"{holding.num_readers}/{holding.max_readers}" if holding.max_readers else str(holding.num_readers)
    return [
        holding.identity.model,
        holding.key[:8],
        # Reports show the same prefix of a revision. The prefix is sufficient for `--revision`.
        holding.revision[:19],
        # While weights are filling, their state and chunks are more specific than the phase of the fetch.
        holding.state if holding.state == "filling" or boot in {"", "ready"} else f"{holding.state}, {boot}",
        holding.tier or ("gpu" if holding.device_id else "host"),
        f"{num_have}/{holding.num_chunks}{share}",
        bytes_text(holding.nbytes),
        readers,
        f"{holding.gb_per_s:.2f} GB/s" if holding.gb_per_s else "",
        holding.path,
        holding.why,
    ]


def why(
    model: Model,
    member: Annotated[str | None, terminal.option("--member", "ID", "Only reasons for this member.")] = None,
    hub: terminal.Hub = None,
    token_file: terminal.TokenFile = None,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Explain from which members a model is read.

    The command also states why other members are not read: different identities, states, or complaints from readers.
    """
    import msgspec

    import penstock

    answer = penstock.hub.why(model, member=member, connection=terminal.connection_of(hub, token_file))
    if format is terminal.OutputFormat.json:
        terminal.write_json(msgspec.to_builtins(answer))
    else:
        terminal.write_lines(*answer.lines)


def drain(
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Its id, or the beginning that status shows.")],
    undo: Annotated[bool, typer.Option("--undo", help="Send readers to it again.")] = False,
    reason: Annotated[
        str, typer.Option("--reason", help="Reason for the audit log and the fleet page.", show_default=False)
    ] = "",
    hub: terminal.Hub = None,
    token_file: terminal.TokenFile = None,
) -> None:
    """Send no more readers to a member.

    The drain ends when the member leaves. Current readers finish or use other members. Requires an operator's token.
    """
    import penstock

    name = penstock.hub.drain(member, undo=undo, reason=reason, connection=terminal.connection_of(hub, token_file))
    terminal.write_lines(f"{name} {'gets readers again' if undo else 'is draining'}")


def cache(
    uris: Annotated[
        list[str] | None, typer.Argument(metavar="URI...", help="Weights, in the form that `penstock load` accepts.")
    ] = None,
    model: Annotated[
        list[str] | None,
        terminal.option("--model", "NAME", "Name for engines, once per URI. Default: the URI's last part."),
    ] = None,
    device: terminal.Device = "cpu",
    hub: terminal.Hub = None,
    listen: terminal.Listen = None,
    data_port: terminal.DataPort = 0,
    token_file: terminal.TokenFile = None,
    memory_bytes: Annotated[
        str | None, terminal.option("--memory-bytes", "BYTES", "Limit for all models on the device, such as 40G.")
    ] = None,
    host_bytes: Annotated[
        str | None, terminal.option("--host-bytes", "BYTES", "Pinned host memory for idle models of a GPU.")
    ] = None,
    disk: Annotated[
        str | None, terminal.option("--disk", "DIR", "Local directory for idle models that do not fit in memory.")
    ] = None,
    disk_bytes: Annotated[str | None, terminal.option("--disk-bytes", "BYTES", "Limit for --disk.")] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Also keep processed parameters that engines on this host hand over.")
    ] = False,
    max_readers: Annotated[
        int,
        typer.Option("--max-readers", metavar="N", min=1, help="Maximum number of concurrent readers of each model."),
    ] = 4,
    max_bytes_per_s: Annotated[
        str,
        terminal.option("--max-bytes-per-s", "BYTES", "Limit for all readers together, such as 2G. 0 means no limit."),
    ] = "0",
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0.0, help="Maximum wait for engines and readers at the end.")
    ] = 30.0,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Keep models in memory for engines on this host.

    Engines map the models without a copy, and members of the fleet read them, until SIGTERM.
    """
    import penstock
    from penstock.storage.locate import model_name, require_local

    uris = uris or []
    if not uris and not accept:
        raise ConfigError("there is nothing to keep", hint="pass a URI or --accept")
    # The first --model names the first URI.
    names = model or [model_name(uri) for uri in uris]
    if len(names) != len(uris):
        raise ConfigError(
            f"{len(names)} names for {len(uris)} weight sets", hint="pass --model once for each URI, or not at all"
        )
    # A misspelt URI would otherwise fail after minutes of loading the URIs before it.
    for uri in uris:
        require_local(uri)
    with penstock.cache.WeightCache(
        device=device,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        disk=disk,
        disk_bytes=disk_bytes,
        connection=terminal.connection_of(hub, token_file, listen, data_port),
        accept=accept,
        max_readers=max_readers,
        max_bytes_per_s=max_bytes_per_s,
    ) as cache:
        reports = [cache.keep(name, uri) for name, uri in zip(names, uris, strict=True)]
        if format is terminal.OutputFormat.json:
            terminal.write_json([{**plain(report), "gb_per_s": report.gb_per_s} for report in reports])
        else:
            terminal.write_lines(*(report.summary() for report in reports))
        # Scripts wait for the reports before they start engines, and stdout to a pipe is buffered.
        sys.stdout.flush()
        total = bytes_text(sum(resident.nbytes for resident in cache.models()))
        kept = ", ".join(names) if names else "parameters that engines hand over"
        text = f"keeping {kept}: {total} on {cache.device}{_rest(cache)}. Stop with SIGTERM or Ctrl-C."
        # A script that reads this line may send a signal immediately, so install the signal handlers first.
        cache.serve(drain_s=drain_s, ready=partial(terminal.note, text))


def _rest(cache: penstock.cache.WeightCache) -> str:
    """Describe the models that were moved to a lower memory tier."""
    first = next(iter(cache.stats().tiers))
    away = [f"{resident.model} in {resident.tier}" for resident in cache.models() if resident.tier != first]
    return f" ({', '.join(away)})" if away else ""


def _fill(uri: str, format: terminal.OutputFormat) -> None:
    """Download a repository to the local cache of the model hub's own library."""
    from penstock.loader.progress import Progress
    from penstock.storage.fill import fill

    with Progress(None, uri) as progress:
        report = fill(uri, on_bytes=progress)
    if format is terminal.OutputFormat.json:
        terminal.write_json({**plain(report), "gb_per_s": report.gb_per_s})
    else:
        terminal.write_lines(report.summary())


def fetch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model's name in the fleet. With --cache, org/name or hf://.")
    ],
    to: Annotated[
        Path | None, terminal.option("--to", "DIR", "Write the model to this directory, with index and manifest.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Fetch the model to cpu, cuda or cuda:1, and release it.", show_default=False),
    ] = None,
    cache: terminal.Cache = False,
    fallback: Annotated[
        str | None, terminal.option("--fallback", "URI", "Storage for weights that no member has.")
    ] = None,
    revision: Annotated[
        str,
        typer.Option(
            "--revision",
            help="Only this revision, or a revision with this prefix.",
            metavar="REVISION",
            show_default=False,
        ),
    ] = "",
    hub: terminal.Hub = None,
    listen: terminal.Listen = None,
    data_port: terminal.DataPort = 0,
    token_file: terminal.TokenFile = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout-s", min=0.0, help="Maximum wait for a first holder.", show_default=False),
    ] = None,
    force: terminal.Force = False,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Fetch a model from the fleet.

    With --cache, download the model from the model hub. The report states where all bytes came from and why.
    """
    if [to is not None, device is not None, cache].count(True) != 1:
        raise ConfigError(
            "exactly one destination is required", hint="pass one of --to DIR, --device DEVICE and --cache"
        )
    if cache:
        if fallback is not None or revision or timeout_s is not None or force:
            hint = "write a revision as org/name@REVISION, and omit --fallback, --timeout-s and --force"
            raise ConfigError("--cache reads from the model hub and not from the fleet", hint=hint)
        _fill(model, format)
        return
    if force and to is None:
        raise ConfigError("--force requires --to DIR", hint="omit --force")
    from penstock.storage import is_remote
    from penstock.storage.locate import require_local, texts_of

    if fallback is not None:
        require_local(fallback)
    from penstock.fetcher.to_files import fetch_model

    try:
        report = fetch_model(
            model,
            connection=terminal.connection_of(hub, token_file, listen, data_port),
            revision=revision,
            to=to,
            device=device or "cpu",
            fallback=fallback,
            timeout_s=timeout_s,
            replace=force,
        )
    except NotFound as error:
        if fallback is None:
            # The argument MODEL is a name in the fleet, even if it looks like a location.
            storage = shlex.quote(model) if is_remote(texts_of(model)[0]) else "URI"
            error.hint = f"run `penstock why {shlex.quote(model)}`, or pass --fallback {storage} to read storage"
        raise
    if format is terminal.OutputFormat.json:
        terminal.write_json({**plain(report), "gb_per_s": report.gb_per_s})
    else:
        terminal.write_lines(report.summary())
        if to is not None:
            terminal.write_lines("a fleet has only weights, without config.json, tokenizer and other small files")
