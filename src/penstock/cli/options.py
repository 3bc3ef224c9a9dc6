"""The arguments and options that several commands share, so that each is spelt and explained once.

In / Out: `Annotated` types for typer, and the connection settings that `--hub`, `--token-file` and `--listen` make.
Not here: options of one command alone, which stand in its file.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config import ConnectionSettings


def given(name: str, metavar: str, help: str) -> Any:
    """Return an option without a default that is worth showing."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False)


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
Names = Annotated[list[str] | None, given("--names", "GLOB", "Only tensors whose name matches; may be repeated.")]
MemoryBytes = Annotated[str | None, given("--memory-bytes", "BYTES", "Host staging: 268435456, 256M, 1.5G.")]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Check digests; default: where there are any.", show_default=False),
]
To = Annotated[str | None, given("--to", "FORMAT", "cast:BF16, fp8-block128, mxfp8, ...")]
Operations = Annotated[
    list[str] | None,
    given(
        "--op",
        "OP",
        "average, linear:weights=0.3,0.7, lora-merge, module:function, ...; may be repeated. See docs/convert.md.",
    ),
]
TaskBytes = Annotated[str, typer.Option("--task-bytes", metavar="BYTES", help="Bytes in and out of one task.")]
Hub = Annotated[
    str | None,
    given(
        "--hub",
        "URL",
        "http(s)://host:port or unix:///path; default: PENSTOCK_HUB, else this host's own, hosted by the first to ask.",
    ),
]
TokenFile = Annotated[
    Path | None, given("--token-file", "FILE", "Its first token is shown to the hub; default: PENSTOCK_TOKEN_FILE.")
]
Listen = Annotated[
    str | None,
    given("--listen", "HOST:PORT", "Where other hosts reach this member; port 0 chooses. Default: this host only."),
]


def connection_of(hub: str | None, token_file: Path | None, listen: str | None = None) -> ConnectionSettings:
    """Return the connection settings that a command's options ask for. ConfigError: one of them is wrong."""
    from penstock.hub.auth import first_token

    return ConnectionSettings(hub=hub, token=first_token(token_file), listen=listen)
