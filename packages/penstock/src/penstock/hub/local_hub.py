"""The hub of one user on one host. The first client process hosts the hub. If that process exits, another takes over.

These files are in the user's runtime directory:

    generation     the number n of the current hub; a silent hub is replaced by n + 1
    grant.seed     the key with which hubs sign grants
    hub-N.lock     locked by the process that hosts hub n; the kernel releases it when the process dies
    hub-N.sock     the socket of hub n
    members.lock   locked by all processes that reached a hub; if there are any, a new hub waits for their reports
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from penstock.errors import HubUnavailable
from penstock.exports import lazily
from penstock.hub.address import HubEndpoint
from penstock.lifecycle import Closeable, release_after_fork
from penstock.net.unix_sockets import connect_unix, peer_credentials, private_directory, runtime_files

_SERVER = lazily(__name__, {"serve_in_thread": "penstock_hub.server"})
BEAT_S = 0.5
"""Heartbeat interval in seconds. On one host a heartbeat takes negligible time, and a new hub knows all members after
one interval."""
# Timeout for connecting to the hub's socket to get the hub's PID. The kernel also accepts connections for a stopped
# process.
_LOOK_S = 0.2
TTL_S = 5.0
"""TTL of a member in seconds, ten heartbeat intervals. A loading process may hold the GIL for about a second."""
HUNG_S = 30.0
"""Seconds without a response after which even a running hub is replaced. 32 copying processes on two cores once kept a
hub from responding for 5 s."""
PASS_S = 5.0
"""Seconds after which a process that acquired the lock and was stopped before it listened is replaced (as
`client.ATTEMPT_S`)."""


class LocalEndpoint(HubEndpoint):
    """The endpoint for `HubClient.connect(None)`. See the module's docstring."""

    def __init__(self, directory: Path, members: _LockFile) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        self._members = members
        self._is_member = False
        self._hosting: _HostedHub | None = None
        # Whether a hub may be dead although the socket's file exists, because no request has succeeded yet or the last
        # request failed.
        self._doubted = True
        self._closed = False
        self._silent_since: float | None = None
        self.is_busy = False

    @classmethod
    def open(cls, directory: Path | None = None) -> LocalEndpoint:
        """Create the directory for the hub's files if needed, and open the members' file.

        Args:
            directory: None means the user's runtime directory. See `config.runtime_dir`.

        Raises:
            ConfigError: the directory belongs to another user, is open to others, is not writable, or its path is too
                long.
        """
        directory = private_directory(directory)
        with runtime_files(directory):
            return cls(directory, _LockFile.open(directory / "members.lock"))

    @property
    def hosts(self) -> bool:
        """Return whether this process hosts the hub for this endpoint."""
        return self._hosting is not None

    def reach(self, within_s: float) -> str:
        """Return the URL of the current hub. If no other process hosts a hub, host one here, even after `within_s`.

        Raises:
            HubUnavailable: the process that holds the lock is not listening.
            ConfigError: the runtime directory cannot be written, or is full.
        """
        began = time.monotonic()
        deadline = began + within_s
        # Poll, because nothing signals that another process created the file.
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
        raise HubUnavailable("the process that hosts this host's hub is not listening", uri=f"unix://{where}")

    def _look(self) -> Path | None:
        """Return the socket of the current hub, or None if it is not ready. Host the hub if no other process does."""
        if self._closed:
            raise HubUnavailable("this hub client was closed")
        number = _generation(self._directory)
        # This process's hub was silent for too long and was replaced. Two hubs would both assign the same chunks.
        if self._hosting is not None and self._hosting.number != number:
            self._hosting.stop()
            self._hosting = None
        path = self._directory / f"hub-{number}.sock"
        if self._hosting is None and (self._doubted or not path.exists()):
            self._hosting = self._host(number)
            self._doubted = False
        return path if path.exists() else None

    def reached(self) -> None:
        """Record that the hub responded, and lock `members.lock`, so that a new hub waits for this process's report."""
        self._silent_since = None
        self.is_busy = False
        if not self._is_member:
            with self._lock:
                self._is_member = self._members.lock(fcntl.LOCK_SH)

    def failed(self, url: str, *, silent: bool) -> None:
        """Replace a hub that is stopped or hangs. If the hub's process has exited, the next `reach` hosts a new hub."""
        with self._lock, runtime_files(self._directory):
            self._doubted = True
            self.is_busy = silent and self._runs_still(url)
            number = _generation(self._directory)
            if silent and self._hosting is None and not self.is_busy and url.endswith(f"/hub-{number}.sock"):
                self._pass_over(number)

    def _pass_over(self, number: int) -> None:
        """Start the next generation if `number` is still the current generation."""
        # If several clients lose the hub at once, the number must increase by only one, so hold a lock.
        with _LockFile.open(self._directory / "generation.lock") as guard:
            if guard.lock(fcntl.LOCK_EX) and _generation(self._directory) == number:
                _replace(self._directory / "generation", f"{number + 1}\n".encode())

    def _pass_over_stopped(self) -> None:
        """Replace a hub whose process was stopped after it locked the lock file and before it opened the socket."""
        with self._lock:
            number = _generation(self._directory)
            if self._hosting is None and not (self._directory / f"hub-{number}.sock").exists():
                path = self._directory / f"hub-{number}.lock"
                try:
                    pid = int(path.read_text(encoding="ascii"))
                    waited_s = time.time() - path.stat().st_mtime
                except (OSError, ValueError):
                    # The process has not written its PID yet.
                    return
                # The state of a process in another PID namespace is unknown, and its PID may belong to a different
                # process here. Wait `HUNG_S` for that process, as for a hub that hangs.
                if _state_of(pid) in {"T", "t"} if _has_open(pid, path) else waited_s > HUNG_S:
                    self._pass_over(number)

    def _runs_still(self, url: str) -> bool:
        """Return whether a silent hub's process is running and the hub was silent for less than `HUNG_S`."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        return now - self._silent_since < HUNG_S and _runs(url.removeprefix("unix://"))

    def close(self) -> None:
        """Stop hosting the hub, so that another process can host it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._hosting is not None:
                self._hosting.stop()
                self._hosting = None
            self._members.close()

    def _host(self, number: int) -> _HostedHub | None:
        """Host hub `number`, or return None if another process hosts or has replaced this hub."""
        lock = _LockFile.open(self._directory / f"hub-{number}.lock")
        try:
            # Read the number again under the lock, because the hub may have been replaced in the meantime.
            if not lock.lock(fcntl.LOCK_EX) or _generation(self._directory) != number:
                lock.close()
                return None
            lock.write(f"{os.getpid()}\n")
            # The exclusive lock succeeds only if no other live process has reached a hub, so that the new hub has no
            # reports to wait for.
            fresh = self._members.lock(fcntl.LOCK_EX)
            self._is_member = self._members.lock(fcntl.LOCK_SH)
            return _HostedHub.start(self._directory, number, lock, fresh=fresh)
        except BaseException:
            lock.close()
            raise


