"""Two releases of Penstock on one host: this tree, and the previous release in an environment of its own.

In: the repository's history. Out: processes of either release: drivers of the API, and `penstock` commands.
Not here: the calls that a driver answers (`tests.support.release_driver`).
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
"""The commit of the previous release. With each release move it to the commit that was released last, so that
tests/integration/deploy/test_upgrade.py always joins two neighbouring releases. CONTRIBUTING.md says so too."""
CALL_S = 120.0
"""Deadline of a call, and of a command's first words."""


def this_release() -> Release:
    """Return the release of this tree."""
    # In front: with an editable installation of another checkout, that one would be tested.
    path = os.pathsep.join(filter(None, (source_path(), os.environ.get("PYTHONPATH"))))
    return Release("new", Path(sys.executable), {**os.environ, "PYTHONPATH": path})


def previous_release() -> Release:
    """Return the previous release, installed at the first call; skip the test where that is not possible."""
    name = f"previous-{PREVIOUS[:12]}-{sys.version_info.major}.{sys.version_info.minor}"
    directory = ROOT / ".cache" / name
    if not directory.exists():
        directory.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=name) as building:
            _install(Path(building))
            # All at once: an interrupted build leaves nothing that a later run takes for whole.
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
    # Dependencies are those of this environment. By a .pth file, which does not read the .pth files in the directories
    # that it names: this tree's editable installation is one of them, and must not be found.
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
    """A release that is installed, as a process that has imported it and forks others. A context manager.

    Args:
        name: for people.
        python: its interpreter.
        environ: the environment.
    """

    def __init__(self, name: str, python: Path, environ: Mapping[str, str]) -> None:
        self.name, self.python = name, python
        # Packets: a request and its descriptor arrive together.
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
        """Start a driver, or with words a command, on this descriptor; return its process id."""
        request = json.dumps({"words": words, "environ": dict(environ)}).encode()
        socket.send_fds(self._requests, [request], [fd])
        return int(self._requests.recv(64))

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        self._requests.send(json.dumps({"reap": pid}).encode())
        return int(self._requests.recv(64))

    def close(self) -> None:
        """End it and all processes that it forked."""
        self._requests.close()
        self._process.kill()
        self._process.wait(30)


class Process(Closeable):
    """A process of a release. A context manager; killed at its end.

    Args:
        release: which one.
        words: of a `penstock` command; none: a driver.
        environ: changes of the environment.
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
        # Closed with the file made of it.
        ours.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self) -> int:
        """Return its exit code once it has ended."""
        if self._code is None:
            assert select.select([self._pidfd], [], [], CALL_S)[0], f"process {self.pid} has not ended"
            self._code = self.release.reap(self.pid)
        return self._code

    def close(self) -> None:
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        os.close(self._pidfd)
        self.lines.close()


class Driver(Process):
    """A process of a release that answers calls of `release_driver`. A context manager; killed at its end."""

    def __init__(self, release: Release, environ: Mapping[str, str]) -> None:
        super().__init__(release, [], environ)

    def send(self, call: str, /, **arguments: Any) -> None:
        """Start a call; see `result`."""
        print(json.dumps({"call": call, "arguments": arguments}), file=self.lines, flush=True)

    def result(self) -> Any:
        """Return the result of the call that was sent. CallFailed: it failed."""
        line = self.lines.readline()
        assert line, f"the driver ended with {self.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise CallFailed(answer["error"], answer["message"])
        return answer["result"]

    def __call__(self, call: str, /, **arguments: Any) -> Any:
        """Make a call and return its result. CallFailed: it failed."""
        self.send(call, **arguments)
        return self.result()


class Command(Process):
    """A `penstock` command of a release that runs until it is stopped. A context manager; killed at its end.

    Args:
        release: whose command.
        words: its arguments.
        environ: changes of its environment.
        until: the start of the line by which it says that it serves.
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
