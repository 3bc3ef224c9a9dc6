"""The terminal of all commands: options that several of them share, and writing of data and errors.

In: plain values, frozen dataclasses. Out: one JSON document or plain columns on stdout, errors on stderr; decimal units
for people (GB = 10^9 bytes), bytes and seconds in JSON.
Not here: options of one command alone, and the data that it writes (each command's file).
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
    """Write one indented JSON document to stdout."""
    # JSON has no NaN or infinity: without the argument Python would write what no other parser reads.
    sys.stdout.write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_lines(*lines: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def write_fields(fields: Mapping[str, object]) -> None:
    """Write names and values to stdout, one pair per line, values aligned."""
    width = max((len(name) for name in fields), default=0)
    write_lines(*(f"{name:<{width}}  {value}".rstrip() for name, value in fields.items()))


def write_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write columns to stdout, two spaces apart, numbers to the right."""
    # Never cut to the terminal's width: the output may be piped.
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
    """Return a number of bytes in decimal units: `2.14 GB`, `512 B`."""
    # Powers of 1000, as vendors give memory and links: a rate in GB/s can be compared with a data sheet.
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def keep_stdout() -> None:
    """Send everything that this process writes to descriptor 1 to stderr, except the output of commands."""
    stdout = sys.__stdout__
    # A caller has replaced sys.stdout (a test, a notebook): output written there does not reach descriptor 1.
    if stdout is None or sys.stdout is not stdout:
        return
    stdout.flush()
    # The descriptor, not only `sys.stdout`: native libraries write to the descriptor.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(  # noqa: SIM115 - the interpreter closes it at its end
        descriptor, "w", encoding=stdout.encoding, errors=stdout.errors, buffering=1 if stdout.line_buffering else -1
    )


def note(text: str) -> None:
    """Write a remark to stderr."""
    sys.stderr.write(f"{text}\n")


def write_error(error: PenstockError, *, exit_code: int, as_json: bool) -> None:
    """Write an error to stderr: the failure, its place, its cause, the state of the destination, and a hint."""
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


def option(name: str, metavar: str, help: str) -> Any:
    """Return an option whose default is not shown, because it is None."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False)


class Format(enum.StrEnum):
    """A form of the data on stdout."""

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
FormatOption = Annotated[Format, typer.Option("--format", help="Form of the data on stdout.")]
Device = Annotated[str, typer.Option("--device", help="Device of the tensors: cpu, cuda, cuda:1.")]
Names = Annotated[list[str] | None, option("--names", "GLOB", "Only tensors whose name matches; may be repeated.")]
MemoryBytes = Annotated[str | None, option("--memory-bytes", "BYTES", "Host staging: 268435456, 256M, 1.5G.")]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Check digests; default: if there are any.", show_default=False),
]
To = Annotated[str | None, option("--to", "FORMAT", "cast:BF16, fp8-block128, mxfp8, ...")]
Operations = Annotated[
    list[str] | None,
    option(
        "--op",
        "OP",
        "average, linear:weights=0.3,0.7, lora-merge, module:function, ...; may be repeated. See docs/convert.md.",
    ),
]
TaskBytes = Annotated[str, typer.Option("--task-bytes", metavar="BYTES", help="Most bytes in and out of one task.")]
Hub = Annotated[
    str | None,
    option(
        "--hub",
        "URL",
        "http(s)://host:port or unix:///path; default: PENSTOCK_HUB, else this host's own hub.",
    ),
]
TokenFile = Annotated[
    Path | None,
    option("--token-file", "FILE", "File whose first token is sent to the hub; default: PENSTOCK_TOKEN_FILE."),
]
Listen = Annotated[
    str | None,
    option(
        "--listen", "HOST:PORT", "Address for members on other hosts; port 0: any free one. Default: this host only."
    ),
]


def connection_of(hub: str | None, token_file: Path | None, listen: str | None = None) -> ConnectionSettings:
    """Return the connection settings that a command's options ask for. ConfigError: one of them is wrong."""
    from penstock.hub.auth import first_token

    return ConnectionSettings(hub=hub, token=first_token(token_file), listen=listen)
