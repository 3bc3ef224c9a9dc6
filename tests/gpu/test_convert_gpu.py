"""Convert on a device: the bits of the CPU, also when a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import penstock  # noqa: E402
from penstock.jobs.convert import WorkerSettings, convert  # noqa: E402
from penstock.jobs.workers.launch import LocalLauncher  # noqa: E402
from penstock.testing.checkpoints import write_llama  # noqa: E402

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {"task_bytes": "2M", "shard_bytes": 20_000_000}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three of one model in BF16."""
    made = tmp_path_factory.mktemp("convert")
    for seed in range(3):
        write_llama(made / str(seed), total_bytes=60_000_000, fp8=False, seed=seed)
    return [made / str(seed) for seed in range(3)]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class Hostile(LocalLauncher):
    """One worker is killed once a quarter is done."""

    is_struck = False

    def strike(self, done: int, total: int) -> None:
        if not self.is_struck and done > total // 4:
            alive = [process for process in self._processes.values() if process.poll() is None]
            os.kill(alive[0].pid, signal.SIGKILL)
            self.is_struck = True


def test_quantised_by_two_workers_of_which_one_is_killed(sources: list[Path], tmp_path: Path) -> None:
    told = {"to": "fp8-block128", "operations": [{"op": "rename", "rules": [[r"^model\.", "m."]]}], **SMALL}
    convert(sources[0], tmp_path / "cpu", devices="cpu", workers=4, **told)
    with Hostile() as launcher:
        report = convert(
            sources[0],
            tmp_path / "gpu",
            devices=["cuda:0"],
            workers=WorkerSettings(num_workers=2, launcher=launcher),
            progress=launcher.strike,
            **told,
        )
    assert launcher.is_struck and any("SIGKILL" in one.end for one in report.workers)
    assert files(tmp_path / "gpu") == files(tmp_path / "cpu")
    assert penstock.verify(tmp_path / "gpu").verified
    assert report.peak_bytes <= 512 << 20


def test_merged(sources: list[Path], tmp_path: Path) -> None:
    told = {"operations": [{"op": "linear", "weights": [0.5, 0.3, 0.2]}], **SMALL}
    convert(sources, tmp_path / "cpu", devices="cpu", workers=4, **told)
    convert(sources, tmp_path / "gpu", devices=["cuda:0"], workers=1, **told)
    assert files(tmp_path / "gpu") == files(tmp_path / "cpu")
    assert penstock.verify(tmp_path / "gpu").verified
