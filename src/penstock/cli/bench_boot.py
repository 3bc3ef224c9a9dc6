"""`penstock bench boot`: start a program, as an inference server, and measure the phases until its first answer.

In: a command, and the request that counts as its first answer. Out: a time line for each start, on stdout.
Not here: the record of phases in the program's processes (`penstock.phases`), its endpoint (`telemetry.endpoint`).

    spawn --launch--> process --imports--> first phase --load, engine's phases--> last phase --rest--> first answer

Each process of the program serves its phases at a port of a range that is chosen here; they are read 20 times a second.
A cold start has empty directories for caches, and the model's files are not in memory. A warm start follows it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock.cli.bench import drop_cached, local_files
from penstock.cli.terminal import Format, FormatOption, note, write_columns, write_json, write_lines
from penstock.errors import MALFORMED, ConfigError, PeerLost, SourceStalled
from penstock.phases import Boot

Case = Literal["cold", "warm"]

NUM_PORTS = 16
"""Ports for the processes of a program: an engine has a server, and a worker for each GPU."""
LOOK_S = 0.05
"""Between two looks at the phases and at the first answer."""
END_S = 30.0
"""How long a program may take to end before it is killed."""
ANSWER_S = 5.0
"""Deadline of an answer with the phases of a process, which may hold the interpreter for long."""
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
        self._log = log
        self._token = secrets.token_hex(16)
        self._token_file = directory / "token"
        self._token_file.write_text(self._token + "\n", encoding="utf-8")
        self._token_file.chmod(0o600)

    def start(self, case: Case, home: Path) -> BootStart:
        """Start the program, wait for its first answer, and end it.

        Raises:
            ConfigError: something answers at the URL before the program is started. PeerLost: the program ended before
                its first answer, or with an error. SourceStalled: there was no answer in time.
        """
        if self._url is not None and _ask(self._url, self._body, ANSWER_S) is not None:
            message = "something answers there before the program is started: its answer would be measured"
            raise ConfigError(message, uri=self._url, hint="end that server, or choose another port")
        first_port = _free_ports()
        environment = self._environment(home, first_port)
        with self._log.open("ab") as log:
            spawned_at, begun = time.time(), time.perf_counter()
            # The user's own command, without a shell.
            process = subprocess.Popen(  # nosec B603
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        with _ended(process), _Watch(first_port, self._token) as watch:
            self._wait(process, begun)
            first_answer_s = time.perf_counter() - begun
            boots = watch.boots()
        return BootStart(
            case=case,
            first_answer_s=first_answer_s,
            num_processes=len(boots),
            phases=time_line(boots, spawned_at, first_answer_s),
        )

    def _environment(self, home: Path, first_port: int) -> dict[str, str]:
        caches = {name: str(home / directory) for name, directory in _CACHES.items()}
        last_port = first_port + NUM_PORTS - 1
        return {
            **os.environ,
            **caches,
            "PENSTOCK_METRICS": f"127.0.0.1:{first_port}-{last_port}",
            "PENSTOCK_METRICS_TOKEN_FILE": str(self._token_file),
        } | _hub_caches(os.environ)

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


def _hub_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return where models of hubs are: what was downloaded is no cache of compilers, and must not move."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"HF_HOME": environ.get("HF_HOME") or str(cache / "huggingface")}


class _Watch:
    """A thread that keeps the newest phases of all processes of a program. A context manager."""

    def __init__(self, first_port: int, token: str) -> None:
        self._urls = [f"http://127.0.0.1:{first_port + number}/v1/phases" for number in range(NUM_PORTS)]
        self._token = token
        self._boots: dict[str, Boot] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-boot", daemon=True)

    def boots(self) -> list[Boot]:
        """Return the phases of each process, as they are now."""
        self._is_over.set()
        self._thread.join()
        return list(self._boots.values())

    def _watch(self) -> None:
        is_last = False
        while not is_last:
            # Once more after the end: the last phases have ended just before.
            is_last = self._is_over.wait(LOOK_S)
            for url in self._urls:
                answer = _ask(url, None, ANSWER_S, {"authorization": f"Bearer {self._token}"})
                # Another program may have taken a port since it was free.
                with contextlib.suppress(*MALFORMED):
                    boot = None if answer is None else msgspec.json.decode(answer, type=Boot)
                    if boot is not None and boot.phases:
                        self._boots[url] = boot

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _ask(url: str, body: str | None, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes | None:
    """Return the answer of a request, by POST if it has a body; None: nothing listens there, or it refuses."""
    data = None if body is None else body.encode()
    content = {} if body is None else {"content-type": "application/json"}
    request = urllib.request.Request(url, data, {**content, **(headers or {})})
    try:
        # Not by a proxy: the program is on this host.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException):
        return None


def _free_ports() -> int:
    """Return the first of some consecutive ports of the loopback that are free now."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
            for port in range(first + 1, first + NUM_PORTS):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise ConfigError(f"there are no {NUM_PORTS} free ports in a row at 127.0.0.1")


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
