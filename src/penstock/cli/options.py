"""The arguments and options that several commands share, so that each is spelt and explained once.

In / Out: `Annotated` types for typer. Not here: options of one command alone, which stand in its file.
"""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Format(enum.StrEnum):
    """How data is written to stdout."""

    human = "human"
    json = "json"


Uri = Annotated[
    str,
    typer.Argument(
        metavar="URI",
        help="A safetensors file, a directory or index of shards, a glob, or s3:// gs:// az:// http(s)://.",
        show_default=False,
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How data is written to stdout.")]
Device = Annotated[str, typer.Option("--device", help="Where the tensors go: cpu, cuda, cuda:1.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--names", metavar="GLOB", help="Only tensors whose name matches; may be repeated.", show_default=False
    ),
]
MemoryBytes = Annotated[
    str | None,
    typer.Option("--memory-bytes", metavar="BYTES", help="Host staging: 268435456, 256M, 1.5G.", show_default=False),
]
