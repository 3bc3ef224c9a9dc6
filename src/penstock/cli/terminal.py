"""How commands write: one JSON document or plain columns on stdout; errors on stderr.

In: plain values, frozen dataclasses. Out: text; decimal units for people (GB = 10^9 bytes), bytes and seconds in JSON.
Not here: what is written (each command's file).

Look up installed packages without importing them.

The arguments and options that several commands share, so that each is spelt and explained once.

In / Out: `Annotated` types for typer, and the connection settings that `--hub`, `--token-file` and `--listen` make.
Not here: options of one command alone, which stand in its file.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config import ConnectionSettings
from penstock.errors import PenstockError
from penstock.report import plain


def write_json(value: object) -> None:
    """One indented JSON document on stdout."""
    sys.stdout.write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_lines(*lines: str) -> None:
    """Lines on stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def write_fields(fields: Mapping[str, object]) -> None:
    """`name  value`, one a line, values aligned."""
    width = max((len(name) for name in fields), default=0)
    write_lines(*(f"{name:<{width}}  {value}".rstrip() for name, value in fields.items()))


def write_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns two spaces apart, never cut, so that they can be piped; numbers to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    for row in cells:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        write_lines("  ".join(padded).rstrip())


def bytes_text(nbytes: float) -> str:
    """`2.14 GB`, `512 B`: decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def keep_stdout() -> None:
    """Keep stdout for what commands write: everything else in this process that writes to descriptor 1 goes to stderr.

    Redirecting `sys.stdout` is not enough for that: native libraries write to the descriptor.
    """
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:
        return  # a caller has replaced it: what is written there does not reach descriptor 1
    stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(  # noqa: SIM115 - the interpreter closes it at its end
        descriptor, "w", encoding=stdout.encoding, errors=stdout.errors, buffering=1 if stdout.line_buffering else -1
    )


def note(text: str) -> None:
    """A remark on stderr."""
    sys.stderr.write(f"{text}\n")


def write_error(error: PenstockError, *, exit_code: int, as_json: bool) -> None:
    """The error on stderr: what, where, whose fault, what it did to the destination, what to do."""
    if as_json:
        facts = {
            "error": type(error).__name__,
            "message": error.message,
            "blame": error.blame,
            "mutated": error.mutated,
            "uri": error.uri,
            "tensor": error.tensor,
            "byte_range": error.byte_range,
            "hint": error.hint,
            "exit_code": exit_code,
        }
        sys.stderr.write(json.dumps(facts) + "\n")
        return
    note(f"penstock: {type(error).__name__}: {error.message}")
    if error.uri is not None:
        where = "" if error.byte_range is None else f" [{error.byte_range[0]}, {error.byte_range[1]})"
        note(f"  in: {error.uri}{where}")
    if error.tensor is not None:
        note(f"  tensor: {error.tensor}")
    note(f"  blame: {error.blame}; destination {'TOUCHED, load it again' if error.mutated else 'untouched'}")
    if error.hint is not None:
        note(f"  hint: {error.hint}")


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(module: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


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
