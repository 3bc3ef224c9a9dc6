"""The hub of one host and user: the first process that uses it hosts it, and another takes over when that one ends.

In: the user's runtime directory. Out: the hub's present address.
Not here: the hub (`app`), requests to it (`client`).

    generation     the number n of the present hub; a silent hub is replaced by n + 1
    grant.seed     the key that hubs sign grants with
    hub-N.lock     locked by the process that hosts hub n; the kernel releases it when the process dies
    hub-N.sock     the socket of hub n
    members.lock   locked by all processes that reached a hub: if there are any, a new hub waits for their reports
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from pathlib import Path

from penstock.errors import HubUnavailable
from penstock.hub.auth import Auth
from penstock.hub.directory import Directory
from penstock.hub.server import HubThread, bind
from penstock.hub.store import LivedClock, MemoryStore
from penstock.lifecycle import Closeable, release_after_fork
from penstock.net.unix_sockets import connect_unix, peer_credentials, private_directory, runtime_files

BEAT_S = 0.5
"""On one host a beat costs nothing compared with moving bytes, and a new hub knows all members within one beat."""
# For the connection by which the kernel reports the hub's process; the kernel also accepts for a stopped process.
_LOOK_S = 0.2
TTL_S = 5.0
"""A process that loads may keep the interpreter for a second; ten beats are longer."""
HUNG_S = 30.0
"""A hub whose process runs but does not answer for this long is replaced too. Before that it counts as busy: 32 copying
processes on two cores kept one from answering for 5 s, and its successors, without its state, read storage again."""
PASS_S = 5.0
"""A process that took the lock and was stopped before it listened is replaced after this time, as one that was stopped
later is (`client.ATTEMPT_S`)."""


class LocalEndpoint:
    """The endpoint of `HubClient.connect(None)`: see the module."""

    def __init__(self, directory: Path, members: _LockFile) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        self._members = members
        self._is_member = False
        self._hosting: _HostedHub | None = None
        # Whether the socket's file proves nothing: no hub was reached through it yet, or the last request failed.
        self._doubted = True
        self._closed = False
        self._silent_since: float | None = None
        self.is_busy = False

    @classmethod
    def open(cls, directory: Path | None = None) -> LocalEndpoint:
        """Make the directory if it is not there, and open the file that counts the members.

        Args:
            directory: Directory of the hub's files. None means the user's own; see `config.runtime_dir`.

        Raises:
            ConfigError: the directory is another's, open to others, cannot be written, or its path too long for a
                socket.
        """
        directory = private_directory(directory)
        with runtime_files(directory):
            return cls(directory, _LockFile.open(directory / "members.lock"))

    @property
    def hosts(self) -> bool:
        """Return whether this process hosts the hub, for this endpoint."""
        return self._hosting is not None

    def reach(self, within_s: float) -> str:
        """Return the URL of the present hub; host it here if no other process does, however long that takes.

        Raises:
            HubUnavailable: a thread of this process or another process holds the lock and does not listen.
        ConfigError: the runtime directory cannot be written, or is full.
        """
        began = time.monotonic()
        deadline = began + within_s
        # By looking again and again: a file that another process makes brings no event to wait for.
        while self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                with runtime_files(self._directory):
                    path = self._look()
            finally:
                self._lock.release()
            if path is not None:
                return f"unix://{path}"
            if time.monotonic() > deadline:
                break
            if time.monotonic() - began > PASS_S:
                with runtime_files(self._directory):
                    self._pass_over_stopped()
            time.sleep(0.01)
        where = self._directory / f"hub-{_generation(self._directory)}.sock"
        raise HubUnavailable("the process that hosts the hub of this host does not listen", uri=f"unix://{where}")

    def _look(self) -> Path | None:
        """Return the socket of the present hub, hosted here if no other process does; None: it does not listen yet."""
        if self._closed:
            raise HubUnavailable("this client was closed")
        number = _generation(self._directory)
        # Our hub was silent for too long and was replaced: two hubs would both assign the same chunks.
        if self._hosting is not None and self._hosting.number != number:
            self._hosting.stop()
            self._hosting = None
        path = self._directory / f"hub-{number}.sock"
        if self._hosting is None and (self._doubted or not path.exists()):
            self._hosting = self._host(number)
            self._doubted = False
        return path if path.exists() else None

    def reached(self) -> None:
        """Record that the hub answered. A lock marks this process as a member: a later hub waits for its report."""
        self._silent_since = None
        self.is_busy = False
        if not self._is_member:
            with self._lock:
                self._is_member = self._members.lock(fcntl.LOCK_SH)

    def failed(self, url: str, *, silent: bool) -> None:
        """Replace a hub whose process is stopped or hung; one that ended is hosted again by the next `reach`."""
        with self._lock, runtime_files(self._directory):
            self._doubted = True
            self.is_busy = silent and self._runs_still(url)
            number = _generation(self._directory)
            if silent and self._hosting is None and not self.is_busy and url.endswith(f"/hub-{number}.sock"):
                self._pass_over(number)

    def _pass_over(self, number: int) -> None:
        """Start the next generation, if `number` is still the present one."""
        # Under a lock and by a rename: of several clients that lose the hub together, one raises the number, by one.
        with _LockFile.open(self._directory / "generation.lock") as guard:
            if guard.lock(fcntl.LOCK_EX) and _generation(self._directory) == number:
                _replace(self._directory / "generation", f"{number + 1}\n".encode())

    def _pass_over_stopped(self) -> None:
        """Replace a process that took the lock and was stopped before it listened: no client can detect that later."""
        with self._lock:
            number = _generation(self._directory)
            if self._hosting is None and not (self._directory / f"hub-{number}.sock").exists():
                path = self._directory / f"hub-{number}.lock"
                try:
                    pid = int(path.read_text(encoding="ascii"))
                    waited_s = time.time() - path.stat().st_mtime
                except (OSError, ValueError):
                    # Not written yet.
                    return
                # In another PID namespace its state cannot be read, and its number may be that of another process here:
                # it gets the time of a hub that hangs.
                if _state_of(pid) in {"T", "t"} if _has_open(pid, path) else waited_s > HUNG_S:
                    self._pass_over(number)

    def _runs_still(self, url: str) -> bool:
        """Return whether a silent hub's process runs, and has not been silent for `HUNG_S`: then it will answer."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        return now - self._silent_since < HUNG_S and _runs(url.removeprefix("unix://"))

    def close(self) -> None:
        """Stop hosting the hub, so that another process can; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._hosting is not None:
                self._hosting.stop()
                self._hosting = None
            self._members.close()

    def _host(self, number: int) -> _HostedHub | None:
        """Host hub `number`; return None if another process does."""
        lock = _LockFile.open(self._directory / f"hub-{number}.lock")
        try:
            # The number once more, under the lock: the hub may have been replaced while this process came here.
            if not lock.lock(fcntl.LOCK_EX) or _generation(self._directory) != number:
                lock.close()
                return None
            lock.write(f"{os.getpid()}\n")
            # The exclusive lock succeeds only if no other process ever reached a hub: then no report is waited for.
            fresh = self._members.lock(fcntl.LOCK_EX)
            self._is_member = self._members.lock(fcntl.LOCK_SH)
            return _HostedHub.start(self._directory, number, lock, fresh=fresh)
        except BaseException:
            lock.close()
            raise


def _runs(path: str) -> bool:
    """Return whether the process that listens at a Unix socket is neither stopped nor dead, as far as it is known."""
    try:
        with connect_unix(path, _LOOK_S) as sock:
            pid = peer_credentials(sock)[0]
    except OSError:
        return False
    # 0: it is in another PID namespace, where only its lock tells whether it lives.
    return pid == 0 or _state_of(pid) not in {"", "T", "t", "Z", "X"}


def _state_of(pid: int) -> str:
    """Return the state letter of proc(5), T for a stopped process; "" if it is unknown."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # From the right: a process may have ")" in its name.
        return line.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process of this PID namespace has this file open."""
    # An OSError: there is no such process, or it closed a file meanwhile.
    with contextlib.suppress(OSError):
        return any(path.samefile(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _generation(directory: Path) -> int:
    """Return the number of the present hub."""
    try:
        return int((directory / "generation").read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0


def find_hub(directory: Path | None = None) -> str | None:
    """Return the URL of the running hub of this host and user; None: there is none. It does not start one.

    Args:
        directory: see `LocalEndpoint`.

    Raises:
        ConfigError: as `LocalEndpoint`.
    """
    directory = private_directory(directory)
    with runtime_files(directory):
        number = _generation(directory)
        path, lock = directory / f"hub-{number}.sock", directory / f"hub-{number}.lock"
        if not path.exists() or not lock.exists():
            return None
        # A lock that can be taken is no longer held by a hub: its process died, and left the socket's file behind.
        with _LockFile.open(lock) as lock_file:
            return None if lock_file.lock(fcntl.LOCK_SH) else f"unix://{path}"


def own_address() -> str:
    """Return the default address of `penstock hub`: a Unix socket in this user's runtime directory.

    Raises:
        ConfigError: as `LocalEndpoint`.
    """
    return f"unix://{private_directory() / 'hub.sock'}"


class _HostedHub:
    """A hub in a thread of this process."""

    def __init__(self, number: int, lock: _LockFile, path: Path, hub: HubThread) -> None:
        self.number = number
        self._lock = lock
        self._path = path
        self._hub = hub

    @classmethod
    def start(cls, directory: Path, number: int, lock: _LockFile, *, fresh: bool) -> _HostedHub:
        """Start hub `number`, whose lock the caller holds, and give its socket the name that clients look for."""
        path = directory / f"hub-{number}.sock"
        # Under another name until it answers: a client that sees the path connects at once.
        draft = directory / f"new-{number}.sock"
        path.unlink(missing_ok=True)
        # Not a wall clock: the process hosts the hub next to its own work, and may be stopped for longer than `TTL_S`.
        store = MemoryStore(LivedClock(most_s=2 * BEAT_S))
        logic = Directory(store, fresh=fresh, beat_s=BEAT_S, ttl_s=TTL_S, seed=_seed(directory))
        hub = HubThread(logic, bind(f"unix://{draft}", Auth()))
        try:
            hub.start()
            draft.rename(path)
        except BaseException:
            hub.stop()
            raise
        _sweep(directory, number)
        return cls(number, lock, path, hub)

    def stop(self) -> None:
        """Remove the socket's file, so that no client connects; then end the hub and release the lock."""
        self._path.unlink(missing_ok=True)
        self._hub.stop()
        # Last: with the lock, the next process starts its hub.
        self._lock.close()


