"""`penstock bench boot`: start a program, as an inference server, and measure the phases until its first answer.

In: a command, and the request that counts as its first answer. Out: a time line for each start, on stdout.
Not here: the record of phases in the program's processes (`penstock.phases`).

    spawn --launch--> process --imports--> first phase --load, engine's phases--> last phase --rest--> first answer

Each process of the program writes its phases, whenever one begins or ends, to a file in a directory that is chosen
here. They are read at the first answer, or after the program ends: a short program loses none.
A cold start has empty directories for caches, and the model's files are not in memory. A warm start follows it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock_tools.bench_command import drop_cached, local_files
from penstock.cli.terminal import Format, FormatOption, note, write_columns, write_json, write_lines
from penstock.config import BOOT_DIRECTORY
from penstock.errors import MALFORMED, ConfigError, PeerLost, SourceStalled
from penstock.phases import Boot

Case = Literal["cold", "warm"]

LOOK_S = 0.05
"""Between two looks for the first answer."""
END_S = 30.0
"""How long a program may take to end before it is killed."""
ANSWER_S = 5.0
"""Deadline of a request to the URL before the program is started, where nothing should answer."""
BAR = 40
"""Characters of the longest bar."""
_CACHES = {
    "XDG_CACHE_HOME": "cache",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Environment variables that place caches of compilers and engines, and their directories in a cold start's home."""
