"""Properties of every command: exit codes, output streams, and imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

from penstock import errors
from penstock.cli import main


def run(arguments: list[str], *, raises: BaseException | None = None, monkeypatch=None) -> int:
    """Return the exit code of `main.run`, whose command raises `raises`."""
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
def test_each_error_class_has_its_exit_code(error: Exception, code: int, monkeypatch, capsys) -> None:
    assert run(["fail"], raises=error, monkeypatch=monkeypatch) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert "no" in written.err or "bug in Penstock" in written.err


def test_error_output_shows_location_blame_and_hint(monkeypatch, capsys) -> None:
    error = errors.SourceTruncated(
        "ends early", uri="s3://b/k", tensor="lm_head.weight", byte_range=(8, 16), hint="copy it again", mutated=True
    )
    assert run(["fail"], raises=error, monkeypatch=monkeypatch) == 4
    text = capsys.readouterr().err
    for part in ("SourceTruncated", "ends early", "s3://b/k [8, 16)", "lm_head.weight", "blame: source", "TOUCHED"):
        assert part in text
    assert "hint: copy it again" in text


def test_json_format_prints_error_as_json(monkeypatch, capsys) -> None:
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
def test_invalid_usage_exits_2(arguments: list[str], capsys) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""


def test_invalid_byte_count_is_usage_error(capsys) -> None:
    assert run(["load", "x", "--memory-bytes", "plenty"]) == 2
    assert "'plenty' is not a number of bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["load", "--help"], ["version"], ["bench", "load", "--help"], ["doctor", "--help"]]
)
def test_help_and_version_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom penstock.cli.main import run\n"
        f"try:\n    run({arguments!r})\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'obstore', 'triton', 'safetensors'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_installed_penstock_command_runs() -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "version", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["penstock"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["version"], ["version", "--format", "json"], ["load", "--help"]])
def test_stdout_write_error_is_reported_in_one_line(arguments: list[str], unbuffered: str) -> None:
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock.cli.main", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (3, "penstock: cannot write to stdout: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_large_output_to_full_stdout_exits_3() -> None:
    code = (
        "from penstock.cli import main\nimport sys\n"
        "main.app.command('much')(lambda: sys.stdout.write('x' * 1_000_000))\nmain.run(['much'])\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "penstock: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_stdout_pipe_prints_no_error(unbuffered: str) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "version"]
    read, write = os.pipe()
    os.close(read)
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_interrupt_prints_no_traceback(monkeypatch, capsys) -> None:
    assert run(["fail"], raises=KeyboardInterrupt(), monkeypatch=monkeypatch) == 130
    assert capsys.readouterr().err == ""


def test_interrupt_shows_command_to_resume(monkeypatch, capsys) -> None:
    interrupt = KeyboardInterrupt()
    interrupt.add_note("3 finished tasks are kept")
    assert run(["fail", "--format", "a b"], raises=interrupt, monkeypatch=monkeypatch) == 130
    assert (
        capsys.readouterr().err == "penstock: interrupted. 3 finished tasks are kept\n  penstock fail --format 'a b'\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", "missing"],
        ["load", "missing.safetensors"],
        ["load", "missing/*.safetensors"],
        ["load", "empty"],
        ["cache", "missing"],
        ["fetch", "m", "--device", "cpu", "--fallback", "missing"],
        ["bench", "load", "missing"],
        ["convert", "missing", "there"],
    ],
    ids=" ".join,
)
def test_missing_location_is_reported_without_importing_torch(arguments: list[str], tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    code = (
        "import sys\nfrom penstock.cli.main import run\n"
        f"try:\n    run({arguments!r})\n"
        "except SystemExit as end:\n    assert end.code == 3, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "NotFound" in done.stderr


@pytest.mark.parametrize("module", ["typer", "penstock.cli.load", "torch"])
def test_interrupt_during_import_has_no_traceback(module: str, tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from penstock.cli.main import run\n"
        f"run(['load', {str(tmp_path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
