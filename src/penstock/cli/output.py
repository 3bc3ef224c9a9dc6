"""How commands write: one JSON document or plain columns on stdout; errors on stderr.

In: plain values, frozen dataclasses. Out: text; decimal units for people (GB = 10^9 bytes), bytes and seconds in JSON.
Not here: what is written (each command's file).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

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
