"""`penstock pull`: a model from the fleet into a directory, or onto a device to see by which path and how fast.

In: a model's name. Out: the report on stdout. Not here: fetching and writing (`fetch.pull`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Format, FormatOption, Hub, Listen, TokenFile, connection_of, given
from penstock.cli.output import write_json, write_lines
from penstock.errors import ConfigError
from penstock.report import plain


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