def _runs(path: str) -> bool:
    """Return whether the process that listens on a Unix socket is neither stopped nor dead, as far as is known."""
    try:
        with connect_unix(path, _LOOK_S) as sock:
            pid = peer_credentials(sock)[0]
    except OSError:
        return False
    # PID 0 means that the process is in a different PID namespace, where only the lock shows whether it is alive.
    return pid == 0 or _state_of(pid) not in {"", "T", "t", "Z", "X"}


def _state_of(pid: int) -> str:
    """Return the state letter from proc(5), such as T for a stopped process, or an empty string if it is unknown."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # A process may have ")" in its name, so split from the right.
        return line.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _has_open(pid: int, path: Path) -> bool:
    # An OSError means that the process does not exist, or closed a file in the meantime.
    with contextlib.suppress(OSError):
        return any(path.samefile(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _generation(directory: Path) -> int:
    try:
        return int((directory / "generation").read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0


def find_hub(directory: Path | None = None) -> str | None:
    """Return the URL of the running hub for this host and user, or None. See `LocalEndpoint.open`."""
    directory = private_directory(directory)
    with runtime_files(directory):
        number = _generation(directory)
        path, lock = directory / f"hub-{number}.sock", directory / f"hub-{number}.lock"
        if not path.exists() or not lock.exists():
            return None
        # If the lock is free, the hub's process died and left the socket's file behind.
        with _LockFile.open(lock) as lock_file:
            return None if lock_file.lock(fcntl.LOCK_SH) else f"unix://{path}"


def own_address() -> str:
    """Return the default address for `penstock hub`: a Unix socket in this user's runtime directory."""
    return f"unix://{private_directory() / 'hub.sock'}"


