"""Runs `penstock` commands in processes forked from the tests' fork server, which saves seconds of imports.

`tests/unit/cli/test_main.py` tests how a new interpreter starts a command.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.fork_server import Forked, ForkServer, settle, surroundings

LAST_S = 120.0


def run(
    fork_server: ForkServer, words: Sequence[str], *, timeout_s: float = LAST_S
) -> subprocess.CompletedProcess[str]:
    """Run `penstock` with these arguments in this directory and environment, and wait for its end.

    Raises:
        TimeoutExpired: it did not end in time and was killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        told = [*surroundings(), str(out), str(err), list(words)]
        with fork_server.fork(f"{__name__}:main", told) as process:
            code = process.wait(timeout_s)
        return subprocess.CompletedProcess(["penstock", *words], code, out.read_text(), err.read_text())


def start(
    fork_server: ForkServer, words: Sequence[str], environ: Mapping[str, str] | None = None, *, terminal: str = ""
) -> Forked:
    """Start `penstock` with these arguments in this directory and environment, plus `environ`.

    Its stderr is the `stdout` of the process. With a terminal's path, all of its output goes there.
    """
    directory, present = surroundings()
    told = [directory, {**present, **(environ or {})}, terminal or os.devnull, terminal, list(words)]
    return fork_server.fork(f"{__name__}:main", told)


def main(told: tuple[str, Mapping[str, str], str, str, Sequence[str]]) -> int:
    """Run the command as its entry point does, in the forked process. Return its exit code."""
    from penstock.cli.main import run as command

    directory, environ, out, err, words = told
    settle(directory, environ)
    os.dup2(1, 2)
    for number, path in ((1, out), (2, err)):
        if path:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.dup2(fd, number)
            os.close(fd)
    try:
        command(words)
    except SystemExit as end:
        return int(end.code or 0)
