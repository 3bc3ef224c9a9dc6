"""Destinations that are not free: sources, symlinks, mount points, foreign files, other writers and odd names."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock as ps
from penstock.errors import ConfigError, DestinationError, DiskFull
from penstock.fetcher.storage_initializer import initialize
from penstock.fetcher.to_files import fetch_model
from penstock.storage.place import DestinationClaim, OutputPlace, clear, fill, remove_dead, require_apart, unlock
from penstock.storage.write import new_file

torch = pytest.importorskip("torch")

APART = r"the destination (is|contains) the source"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "source")


def checkpoint(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    save_file({"w": np.full((8, 8), value, np.float32)}, str(directory / "model.safetensors"))
    (directory / "config.json").write_text('{"model_type": "x"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def convert(source: Path, out: str | Path, **options: object) -> None:
    ps.convert(source, out, devices="cpu", workers=1, progress=False, **options)  # type: ignore[arg-type]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def value_of(directory: Path) -> float:
    return float(ps.load(directory, progress=False)["w"][0, 0])


@pytest.mark.parametrize("how", ["same", "link", "parent", "file link", "hidden by dots"])
def test_destination_overlapping_source_is_refused(source: Path, tmp_path: Path, how: str) -> None:
    to = {"same": source, "parent": tmp_path, "hidden by dots": source / "x" / ".."}.get(how, tmp_path / "to")
    read = source
    if how == "link":
        to.symlink_to(source)
    elif how == "file link":
        # As in the cache of huggingface_hub, the source's files are symlinks into the destination.
        to.mkdir()
        (source / "model.safetensors").rename(to / "blob")
        (source / "model.safetensors").symlink_to(to / "blob")
    elif how == "hidden by dots":
        (source / "x").mkdir()
    before = contents(tmp_path)
    for replace in (False, True):
        with pytest.raises(ConfigError, match=APART):
            convert(read, to, replace=replace)
        with pytest.raises(ConfigError, match=APART):
            require_apart([str(read)], OutputPlace.at(to).path, replace=replace)
    with pytest.raises(ConfigError, match=APART):
        initialize(str(read), to)
    assert contents(tmp_path) == before


def test_destination_inside_source_is_never_replaced(source: Path) -> None:
    convert(source, source / "out")
    before = contents(source)
    with pytest.raises(ConfigError, match="the destination is inside the source"):
        convert(source, source / "out", replace=True, to="cast:BF16")
    assert contents(source) == before


def test_remote_destination_overlapping_source_is_refused() -> None:
    for read, to in (("s3://b/m", "s3://b/m/"), ("s3://b/m/x/", "s3://b/m"), ("s3://b/m/a.safetensors", "s3://b/m")):
        with pytest.raises(ConfigError, match=APART):
            ps.convert(read, to, progress=False)


@pytest.mark.parametrize(
    "others",
    [["notes.txt"], ["other.safetensors"], ["photographs/"], ["sub/model.safetensors"], ["model.gguf", "config.json"]],
)
def test_replace_error_names_unrelated_files(source: Path, tmp_path: Path, others: list[str]) -> None:
    out = tmp_path / "out"
    ps.convert(source / "model.safetensors", out, devices="cpu", workers=1, progress=False)
    for name in others:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).mkdir() if name.endswith("/") else (out / name).write_bytes(b"precious")
    before = contents(tmp_path)
    with pytest.raises(ConfigError) as caught:
        convert(source, out, to="cast:BF16", replace=True)
    assert all(name.partition("/")[0] in str(caught.value) for name in others)
    assert contents(tmp_path) == before and (out / "photographs").exists() == ("photographs/" in others)


def test_replace_rejects_weights_without_manifest(source: Path, tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", 2.0)
    with pytest.raises(ConfigError, match=r"config\.json, model\.safetensors, tokenizer\.json"):
        convert(source, other, replace=True)
    assert value_of(other) == 2.0


def test_replace_removes_all_files_of_earlier_conversion(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out)
    convert(checkpoint(tmp_path / "other", 3.0), out, replace=True)
    assert value_of(out) == 3.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out", "source"]


def test_symlink_to_empty_directory_is_filled_and_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert(source, tmp_path / "link")
    assert value_of(tmp_path / "real") == 1.0 and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "source"]


@pytest.mark.parametrize("to", [".", "./", "../here", ""])
def test_conversion_into_working_directory_keeps_inode(
    source: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    inode = here.stat().st_ino
    convert(source, to or str(here))
    assert here.stat().st_ino == inode
    assert sorted(os.listdir(".")) == sorted(contents(here)) and value_of(here) == 1.0
    assert "config.json" in os.listdir(".") and sorted(os.listdir("..")) == ["here", "source"]
    with pytest.raises(ConfigError, match="working directory"):
        convert(source, to or str(here), to="cast:BF16", replace=True)
    # The same call finds its previous result.
    convert(source, to or str(here))


def test_failed_publish_moves_files_back(tmp_path: Path) -> None:
    place, staging = tmp_path / "place", tmp_path / "place" / ".place.penstock-1"
    staging.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (staging / name).write_text(name)

    def stop(name: str) -> int:
        return "acb".index(name)

    (staging / "c").unlink()
    (staging / "c").mkdir()
    (place / "c").mkdir()
    (place / "c" / "of another").write_text("x")
    with pytest.raises(OSError, match="not empty"):
        fill(place, staging, stop)
    assert sorted(path.name for path in place.iterdir()) == [staging.name, "c"]
    assert sorted(path.name for path in staging.iterdir()) == ["a", "b", "c"]


def test_next_writer_rolls_back_killed_publish(tmp_path: Path) -> None:
    place, staging = tmp_path / "place", tmp_path / "place" / ".place.penstock-1"
    staging.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (staging / name).write_text(name)
    if not (child := os.fork()):
        fill(place, staging, lambda name: os.kill(os.getpid(), signal.SIGKILL) or 0 if name == "never" else 0)
        os._exit(0)
    os.waitpid(child, 0)
    assert sorted(path.name for path in place.iterdir()) == ["a", "b", "c"]
    # This is the state after a kill between two renames.
    staging.mkdir()
    (place / "c").rename(staging / "c")
    (staging / ".penstock-moving").write_text('["a", "b", "c", "../x"]')
    with DestinationClaim.open(place, staging):
        assert [path.name for path in place.iterdir()] == [staging.name]
        assert {path.name for path in staging.iterdir()} >= {"a", "b", "c"}


def test_second_writer_to_destination_is_refused(tmp_path: Path) -> None:
    place = OutputPlace.at(tmp_path / "out")
    with DestinationClaim.open(place.path, place.staging("1")):
        for token in ("1", "2"):
            with pytest.raises(DestinationError, match="another process writes to this place"):
                DestinationClaim.open(place.path, place.staging(token))
        DestinationClaim.open(tmp_path / "elsewhere", OutputPlace.at(tmp_path / "elsewhere").staging("1")).close()
    DestinationClaim.open(place.path, place.staging("2")).close()


def test_killed_writer_leaves_no_lock(tmp_path: Path) -> None:
    place = OutputPlace.at(tmp_path / "out")
    ready, done = os.pipe()
    if not (child := os.fork()):
        claim = DestinationClaim.open(place.path, place.staging("dead-1"))
        (claim.staging / "file").write_text("half")
        os.write(done, b"x")
        signal.pause()
    os.read(ready, 1)
    with pytest.raises(DestinationError):
        DestinationClaim.open(place.path, place.staging("2"))
    remove_dead(place, "dead-")
    assert place.staging("dead-1").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with DestinationClaim.open(place.path, place.staging("2")):
        remove_dead(place, "dead-")
        assert not place.staging("dead-1").exists()


def test_forked_child_inherits_no_destination_lock(tmp_path: Path) -> None:
    place = OutputPlace.at(tmp_path / "out")
    claim = DestinationClaim.open(place.path, place.staging("1"))
    (hold, go), (is_forked, forked) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.close(go)
        os.write(forked, b"x")
        os.read(hold, 1)
        os._exit(0)
    os.read(is_forked, 1)
    claim.close()
    DestinationClaim.open(place.path, place.staging("1")).close()
    for fd in (hold, go, is_forked, forked):
        os.close(fd)
    os.waitpid(child, 0)


def test_second_conversion_to_same_destination_is_refused(source: Path, tmp_path: Path) -> None:
    refused: list[Exception] = []

    def again(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(DestinationError, match="another process writes") as caught:
                convert(source, tmp_path / "out", to="cast:BF16")
            refused.append(caught.value)

    ps.convert(source, tmp_path / "out", devices="cpu", workers=1, progress=again)
    assert refused and value_of(tmp_path / "out") == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("what", ["link", "file", "pipe", "dangling link"])
def test_staging_directory_of_other_user_is_rejected(source: Path, tmp_path: Path, what: str) -> None:
    victim = checkpoint(tmp_path / "victim", 2.0)
    before = contents(victim)
    place = OutputPlace.at(tmp_path / "out")
    planted = place.staging("key")
    plant(planted, what, victim)
    with pytest.raises(DestinationError, match="not a directory of this user"):
        DestinationClaim.open(place.path, planted)
    assert contents(victim) == before and os.path.lexists(planted)


def plant(path: Path, what: str, victim: Path) -> None:
    if what == "link":
        path.symlink_to(victim)
    elif what == "dangling link":
        path.symlink_to(victim / "absent")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("x")


def test_conversion_does_not_follow_planted_symlink(source: Path, tmp_path: Path) -> None:
    victim = checkpoint(tmp_path / "victim", 2.0)
    before = contents(victim)
    with pytest.raises(RuntimeError, match="ends here"):
        ps.convert(source, tmp_path / "out", devices="cpu", workers=1, progress=ends)
    (kept,) = (path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith(".out"))
    for file in kept.iterdir():
        file.unlink()
    (kept / "model.safetensors").symlink_to(victim / "model.safetensors")
    with pytest.raises(DestinationError):
        convert(source, tmp_path / "out")
    assert contents(victim) == before


def ends(done: int, total: int) -> None:
    if done == total:
        raise RuntimeError("it ends here")


def test_new_file_replaces_symlink_and_keeps_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to("target")
    with new_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "target").read_text() == "precious" and (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").stat().st_mode & 0o777 == 0o644
    with pytest.raises(RuntimeError), new_file(tmp_path / "link") as file:
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_clear_and_unlock_leave_empty_staging_directory(tmp_path: Path) -> None:
    place = OutputPlace.at(tmp_path / "out")
    with DestinationClaim.open(place.path, place.staging("1")) as claim:
        (claim.staging / "sub").mkdir()
        (claim.staging / "link").symlink_to(tmp_path)
        clear(claim.staging)
        unlock(claim.staging)
        assert not list(claim.staging.iterdir())
    assert tmp_path.exists()


_WRITERS: dict[str, Callable[[Path, str], object]] = {
    "convert": convert,
    "initialize": lambda source, to: initialize(str(source), to),
    "place": lambda source, to: OutputPlace.at(to).require_free(),
    "fetch": lambda source, to: fetch_model(
        "m", connection=ps.ConnectionSettings(), to=to, fallback=str(source), timeout_s=0.1
    ),
}


@pytest.mark.parametrize("writer", _WRITERS)
@pytest.mark.parametrize(
    "name", ["nul\0", "surrogate\ud800", "x" * 256, "é" * 200], ids=["nul", "surrogate", "256", "utf8"]
)
def test_invalid_destination_name_raises_and_writes_nothing(
    source: Path, tmp_path: Path, name: str, writer: str
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises((ConfigError, DestinationError)):
        _WRITERS[writer](source, f"{tmp_path}/{name}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "new\nline", "a b*?[c]", "-o", "~x", "a:b"])
def test_destination_name_with_special_characters_is_written(source: Path, tmp_path: Path, name: str) -> None:
    convert(source, tmp_path / name)
    assert value_of(tmp_path / name) == 1.0
    convert(source, tmp_path / name, to="cast:BF16", replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "source"])


def test_manifest_path_cannot_replace_weights(source: Path) -> None:
    before = contents(source)
    for name in ("model.safetensors", "../source/model.safetensors"):
        with pytest.raises(ConfigError, match="would replace a file of the weights"):
            ps.manifest(source, out=source / name, replace=True, progress=False)
    assert contents(source) == before


def test_conversion_to_undecodable_name_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        convert(source, tmp_path / "bytes\udcff")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert initialize(str(source), tmp_path / "bytes\udcff").num_files == 3


def test_exhausted_inodes_raise_disk_full_and_leave_no_files(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    # The root, the destination and one directory in it use all inodes.
    if libc.mount(b"none", str(disk).encode(), b"tmpfs", 0, b"nr_inodes=3"):
        pytest.skip("mounting is not allowed here")
    try:
        for write_to in (lambda: initialize(str(source), disk / "a"), lambda: convert(source, disk / "a" / "b")):
            with pytest.raises(DiskFull):
                write_to()
            assert not (disk / "a" / "b").exists() and not any(path.is_file() for path in disk.rglob("*"))
        with pytest.raises(DestinationError):
            fetch_model("m", connection=ps.ConnectionSettings(), to="/dev/null/x", fallback=str(source), timeout_s=0.1)
    finally:
        libc.umount2(str(disk).encode(), 2)
