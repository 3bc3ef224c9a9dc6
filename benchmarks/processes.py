"""A fresh process and all that it starts: how long, how much of the processors, how much memory at once.

In: a command. Out: what it took.
Not here: what is measured so (`bench_convert`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PEEK_S = 0.1
"""Between looks at the memory."""


class Failed(Exception):
    """The process did not end in time, or ended with an error."""


def family(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    for thread in _listed(f"/proc/{pid}/task"):
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def pss_bytes(pid: int) -> int:
    """Proportional set size, less what is mapped of files in tmpfs; 0 for a process that is gone."""
    try:
        said = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in said.splitlines()[1:]}
    return fields.get("Pss", 0) - fields.get("Pss_Shmem", 0)


def run(
    command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = float("inf")
) -> tuple[float, float, float, str]:
    """Seconds, CPU seconds and peak memory (MB) of a fresh process and those that it starts; what it printed.

    Raises:
        Failed: with its last words.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda pipe: said.append(pipe.read()), args=(process.stdout,))
    reader.start()
    peak, is_late = 0, False
    while process.poll() is None:
        peak = max(peak, sum(pss_bytes(pid) for pid in family(process.pid)))
        if time.monotonic() - began > timeout_s:
            is_late = True
            for pid in list(family(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(PEEK_S)
    ended = time.monotonic()
    reader.join()
    if is_late:
        raise Failed(f"it did not end within {timeout_s:.0f} s")
    if process.returncode:
        raise Failed(f"it ended with {process.returncode}: {''.join(said)[-1500:].strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ended - began, cpu_s, peak / 1e6, "".join(said)
