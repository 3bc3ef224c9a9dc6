"""Conversions with real workers are equal bit for bit, even if workers die, hang or are resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import safetensors
import torch
from safetensors.torch import load_file
from tests.support.every_dtype import every_dtype
from tests.support.jobs import convert_as

import penstock
from penstock.errors import (
    BudgetTooSmall,
    ConfigError,
    DestinationError,
    PeerLost,
    PlanError,
    SourceChanged,
    SourceTruncated,
)
from penstock.testing.checkpoints import write_llama
from penstock.types import DType
from penstock_convert.convert import WorkerSettings, convert
from penstock_convert.request import plan
from penstock_convert.result import Journal
from penstock_convert.workers.launch import LocalLauncher, num_prewarmed

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

RULES = [{"op": "rename", "rules": [[r"^model\.", "m."]]}]


def read(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("convert") / "source"
    write_llama(directory, total_bytes=24_000_000)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the output's files, made by one worker."""
    into = tmp_path_factory.mktemp("expected") / "out"
    report = convert(
        source,
        into,
        operations=RULES,
        devices="cpu",
        workers=WorkerSettings(num_workers=1, task_bytes="1M"),
        shard_bytes=10_000_000,
    )
    assert report.num_tasks > 20 and report.num_resumed == 0
    return files(into)


SLOWER = [*RULES, {"op": "function", "function": "tests.support.jobs:pauses"}]
"""The same output, a few seconds later."""


def run(source: Path, into: Path, operations=RULES, workers: WorkerSettings | int | None = None, **more):
    return convert(
        source,
        into,
        operations=operations,
        devices="cpu",
        workers=replace(WorkerSettings.of(workers), task_bytes="1M"),
        shard_bytes=10_000_000,
        **more,
    )


