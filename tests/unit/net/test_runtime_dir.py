from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.net.unix_sockets import RuntimeDir


@pytest.fixture(autouse=True)
def somewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    return path


def test_a_runtime_dir_is_private_and_removed_on_close() -> None:
    directory = RuntimeDir()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert not directory.path.exists()


def test_directories_of_dead_processes_are_removed_and_those_of_live_ones_kept(somewhere: Path) -> None:
    code = (
        "from penstock.net.unix_sockets import RuntimeDir; import time; "
        "directory = RuntimeDir(); print(directory.path, flush=True); time.sleep(9)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
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
