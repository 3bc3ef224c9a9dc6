"""The arguments and options that several commands share, so that each is spelt and explained once.

In / Out: `Annotated` types for typer. Not here: options of one command alone, which stand in its file.
"""

from __future__ import annotations

import enum
from pathlib import Path
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
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Check digests; default: where there are any.", show_default=False),
]
To = Annotated[
    str | None,
    typer.Option("--to", metavar="FORMAT", help="cast:BF16, fp8-block128, mxfp8, ...", show_default=False),
]
Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--op",
        metavar="OP",
        help="average, linear:weights=0.3,0.7, lora-merge, module:function, ...; may be repeated.",
        show_default=False,
    ),
]
TaskBytes = Annotated[str, typer.Option("--task-bytes", metavar="BYTES", help="Bytes in and out of one task.")]
Hub = Annotated[
    str | None,
    typer.Option(
        "--hub",
        metavar="URL",
        help="http(s)://host:port or unix:///path; default: this host's own, which the first to ask hosts.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="Its first token is shown to the hub and to doors.", show_default=False
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Where other hosts reach this member; port 0 chooses. Default: this host only.",
        show_default=False,
    ),
]
