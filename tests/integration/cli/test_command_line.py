"""The command line with real processes: Ctrl-C and resuming, `--force`, a full disk, `status` in a terminal."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import commands
from tests.support.compare import assert_same, by_safetensors
from tests.support.fork_server import ForkServer
from tests.support.terminal import Terminal

import penstock as ps
from penstock.errors import ConfigError, DestinationError, DiskFull
from penstock.fetcher.storage_initializer import initialize
from penstock.fetcher.to_files import fetch_to_files
from penstock.storage import output
from penstock.testing.checkpoints import write_llama

TO_F32 = ["--to", "cast:F32", "--devices", "cpu", "--workers", "1"]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # `tmp_path` is too long, because the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pk-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield


def test_interrupted_conversion_explains_how_to_resume(tmp_path: Path) -> None:
    # Large enough that its tasks take longer than it takes to see the bar and press a key.
    write_llama(tmp_path / "large", total_bytes=96 << 20)
    words = ["convert", str(tmp_path / "large"), str(tmp_path / "an out"), *TO_F32, "--task-bytes", "256K"]
    with Terminal(columns=400) as terminal:
        terminal.spawn(words)
        terminal.until(lambda: re.search(r"[1-9]\d? % of", terminal.text) is not None)
        # The terminal sends the signal to the workers too.
        terminal.press(b"\x03")
        assert terminal.end() == 130, terminal.text
        said, command = terminal.lines[-2:]
    assert re.search(r"penstock: interrupted. \d+ finished tasks are kept in .* the same call resumes from them", said)
    assert "Traceback" not in terminal.text and not (tmp_path / "an out").exists()
    # The line must be a valid command for any characters in the paths.
    name, *again = shlex.split(command)
    assert (name, again) == ("penstock", words)
    with Terminal(columns=400) as terminal:
        terminal.spawn([*again])
        assert terminal.end() == 0, terminal.text
        shares = [int(share) for share in re.findall(r"(\d+) % of", "\n".join(terminal.seen))]
    # The bar begins where the first one ended.
    assert shares[0] > 0
    assert re.search(r"including [1-9]\d* from an earlier run", terminal.text)
    assert ps.verify(tmp_path / "an out", progress=False).verified


def revision(place: Path) -> str:
    return ps.inspect(place).manifest.revision


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    write_llama(directory, total_bytes=1 << 20)
    return directory


def write(source: Path, to: Path, *, replace: bool = False, progress: object = False) -> None:
    """Write a copy by `fetch_to_files`, as `convert` writes its result, without the seconds in which workers start."""
    with ps.join("m", connection=ps.ConnectionSettings(transports=["loopback"])) as fleet:
        fetch_to_files(fleet, to=to, fallback=source, replace=replace, progress=progress)


def test_force_replaces_result_after_completion(
    small_checkpoint: Path, other: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    out = tmp_path / "out"
    write(other, out)
    first = revision(out)
    (out / "notes.txt").write_text("of the old one")
    for words in (
        ["convert", str(small_checkpoint), str(out)],
        ["fetch", "m", "--to", str(out), "--fallback", str(small_checkpoint)],
    ):
        refused = commands.run(fork_server, words)
        assert refused.returncode == 2 and "--force" in refused.stderr and revision(out) == first
    refused = commands.run(fork_server, ["convert", str(small_checkpoint), str(out), *TO_F32, "--force"])
    assert refused.returncode == 2 and "notes.txt" in refused.stderr and (out / "notes.txt").exists()
    (out / "notes.txt").unlink()
    done = commands.run(
        fork_server, ["convert", str(small_checkpoint), str(out), *TO_F32, "--force", "--format", "json"]
    )
    assert done.returncode == 0, done.stderr
    assert revision(out) == json.loads(done.stdout)["revision"] != first
    assert ps.verify(out, progress=False).verified
    fetched = commands.run(fork_server, ["fetch", "m", "--to", str(out), "--fallback", str(other), "--force"])
    assert fetched.returncode == 0, fetched.stderr
    assert revision(out) == first
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_conversion_keeps_old_result(
    small_checkpoint: Path, tmp_path: Path, launcher_fork_servers: None
) -> None:
    out, seen = tmp_path / "out", set[str]()
    write(small_checkpoint, out)
    first = revision(out)

    def check_progress(done: int, total: int) -> None:
        seen.add(revision(out))
        if done == total:
            raise RuntimeError("the conversion fails at its end")

    with pytest.raises(RuntimeError):
        ps.convert(
            small_checkpoint, out, to="cast:F32", devices="cpu", workers=1, replace=True, progress=check_progress
        )
    assert seen == {first} and ps.verify(out, progress=False).revision == first


@pytest.mark.parametrize("kind", ["file", "directory", "link to nothing"])
def test_force_replaces_only_weight_sets(kind: str, small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("precious")
    elif kind == "directory":
        (out / "photographs").mkdir(parents=True)
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="only weight sets are replaced"):
        write(small_checkpoint, out, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_replaces_symlink_and_keeps_target(small_checkpoint: Path, other: Path, tmp_path: Path) -> None:
    write(small_checkpoint, tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    write(other, tmp_path / "current", replace=True)
    assert not (tmp_path / "current").is_symlink()
    assert revision(tmp_path / "v1") != revision(tmp_path / "current")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "v1"]


def test_force_cannot_replace_source_or_object_store(small_checkpoint: Path, tmp_path: Path) -> None:
    write(small_checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match="the destination is the source"):
        ps.convert(tmp_path / "out", tmp_path / "out", to="cast:F32", workers=1, replace=True)
    with pytest.raises(ConfigError, match="only a local directory can be replaced"):
        ps.convert(small_checkpoint, "s3://bucket/out", replace=True)


def test_two_renames_are_used_if_exchange_is_unsupported(
    small_checkpoint: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(output, "exchange", refuse)
    write(small_checkpoint, tmp_path / "out")
    first = revision(tmp_path / "out")
    write(other, tmp_path / "out", replace=True)
    assert revision(tmp_path / "out") != first and "in two steps" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # If the second step fails, the old one is restored.
    rename, second = os.rename, revision(tmp_path / "out")

    def fail(one: Path, other: Path) -> None:
        if Path(other).name == "out" and ".old" not in Path(one).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(one, other)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(DestinationError):
        write(small_checkpoint, tmp_path / "out", replace=True)
    assert revision(tmp_path / "out") == second
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


NEEDED = re.compile(r"not enough disk space: ([\d.]+) MB needed, ([\d.]+) MB free")


@pytest.mark.parametrize("command", ["convert", "fetch", "storage-initializer"])
def test_too_small_disk_is_reported_before_writing(
    command: str, small_checkpoint: Path, small_disk: Callable[[int], Path], fork_server: ForkServer
) -> None:
    disk = small_disk(4 << 20)
    words = {
        "convert": ["convert", str(small_checkpoint), str(disk / "out"), *TO_F32],
        "fetch": ["fetch", "m", "--to", str(disk / "out"), "--fallback", str(small_checkpoint)],
        "storage-initializer": ["storage-initializer", str(small_checkpoint), str(disk / "out")],
    }[command]
    done = commands.run(fork_server, words)
    assert done.returncode == 3, done.stderr
    found = NEEDED.search(done.stderr)
    assert found is not None, done.stderr
    needed, free = (float(number) for number in found.groups())
    # Count headers too. The directory uses a page or more of the free space.
    assert needed > ps.inspect(small_checkpoint).nbytes / 1e6 - 0.1 and 4 < free < 4.2
    assert "free some space there" in done.stderr
    assert not any(path.is_file() for path in disk.rglob("*"))


def test_disk_filled_midway_reports_needed_bytes(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    disk = small_disk(1 << 20)
    with pytest.raises(DiskFull, match=r"No space left on device; 8\.00 MB needed in total, 0 B free"):  # noqa: SIM117
        with output.typed(disk / "file", needed=8_000_000), open(disk / "file", "wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))


@pytest.mark.usefixtures("own_runtime")
def test_status_fits_resized_terminal(small_checkpoint: Path, fork_server: ForkServer) -> None:
    with ps.cache.WeightCache() as keeper:
        keeper.keep("a-model-with-a-rather-long-name", small_checkpoint, progress=False)
        whole = commands.run(fork_server, ["status"]).stdout
        # A pipe receives the whole text, however wide it is.
        assert "a-model-with-a-rather-long-name" in whole and "no member had these chunks" in whole
        for columns in (400, 100, 60, 30):
            with Terminal(columns=columns) as terminal:
                terminal.fork(fork_server, ["status"])
                assert terminal.end() == 0
                # There is a line for the header, one for the member, and one for the omitted members.
                assert len(terminal.lines) == (2 if columns == 400 else 3), terminal.text
                assert terminal.lines[0].startswith("member") and "model" in terminal.lines[0]
                assert all(len(line) <= columns for line in terminal.lines)
                assert ("left out: key, host" in terminal.text) == (columns < 400)
        with Terminal(columns=100, rows=8) as terminal:
            terminal.fork(fork_server, ["status", "--watch", "0.2"])
            terminal.until(lambda: "Stop with Ctrl-C" in terminal.text and "whole" in terminal.text)
            # The same lines are drawn again in place.
            screens = len(terminal.seen)
            terminal.until(lambda: len(terminal.seen) > screens + 3)
            assert terminal.text.count("Stop with Ctrl-C") == 1
            terminal.resize(50, 8)
            terminal.until(lambda: "tier, why, silent" in terminal.text and max(map(len, terminal.lines)) <= 50)
            terminal.resize(50, 3)
            terminal.until(lambda: "more lines" in terminal.text)
            terminal.send_signal(2)
            assert terminal.end() == 0
            assert "model" in terminal.text and "whole" in terminal.lines[-2]


@pytest.mark.parametrize("command", ["convert", "fetch", "storage-initializer"])
def test_conversion_fills_empty_mount_point(
    command: str, small_checkpoint: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(64 << 20)
    # An empty volume of ext4 has this directory.
    (disk / "lost+found").mkdir()
    if command == "convert":
        ps.convert(small_checkpoint, disk, devices="cpu", workers=1, progress=False)
    elif command == "fetch":
        write(small_checkpoint, disk)
    else:
        initialize(str(small_checkpoint), disk)
    assert_same(by_safetensors(disk), by_safetensors(small_checkpoint))
    assert not [path.name for path in disk.iterdir() if path.name.startswith(".")]
    assert [path.name for path in disk.parent.iterdir()] == [disk.name]
    if command != "storage-initializer":
        with pytest.raises(ConfigError, match="mount point"):
            write(small_checkpoint, disk, replace=True)
        assert ps.verify(disk, progress=False).verified


def test_conversion_fills_bind_mount_on_same_filesystem(
    small_checkpoint: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(64 << 20)
    (disk / "a b").mkdir()
    (disk / "volume").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mount(str(disk / "volume").encode(), str(disk / "a b").encode(), None, 4096, None)
    try:
        write(small_checkpoint, disk / "a b")
        assert_same(by_safetensors(disk / "volume"), by_safetensors(small_checkpoint))
        with pytest.raises(ConfigError, match="the destination is the source"):
            ps.convert(disk / "volume", disk / "a b", replace=True, progress=False)
    finally:
        libc.umount2(str(disk / "a b").encode(), 2)
