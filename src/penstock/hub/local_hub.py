"""The hub of one host and user, with nothing to start: the first to ask hosts it, another takes over when it goes.

In: the user's runtime directory. Out: where the hub is now.
Not here: the hub (`app`), its questions (`client`).

    generation     the number n of the hub in force; one that is silent is passed over by n + 1
    grant.seed     what hubs sign grants with
    hub-N.lock     who holds it hosts hub n; the kernel lets go of it when the process dies
    hub-N.sock     where hub n listens
    members.lock   shared by all who reached a hub: while another holds it, a new hub waits for them to announce
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import weakref
from pathlib import Path

from penstock.closing import Closing
from penstock.config import runtime_dir
from penstock.errors import ConfigError, HubUnavailable
from penstock.fork import let_go_in_children
from penstock.hub.auth import Auth
from penstock.hub.directory import Directory
from penstock.hub.server import HubThread, bind
from penstock.hub.store import LivedClock, MemoryStore
from penstock.net.peercred import connect_unix, peer_credentials

BEAT_S = 0.5
"""On one host a beat costs nothing beside the bytes moved, and a hub that takes over knows all within one."""
LOOK_S = 0.2
"""For the connection by which the kernel says whose a hub is; it accepts for a process that is stopped, too."""
TTL_S = 5.0
"""A process that loads may keep the interpreter for a second; ten beats are longer."""
HUNG_S = 30.0
"""A hub whose process runs and answers nobody for so long is passed over too. Before that it is busy: 32 processes that
copy on two cores kept one from answering for 5 s, and its successors, who knew nothing, had storage read again."""
PASS_S = 5.0
"""A process that holds the lock, was stopped before it listened and stays so is passed over after this, as one that was
stopped later is (`client.ATTEMPT_S`)."""
_MAX_PATH_BYTES = 107
"""Source: unix(7)."""


class LocalEndpoint:
    """See the module; the `Line` of `HubClient.connect(None)`.

    Args:
        directory: None: the user's own, see `config.runtime_dir`.

    Raises:
        ConfigError: the directory is another's, open to others, or its path too long for a socket.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = _private(directory or runtime_dir())
        self._lock = threading.RLock()
        self._members = _File(self._directory / "members.lock")
        self._is_member = False
        self._hosting: _Hosting | None = None
        self._doubted = True
        self._closed = False
        self._silent_since: float | None = None
        self.is_busy = False

    @property
    def hosts(self) -> bool:
        """Whether this process hosts the hub, for this line."""
        return self._hosting is not None

    def reach(self, within_s: float) -> str:
        """The URL of the hub in force, hosted here if nobody else does; to begin that takes what it takes.

        Raises:
            HubUnavailable: somebody holds the lock and does not listen, in this process or in another.
        """
        began = time.monotonic()
        deadline = began + within_s
        while self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                path = self._look()
            finally:
                self._lock.release()
            if path is not None:
                return f"unix://{path}"
            if time.monotonic() > deadline:
                break
            if time.monotonic() - began > PASS_S:
                self._pass_over_stopped()
            time.sleep(0.01)
        where = self._directory / f"hub-{_generation(self._directory)}.sock"
        raise HubUnavailable("who hosts the hub of this host does not listen", uri=f"unix://{where}")

    def _look(self) -> Path | None:
        """Where the hub in force listens, hosted here if nobody else does; None: not yet."""
        if self._closed:
            raise HubUnavailable("this client was closed")
        number = _generation(self._directory)
        if self._hosting is not None and self._hosting.number != number:
            self._hosting.stop()  # we were silent, and passed over
            self._hosting = None
        path = self._directory / f"hub-{number}.sock"
        if self._hosting is None and (self._doubted or not path.exists()):
            self._hosting = self._host(number)
            self._doubted = False
        return path if path.exists() else None

    def reached(self) -> None:
        """Remembered by the kernel while this process lives: a later hub waits for what we hold."""
        self._silent_since, self.is_busy = None, False
        if not self._is_member:
            with self._lock:
                self._is_member = self._members.lock(fcntl.LOCK_SH)

    def failed(self, url: str, *, silent: bool) -> None:
        """Pass over a hub whose process is stopped or hung; one that is gone is hosted anew by who reaches first."""
        with self._lock:
            self._doubted = True
            self.is_busy = silent and self._runs_still(url)
            number = _generation(self._directory)
            if silent and self._hosting is None and not self.is_busy and url.endswith(f"/hub-{number}.sock"):
                self._pass_over(number)

    def _pass_over(self, number: int) -> None:
        """Let the next generation begin, if `number` is still the one in force."""
        with _File(self._directory / "generation.lock") as guard:
            if guard.lock(fcntl.LOCK_EX) and _generation(self._directory) == number:
                new = self._directory / f".generation-{os.getpid()}"
                new.write_text(f"{number + 1}\n", encoding="ascii")
                new.replace(self._directory / "generation")

    def _pass_over_stopped(self) -> None:
        """Pass over a process that took the lock and was stopped before it listened: nobody can ask it anything."""
        with self._lock:
            number = _generation(self._directory)
            if self._hosting is None and not (self._directory / f"hub-{number}.sock").exists():
                try:
                    pid = int((self._directory / f"hub-{number}.lock").read_text(encoding="ascii"))
                except (OSError, ValueError):
                    return  # not written yet
                if _state_of(pid) in {"T", "t"}:
                    self._pass_over(number)

    def _runs_still(self, url: str) -> bool:
        """Whether a silent hub's process runs, and has not been silent for `HUNG_S`: it will answer."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        return now - self._silent_since < HUNG_S and _runs(url.removeprefix("unix://"))

    def close(self) -> None:
        """Let another host the hub, if it was hosted here; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._hosting is not None:
                self._hosting.stop()
                self._hosting = None
            self._members.close()

    def _host(self, number: int) -> _Hosting | None:
        """Host hub `number`; None: somebody does."""
        lock = _File(self._directory / f"hub-{number}.lock")
        try:
            if not lock.lock(fcntl.LOCK_EX) or _generation(self._directory) != number:
                lock.close()
                return None
            lock.write(f"{os.getpid()}\n")
            # Nobody else ever reached a hub: there is nothing to wait for.
            fresh = self._members.lock(fcntl.LOCK_EX)
            self._is_member = self._members.lock(fcntl.LOCK_SH)
            return _Hosting(self._directory, number, lock, fresh=fresh)
        except BaseException:
            lock.close()
            raise


