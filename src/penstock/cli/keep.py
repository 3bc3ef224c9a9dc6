"""`penstock keep`: holds models for the engines of this host until it is told to stop.

In: URIs. Out: a report of each on stdout once all are kept; then nothing until SIGTERM or SIGINT.
Not here: keeping (`keeper.keeper`).
"""

from __future__ import annotations

import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from penstock.cli.options import Device, Format, FormatOption, Hub, Listen, TokenFile, connection_of, given
from penstock.cli.output import bytes_text, note, write_json, write_lines
from penstock.errors import ConfigError
from penstock.report import plain

if TYPE_CHECKING:
    from penstock import api


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
