"""`penstock keep`: holds models for the engines of this host until it is told to stop.

In: URIs. Out: a report of each on stdout once all are kept; then nothing until SIGTERM or SIGINT.
Not here: keeping (`fleet.keeper`).
"""

from __future__ import annotations

import sys
from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

import typer

from penstock.cli.options import Device, Format, FormatOption, Hub, Listen, TokenFile, read_token
from penstock.cli.output import bytes_text, note, plain, write_json, write_lines
from penstock.config import parse_bytes
from penstock.errors import ConfigError


def keep(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Weight sets, each as `penstock load` takes it.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="What engines call it; one a URI. Default: its last part.",
            show_default=False,
        ),
    ] = None,
    device: Device = "cpu",
    hub: Hub = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    memory_bytes: Annotated[
        str | None,
        typer.Option("--memory-bytes", metavar="BYTES", help="Bound of all models together: 40G.", show_default=False),
    ] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0.0, help="How long the end waits for engines and readers.")
    ] = 30.0,
    format: FormatOption = Format.human,
) -> None:
    """Keep models in memory for engines of this host, which attach without a copy; be a source for the fleet."""
    from penstock import api

    names = model or [model_name(uri) for uri in uris]
    if len(names) != len(uris):
        raise ConfigError(
            f"{len(names)} names for {len(uris)} weight sets", hint="give --model once a URI, or not at all"
        )
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    token = read_token(token_file)
    with api.Keeper(device=device, memory_bytes=budget, hub=hub, token=token, listen=listen) as keeper:
        reports = [keeper.keep(name, uri) for name, uri in zip(names, uris, strict=True)]
        if format is Format.json:
            write_json([{**plain(report), "gb_per_s": report.gb_per_s} for report in reports])
        else:
            write_lines(*(report.summary() for report in reports))
        sys.stdout.flush()
        kept = bytes_text(sum(one.nbytes for one in keeper.models()))
        note(f"keeping {', '.join(names)}: {kept} on {keeper.device}; SIGTERM or Ctrl-C ends it")
        keeper.serve(drain_s=drain_s)


def model_name(uri: str) -> str:
    """What a weight set is called where nobody says: the last part of its path. ConfigError for a glob."""
    last = PurePosixPath(urlsplit(uri).path or uri).name
    for ending in (".index.json", ".safetensors"):
        last = last.removesuffix(ending)
    if not last or any(letter in last for letter in "*?["):
        raise ConfigError(f"{uri!r} does not say what the model is called", hint="give --model NAME")
    return last
