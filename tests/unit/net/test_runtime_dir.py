from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.net.runtime_dir import RuntimeDir


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_home_is_private_and_gone_when_closed() -> None:
    home = RuntimeDir()
    assert home.path.stat().st_mode & 0o777 == 0o700
    home.close()
    home.close()
    assert not home.path.exists()


def test_homes_of_the_dead_are_swept_and_of_the_living_are_not(somewhere: Path) -> None:
    code = (
        "from penstock.net.runtime_dir import Home; import time; h = Home(); print(h.path, flush=True); time.sleep(9)"
    )
    environ = {**os.environ, "TMPDIR": str(somewhere)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        mine = RuntimeDir()
        assert path.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        third = RuntimeDir()
    assert not path.exists() and mine.path.exists()
    mine.close()
    third.close()
