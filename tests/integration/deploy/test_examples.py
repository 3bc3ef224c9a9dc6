"""The examples run on a CPU, as written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.long_running import long_running

pytest.importorskip("torch")

DIRECTORY = Path(__file__).resolve().parents[3] / "examples"
SERVES = DIRECTORY / "fetch_two_terminals.py"
SYNCS = DIRECTORY / "sync_two_terminals.py"
IS_IMPORTED = DIRECTORY / "fold_norms.py"  # A conversion imports it, and convert/test_operations.py runs it.
OF_ENGINES = {DIRECTORY / "sync_torchrun.py", DIRECTORY / "sync_ray.py"}  # a minute each; tests/engines runs them
EXAMPLES = sorted(set(DIRECTORY.glob("*.py")) - {SERVES, SYNCS, IS_IMPORTED} - OF_ENGINES)
LAST_S = 150.0


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Use a separate hub in a directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as runtime:
        yield {**os.environ, "PENSTOCK_RUNTIME_DIR": runtime}


LONG = {"fetch_torchrun", "load_into_transformers"}


def long_one(example: Path) -> Any:
    """Return the example. It is a drill if it is slow and another example does nearly the same."""
    return pytest.param(example, marks=long_running) if example.stem in LONG else example


@pytest.mark.parametrize("example", [long_one(path) for path in EXAMPLES], ids=lambda path: path.stem)
def test_example_exits_successfully(example: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=LAST_S, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    """Return its lines up to the one with `word`, or all lines if it ends first."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if word in line:
            break
    return said


def test_second_process_receives_weights_from_first(environ: dict[str, str]) -> None:
    pytest.importorskip("starlette")
    command = [sys.executable, str(SERVES)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    alarm = threading.Timer(LAST_S, first.kill)
    alarm.start()
    try:
        said = read_until(first, "serving")
        assert any("by storage" in line for line in said), said
        second = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=LAST_S, env=environ)
        assert second.returncode == 0, second.stderr
        assert "shm <- " in second.stdout
        assert "storage" not in second.stdout.splitlines()[1]
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=60) == 0
    finally:
        alarm.cancel()
        first.kill()
        first.communicate()


def test_engine_receives_versions_from_trainer_process(environ: dict[str, str]) -> None:
    command = [sys.executable, str(SYNCS)]
    trainer = subprocess.Popen([*command, "train"], stdout=subprocess.DEVNULL, env=environ)
    alarm = threading.Timer(LAST_S, trainer.kill)
    alarm.start()
    try:
        engine = subprocess.run(
            [*command, "serve", "--versions", "2"], capture_output=True, text=True, timeout=LAST_S, env=environ
        )
        assert engine.returncode == 0, engine.stderr
        assert engine.stdout.count("two-terminals version") == 2
        trainer.send_signal(signal.SIGINT)
        assert trainer.wait(timeout=60) == 0
    finally:
        alarm.cancel()
        trainer.kill()