class _LockFile(Closeable):
    """A file to lock. The kernel releases its lock when the process ends; forked children close their copy."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _CLOSED_IN_CHILDREN.add(self)

    @classmethod
    def open(cls, path: Path) -> _LockFile:
        """Open the file, which is made if it is not there. OSError: the system refuses."""
        # No symbolic links: with one, another user of a shared directory could have any of our files locked or cut.
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def lock(self, kind: int) -> bool:
        """Lock or relock it without waiting; False: another process holds it, and our earlier lock may be lost."""
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, text: str) -> None:
        """Replace the file's content."""
        # In place: a file renamed over this one would be another file, which nobody has locked.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def close(self) -> None:
        """Close the file, which releases its lock; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# A child of a fork that lived on would keep the locks of a hub that died.
_CLOSED_IN_CHILDREN: weakref.WeakSet[_LockFile] = release_after_fork(lambda file: file.close())


def _seed(directory: Path) -> bytes:
    """Return the key that grants are signed with: one for all hubs of this host, so that grants outlive a hub."""
    # In a file, so that it outlives the hub: readers show the grants of a hub that ended to sources that live on.
    path = directory / "grant.seed"
    try:
        seed = path.read_bytes()
    except FileNotFoundError:
        seed = b""
    if len(seed) != 32:
        seed = os.urandom(32)
        _replace(path, seed)
    return seed


def _replace(path: Path, data: bytes) -> None:
    """Write a small file that is only this user's, all at once."""
    # Written aside and renamed: a reader must never find it empty. An empty `generation` would mean number 0.
    # Not by process id: in two PID namespaces two processes have the same.
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)


def _sweep(directory: Path, number: int) -> None:
    """Remove files of old generations; a process that still holds one of these locks was replaced."""
    # The last generation stays: its process may be about to notice that it was replaced.
    for path in directory.glob("hub-*.*"):
        with contextlib.suppress(ValueError):
            if int(path.stem.removeprefix("hub-")) < number - 1:
                path.unlink(missing_ok=True)
