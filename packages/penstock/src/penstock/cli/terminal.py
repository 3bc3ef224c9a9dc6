"""Shared options of the commands, and functions that write data and errors to the terminal.

Data on stdout is one JSON document or plain columns. Errors go to stderr. Text for people uses decimal units (GB = 10^9
bytes). JSON uses bytes and seconds.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config import ConnectionSettings
from penstock.errors import PenstockError, printable
from penstock.report import plain


def write_json(value: object) -> None:
    """Write one indented JSON document to stdout."""
    # JSON has no NaN or infinity, but Python writes them by default.
    sys.stdout.write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_lines(*lines: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write("".join(f"{printable(line, keep_lines=True)}\n" for line in lines))


def write_fields(fields: Mapping[str, object]) -> None:
    """Write aligned names and values to stdout, one pair per line."""
    width = max((len(name) for name in fields), default=0)
    write_lines(*(f"{name:<{width}}  {value}".rstrip() for name, value in fields.items()))


def write_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write columns to stdout, two spaces apart, with numbers right-aligned.

    No cell is shortened, because the output may be piped.
    """
    write_lines(*columns(header, rows))


def columns(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, width: int | None = None, spare: Sequence[str] = ()
) -> list[str]:
    """Return the columns as lines, two spaces apart, with numbers right-aligned.

    Args:
        width: maximum length of a line. Long cells are shortened first, then columns are omitted and listed below the
            table. The default is no limit.
        spare: columns that may be omitted, in this order.
    """
    cells = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    widths = {name: max(len(row[i]) for row in cells) for i, name in enumerate(header)}
    left_out: list[str] = []
    if width is not None:
        natural, candidates = dict(widths), list(spare)
        while (excess := sum(widths.values()) + 2 * (len(widths) - 1) - width) > 0:
            longest = max(widths, key=lambda name: widths[name])
            if widths[longest] > _LEAST_CELL:
                widths[longest] = max(_LEAST_CELL, widths[longest] - excess)
            elif candidates:
                left_out.append(candidates.pop(0))
                # The remaining cells may use the space of the removed column.
                widths = {name: natural[name] for name in header if name not in left_out}
            else:
                break
    lines = []
    for row in cells:
        padded = [
            cut(cell, widths[name]).rjust(widths[name]) if to_right else cut(cell, widths[name]).ljust(widths[name])
            for name, cell, to_right in zip(header, row, right, strict=True)
            if name in widths
        ]
        lines.append("  ".join(padded).rstrip())
    if left_out:
        lines.append(f"left out: {', '.join(left_out)}. Use --format json to get all columns.")
    return [cut(line, width) for line in lines]


_LEAST_CELL = 16
"""Minimum width of a shortened cell in characters, enough for two ids of eight digits or most of a model's name."""


def cut(text: str, width: int | None) -> str:
    """Shorten a text to this width, or return the text unchanged if `width` is None."""
    return text if width is None or len(text) <= width else f"{text[: max(0, width - 1)]}…"


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout, or None if stdout is a file or a pipe."""
    # Some terminals (serial lines, `script`) report a size of 0.
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def note(text: str) -> None:
    """Write a message to stderr."""
    sys.stderr.write(f"{printable(text, keep_lines=True)}\n")


def write_error(error: PenstockError, *, exit_code: int, as_json: bool) -> None:
    """Write an error to stderr with its location and cause, the state of the destination, and a hint."""
    message, hint = _in_options(error.message), None if error.hint is None else _in_options(error.hint)
    if as_json:
        facts = {
            "error": type(error).__name__,
            "message": message,
            "blame": error.blame,
            "mutated": error.mutated,
            "uri": error.uri,
            "tensor": error.tensor,
            "byte_range": error.byte_range,
            "hint": hint,
            "exit_code": exit_code,
        }
        sys.stderr.write(json.dumps(facts) + "\n")
        return
    note(f"penstock: {type(error).__name__}: {message}")
    if error.uri is not None:
        where = "" if error.byte_range is None else f" [{error.byte_range[0]}, {error.byte_range[1]})"
        note(f"  in: {error.uri}{where}")
    if error.tensor is not None:
        note(f"  tensor: {error.tensor}")
    note(f"  blame: {error.blame}; destination {'TOUCHED, load it again' if error.mutated else 'untouched'}")
    if hint is not None:
        note(f"  hint: {hint}")


# Errors name Python arguments, because programs call the same functions. The command line shows options instead.
_OPTIONS = {"num_workers": "--workers", "private_key": "--sign"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("fallback", "memory_bytes", "public_key", "shard_bytes", "task_bytes", "timeout_s")
}
# Replace `fallback` only with `=`, because the bare word may be English or part of a path.
_ARGUMENT = re.compile(
    rf"(?<![\w(./'\"-])(fallback(?==)|{'|'.join(name for name in _OPTIONS if '_' in name)})\b(=?)(?=(\S?))"
)


def _in_options(text: str) -> str:
    """Replace Python arguments in an error's text with the command line's options."""

    # `memory_bytes=400` becomes `--memory-bytes 400`. An argument without a value, `fallback=`, becomes `--fallback`.
    return _ARGUMENT.sub(
        lambda found: _OPTIONS[found[1]] + (" " if found[2] and found[3] else ""),
        text.replace("verify=True", "--verify"),
    )


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(module: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def examples(*lines: str) -> str:
    """Format examples for the end of a command's help."""
    # Typer joins the lines of a paragraph unless it begins with `\b`.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def option(name: str, metavar: str, help: str) -> Any:
    """Create an option with the default None, which the help text does not show."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False)


class OutputFormat(enum.StrEnum):
    """A format of the data on stdout."""

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
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="Format of the data on stdout.")]
Device = Annotated[str, typer.Option("--device", help="Device for the tensors: cpu, cuda, cuda:1.")]
Names = Annotated[list[str] | None, option("--names", "GLOB", "Only tensors with a matching name. May be repeated.")]
MemoryBytes = Annotated[str | None, option("--memory-bytes", "BYTES", "Host memory for staging, such as 256M or 1.5G.")]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Check digests. Default: if there are any.", show_default=False),
]
Cache = Annotated[bool, typer.Option("--cache", help="Also store the model in the local cache of its hub's library.")]


Force = Annotated[
    bool, typer.Option("--force", help="Replace weights at the destination once the new ones are complete.")
]
Hub = Annotated[
    str | None,
    option("--hub", "URL", "http(s)://host:port or unix:///path. Default: PENSTOCK_HUB, or this host's hub."),
]
TokenFile = Annotated[
    Path | None,
    option("--token-file", "FILE", "File whose first token is sent to the hub. Default: PENSTOCK_TOKEN_FILE."),
]
Listen = Annotated[
    str | None,
    option(
        "--listen",
        "HOST:PORT",
        "Address for members on other hosts. Port 0 selects a free port. Default: this host only.",
    ),
]
DataPort = Annotated[
    int,
    typer.Option(
        "--data-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Second port at the host of --listen, for the bytes that others read. 0 selects a free port.",
        show_default=False,
    ),
]


def connection_of(
    hub: str | None, token_file: Path | None, listen: str | None = None, data_port: int = 0
) -> ConnectionSettings:
    """Return the connection settings from a command's options. Raise ConfigError if an option is wrong."""
    return ConnectionSettings(hub=hub, token_file=token_file, listen=listen, data_port=data_port)
