"""`penstock cache` in its own process, which tests and benchmarks start, wait for, stop and kill.

with KeeperProcess(["/ckpt", "--model", "m"], environ={"PENSTOCK_RUNTIME_DIR": directory}) as keeper:
    penstock.cache.attach("m")
    keeper.process.send_signal(signal.SIGTERM)
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

from tests.support import commands
from tests.support.fork_server import Forked, ForkServer


class KeeperProcess:
    """A weight cache process, which is killed when the context ends.

    Args:
        arguments: arguments of `penstock cache`.
        environ: variables added to this process's environment.
        timeout_s: seconds within which the cache must hold the model.
        fork_server: server that forks the process. None means a new interpreter that imports everything itself.
        prefix: words before the command of a new interpreter.

    Raises:
        ChildProcessError: it ended, or did not hold the model in time. The message has its output.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        fork_server: ForkServer | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.process: subprocess.Popen[bytes] | Forked
        self._says: IO[bytes]
        if fork_server is not None:
            self.process = commands.start(fork_server, ["cache", *arguments], environ)
            self._says = self.process.stdout
        else:
            changed = ["env", *(f"{name}={value}" for name, value in (environ or {}).items())]
            command = [*prefix, *changed, sys.executable, "-m", "penstock.cli.main", "cache", *arguments]
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            assert self.process.stderr is not None
            self._says = self.process.stderr
        self.errors: list[str] = []
        self._keeps = threading.Event()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._keeps.wait(timeout_s) or self._ended.is_set():
            self.__exit__(None, None, None)
            raise ChildProcessError(f"the cache does not hold the model: {''.join(self.errors)}")

    def _read(self) -> None:
        for line in map(bytes.decode, self._says):
            self.errors.append(line)
            if line.startswith("keeping"):
                self._keeps.set()
        if not self._keeps.is_set():
            self._ended.set()
            self._keeps.set()

    def __enter__(self) -> KeeperProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)
        self._reader.join(timeout=30)
        for pipe in (self.process.stdin, self._says):
            if pipe is not None:
                pipe.close()
