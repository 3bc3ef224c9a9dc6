"""Two releases of Penstock on one host: this tree, and the previous release in its own environment.

It starts processes of either release: drivers of the API (see `tests.support.release_driver`) and `penstock` commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.sources import source_path

from penstock.lifecycle import Closeable

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = "e78e21d2243e079bfee6bde292d2037b9fb44e29"
"""The commit of the previous release. Update it with each release, so that tests/integration/deploy/test_upgrade.py
always tests two neighbouring releases. CONTRIBUTING.md says so too."""
CALL_S = 120.0
"""Time limit for a call and for a command's first output, in seconds."""


def this_release() -> Release:
    """Return the release of this tree."""
    # Put this tree first, because an editable installation of another checkout would be tested otherwise.
    path = os.pathsep.join(filter(None, (source_path(), os.environ.get("PYTHONPATH"))))
    return Release("new", Path(sys.executable), {**os.environ, "PYTHONPATH": path})


def previous_release() -> Release:
    """Return the previous release. Install it at the first call. Skip the test if that is not possible."""
    name = f"previous-{PREVIOUS[:12]}-{sys.version_info.major}.{sys.version_info.minor}"
    directory = ROOT / ".cache" / name
    if not directory.exists():
        directory.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=name) as building:
            _install(Path(building))
            # Move it at the end, so that an interrupted build leaves nothing that a later run takes for complete.
            shutil.move(Path(building, "environment"), directory)
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return Release("old", directory / "bin" / "python", environ)


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run git on this repository."""
    return subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "-C", ROOT, *words], capture_output=True, timeout=60, check=False
    )


def _install(building: Path) -> None:
    """Build the wheel of the previous commit and install it into `building/environment`, without dependencies."""
    archive = git("archive", PREVIOUS, "src", "pyproject.toml", "README.md", "LICENSE")
    if archive.returncode:
        pytest.skip(f"commit {PREVIOUS[:12]} is not in this clone's history (a shallow clone?): git fetch --unshallow")
    tree, environment = building / "tree", building / "environment"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True, timeout=60)
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    install = [sys.executable, ROOT / "scripts" / "install.py", sys.prefix, "--no-deps", "--target", packages, tree]
    built = subprocess.run(install, capture_output=True, text=True, timeout=170, check=False)
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("the build needs hatchling from a package index, which does not answer here")
    assert built.returncode == 0, built.stderr
    # Use this environment's dependencies through a .pth file. It ignores .pth files in the directories that it names,
    # so this tree's editable installation is not found.
    depends = [entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}]
    (packages / "dependencies.pth").write_text("\n".join(depends) + "\n")


class CallFailed(Exception):
    """A PenstockError in a driver's process.

    Attributes:
        error: the name of its type.
    """

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error = error


class Release(Closeable):
    """An installed release, as a process that has imported it and forks others. Use it as a context manager.

    Args:
        name: name for messages.
        python: its interpreter.
        environ: the environment.
    """

    def __init__(self, name: str, python: Path, environ: Mapping[str, str]) -> None:
        self.name, self.python = name, python
        # Use packets, so that a request and its descriptor arrive together.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(CALL_S)
        command = [python, "-P", ROOT / "tests" / "support" / "release_driver.py", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )  # fmt: skip

    def __str__(self) -> str:
        return self.name

    def fork(self, words: Sequence[str], environ: Mapping[str, str], fd: int) -> int:
        """Start a driver on this descriptor, or a command if `words` are given. Return its process id."""
        request = json.dumps({"words": words, "environ": dict(environ)}).encode()
        socket.send_fds(self._requests, [request], [fd])
        return int(self._requests.recv(64))

    def reap(self, pid: int) -> int:
        """Return the exit code of an ended process."""
        self._requests.send(json.dumps({"reap": pid}).encode())
        return int(self._requests.recv(64))

    def close(self) -> None:
        """End the process and all processes that it forked."""
        self._requests.close()
        self._process.kill()
        self._process.wait(30)


class Process(Closeable):
    """A process of a release. As a context manager it is killed on exit.

    Args:
        release: the release.
        words: arguments of a `penstock` command. Empty means a driver.
        environ: changes to the environment.
    """

    def __init__(self, release: Release, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.release = release
        ours, theirs = socket.socketpair()
        with theirs:
            self.pid = release.fork(words, environ, theirs.fileno())
        self._pidfd = os.pidfd_open(self.pid)
        self._code: int | None = None
        ours.settimeout(CALL_S)
        self.lines = ours.makefile("rw")
        # The file closes its descriptor.
        ours.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        if self._code is None:
            assert select.select([self._pidfd], [], [], CALL_S)[0], f"process {self.pid} has not ended"
            self._code = self.release.reap(self.pid)
        return self._code

    def close(self) -> None:
        """Kill it if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        os.close(self._pidfd)
        self.lines.close()


class Driver(Process):
    """A process of a release that answers calls of `release_driver`. As a context manager it is killed on exit."""

    def __init__(self, release: Release, environ: Mapping[str, str]) -> None:
        super().__init__(release, [], environ)

    def send(self, call: str, /, **arguments: Any) -> None:
        """Start a call. See `result`."""
        print(json.dumps({"call": call, "arguments": arguments}), file=self.lines, flush=True)

    def result(self) -> Any:
        """Return the result of the sent call, or raise CallFailed."""
        line = self.lines.readline()
        assert line, f"the driver ended with {self.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise CallFailed(answer["error"], answer["message"])
        return answer["result"]

    def __call__(self, call: str, /, **arguments: Any) -> Any:
        """Make a call and return its result, or raise CallFailed."""
        self.send(call, **arguments)
        return self.result()


class Command(Process):
    """A `penstock` command of a release that runs until it is stopped. As a context manager it is killed on exit.

    Args:
        release: the release.
        words: its arguments.
        environ: changes to its environment.
        until: the start of the output line that reports that it serves.
    """

    def __init__(self, release: Release, words: Sequence[str], environ: Mapping[str, str], until: str) -> None:
        super().__init__(release, words, environ)
        self.said: list[str] = []
        for line in self.lines:
            self.said.append(line)
            if line.startswith(until):
                return
        self.close()
        raise ChildProcessError(f"penstock {words[0]} does not serve: {''.join(self.said)}")

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()