def _runs(path: str) -> bool:
    """Whether the process that listens at a Unix socket is neither stopped nor dead; False where that is not seen."""
    try:
        with connect_unix(path, LOOK_S) as sock:
            pid = peer_credentials(sock)[0]
    except OSError:
        return False
    return _state_of(pid) not in {"", "T", "t", "Z", "X"}


def _state_of(pid: int) -> str:
    """The letter of proc(5) for what a process does, T for a stopped one; "" where that is not seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _generation(directory: Path) -> int:
    """Number of the hub in force."""
    try:
        return int((directory / "generation").read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0


def find_hub(directory: Path | None = None) -> str | None:
    """The URL of the hub of this host and user where one runs, hosted by whomever; nothing is started for it.

    Args:
        directory: see `LocalEndpoint`.

    Raises:
        ConfigError: as `LocalEndpoint`.
    """
    directory = _private(directory or runtime_dir())
    number = _generation(directory)
    path, lock = directory / f"hub-{number}.sock", directory / f"hub-{number}.lock"
    if not path.exists() or not lock.exists():
        return None
    with _File(lock) as held:
        return None if held.lock(fcntl.LOCK_SH) else f"unix://{path}"


def own_address() -> str:
    """Return where `penstock hub` listens unless it is told: a Unix socket in this user's runtime directory.

    Raises:
        ConfigError: as `LocalEndpoint`.
    """
    return f"unix://{_private(runtime_dir()) / 'hub.sock'}"


class _Hosting:
    """A hub in a thread of this process."""

    def __init__(self, directory: Path, number: int, lock: _File, *, fresh: bool) -> None:
        self.number = number
        self._lock = lock
        self._path = directory / f"hub-{number}.sock"
        # Under another name until it answers: who sees the path may connect.
        draft = directory / f"new-{number}.sock"
        self._path.unlink(missing_ok=True)
        store = MemoryStore(LivedClock(most_s=2 * BEAT_S))
        logic = Directory(store, fresh=fresh, beat_s=BEAT_S, ttl_s=TTL_S, seed=_seed(directory))
        self._hub = HubThread(logic, bind(f"unix://{draft}", Auth()))
        try:
            self._hub.start()
            draft.rename(self._path)
        except BaseException:
            self._hub.stop()
            raise
        _sweep(directory, number)

    def stop(self) -> None:
        """Nobody is to connect any more; then end."""
        self._path.unlink(missing_ok=True)
        self._hub.stop()
        self._lock.close()


class _File(Closing):
    """A file to lock. Its lock is the kernel's: it ends with the process, and children of a fork let go of it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _CLOSED_IN_CHILDREN.add(self)

    def lock(self, kind: int) -> bool:
        """Lock or relock it without waiting; False: somebody holds it, and an earlier lock of ours may be gone."""
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, text: str) -> None:
        """Replace what the file says."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def close(self) -> None:
        """Let go; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_CLOSED_IN_CHILDREN: weakref.WeakSet[_File] = let_go_in_children(lambda held: held.close())
"""A child of a fork that lived on would keep the locks of a hub that died."""


def _private(directory: Path) -> Path:
    """The directory, made where it is missing, for this user alone."""
    if len(os.fsencode(directory)) + len("/hub-99999.sock") > _MAX_PATH_BYTES:
        raise ConfigError(f"{directory} is too long for a socket in it", hint="set PENSTOCK_RUNTIME_DIR")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(f"no place for the hub's socket: {error}", hint="set PENSTOCK_RUNTIME_DIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not this user's alone", hint="chmod 700 it, or set PENSTOCK_RUNTIME_DIR to another"
        )
    return directory


def _seed(directory: Path) -> bytes:
    """What grants are signed with: the same for the hubs that follow each other, so that grants outlive one."""
    path = directory / "grant.seed"
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = b""
    if len(found) != 32:
        found = os.urandom(32)
        new = directory / f".seed-{os.getpid()}"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(found)
        new.replace(path)
    return found


def _sweep(directory: Path, number: int) -> None:
    """Remove what generations long past left; who still holds such a lock was passed over."""
    for path in directory.glob("hub-*.*"):
        with contextlib.suppress(ValueError):
            if int(path.stem.removeprefix("hub-")) < number - 1:
                path.unlink(missing_ok=True)