class _HostedHub:
    def __init__(self, number: int, lock: _LockFile, path: Path, stop_server: Callable[[], None]) -> None:
        self.number = number
        self._lock = lock
        self._path = path
        self._stop_server = stop_server

    @classmethod
    def start(cls, directory: Path, number: int, lock: _LockFile, *, fresh: bool) -> _HostedHub:
        """Start hub `number`, whose lock the caller holds, and rename its socket to the name that clients expect."""
        path = directory / f"hub-{number}.sock"
        # Use a temporary name until the hub is ready, because a client connects as soon as it sees the path.
        draft = directory / f"new-{number}.sock"
        path.unlink(missing_ok=True)
        # Most members never host a hub, so only the process that hosts one imports the server.
        serve = _SERVER("serve_in_thread")
        stop_server = serve(f"unix://{draft}", seed=_seed(directory), fresh=fresh, beat_s=BEAT_S, ttl_s=TTL_S)
        try:
            draft.rename(path)
        except BaseException:
            stop_server()
            raise
        _sweep(directory, number)
        return cls(number, lock, path, stop_server)

    def stop(self) -> None:
        """Remove the socket's file, so that no client connects. Then stop the hub and release the lock."""
        self._path.unlink(missing_ok=True)
        self._stop_server()
        # The next process starts its hub when it gets the lock, so release the lock last.
        self._lock.close()


class _LockFile(Closeable):
    """A lock file. The kernel releases the lock when the process exits, and forked children close their descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _CLOSED_IN_CHILDREN.add(self)

    @classmethod
    def open(cls, path: Path) -> _LockFile:
        # Refuse symlinks, with which other users of a shared directory could lock or truncate this user's files.
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def lock(self, kind: int) -> bool:
        """Lock the file without waiting. Return False on a conflict, which may also release an earlier lock."""
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, text: str) -> None:
        # Write in place, because a new file renamed to this name would not be locked.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# A forked child closes the lock files, because a child that outlives the hub would keep the hub's locks.
_CLOSED_IN_CHILDREN: weakref.WeakSet[_LockFile] = release_after_fork(lambda file: file.close())


def _seed(directory: Path) -> bytes:
    """Return the key for signing grants. All hubs on this host share the key, so that grants outlive a hub."""
    # Readers present a dead hub's grants to sources that are still running, so the key is in a file.
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
    # A reader must never find an empty file, because an empty `generation` means number 0. Processes in different PID
    # namespaces may have the same PID, so the temporary name is random.
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)


def _sweep(directory: Path, number: int) -> None:
    """Remove files of old generations, even if a hub that was replaced still holds a lock on one of the files."""
    # The process of the previous generation may not have detected yet that it was replaced, so keep its files.
    for path in directory.glob("hub-*.*"):
        with contextlib.suppress(ValueError):
            if int(path.stem.removeprefix("hub-")) < number - 1:
                path.unlink(missing_ok=True)
