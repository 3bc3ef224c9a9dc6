"""Text and JSON of the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.terminal import columns, write_columns, write_error, write_fields, write_json
from penstock.errors import ConfigError
from penstock.report import bytes_text, plain
from penstock.types import DType


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    path: Path
    dtype: DType
    phases: dict[DType, float]
    files: tuple[str, ...]
    count: np.int64


def test_plain_report_values_match_json() -> None:
    report = Report(Path("/a"), DType.BF16, {DType.F4: 0.5}, ("x", "y"), np.int64(3))
    expected = {"path": "/a", "dtype": "BF16", "phases": {"F4": 0.5}, "files": ["x", "y"], "count": 3}
    assert plain(report) == expected
    assert json.loads(json.dumps(plain(report))) == expected


def test_write_json_prints_one_document(capsys) -> None:
    write_json({"a": [1, None, True]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None, True]}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (2_137_000_000, "2.14 GB"),
        (3.5e12, "3.50 TB"),
        (7e15, "7000.00 TB"),
    ],
)
def test_bytes_are_shown_in_decimal_units(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_table_shows_complete_cells_and_right_aligned_numbers(capsys) -> None:
    write_columns(["name", "n"], [["x" * 300, 7], ["y", 1000]])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{'name':<300}     n", f"{'x' * 300}     7", f"{'y':<300}  1000"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["name                  kind  why", "a-name-of-20-letters  gpu   because it is so"]),
        (44, ["name                  kind  why", "a-name-of-20-letters  gpu   because it is so"]),
        (40, ["name              kind  why", "a-name-of-20-le…  gpu   because it is so"]),
        (26, ["name                  kind", "a-name-of-20-letters  gpu", "left out: why. Use --form…"]),
        (20, ["name", "a-name-of-20-letters", "left out: why, kind…"]),
        (10, ["name", "a-name-of…", "left out:…"]),
    ],
)
def test_table_columns_fit_terminal_width(width: int | None, lines: list[str]) -> None:
    rows = [["a-name-of-20-letters", "gpu", "because it is so"]]
    assert columns(["name", "kind", "why"], rows, width=width, spare=("why", "kind")) == lines


def test_multiline_cell_text_is_escaped_to_one_line() -> None:
    assert columns(["error"], [["no room\n\x1b[2Jon the disk"]]) == ["error", r"no room\n\x1b[2Jon the disk"]


def test_table_without_rows_prints_header(capsys) -> None:
    write_columns(["name", "n"], [])
    assert capsys.readouterr().out == "name  n\n"


def test_terminal_fields_are_aligned(capsys) -> None:
    write_fields({"a": 1, "long": "x"})
    assert capsys.readouterr().out == "a     1\nlong  x\n"


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("pass fallback= to read storage", "pass --fallback to read storage"),
        ("set memory_bytes >= 438272", "set --memory-bytes >= 438272"),
        ("memory_bytes=400 holds 1 buffer", "--memory-bytes 400 holds 1 buffer"),
        ("verify=True, but no manifest at llama", "--verify, but no manifest at llama"),
        ("set PENSTOCK_KEY, or give private_key=", "set PENSTOCK_KEY, or give --sign"),
        ("num_workers=0: it needs one", "--workers 0: it needs one"),
        ("give --fallback URI; no file /a/fallback/b.fallback", "give --fallback URI; no file /a/fallback/b.fallback"),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_errors_show_command_line_option_names(python, shell, as_json, capsys) -> None:
    write_error(ConfigError(python, hint=python), exit_code=2, as_json=as_json)
    printed = capsys.readouterr().err
    assert printed.count(shell) == 2
    assert python == shell or python not in printed
