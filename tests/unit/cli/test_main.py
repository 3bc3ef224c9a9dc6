"""What the command line promises whatever the command: exit codes, where text goes, what is not imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from penstock import errors
from penstock.cli import main


def run(arguments: list[str], *, raises: BaseException | None = None, monkeypatch=None) -> int:
    """The exit code of `main.run`; with `raises`, of a command that raises it."""
    if raises is not None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.callback()
        def root() -> None: ...

        @app.command()
        def fail(format: str = "human") -> None:
            raise raises

        monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as caught:
        main.run(arguments)
    return caught.value.code or 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("no"), 2),
        (errors.MissingExtra("no"), 2),
        (errors.FormatError("no"), 3),
        (errors.IntegrityError("no"), 3),
        (errors.BudgetTooSmall("no", minimum_bytes=1), 3),
        (errors.SourceTruncated("no", mutated=True), 4),
        (errors.DeviceOutOfMemory("no"), 3),
        (RuntimeError("our own fault"), 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_becomes_its_exit_code(error: Exception, code: int, monkeypatch, capsys) -> None:
    assert run(["fail"], raises=error, monkeypatch=monkeypatch) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert "no" in written.err or "fault of Penstock itself" in written.err


def test_an_error_says_where_whose_fault_and_what_to_do(monkeypatch, capsys) -> None:
    error = errors.SourceTruncated(
        "ends early", uri="s3://b/k", tensor="lm_head.weight", byte_range=(8, 16), hint="copy it again", mutated=True
    )
    assert run(["fail"], raises=error, monkeypatch=monkeypatch) == 4
    text = capsys.readouterr().err
    for part in ("SourceTruncated", "ends early", "s3://b/k [8, 16)", "lm_head.weight", "blame: source", "TOUCHED"):
        assert part in text
    assert "hint: copy it again" in text


def test_an_error_is_one_json_line_where_json_was_asked_for(monkeypatch, capsys) -> None:
    error = errors.FormatError("bad header", uri="a.safetensors")
    assert run(["fail", "--format", "json"], raises=error, monkeypatch=monkeypatch) == 3
    facts = json.loads(capsys.readouterr().err)
    assert facts["error"] == "FormatError"
    assert facts["blame"] == "source"
    assert facts["mutated"] is False
    assert facts["exit_code"] == 3


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["load"], ["load", "x", "--no-such-option"], ["load", "x", "--format", "xml"]]
)
def test_wrong_usage_is_two(arguments: list[str], capsys) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""


def test_a_wrong_number_of_bytes_is_wrong_usage(capsys) -> None:
    assert run(["load", "x", "--memory-bytes", "plenty"]) == 2
    assert "'plenty' is not a number of bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["load", "--help"], ["version"], ["bench", "load", "--help"], ["doctor", "--help"]]
)
def test_help_and_version_need_neither_torch_nor_obstore(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom penstock.cli.main import run\n"
        f"try:\n    run({arguments!r})\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'obstore', 'triton', 'safetensors'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_installed_command_runs() -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "version", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["penstock"]
