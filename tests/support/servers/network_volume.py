"""A read-only network volume on this host with the latency and bandwidth of a link, for tests and benchmarks.

    with NetworkVolume(directory, mount_point, latency_s=0.005) as volume:
        open(volume / "model.safetensors", "rb")

It is a FUSE file system without writes and subdirectories. The kernel treats a page fault on a FUSE file like one on
NFS or SMB, as a request of up to `read_ahead_kb` that the process waits for. It implements the kernel's protocol
itself, so it needs no library, only Linux, `/dev/fuse` and the right to mount. The server is a separate process,
because a program that waits for a page fault may hold the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import os
import stat
import struct
import subprocess  # nosec B404
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import ConfigError

# Source of all numbers and layouts: include/uapi/linux/fuse.h, protocol 7.31.
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _ACCESS = 25, 26, 27, 28, 29, 34
_INTERRUPT, _DESTROY, _BATCH_FORGET = 36, 38, 42
_MINOR = 31
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_KEEP_CACHE = 1 << 1
_VALID_S = 3600
# 256 pages of 4 KiB are the largest read of today's FUSE file systems, like rsize in NFS.
_READ_PAGES = 256
# 128 KiB and 12 are the defaults of libfuse 3, so mounts of rclone or sshfs have them.
_READ_AHEAD_BYTES = 128 << 10
_MAX_BACKGROUND = 12
_REQUEST_BYTES = 1 << 17

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MNT_DETACH = 1, 2, 4, 2

_START_S = 20.0
"""Longest wait for the mount, and for the server's end, in seconds."""

_libc: Any = ctypes.CDLL(None, use_errno=True)


def refusal() -> str:
    """Return why this process cannot mount a volume, or "" if it can."""
    if sys.platform != "linux":
        return "FUSE is mounted on Linux only"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse does not exist, or this user may not open it"
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    # Bit 21 is CAP_SYS_ADMIN, which mount(2) needs.
    return "" if int(capabilities, 16) >> 21 & 1 else "this user may not mount"