def test_rename_operation_keeps_tensor_bytes(source, expected, tmp_path):
    into = tmp_path / "out"
    report = run(source, into, workers=2)
    before, after = read(source), read(into)
    assert after.keys() == {name.replace("model.", "m.", 1) if name.startswith("model.") else name for name in before}
    for name, tensor in before.items():
        renamed = "m." + name.removeprefix("model.") if name.startswith("model.") else name
        assert raw(after[renamed]) == raw(tensor), name
    assert files(into) == expected
    checked = penstock.verify(into)
    assert checked.verified and checked.revision == report.revision
    assert (into / "tokenizer.json").read_text() == "{}"
    assert msgspec.json.decode((into / "config.json").read_bytes()) == {"architectures": ["LlamaForCausalLM"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert report.peak_bytes <= 512 << 20


class Hostile(LocalLauncher):
    """Workers that receive a signal once they have begun, one signal for each of the first few."""

    def __init__(self, signals: list[int]) -> None:
        super().__init__()
        self.signals, self.sent = signals, 0

    def strike(self, done: int, total: int) -> None:
        if self.sent < len(self.signals) and done >= 2 + 3 * self.sent:
            alive = [process for process in self._processes.values() if process.poll() is None]
            if len(alive) > 1 or self.signals[self.sent] == signal.SIGKILL:
                os.kill(alive[0].pid, self.signals[self.sent])
                self.sent += 1


def output(directory: Path) -> dict[str, bytes]:
    """Return the files of a result without the one that names the job."""
    return {name: data for name, data in files(directory).items() if name != "penstock.job"}


def test_only_tasks_of_killed_workers_are_repeated(source, expected, tmp_path):
    with Hostile([signal.SIGKILL, signal.SIGKILL]) as launcher:
        workers = WorkerSettings(num_workers=2, launcher=launcher)
        report = run(source, tmp_path / "out", SLOWER, workers=workers, progress=launcher.strike)
    assert launcher.sent == 2
    assert output(tmp_path / "out") == {name: expected[name] for name in expected if name != "penstock.job"}
    assert sum("SIGKILL" in one.end for one in report.workers) >= 1


def test_tasks_of_stopped_worker_are_repeated(source, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STALL_S", "5")
    with Hostile([signal.SIGSTOP]) as launcher:
        run(
            source, tmp_path / "out", workers=WorkerSettings(num_workers=2, launcher=launcher), progress=launcher.strike
        )
    assert launcher.sent == 1
    assert files(tmp_path / "out") == expected


def test_killed_fork_server_is_replaced(source, expected, tmp_path):
    launcher, killed = LocalLauncher(), list[int]()

    def strike(done: int, total: int) -> None:
        if not killed:
            assert launcher.fork_server is not None
            killed.append(launcher.fork_server.pid)
            os.kill(killed[0], signal.SIGKILL)

    with launcher:
        workers = WorkerSettings(num_workers=2, launcher=launcher)
        report = run(source, tmp_path / "out", SLOWER, workers=workers, progress=strike)
        assert launcher.fork_server is not None and launcher.fork_server.pid != killed[0]
    assert output(tmp_path / "out") == {name: expected[name] for name in expected if name != "penstock.job"}
    assert len(report.workers) == 4


COORDINATOR = """
import sys
import penstock
penstock.convert(sys.argv[1:3], sys.argv[3], operations=[{"op": "linear"}], to="cast:F32", workers=2)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_job_uses_prewarmed_workers_first(source, expected, tmp_path, monkeypatch, workers):
    monkeypatch.setattr("penstock_convert.workers.launch.num_prewarmed", lambda devices, workers: 2)
    with LocalLauncher() as launcher:
        launcher.begin()
        prewarmed = [process for process, _ in launcher._prewarmed]
        report = run(source, tmp_path / "out", workers=WorkerSettings(num_workers=workers, launcher=launcher))
        used = [process for process in launcher._processes.values() if process in prewarmed]
        assert len(used) == min(2, workers) == len(prewarmed) - len(launcher._prewarmed)
    assert [one.end for one in report.workers] == ["finished"] * workers
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("devices", "workers", "shown", "num"),
    [
        ("cpu", 4, None, 0),
        ("all", None, None, 3),
        ("all", 2, None, 2),
        ("all", 6, None, 6),
        ("all", 500, None, 8),
        ("all", None, "1,2", 2),
        ("all", None, "", 0),
        ("all", None, "-1", 0),
        ("all", None, "1,-1,2", 1),
        (["cuda:0", "cpu", "cuda:1"], None, None, 2),
        (["cuda:0"], 4, None, 4),
        (["cuda:0", "cpu"], 5, None, 3),
    ],
)
def test_prewarmed_processes_match_gpu_count(monkeypatch, devices, workers, shown, num):
    monkeypatch.setattr("penstock_convert.workers.launch.has_driver", lambda: True)
    monkeypatch.setattr("glob.glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(3)])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert num_prewarmed(devices, workers) == num


def test_gpu_count_matches_torch(monkeypatch):
    monkeypatch.setattr("penstock_convert.workers.launch.has_driver", lambda: True)
    with LocalLauncher() as launcher:
        assert launcher.gpus() == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        assert launcher.fork_server is not None
    with (
        LocalLauncher() as launcher,
        monkeypatch.context() as patched,
        pytest.raises(PeerLost, match="exit code 16"),
    ):
        # As if it had failed.
        patched.setattr("penstock_convert.workers.launch._COUNTED", 17 + torch.cuda.device_count())
        launcher.gpus()


def test_prewarmed_gpu_processes_exit_if_unused(source, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock_convert.workers.launch.num_prewarmed", lambda devices, workers: 2)
    monkeypatch.setattr("penstock_convert.workers.launch.has_driver", lambda: False)
    before = len(os.listdir("/proc/self/fd"))
    with LocalLauncher() as launcher:
        launcher.begin()
        assert len(launcher._prewarmed) == 2 and launcher.gpus() == [] and not launcher._prewarmed
        run(source, tmp_path / "out", workers=WorkerSettings(num_workers=2, launcher=launcher))
    assert files(tmp_path / "out") == expected
    # There may be fewer, because the collector closes leftovers of earlier tests.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_coordinator_does_not_import_torch(source, tmp_path):
    words = [sys.executable, "-c", COORDINATOR, str(source), str(source), str(tmp_path / "out")]
    subprocess.run(words, check=True, timeout=120)
    # Quantised tensors are merged by value, so the result has no scales.
    assert read(tmp_path / "out").keys() == {name for name in read(source) if not name.endswith("_scale_inv")}


PROGRAM = """
import json, signal, sys
from tests.support.jobs import convert_as
def said(done, total):
    if done == 6:
        print("six", flush=True)
        signal.pause()
convert_as(sys.argv[1], sys.argv[2], progress=said, workers=1, **json.loads(sys.argv[3]))
"""
TOLD = {"operations": RULES, "devices": "cpu", "task_bytes": "1M", "shard_bytes": 10_000_000}


def first_done(source: Path, growing: Path) -> tuple[Path, int]:
    """Return the file of the first finished task and the offset in it. Six were finished."""
    job = plan(source, operations=RULES, task_bytes="1M", shard_bytes=10_000_000)
    journal = Journal.open(growing.with_name(f"{growing.name}.journal"), job.key)
    assert len(journal.done) == 6
    made = next(job.written(min(journal.done)))
    journal.close()
    path = sorted(growing.glob("*.safetensors"))[int(job.files.table.file_index[made.row])]
    with open(path, "rb") as body:
        return path, 8 + int.from_bytes(body.read(8), "little") + int(job.files.table.offset[made.row]) + made.start


def damage(path: Path, at: int) -> None:
    """Change a byte."""
    with open(path, "r+b") as body:
        body.seek(at)
        byte = body.read(1)[0]
        body.seek(at)
        body.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("harm", [damage, lambda path, at: path.unlink(), os.truncate], ids=["byte", "gone", "short"])
def test_killed_conversion_resumes_remaining_tasks(source, expected, tmp_path, harm):
    into = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source), str(into), json.dumps(TOLD)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "six\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert not into.exists()
    (growing,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    harm(*first_done(source, growing))  # what was done is read back, so that it is done again
    report = convert_as(source, into, workers=1, **TOLD)
    assert report.num_resumed == 5 if harm is damage else report.num_resumed < 6
    assert files(into) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_changed_source_fails_conversion(source, tmp_path):
    copy = tmp_path / "source"
    write_llama(copy, total_bytes=24_000_000)
    path = next(copy.glob("*.safetensors"))

    def touch(done: int, total: int) -> None:
        if done == 3:
            with open(path, "r+b") as file:
                file.seek(-10, os.SEEK_END)
                file.write(b"changed")

    with pytest.raises(SourceChanged) as caught:
        run(copy, tmp_path / "out", workers=1, progress=touch)
    assert not caught.value.mutated
    assert not (tmp_path / "out").exists()


def test_truncated_source_leaves_no_files(tmp_path):
    copy = tmp_path / "source"
    write_llama(copy, total_bytes=24_000_000)
    path = next(copy.glob("*.safetensors"))

    def cut(done: int, total: int) -> None:
        if done == 3:
            os.truncate(path, path.stat().st_size // 4)

    with pytest.raises((SourceTruncated, SourceChanged)) as caught:
        run(copy, tmp_path / "out", workers=1, progress=cut)
    assert not caught.value.mutated
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_existing_destination_is_not_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="already"):
        run(source, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_invalid_destination_or_device_raises_before_reading(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError):
        run(source, tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match="trace"):
        run(source, tmp_path / "out", workers=WorkerSettings(trace=tmp_path / "none" / "trace.json"))
    with pytest.raises(ConfigError, match="no such device: gpu"):
        convert(source, tmp_path / "out", devices=["gpu"])
    with pytest.raises(ConfigError, match="no device cuda:99"):
        convert(source, tmp_path / "out", devices=["cuda:99"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_error_for_too_small_budget_states_minimum(source, tmp_path):
    with pytest.raises(BudgetTooSmall) as caught:
        run(source, tmp_path / "out", workers=WorkerSettings(memory_bytes="100K"))
    enough = WorkerSettings(num_workers=1, memory_bytes=caught.value.minimum_bytes)
    report = run(source, tmp_path / "out", workers=enough)
    assert report.peak_bytes <= caught.value.minimum_bytes


NARROW = {DType.F6_E2M3, DType.F6_E3M2}
"""Return tensors for which torch has no dtype."""


@pytest.mark.parametrize(
    "words",
    [[], [{"op": "rename", "rules": [["^", "m."]]}], [{"op": "rename", "rules": [["^", "m."]]}, {"op": "copy"}]],
    ids=["copied", "renamed", "both"],
)
def test_dtypes_unsupported_by_torch_are_copied(words, tmp_path):
    made = every_dtype(tmp_path / "all.safetensors")
    convert(tmp_path / "all.safetensors", tmp_path / "out", operations=words, devices="cpu", workers=1)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = {name: (one["dtype"], bytes(one["data"])) for name, one in safetensors.deserialize(file.read_bytes())}
    prefix = "m." if words else ""
    assert found == {f"{prefix}{name}": (dtype.value, data) for name, (dtype, _, data) in made.items()}
    assert penstock.verify(tmp_path / "out").verified


def test_cast_copies_uncastable_tensors_unchanged(tmp_path):
    made = every_dtype(tmp_path / "all.safetensors")
    convert(tmp_path / "all.safetensors", tmp_path / "out", to="cast:F32", devices="cpu", workers=1)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = {name: (one["dtype"], bytes(one["data"])) for name, one in safetensors.deserialize(file.read_bytes())}
    assert found["bf16.matrix"][0] == "F32"
    narrow = {name: (dtype.value, data) for name, (dtype, _, data) in made.items() if dtype in NARROW}
    assert {name: found[name] for name in narrow} == narrow


def test_unsupported_tensors_are_rejected_before_reading(tmp_path):
    every_dtype(tmp_path / "all.safetensors", skip={DType.F6_E3M2})
    words = [{"op": "reshard", "to": 2, "rules": [["", "replicate"]]}]
    with pytest.raises(PlanError, match="no dtype for F6_E2M3") as caught:
        plan(tmp_path / "all.safetensors", operations=words)
    assert str(caught.value.tensor).startswith("f6_e2m3.") and "rename" in str(caught.value.hint)
    plan(tmp_path / "all.safetensors", operations=[{"op": "rename", "rules": [["^f6_.*", ""]]}, *words])
