"""Containers that use this host's files through namespaces and an overlay instead of an image. They need root on Linux.

The root is an overlay over the host's root directory. The interpreter and the packages are the host's, and writes are
lost. A network has only a loopback device, so nothing can reach what listens in it. `kubernetes` and
`tests/integration/deploy` decide which containers a manifest or a Dockerfile needs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.lifecycle import Closeable

REPOSITORY = Path(__file__).resolve().parents[2]
_TOOLS = ("unshare", "nsenter", "setpriv", "chroot", "mount", "ip")


def missing() -> str | None:
    """Return why containers cannot run here, or None if they can."""
    if os.geteuid() != 0:
        return "only root makes namespaces and overlays"
    absent = [name for name in _TOOLS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    script = (
        "mount -t tmpfs t /mnt && cd /mnt && mkdir a b c && mount -t overlay o -o lowerdir=/,upperdir=a,workdir=b c"
    )
    probe = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--fork", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return f"namespaces or overlays are not allowed: {probe.stderr.strip()}" if probe.returncode else None


class Network(Closeable):
    """A network namespace with a loopback device that several containers can share."""

    def __init__(self) -> None:
        # `cat` ends with its standard input, even if this process is killed.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"ready\n"
        self.path = f"/proc/{self._holder.pid}/ns/net"

    def run(self, *command: str | Path, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command of the host in this network, as a process on a node does."""
        words = ["nsenter", f"--net={self.path}", *map(str, command)]
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)

    def close(self) -> None:
        """Close the namespace. Containers in it keep it alive until they end."""
        with self._holder:
            self._holder.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory of the host at a path in a container."""

    source: Path
    target: str
    read_only: bool = False


class Container(Closeable):
    """An overlay over the host's root in its own namespaces. Its processes end with it.

    Args:
        directory: an empty directory of the host, for the overlay.
        network: the network to use. None means the host's.
        mounts: mounted in this order. Mount points are created.
        hosts: names that resolve to 127.0.0.1 inside.
        is_read_only: whether only the mounts are writable.
    """

    def __init__(
        self,
        directory: Path,
        *,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        hosts: Iterable[str] = (),
        is_read_only: bool = False,
    ) -> None:
        self.root = directory / "root"
        words = ["nsenter", f"--net={network.path}"] if network else []
        words += ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-ec"]
        words.append(self._script(directory, mounts, hosts, is_read_only))
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the container did not start: {self._holder.stderr.read().decode()}")

    def _script(self, directory: Path, mounts: Sequence[Mount], hosts: Iterable[str], is_read_only: bool) -> str:
        """Return the shell script that makes the root and then waits."""
        root = shlex.quote(str(self.root))
        layers = shlex.quote(str(directory))
        lines = [
            f"mount -t tmpfs -o mode=755 layers {layers}",
            f"mkdir {layers}/upper {layers}/work {root}",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={layers}/upper,workdir={layers}/work {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            *(f"echo 127.0.0.1 {name} >> {root}/etc/hosts" for name in hosts),
        ]
        needed = {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
        # The interpreter may be in root's home, which other users cannot enter.
        for path in needed:
            lines += [f"chmod a+x {root}{shlex.quote(str(parent))}" for parent in path.parents]
            # An overlay shows one file system without the file systems mounted in it.
            if os.stat(path).st_dev != os.stat("/").st_dev:
                inside = f"{root}{shlex.quote(str(path))}"
                lines.append(f"mkdir -p {inside} && mount --rbind {shlex.quote(str(path))} {inside}")
        for mount in mounts:
            source, target = shlex.quote(str(mount.source)), f"{root}{shlex.quote(mount.target)}"
            lines.append(f"mkdir -p {target} && mount --bind {source} {target}")
            if mount.read_only:
                lines.append(f"mount -o remount,bind,ro {target}")
            # The container's own /tmp hides a clone below /tmp.
            for path in needed:
                if path.is_relative_to(mount.target):
                    inside = f"{root}{shlex.quote(str(path))}"
                    lines.append(f"mkdir -p {inside} && mount --rbind {shlex.quote(str(path))} {inside}")
        if is_read_only:
            lines.append(f"mount -o remount,ro {root}")
        return "\n".join([*lines, "echo ready", "exec cat"])

    def path(self, path: str) -> Path:
        """Return the path under which this process sees a path in the container."""
        return Path(f"/proc/{self._holder.pid}/root{self.root}{path}")

    def command(
        self,
        words: Sequence[str],
        *,
        environ: Mapping[str, str],
        uid: int = 0,
        gid: int = 0,
        capabilities: Sequence[str] | None = None,
        directory: str = "/",
    ) -> list[str]:
        """Return a host command that runs `words` in the container with only this environment.

        Args:
            words: the command.
            environ: its whole environment.
            uid, gid: its user and group, without other groups.
            capabilities: the capabilities that root keeps, in lower case without `cap_`. None means all.
            directory: its working directory.
        """
        namespaces = f"/proc/{self._holder.pid}/ns"
        inside = [f"--mount={namespaces}/mnt", f"--pid={namespaces}/pid_for_children", f"--ipc={namespaces}/ipc"]
        privileges = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        if capabilities is not None:
            kept = ",".join(["-all", *(f"+{name}" for name in capabilities)])
            privileges += ["--no-new-privs", f"--bounding-set={kept}", "--inh-caps=-all"]
        variables = [f"{name}={value}" for name, value in environ.items()]
        # Use env's own option, because a shell with `cd` would need the right to run in both places.
        start = ["env", "-i", f"--chdir={directory}", *variables, *words]
        return [
            *["nsenter", *inside, f"--net={namespaces}/net", "chroot", str(self.root)],
            *["setpriv", *privileges, *start],
        ]

    @staticmethod
    def send_signal(process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to a running `command`. Its parent nsenter does not pass signals on."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in children:
            os.kill(int(pid), number)

    def close(self) -> None:
        """Kill its processes and unmount everything. Idempotent."""
        with self._holder:
            self._holder.kill()