class NetworkVolume:
    """A mounted volume. Its `with` block returns the mount point.

    Args:
        directory: directory whose regular files are shown, as they are at the time of the mount.
        mount_point: an empty directory, created if it does not exist.
        latency_s: seconds from a request to the first byte of its response. Requests do not wait for each other.
        bytes_per_s: limit for all responses together. 0 means no limit.

    Raises:
        ConfigError: it cannot be mounted here.
    """

    def __init__(self, directory: Path, mount_point: Path, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self._directory = directory
        self._mount_point = mount_point
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Path:
        if reason := refusal():
            raise ConfigError(f"no network volume can be mounted: {reason}", hint="run as root, with /dev/fuse")
        self._mount_point.mkdir(parents=True, exist_ok=True)
        numbers = [str(self._latency_s), str(self._bytes_per_s)]
        command = [sys.executable, "-m", __name__, str(self._directory), str(self._mount_point), *numbers]
        # nosec: this interpreter, this module, the caller's paths; no shell.
        self._process = subprocess.Popen(  # nosec B603
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None  # nosec B101
        if self._process.stdout.readline() != "mounted\n":
            self._end()
            raise ConfigError(f"cannot mount a network volume at {self._mount_point}")
        return self._mount_point

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def read_bytes(self) -> int:
        """Return the number of bytes that reads have requested so far."""
        return int((self._mount_point / COUNTER).read_text())

    def drop_caches(self) -> None:
        """Drop all cached pages of the volume's files."""
        for name in os.listdir(self._mount_point):
            descriptor = os.open(self._mount_point / name, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _libc.umount2(os.fsencode(self._mount_point), _MNT_DETACH)
        # It ends by itself, because its read of /dev/fuse fails after the unmount.
        try:
            process.wait(_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_START_S)
        if process.stdout is not None:
            process.stdout.close()


COUNTER = ".read-bytes"
"""A file of the volume that is not in the directory. Its text is the number of bytes that reads have requested."""


class _Server:
    """Answers the kernel's requests, each after the latency, in the order in which the link would carry them."""

    def __init__(self, device: int, directory: str, latency_s: float, bytes_per_s: float) -> None:
        self._device = device
        self._latency_s = latency_s
        self._seconds_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        paths = [entry.path for entry in os.scandir(directory) if entry.is_file()]
        # Keyed by node. Node 1 is the root and 2 is the counter.
        self._nodes: dict[int, int] = {number: os.open(path, os.O_RDONLY) for number, path in enumerate(paths, 3)}
        self._names = {os.fsencode(os.path.basename(path)): number for number, path in enumerate(paths, 3)}
        self._names[COUNTER.encode()] = 2
        self._read_bytes = 0
        self._link_free_at = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._answers: list[tuple[float, int, bytes]] = []

    def serve(self) -> None:
        """Answer until the volume is unmounted."""
        threading.Thread(target=self._send_all, name="penstock-volume", daemon=True).start()
        while True:
            try:
                request = os.read(self._device, _REQUEST_BYTES)
            except OSError as error:
                # ENODEV means that it is unmounted, and ENOENT that a request was interrupted before it was read.
                if error.errno == errno.ENODEV:
                    return
                if error.errno in {errno.ENOENT, errno.EINTR, errno.EAGAIN}:
                    continue
                raise
            _, opcode, unique, node = struct.unpack_from("=IIQQ", request)
            if opcode in {_FORGET, _BATCH_FORGET, _INTERRUPT, _DESTROY}:
                continue
            code, body = self._answer(opcode, node, request[40:])
            self._post(unique, struct.pack("=IiQ", 16 + len(body), -code, unique) + body, now=opcode == _INIT)

    def _post(self, unique: int, answer: bytes, *, now: bool) -> None:
        start = time.monotonic()
        with self._changed:
            self._link_free_at = max(self._link_free_at, start) + len(answer) * self._seconds_per_byte
            due = start if now else self._link_free_at + self._latency_s
            heapq.heappush(self._answers, (due, unique, answer))
            self._changed.notify()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                while not self._answers or self._answers[0][0] > time.monotonic():
                    wait_s = self._answers[0][0] - time.monotonic() if self._answers else 1.0
                    self._changed.wait(max(0.0, wait_s))
                _, _, answer = heapq.heappop(self._answers)
            # ENOENT means that the request was interrupted, and ENODEV that the volume was unmounted.
            with contextlib.suppress(OSError):
                os.write(self._device, answer)

    def _answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        """Return an errno and the body of the response."""
        if opcode == _INIT:
            flags = _ASYNC_READ | _MAX_PAGES
            numbers = (7, _MINOR, _READ_AHEAD_BYTES, flags, _MAX_BACKGROUND, _MAX_BACKGROUND * 3 // 4, 4096, 1)
            return 0, struct.pack("=IIIIHHIIHH", *numbers, _READ_PAGES, 0) + bytes(32)
        if opcode == _LOOKUP:
            found = self._names.get(body.rstrip(b"\0"))
            if found is None:
                return errno.ENOENT, b""
            return 0, struct.pack("=QQQQII", found, 0, _VALID_S, _VALID_S, 0, 0) + self._attributes(found)
        if opcode == _GETATTR:
            return 0, struct.pack("=QII", _VALID_S, 0, 0) + self._attributes(node)
        if opcode in {_OPEN, _OPENDIR}:
            # The counter changes, so it is never cached.
            return 0, struct.pack("=QII", 0, _KEEP_CACHE if node != 2 else 1, 0)
        if opcode == _READ:
            offset, size = struct.unpack_from("=QI", body, 8)
            if node == 2:
                return 0, f"{self._read_bytes:020}".encode()[offset : offset + size]
            data = os.pread(self._nodes[node], size, offset)
            self._read_bytes += len(data)
            return 0, data
        if opcode == _READDIR:
            return 0, self._listing(struct.unpack_from("=QI", body, 8))
        if opcode == _STATFS:
            return 0, struct.pack("=QQQQQIII", 0, 0, 0, 0, 0, 4096, 255, 4096) + bytes(28)
        if opcode in {_RELEASE, _RELEASEDIR, _FLUSH, _ACCESS}:
            return 0, b""
        return errno.ENOSYS, b""

    def _attributes(self, node: int) -> bytes:
        if node in self._nodes:
            found = os.fstat(self._nodes[node])
            size, mode, mtime_ns = found.st_size, stat.S_IFREG | 0o444, found.st_mtime_ns
        else:
            size, mode, mtime_ns = (20, stat.S_IFREG | 0o444, 0) if node == 2 else (0, stat.S_IFDIR | 0o555, 0)
        seconds, ns = divmod(mtime_ns, 10**9)
        times = (seconds, seconds, seconds, ns, ns, ns)
        return struct.pack("=QQQQQQIIIIIIIIII", node, size, (size + 511) // 512, *times, mode, 1, 0, 0, 0, 4096, 0)

    def _listing(self, asked: tuple[int, int]) -> bytes:
        offset, size = asked
        data = b""
        for place, (name, node) in enumerate(self._names.items(), 1):
            if place > offset and node != 2:
                entry = struct.pack("=QQII", node, place, len(name), stat.S_IFREG >> 12) + name
                entry += bytes(-len(entry) % 8)
                if len(data) + len(entry) > size:
                    break
                data += entry
        return data


def _main(directory: str, mount_point: str, latency_s: str, bytes_per_s: str) -> int:
    """Mount, report it on stdout, and serve until the volume is unmounted."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    if _libc.mount(b"penstock", os.fsencode(mount_point), b"fuse", flags, options.encode()):
        sys.stderr.write(f"{os.strerror(ctypes.get_errno())}\n")
        return 1
    server = _Server(device, directory, float(latency_s), float(bytes_per_s))
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
