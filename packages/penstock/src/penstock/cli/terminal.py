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
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import ConfigError, PenstockError, printable
from penstock.report import plain


def write_json(value: object) -> None:
    """Write one indented JSON document to stdout."""
    # JSON has no NaN or infinity: without the argument Python would write what no other parser reads.
    sys.stdout.write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_lines(*lines: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write("".join(f"{printable(line, keep_lines=True)}\n" for line in lines))


def write_fields(fields: Mapping[str, object]) -> None:
    """Write names and values to stdout, one pair per line, values aligned."""
    width = max((len(name) for name in fields), default=0)
    write_lines(*(f"{name:<{width}}  {value}".rstrip() for name, value in fields.items()))


def write_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write columns to stdout, two spaces apart, numbers to the right. Never cut: the output may be piped."""
    write_lines(*columns(header, rows))


def columns(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, width: int | None = None, spare: Sequence[str] = ()
) -> list[str]:
    """Return lines of columns, two spaces apart, numbers to the right.

    Args:
        width: longest line: long cells are cut, then columns are left out and named below; None: nothing is cut.
        spare: columns that may be left out, the first one first.
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
                # The cells that were cut for the column that goes may have their room back.
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
        lines.append(f"no room for: {', '.join(left_out)}; --format json has all")
    return [cut(line, width) for line in lines]


_LEAST_CELL = 16
"""A cell is not cut below this many characters: two ids of eight digits, or most of a model's name."""


def cut(text: str, width: int | None) -> str:
    """Return a text of at most this width; None: as it is."""
    return text if width is None or len(text) <= width else f"{text[: max(0, width - 1)]}…"


def terminal_width() -> int | None:
    """Return the width of the terminal that stdout is; None: it is a file or a pipe."""
    # Some terminals (serial lines, `script`) do not know their size, and say 0.
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


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
    sys.stderr.write(f"{printable(text, keep_lines=True)}\n")


def write_error(error: PenstockError, *, exit_code: int, as_json: bool) -> None:
    """Write an error to stderr: the failure, its place, its cause, the state of the destination, and a hint."""
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


# Errors are raised by functions that programs call, too, and name their arguments. The CLI's options have other names.
_OPTIONS = {
    "fallback": "--fallback",
    "memory_bytes": "--memory-bytes",
    "num_workers": "--workers",
    "private_key": "--sign",
    "public_key": "--public-key",
    "shard_bytes": "--shard-bytes",
    "task_bytes": "--task-bytes",
    "timeout_s": "--timeout-s",
}
# The bare word `fallback` is English, or a part of a path.
_ARGUMENT = re.compile(
    rf"(?<![\w(./'\"-])(fallback(?==)|{'|'.join(name for name in _OPTIONS if '_' in name)})\b(=?)(?=(\S?))"
)


def _in_options(text: str) -> str:
    """Return an error's text with the options of the command line in place of the arguments of Python."""

    def option_of(found: re.Match[str]) -> str:
        # `memory_bytes=400` becomes `--memory-bytes 400`, `fallback= to read` loses its sign.
        return _OPTIONS[found[1]] + (" " if found[2] and found[3] else "")

    return _ARGUMENT.sub(option_of, text.replace("verify=True", "--verify"))


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution; None when it is not installed."""
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
    """Return examples as the end of a command's help."""
    # `\b` keeps the lines as they are; without it they would be filled to one paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def option(name: str, metavar: str, help: str) -> Any:
    """Return an option whose default is not shown, because it is None."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False)


class OutputFormat(enum.StrEnum):
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
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="Form of the data on stdout.")]
Device = Annotated[str, typer.Option("--device", help="Device of the tensors: cpu, cuda, cuda:1.")]
Names = Annotated[list[str] | None, option("--names", "GLOB", "Only tensors whose name matches; may be repeated.")]
MemoryBytes = Annotated[str | None, option("--memory-bytes", "BYTES", "Host staging: 268435456, 256M, 1.5G.")]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Check digests; default: if there are any.", show_default=False),
]
Cache = Annotated[
    bool, typer.Option("--cache", help="Keep it in the local cache of its hub's own library, for other tools too.")
]


def _task_bytes(value: str | None) -> str | None:
    """Return the value of --task-bytes. ConfigError: it is too small for tasks of a conversion."""
    if value is not None and parse_bytes(value) < _LEAST_TASK_BYTES:
        message = f"--task-bytes {value} is too small: every task reads the leaves of 256 KiB around it"
        raise ConfigError(message, hint="give 64K or more, or leave it out")
    return value


_LEAST_TASK_BYTES = 64_000
"""A smaller task reads its leaves several times over: tasks of one byte read 21 GB of a model of 66 MB."""
To = Annotated[str | None, option("--to", "FORMAT", "cast:BF16, fp8-block128, mxfp8, ...")]
Operations = Annotated[
    list[str] | None,
    option(
        "--op",
        "OP",
        "average, linear:weights=0.3,0.7, lora-merge, module:function, ...; may be repeated. See docs/convert.",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a weight set at the destination, once the new one is complete."),
]
TaskBytes = Annotated[
    str | None,
    typer.Option(
        "--task-bytes",
        metavar="BYTES",
        help="Most bytes in and out of one task; 64M unless given, and up to 128M for large sources.",
        callback=_task_bytes,
        show_default=False,
    ),
]
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


DataPort = Annotated[
    int,
    typer.Option(
        "--data-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Second port, at the host of --listen, for the bytes that others read; 0: any free one.",
        show_default=False,
    ),
]


def connection_of(
    hub: str | None, token_file: Path | None, listen: str | None = None, data_port: int = 0
) -> ConnectionSettings:
    """Return the connection settings that a command's options ask for. ConfigError: one of them is wrong."""
    return ConnectionSettings(hub=hub, token_file=token_file, listen=listen, data_port=data_port)
