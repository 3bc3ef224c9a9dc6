"""`penstock storage-initializer`: put models into directories before an engine starts, as KServe requires."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from penstock.cli.terminal import FormatOption, Hub, OutputFormat, TokenFile, connection_of, write_json, write_lines
from penstock.errors import ConfigError


def storage_initializer(
    pairs: Annotated[
        list[str],
        typer.Argument(metavar="SRC DEST...", help="A model's URI and the directory for its files."),
    ],
    hub: Hub = None,
    token_file: TokenFile = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Fill directories for an init container.

    Each directory gets all files of its model, as KServe requires.
    """
    from penstock.fetcher.storage_initializer import initialize

    if len(pairs) % 2:
        raise ConfigError(f"{pairs[-1]!r} has no destination", hint="pass pairs: SRC DEST [SRC DEST ...]")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.getLogger("penstock").addHandler(handler)
    connection = connection_of(hub, token_file)
    reports = []
    for source, destination in zip(pairs[::2], pairs[1::2], strict=True):
        reports.append(initialize(source, destination, connection=connection))
        if format is OutputFormat.human:
            write_lines(reports[-1].summary())
            # Flush, because users follow a pod's log while the next model is copied.
            sys.stdout.flush()
    if format is OutputFormat.json:
        write_json(reports)
