"""`penstock status` and `penstock why`: who holds what, and why who takes a model from whom.

In: the hub's answers. Out: columns or JSON on stdout. Not here: the answers (`hub.directory`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Format, FormatOption, Hub, TokenFile, connection_of, given
from penstock.cli.output import bytes_text, write_columns, write_json, write_lines

if TYPE_CHECKING:
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
