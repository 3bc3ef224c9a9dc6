"""Conversion on a device is bit-identical to the CPU, also after a worker is killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.support.jobs import convert_as  # noqa: E402

import penstock  # noqa: E402
from penstock.testing.checkpoints import write_llama  # noqa: E402
from penstock_convert.convert import WorkerSettings  # noqa: E402
from penstock_convert.workers.launch import LocalLauncher  # noqa: E402

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {"task_bytes": "2M", "shard_bytes": 20_000_000}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one model in BF16."""
    made = tmp_path_factory.mktemp("convert")
    for seed in range(3):
        write_llama(made / str(seed), total_bytes=60_000_000, fp8=False, seed=seed)
    return [made / str(seed) for seed in range(3)]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class Hostile(LocalLauncher):
    """Kill one worker once a quarter is done."""

    is_struck = False

    def strike(self, done: int, total: int) -> None:
        if not self.is_struck and done > total // 4:
            alive = [process for process in self._processes.values() if process.poll() is None]
            os.kill(alive[0].pid, signal.SIGKILL)
            self.is_struck = True


def test_killed_worker_does_not_change_quantised_result(sources: list[Path], tmp_path: Path) -> None:
    told = {"to": "fp8-block128", "operations": [{"op": "rename", "rules": [[r"^model\.", "m."]]}], **SMALL}
    convert_as(sources[0], tmp_path / "cpu", devices="cpu", workers=4, **told)
    with Hostile() as launcher:
        report = convert_as(
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
    # Staging alone needs 8 MiB for each of 6 reading and 4 writing threads.
    assert 0 < report.peak_bytes <= 80 << 20


def test_gpu_merge_matches_cpu_merge(sources: list[Path], tmp_path: Path) -> None:
    told = {"operations": [{"op": "linear", "weights": [0.5, 0.3, 0.2]}], **SMALL}
    convert_as(sources, tmp_path / "cpu", devices="cpu", workers=4, **told)
    convert_as(sources, tmp_path / "gpu", devices=["cuda:0"], workers=1, **told)
    assert files(tmp_path / "gpu") == files(tmp_path / "cpu")
    assert penstock.verify(tmp_path / "gpu").verified


def test_tasks_are_staged_in_pieces_under_small_budget(tmp_path: Path) -> None:
    """Pieces are a quarter of the memory: 1 MiB, and 8 MiB, which is less than one read."""
    source = tmp_path / "source"
    write_llama(source, num_layers=1, hidden=2048, vocab=4096, fp8=False)
    penstock.manifest(source)
    convert_as(source, tmp_path / "cpu", to="fp8-block128", devices="cpu", workers=4, **SMALL)
    for memory, task_bytes in (("4M", "2M"), ("32M", "16M")):
        report = convert_as(
            source,
            tmp_path / f"gpu{memory}",
            to="fp8-block128",
            verify=True,
            devices=["cuda:0"],
            workers=WorkerSettings(num_workers=1, memory_bytes=memory),
            **{**SMALL, "task_bytes": task_bytes},
        )
        weights = [tmp_path / of for of in ("cpu", f"gpu{memory}")]
        assert [p.read_bytes() for p in sorted(weights[0].glob("*.safetensors"))] == [
            p.read_bytes() for p in sorted(weights[1].glob("*.safetensors"))
        ]
        assert report.verified
        assert 0 < report.peak_bytes <= int(memory[:-1]) << 19


def test_corrupt_source_byte_raises_integrity_error(sources: list[Path], tmp_path: Path) -> None:
    source = shutil.copytree(sources[0], tmp_path / "source")
    penstock.manifest(source)
    weights = next(source.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(penstock.IntegrityError):
        convert_as(source, tmp_path / "gpu", to="fp8-block128", devices=["cuda:0"], workers=1, **SMALL)
    assert not (tmp_path / "gpu").exists()
