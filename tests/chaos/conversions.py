"""Rounds with a conversion: processes are killed or stopped, disks fill up, or sources change.

Violations are files that differ from an undisturbed run's, left-over files, a hang, or an untyped error. Operations and
formats have their own tests.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.chaos.harness import Process, Round

from penstock.types import MIB
from penstock_convert.result import STAMP

ARGUMENTS: dict[str, Any] = {
    "operations": [{"op": "function", "function": "tests.support.jobs:slowly"}],
    "to": "cast:F32",
    "devices": "cpu",
    "shard_bytes": 10_000_000,
}
TROUBLE = ("hits", "hits", "hits", "file limit", "small disk", "source truncated", "source changed")
PHASES = ("start", "begin", "run", "end", "publish")
STALL_S = "4.0"
NUM_RUNS = 6
"""Maximum number of calls until one succeeds. A round kills at most two, and each later call resumes."""
FULL = {"DiskFull", "DestinationError"}
CHANGED = {"SourceChanged", "SourceTruncated", "IntegrityError", "FormatError"}
_truth_lock = threading.Lock()


def files(directory: Path) -> dict[str, bytes]:
    """Return the content of a directory's files by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class ConvertRound(Round):
    """A conversion, which is called again until it is done."""

    kind = "convert"
    at_once = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        self.num_workers = rng.choice([1, 2, 2, 3])
        self.trouble = rng.choice(TROUBLE)
        self.hits = [
            (
                rng.choice(["worker", "worker", "coordinator", "coordinator", "fork server"]),
                rng.choice(["kill", "kill", "kill", "pause"]),
                rng.choice(PHASES),
            )
            for _ in range(rng.choice([1, 1, 2]))
        ]
        self.share = rng.random()
        self.run_number = 0
        self.limit_bytes = 0
        self.into = self.directory / "into"
        self.source = self.world.checkpoints["many"].directory

    def __str__(self) -> str:
        what = ", then ".join(" ".join(hit) for hit in self.hits) if self.trouble == "hits" else self.trouble
        return f"{self.num_workers} workers; {what}"

    def environ(self) -> dict[str, str]:
        return super().environ() | {"PENSTOCK_STALL_S": STALL_S}

    def start_run(self, source: Path | None = None, into: Path | None = None) -> Process:
        arguments = ARGUMENTS | {
            "sources": str(source or self.source),
            "destination": str((into or self.into) / "out"),
            "workers": self.num_workers,
        }
        return self.start("convert", {"arguments": arguments, "limit_file_bytes": self.limit_bytes})

    def expected(self) -> dict[str, bytes]:
        """Return the files of an undisturbed run, which runs once."""
        with _truth_lock:
            if "convert" not in self.world.results:
                into = self.world.directory / "expected"
                into.mkdir()
                ended = self.follow(self.start_run(into=into))
                assert ended["event"] == "converted", ended
                self.world.results["convert"] = files(into / "out")
        found: dict[str, bytes] = self.world.results["convert"]
        return found

    def run(self) -> None:
        expected = self.expected()
        self.into.mkdir()
        try:
            self.trial(expected)
        finally:
            if os.path.ismount(self.into):
                ctypes.CDLL(None).umount2(str(self.into).encode(), 2)

    def trial(self, expected: dict[str, bytes]) -> None:
        if self.trouble == "hits":
            self.outcome.num_deaths = len(self.hits)
            ended = self.through(self.hits)
        elif self.trouble == "file limit":
            self.limit_bytes = int(self.share * 9_000_000) + 1
            self.fault("file size limit")
            self.refused(self.follow(self.start_run()), FULL)
            self.limit_bytes = 0
            ended = self.through([])
        elif self.trouble == "small disk":
            ended = self.on_a_small_disk(sum(map(len, expected.values())))
        else:
            self.with_a_source_that_changes(expected)
            return
        if ended["event"] != "converted":
            self.violate("unexpected error", f"{ended.get('kind')}: {ended.get('text')}")
            return
        self.check(expected)

    def check(self, expected: dict[str, bytes], *, is_same_source: bool = True) -> None:
        result = files(self.into / "out")
        if not is_same_source:
            # The stamp names the job and so its sources. A copy of a source is a different source.
            result[STAMP] = expected[STAMP]
        if result != expected:
            self.violate("wrong bytes", "the files differ from those of an undisturbed run")
        left = [path.name for path in self.into.iterdir() if path.name != "out"]
        if left:
            self.violate("left files", f"next to the destination: {left}")

    def through(self, hits: list[tuple[str, str, str]]) -> dict[str, Any]:
        """Call it, disturb it, and call it again. Return the last event of the last call."""
        ended: dict[str, Any] = {"event": "ended"}
        hits = list(hits)
        for _ in range(NUM_RUNS):
            run = self.start_run()
            while hits:
                ended = self.until(run, hits[0][2])
                if ended["event"] not in {"fork server", "done"}:
                    break
                who, how, _ = hits.pop(0)
                self.strike(run, who, how)
                if who == "coordinator" and how == "kill":
                    break
            ended = self.follow(run) if ended["event"] not in {"converted", "failed"} else ended
            run.process.wait(timeout=self.left_s())
            if ended["event"] == "ended":  # killed: another call goes on
                continue
            if ended["event"] == "converted" or ended.get("kind") not in {"OperationFailed", "PeerLost"}:
                return ended
            self.violate("unexpected error", f"{ended['kind']}: {ended['text']}")
        return ended

    def until(self, run: Process, phase: str) -> dict[str, Any]:
        """Wait for a moment in a phase. Return how the run ended if it ended before."""
        share = {"start": None, "begin": None, "run": self.rng.random(), "end": 0.98, "publish": 1.0}[phase]
        while (said := self.next(run))["event"] in {"fork server", "done"}:
            at = (
                said["event"] == "fork server" if share is None else said.get("num", -1) >= share * said.get("total", 1)
            )
            if at:
                pause_s = {"start": 0.03, "begin": 0.6, "run": 0.02, "end": 0.02, "publish": 0.1}[phase]
                time.sleep(self.rng.random() * pause_s)
                break
        return said

    def next(self, run: Process) -> dict[str, Any]:
        """Return the next event from a run, or `ended` at its end."""
        said = run.next(self.left_s())
        if said is None:
            self.hang("the conversion sends no event")
        if said["event"] == "fork server":
            self.server = said["pid"]
        return said

    def follow(self, run: Process) -> dict[str, Any]:
        """Return the last event from a run."""
        last: dict[str, Any] = {"event": "ended"}
        while (said := self.next(run))["event"] != "ended":
            if said["event"] in {"converted", "failed"}:
                last = said
            if said["event"] == "census":
                self.check_census(said)
        return last

    def strike(self, run: Process, who: str, how: str) -> None:
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        self.fault(f"{who}: {how}")
        if who == "coordinator":
            pid = run.process.pid
        else:
            pid = self.server
            if who == "worker":
                with suppress(OSError):
                    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                    pid = int(self.rng.choice(children)) if children else pid
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            if how == "pause":
                time.sleep(self.rng.random() * 1.5)
                os.kill(pid, signal.SIGCONT)

    def refused(self, ended: dict[str, Any], kinds: set[str]) -> None:
        if ended["event"] != "failed" or ended["kind"] not in kinds:
            self.violate("unexpected error", f"expected {sorted(kinds)}, got {ended}")

    def on_a_small_disk(self, result_bytes: int) -> dict[str, Any]:
        """Convert onto a file system that becomes full and later has space."""
        libc, nbytes = ctypes.CDLL(None, use_errno=True), 22 * MIB
        if libc.mount(b"none", str(self.into).encode(), b"tmpfs", 0, f"size={nbytes}".encode()):
            return self.through([])  # mounting is not allowed here
        self.fault("disk full")
        (self.into / "ballast").write_bytes(bytes(nbytes - int((0.1 + 0.8 * self.share) * result_bytes)))
        self.refused(self.follow(self.start_run()), FULL)
        (self.into / "ballast").unlink()
        libc.mount(b"none", str(self.into).encode(), b"tmpfs", 32, f"size={64 * MIB}".encode())  # 32: MS_REMOUNT
        return self.through([])

    def with_a_source_that_changes(self, expected: dict[str, bytes]) -> None:
        """Truncate or overwrite a source during the run. The run must refuse it, or have read all of it before."""
        source = self.directory / "source"
        shutil.copytree(self.source, source)
        self.fault(self.trouble)
        run = self.start_run(source)
        while (said := self.next(run))["event"] in {"fork server", "done"}:
            if said["event"] == "done" and said["num"] >= self.share * said["total"]:
                break
        victim = self.rng.choice(sorted(source.glob("*.safetensors")))
        if self.trouble == "source truncated":
            os.truncate(victim, int(victim.stat().st_size * self.rng.random()))
        else:
            with victim.open("r+b") as file:
                file.seek(victim.stat().st_size // 2)
                file.write(os.urandom(victim.stat().st_size // 2))
        ended = said if said["event"] in {"converted", "failed"} else self.follow(run)
        if ended["event"] == "converted":
            self.check(expected, is_same_source=False)
            return
        self.refused(ended, CHANGED)
        left = [path.name for path in self.into.iterdir()]
        if left:
            self.violate("left files", f"after {ended.get('kind')}: {left}")
