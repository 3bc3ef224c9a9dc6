"""Real S3 servers on loopback: OpenStack Swift with s3api, and Ceph's object gateway.

Each runs in its own `with` block, which ends all of its processes. They listen only on 127.0.0.1.
`scripts/setup_swift.sh` and `scripts/setup_radosgw.sh` install them.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store
from tests.support.ports import free_ports

_READY_S = 90.0
"""Time limit for a server's first answer, in seconds. It took 12 s on two idle cores, and a busy machine needs more."""

_ATTEMPTS = 2
"""Starts before the failure counts. Once, Ceph's monitor did not answer a command within 90 s on a busy machine."""

_COMMAND_S = 60.0
"""Time limit for one command, in seconds. Each took less than 2 s on two idle cores."""

_BUCKET_S = 30.0
"""Seconds in which a server may say that it is not ready. Swift does so while its parts start."""

_STOP_S = 3.0
"""Seconds that a process has to end before it is killed. There is nothing to save."""


class Unavailable(RuntimeError):
    """The server cannot run here. The message says why. Tests skip on it."""


class S3Server(ABC):
    """An S3 server that runs while its `with` block does.

    Args:
        folder: scratch directory, ideally on tmpfs. The caller removes it.

    Attributes:
        endpoint: `http://127.0.0.1:PORT`.
        access_key, secret_key, region: credentials for clients.
    """

    name = ""
    access_key = ""
    secret_key = ""
    region = "us-east-1"

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        self.endpoint = ""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.check()
        for attempt in range(1, _ATTEMPTS + 1):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._start()
                self._wait_until(self._answers, f"{self.name} to answer")
            except RuntimeError:
                self._stop()
                if attempt == _ATTEMPTS:
                    raise
                shutil.rmtree(self.folder, ignore_errors=True)
            except BaseException:
                self._stop()
                raise
            else:
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise `Unavailable` unless the server is installed."""

    @abstractmethod
    def _start(self) -> None:
        """Start the processes and set `endpoint`."""

    @property
    def storage_options(self) -> dict[str, str]:
        """Return the options with which penstock reads from this server."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": self.region,
        }

    def store(self, bucket: str) -> S3Store:
        """Return obstore's store for `bucket`, to write test data."""
        return S3Store(bucket, config=self.storage_options, client_options={"allow_http": True})  # type: ignore[arg-type]

    def make_bucket(self, bucket: str) -> None:
        """Create `bucket`. Retry while the server starts. Raise RuntimeError if it refuses."""
        deadline = time.monotonic() + _BUCKET_S
        while True:
            status, body = self._put_bucket(bucket)
            if status == 200:
                return
            if status != 503 or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} refused to make a bucket: {status} {body!r}")
            time.sleep(0.5)

    def _put_bucket(self, bucket: str) -> tuple[int, bytes]:
        url = urlsplit(obstore.sign(self.store(bucket), "PUT", "", timedelta(seconds=60)))
        connection = http.client.HTTPConnection(url.netloc, timeout=30)
        try:
            # Some servers sign the path without a trailing slash, and others with it.
            connection.request("PUT", f"{url.path}?{url.query}", headers={"Content-Length": "0"})
            reply = connection.getresponse()
            return reply.status, reply.read(2000)
        finally:
            connection.close()

    def _run(self, command: Sequence[str | Path], *, name: str, environ: dict[str, str] | None = None) -> None:
        """Start a background process with its output in a file of the scratch folder."""
        with open(self.folder / f"{name}.out", "wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env={**os.environ, **(environ or {})},
                )
            )

    def _do(self, *command: str | Path) -> str:
        """Run a command to its end and return its output. Raise RuntimeError if a server that it may need has ended."""
        words = [str(word) for word in command]
        deadline_s = time.monotonic() + _COMMAND_S
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=self.folder) as process:
            while True:
                try:
                    output, errors = process.communicate(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    pass
                try:
                    self._raise_if_ended()
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(f"{words} did not end within {_COMMAND_S} s; see {self.folder}")
                except RuntimeError:
                    process.kill()
                    raise
        if process.returncode:
            raise RuntimeError(f"{command[0]} failed: {errors.decode(errors='replace')[-2000:]}")
        return output.decode()

    def _raise_if_ended(self) -> None:
        """Raise RuntimeError if a background process has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}; see {self.folder}")

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not ready():
            self._raise_if_ended()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {_READY_S} s for {what}; see {self.folder}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        url = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(url.netloc, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


class SwiftServer(S3Server):
    """OpenStack Swift with its S3 interface, and one proxy, account, container and object server each."""

    name = "swift"
    access_key = "test:tester"
    secret_key = "testing"
    environment = Path(".cache/swift")
    """The virtual environment that `scripts/setup_swift.sh` creates, relative to the repository."""

    @classmethod
    def check(cls) -> None:
        """Raise `Unavailable` if a program is missing. See `S3Server.check`."""
        if not (cls.environment / "pins").exists():
            raise Unavailable("Swift is not installed; run scripts/setup_swift.sh in the repository")

    def _start(self) -> None:
        programs = self.environment.absolute() / "bin"
        ports = dict(zip(("proxy", "account", "container", "object"), free_ports(4), strict=True))
        (self.folder / "devices" / "d1").mkdir(parents=True, exist_ok=True)
        (self.folder / "swift.conf").write_text(_SWIFT_CONF)
        for ring in ("account", "container", "object"):
            builder = f"{ring}.builder"
            self._do(programs / "swift-ring-builder", builder, "create", "4", "1", "0")
            self._do(programs / "swift-ring-builder", builder, "add", f"r1z1-127.0.0.1:{ports[ring]}/d1", "1")
            self._do(programs / "swift-ring-builder", builder, "rebalance")
            text = _SWIFT_BACKEND.format(port=ports[ring], folder=self.folder, kind=ring, user=_user())
            (self.folder / f"{ring}.conf").write_text(text)
        text = _SWIFT_PROXY.format(port=ports["proxy"], folder=self.folder, user=_user(), region=self.region)
        (self.folder / "proxy.conf").write_text(text)
        self.endpoint = f"http://127.0.0.1:{ports['proxy']}"
        for kind in ports:
            self._run([programs / f"swift-{kind}-server", f"{kind}.conf"], name=kind)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


_SWIFT_CONF = """\
[swift-hash]
swift_hash_path_prefix = penstock
swift_hash_path_suffix = tests
"""

_SWIFT_BACKEND = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
devices = {folder}/devices
mount_check = false
swift_dir = {folder}
user = {user}
log_name = {kind}
fallocate_reserve = 0
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
disable_fallocate = true
"""

_SWIFT_PROXY = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
swift_dir = {folder}
user = {user}
[pipeline:main]
pipeline = catch_errors cache listing_formats s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
node_timeout = 60
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = {region}
s3_acl = false
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:slo]
use = egg:swift#slo
"""


class RadosgwServer(S3Server):
    """Ceph's object gateway with one monitor, one manager and one object store that keeps everything in memory."""

    name = "radosgw"
    access_key = "penstock"
    secret_key = "penstock-secret"
    programs = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")

    @classmethod
    def check(cls) -> None:
        """Raise `Unavailable` if a program is missing. See `S3Server.check`."""
        for program in cls.programs:
            if shutil.which(program) is None:
                raise Unavailable(
                    f"{program} is not installed; scripts/setup_radosgw.sh installs it as root by apt-get"
                )

    def _start(self) -> None:
        v2, v1, gateway = free_ports(3)
        self.endpoint = f"http://127.0.0.1:{gateway}"
        cluster = str(uuid.uuid4())
        monitor = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        for name in ("mon", "osd", "mgr", "rgw", "run"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "ceph.conf").write_text(_CEPH_CONF.format(cluster=cluster, monitor=monitor, folder=self.folder))
        self._do("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for who, caps in _CEPH_USERS.items():
            words = [word for daemon, cap in caps.items() for word in ("--cap", daemon, cap)]
            self._do("ceph-authtool", "keyring", "--gen-key", "-n", who, *words)
        self._do("monmaptool", "--create", "--addv", "a", monitor, "--fsid", cluster, "--clobber", "monmap")
        self._do("ceph-mon", "-i", "a", "--mkfs", "--monmap", "monmap", *self._ceph)
        self._run(["ceph-mon", "-f", "-i", "a", *self._ceph], name="mon")
        self._do("ceph", *self._ceph, "auth", "import", "-i", "keyring")
        self._run(["ceph-mgr", "-f", "-i", "x", *self._ceph], name="mgr")
        number = self._do("ceph", *self._ceph, "osd", "create").strip()
        self._do("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", str(uuid.uuid4()), *self._ceph)
        self._run(["ceph-osd", "-f", "-i", number, *self._ceph], name="osd")
        front = f"--rgw_frontends=beast endpoint=127.0.0.1:{gateway}"
        self._run(["radosgw", "-f", "-n", "client.rgw", front, *self._ceph], name="rgw")
        self._wait_until(self._answers, "radosgw to answer")
        keys = ("--access-key", self.access_key, "--secret-key", self.secret_key)
        self._do("radosgw-admin", *self._ceph, "user", "create", "--uid=penstock", "--display-name=penstock", *keys)

    @property
    def _ceph(self) -> tuple[str, str, str, str]:
        return ("-c", "ceph.conf", "--keyring", "keyring")


_CEPH_USERS = {
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx", "mgr": "allow rw"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
    "mgr.x": {"mon": "allow profile mgr", "osd": "allow *"},
}

_CEPH_CONF = """\
[global]
fsid = {cluster}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/$name.log
keyring = {folder}/keyring
[mon.a]
mon data = {folder}/mon
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
[mgr.x]
mgr data = {folder}/mgr
[client.rgw]
rgw data = {folder}/rgw
"""
