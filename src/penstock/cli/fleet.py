"""`penstock status` and `penstock why`: who holds what, and why who takes a model from whom.

In: the hub's answers. Out: columns or JSON on stdout. Not here: the answers (`hub.directory`).

`penstock keep`: holds models for the engines of this host until it is told to stop.

In: URIs. Out: a report of each on stdout once all are kept; then nothing until SIGTERM or SIGINT.
Not here: keeping (`keeper.keeper`).

`penstock pull`: a model from the fleet into a directory, or onto a device to see by which path and how fast.

In: a model's name. Out: the report on stdout. Not here: fetching and writing (`fetch.pull`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from penstock.cli.terminal import (
    Device,
    Format,
    FormatOption,
    Hub,
    Listen,
    TokenFile,
    bytes_text,
    connection_of,
    given,
    note,
    write_columns,
    write_json,
    write_lines,
)
from penstock.errors import ConfigError
from penstock.report import plain

if TYPE_CHECKING:
    from penstock import api
    from penstock.hub.messages import HoldingState, MemberStatus, Status


Model = Annotated[str, typer.Argument(metavar="MODEL", help="The name its members agree on.", show_default=False)]
_HEADER = [
    "member",
    "host",
    "model",
    "key",
    "revision",
    "state",
    "tier",
    "chunks",
    "bytes",
    "readers",
    "rate",
    "from",
    "why",
    "silent",
]
_SYNC_HEADER = ["member", "host", "sync", "rank", "version", "run", "state", "bytes", "from", "silent"]


def status(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Only members that have or get it.", show_default=False)
    ] = None,
    hub: Hub = None,
    token_file: TokenFile = None,
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="SECONDS", min=0.1, help="Again and again, until ^C.", show_default=False),
    ] = None,
    format: FormatOption = Format.human,
) -> None:
    """Members of the fleet, what they hold, how far they are, and where their bytes come from."""
    from penstock import api

    connection = connection_of(hub, token_file)
    if watch is None:
        _show(api.status(model, connection=connection), model, format)
        return
    from penstock.hub.client import HubClient, resolve_connection

    connection = resolve_connection(connection)
    # One client for all looks: it keeps its connection, and waits for a hub that is away for a moment.
    with HubClient.connect(connection.hub, connection.token) as client, contextlib.suppress(KeyboardInterrupt):
        while True:
            _show(client.status(model), model, format)
            sys.stdout.flush()
            time.sleep(watch)
            if format is Format.human:
                write_lines("")


def _show(found: Status, model: str | None, format: Format) -> None:
    if format is Format.json:
        import msgspec

        write_json(msgspec.to_builtins(found))
        return
    if not found.members:
        write_lines("no members" if model is None else f"no member has or wants {model}")
        return
    held = [row for member in found.members for row in _rows(member, model)]
    syncs = [row for member in found.members for row in _sync_rows(member)]
    for number, (header, rows) in enumerate(((_HEADER, held), (_SYNC_HEADER, syncs))):
        if rows:
            write_lines(*[""] * (number > 0 and bool(held)))
            write_columns(header, rows)


def _rows(member: MemberStatus, model: str | None) -> list[list[object]]:
    """Return one row for each set of weights; a member without weights or syncs has a row too."""
    who = _who(member)
    silent = f"{member.silent_s:.1f} s" + (f", {member.complaints} complaints" if member.complaints else "")
    rows: list[list[object]] = []
    for holding in member.holdings:
        if model is None or holding.identity.model == model:
            rows.append([who, member.host[:8], *_cells(holding), silent])
    if member.syncs:
        return rows
    return rows or [[who, member.host[:8], "", "", "", "idle", "", "", "", "", "", "", "", silent]]


def _who(member: MemberStatus) -> str:
    return f"{member.member[:8]} {member.name}"  # as paths and `why` name it


def _sync_rows(member: MemberStatus) -> list[list[object]]:
    """Return one row for each rank of a sync."""
    return [
        [
            _who(member),
            member.host[:8],
            state.name,
            f"{state.side} {state.rank}/{state.world_size}",
            "" if state.version < 0 else state.version,
            state.run[:8],
            state.state,
            bytes_text(state.nbytes),
            state.path,
            f"{member.silent_s:.1f} s",
        ]
        for state in member.syncs
    ]


def _cells(holding: HoldingState) -> list[object]:
    num_have = sum(stop - start for start, stop in holding.have)
    share = "" if num_have == holding.num_chunks else f" ({num_have / max(1, holding.num_chunks):.0%})"
    readers = f"{holding.num_readers}/{holding.max_readers}" if holding.max_readers else str(holding.num_readers)
    return [
        holding.identity.model,
        holding.key[:8],
        holding.revision[:19],  # as reports show it; `--revision` takes it
        holding.state,
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
    member: Annotated[str | None, given("--member", "ID", "Only of this member.")] = None,
    hub: Hub = None,
    token_file: TokenFile = None,
    format: FormatOption = Format.human,
) -> None:
    """Why who takes a model from whom, and what keeps the others apart: identities, states, complaints."""
    import msgspec

    from penstock import api

    found = api.why(model, member=member, connection=connection_of(hub, token_file))
    if format is Format.json:
        write_json(msgspec.to_builtins(found))
    else:
        write_lines(*found.lines)


def keep(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Weight sets, each as `penstock load` takes it.")],
    model: Annotated[
        list[str] | None, given("--model", "NAME", "What engines call it; one a URI. Default: its last part.")
    ] = None,
    device: Device = "cpu",
    hub: Hub = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    memory_bytes: Annotated[
        str | None, given("--memory-bytes", "BYTES", "Bound of all models on the device: 40G.")
    ] = None,
    host_bytes: Annotated[
        str | None, given("--host-bytes", "BYTES", "Pinned host memory for idle models of a GPU.")
    ] = None,
    disk: Annotated[str | None, given("--disk", "DIR", "Where idle models go then, on a local disk.")] = None,
    disk_bytes: Annotated[str | None, given("--disk-bytes", "BYTES", "Bound of --disk.")] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0.0, help="How long the end waits for engines and readers.")
    ] = 30.0,
    format: FormatOption = Format.human,
) -> None:
    """Keep models in memory for engines of this host, which attach without a copy; be a source for the fleet."""
    from penstock import api
    from penstock.storage.locate import look

    names = model or [model_name(uri) for uri in uris]
    if len(names) != len(uris):
        raise ConfigError(
            f"{len(names)} names for {len(uris)} weight sets", hint="give --model once a URI, or not at all"
        )
    for uri in uris:
        look(uri)
    with api.Keeper(
        device=device,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        disk=disk,
        disk_bytes=disk_bytes,
        connection=connection_of(hub, token_file, listen),
    ) as keeper:
        reports = [keeper.keep(name, uri) for name, uri in zip(names, uris, strict=True)]
        if format is Format.json:
            write_json([{**plain(report), "gb_per_s": report.gb_per_s} for report in reports])
        else:
            write_lines(*(report.summary() for report in reports))
        sys.stdout.flush()
        kept = bytes_text(sum(one.nbytes for one in keeper.models()))
        note(f"keeping {', '.join(names)}: {kept} on {keeper.device}{_rest(keeper)}; SIGTERM or Ctrl-C ends it")
        keeper.serve(drain_s=drain_s)


def _rest(keeper: api.Keeper) -> str:
    """Models that are elsewhere, in words."""
    first = next(iter(keeper.stats().tiers))
    away = [f"{one.model} in {one.tier}" for one in keeper.models() if one.tier != first]
    return f" ({', '.join(away)})" if away else ""


def model_name(uri: str) -> str:
    """Return what a weight set is called where nobody says: the last part of its path. ConfigError for a glob."""
    last = PurePosixPath(urlsplit(uri).path or uri).name
    for ending in (".index.json", ".safetensors"):
        last = last.removesuffix(ending)
    if not last or any(letter in last for letter in "*?["):
        raise ConfigError(f"{uri!r} does not say what the model is called", hint="give --model NAME")
    return last


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name its members agree on.")],
    to: Annotated[Path | None, given("--to", "DIR", "Write it here, with index and manifest.")] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Fetch it to cpu, cuda or cuda:1 and let it go.", show_default=False),
    ] = None,
    fallback: Annotated[str | None, given("--fallback", "URI", "Where storage has what no member has.")] = None,
    revision: Annotated[
        str, typer.Option("--revision", help="Only this one, or as it begins.", metavar="REVISION", show_default=False)
    ] = "",
    hub: Hub = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    wait_s: Annotated[
        float | None,
        typer.Option("--wait-s", min=0.0, help="How long to wait for a first holder.", show_default=False),
    ] = None,
    format: FormatOption = Format.human,
) -> None:
    """Fetch a model from the fleet and report what came from where, by which path, and how fast."""
    if (to is None) == (device is None):
        raise ConfigError("say where to: either --to DIR or --device DEVICE")
    if fallback is not None:
        from penstock.storage.locate import look

        look(fallback)
    from penstock import api
    from penstock.fetch.pull import pull as fetch

    with api.join(model, connection=connection_of(hub, token_file, listen), revision=revision) as fleet:
        report = fetch(fleet, to=to, device=device or "cpu", fallback=fallback, wait_s=wait_s)
    if format is Format.json:
        write_json({**plain(report), "gb_per_s": report.gb_per_s})
    else:
        write_lines(report.summary())