_WEIGHTS = frozenset({"load", "fetch", "attach"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BootPhase:
    """A phase of a start. Seconds after the program was spawned."""

    name: str
    kind: Literal["launch", "imports", "weights", "engine", "rest"]
    """`weights`: of a load, a fetch or an attach; `engine`: reported by the engine; phases may be within others."""
    start_s: float
    seconds: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BootStart:
    """A start of the program, of whose processes the phases are those of the last one to be ready."""

    case: Case
    first_answer_s: float
    num_processes: int
    """Processes that reported phases."""
    phases: list[BootPhase]
    cut_off: list[str]
    """Processes that ended while a phase ran, each with that phase: what came after it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """The phases that a process has written."""

    pid: int
    boot: Boot
    is_running: bool


def bench_boot(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM ARGUMENTS...", help="The program to start.")],
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Request of the first answer; unset: the program's end.")
    ] = None,
    body: Annotated[str | None, typer.Option("--body", metavar="JSON", help="Body of that request, by POST.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="URI", help="Local files to drop from memory before a cold start.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Starts of each kind.")] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="Longest start, in seconds.")] = 900.0,
    log: Annotated[Path | None, typer.Option("--log", metavar="FILE", help="Output of the program.")] = None,
    format: FormatOption = Format.human,
) -> None:
    """Measure a program's start until its answer.

    Cold: caches of compilers are empty, and files of --model are not in memory. Warm: the same once more.
    """
    if shutil.which(command[0]) is None:
        hint = "give the program and its arguments after --, as: penstock bench boot -- python app.py"
        raise ConfigError(f"cannot run {command[0]!r}: there is no such program, or it is not executable", hint=hint)
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError("--url takes http:// or https://", uri=url)
    files = [] if model is None else local_files(model)
    if model is not None and not files:
        raise ConfigError("--model is for local files", uri=model)
    starts = []
    with tempfile.TemporaryDirectory(prefix="penstock-boot-") as directory:
        program = _Program(command, url, body, timeout_s, Path(directory), log or Path(directory) / "log")
        for number in range(repeat):
            home = Path(directory) / f"home{number}"
            home.mkdir()
            drop_cached(files)
            starts += [program.start("cold", home), program.start("warm", home)]
    if format is Format.json:
        write_json({"command": command, "starts": starts, "first_answer_s": medians(starts)})
        return
    for start in starts:
        write_lines(f"{start.case} start: first answer after {start.first_answer_s:.2f} s")
        write_columns(["phase", "kind", "from s", "s", ""], rows(start))
        for text in start.cut_off:
            note(f"{start.case} start: {text}: its last phases may be missing")
    if not any(start.num_processes for start in starts):
        note("no process reported phases: it loads nothing by Penstock")
    for case, seconds in medians(starts).items():
        write_lines(f"{case}: {seconds:.2f} s to the first answer, median of {repeat}")


def medians(starts: Sequence[BootStart]) -> dict[str, float]:
    """Return the median seconds to the first answer by case."""
    cases = dict.fromkeys(start.case for start in starts)
    return {case: statistics.median(start.first_answer_s for start in starts if start.case == case) for case in cases}


def rows(start: BootStart) -> list[list[object]]:
    """Return the time line of a start as rows of a table, each with its bar."""
    scale = BAR / max(start.first_answer_s, 1e-9)
    made: list[list[object]] = []
    for phase in start.phases:
        first = min(BAR - 1, round(phase.start_s * scale))
        bar = " " * first + "#" * max(1, min(BAR - first, round(phase.seconds * scale)))
        made.append([phase.name, phase.kind, f"{phase.start_s:.2f}", f"{phase.seconds:.2f}", bar])
    return made


def time_line(boots: Sequence[Boot], spawned_at: float, first_answer_s: float) -> list[BootPhase]:
    """Return the phases of the process that was ready last, with what is before and after them.

    Args:
        boots: of all processes that reported phases.
        spawned_at: Unix time at which the program was started.
        first_answer_s: seconds from then to the first answer.
    """
    if not boots:
        return [BootPhase(name="to the first answer", kind="rest", start_s=0.0, seconds=first_answer_s)]
    boot = max(boots, key=lambda boot: boot.started_at + boot.seconds)
    zero = boot.started_at - spawned_at
    # The process's own clock counts in ticks of 10 ms.
    began = max(0.0, zero - boot.process_s)
    phases = [
        BootPhase(name="to the process", kind="launch", start_s=0.0, seconds=began),
        BootPhase(name="imports and set-up", kind="imports", start_s=began, seconds=zero - began),
    ]
    for phase in sorted(boot.phases, key=lambda phase: (phase.start_s, -phase.seconds)):
        phases.append(
            BootPhase(
                name=phase.name,
                kind="weights" if phase.journey in _WEIGHTS else "engine",
                start_s=zero + phase.start_s,
                seconds=phase.seconds,
                nbytes=phase.nbytes,
            )
        )
    end = zero + boot.seconds
    phases.append(
        BootPhase(name="to the first answer", kind="rest", start_s=end, seconds=max(0.0, first_answer_s - end))
    )
    return phases


class _Program:
    """A program that is started several times."""

    def __init__(
        self, command: Sequence[str], url: str | None, body: str | None, timeout_s: float, directory: Path, log: Path
    ) -> None:
        self._command = list(command)
        self._url, self._body = url, body
        self._timeout_s = timeout_s
        self._directory = directory
        self._log = log

    def start(self, case: Case, home: Path) -> BootStart:
        """Start the program, wait for its first answer, and end it.

        Raises:
            ConfigError: something answers at the URL before the program is started. PeerLost: the program ended before
                its first answer, or with an error. SourceStalled: there was no answer in time.
        """
        if self._url is not None and _ask(self._url, self._body, ANSWER_S) is not None:
            message = "something answers there before the program is started: its answer would be measured"
            raise ConfigError(message, uri=self._url, hint="end that server, or choose another port")
        # A directory for each start: the processes of the one before must not be counted.
        written = Path(tempfile.mkdtemp(prefix="phases-", dir=self._directory))
        with self._log.open("ab") as log:
            spawned_at, begun = time.time(), time.perf_counter()
            # The user's own command, without a shell.
            process = subprocess.Popen(  # nosec B603
                self._command, env=_environment(home, written), stdout=log, stderr=log, start_new_session=True
            )
        with _ended(process):
            self._wait(process, begun)
            first_answer_s = time.perf_counter() - begun
            found = _read(written)
        answered_at = spawned_at + first_answer_s
        return BootStart(
            case=case,
            first_answer_s=first_answer_s,
            num_processes=len(found),
            phases=time_line([_until(each, answered_at) for each in found], spawned_at, first_answer_s),
            cut_off=[
                f"process {each.pid} ended in the phase {each.boot.phase!r}"
                for each in found
                if not each.is_running and any(phase.state == "running" for phase in each.boot.phases)
            ],
        )

    def _wait(self, process: subprocess.Popen[bytes], begun: float) -> None:
        while True:
            code = process.poll()
            if code is not None and (code or self._url is not None):
                raise PeerLost(f"{self._command[0]} ended with {code} before its first answer{self._end()}")
            left_s = begun + self._timeout_s - time.perf_counter()
            if code is not None or (self._url is not None and _ask(self._url, self._body, left_s) is not None):
                return
            if left_s < LOOK_S:
                raise SourceStalled(
                    f"{self._command[0]} gave no answer for {self._timeout_s:.0f} s{self._end()}",
                    hint="raise --timeout-s, or look at the output of the program: --log FILE",
                )
            time.sleep(LOOK_S)

    def _end(self) -> str:
        """Return the end of the program's output."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return "; its output ends with:\n" + "\n".join(lines) if lines else "; it wrote nothing"


def _environment(home: Path, written: Path) -> dict[str, str]:
    """Return the environment of a start: empty caches in `home`, phases to `written`."""
    caches = {name: str(home / directory) for name, directory in _CACHES.items()}
    return {**os.environ, **caches, BOOT_DIRECTORY: str(written)} | _hub_caches(os.environ)


def _hub_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return where models of hubs are: what was downloaded is no cache of compilers, and must not move."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"HF_HOME": environ.get("HF_HOME") or str(cache / "huggingface")}


def _read(directory: Path) -> list[_Reported]:
    """Return the phases that each process of a program has written."""
    found = []
    for path in sorted(directory.glob("*.json")):
        # A program can write any file there.
        with contextlib.suppress(*MALFORMED, ValueError):
            pid, boot = int(path.stem), msgspec.json.decode(path.read_bytes(), type=Boot)
            if boot.phases:
                found.append(_Reported(pid=pid, boot=boot, is_running=_is_running(pid)))
    return found


def _is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended, and whose parent has not asked for that, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in {b"Z", b"X"}
    except (OSError, IndexError):
        return False


def _until(reported: _Reported, now: float) -> Boot:
    """Return a boot whose running phases last until now, Unix time: the file has their length at its last change."""
    boot = reported.boot
    seconds = max(boot.seconds, now - boot.started_at)
    if not reported.is_running or all(phase.state != "running" for phase in boot.phases):
        return boot
    phases = tuple(
        msgspec.structs.replace(phase, seconds=seconds - phase.start_s) if phase.state == "running" else phase
        for phase in boot.phases
    )
    return msgspec.structs.replace(boot, phases=phases, seconds=seconds)


def _ask(url: str, body: str | None, timeout_s: float) -> bytes | None:
    """Return the answer of a request, by POST if it has a body; None: nothing listens there, or it refuses."""
    data = None if body is None else body.encode()
    request = urllib.request.Request(url, data, {} if body is None else {"content-type": "application/json"})
    try:
        # Not by a proxy: the program is on this host.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException):
        return None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a program and the processes that it started, when the block ends."""
    try:
        yield
    finally:
        # The group outlives its first process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=END_S)
