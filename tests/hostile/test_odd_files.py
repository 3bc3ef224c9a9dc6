"""Names that are no regular files, arguments that are no names: a typed error at once, no wait, no silence."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.main import run
from penstock.errors import ConfigError, NotFound, PenstockError, SourceUnavailable
from penstock.hub.auth import first_token
from penstock.testing.checkpoints import write_llama
from penstock_hf.runai_streamer import FileChunks, FileStreamer, SafetensorsStreamer

SOON_S = 30.0
"""Far above what a refusal takes on a loaded machine."""


def refused(call: Callable[[], object]) -> PenstockError:
    """The error of a call that must end: a hang is a failure here, not of the whole run."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test looks at whatever it is
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive(), "it hangs"
    assert raised, "it succeeded"
    assert isinstance(raised[0], PenstockError), repr(raised[0])
    return raised[0]


def command(*arguments: str) -> int | str | None:
    """The exit code of a command of the CLI, in this process."""
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    return ended.value.code


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_llama(tmp_path / "sharded", num_layers=1, hidden=64, shards=2)
    return tmp_path / "sharded"


def do_stream(uri: Any) -> None:
    with penstock.stream(uri) as tensors:
        list(tensors)


def do_fetch(uri: Any) -> None:
    with penstock.join("odd") as fleet:
        fleet.fetch({}, fallback=uri)


VERBS: dict[str, Callable[[Any], object]] = {
    "load": penstock.load,
    "inspect": penstock.inspect,
    "verify": penstock.verify,
    "stream": do_stream,
    "load_into": lambda uri: penstock.load_into({}, uri),
    "fetch": do_fetch,
}

ODD = ["pipe", "link to a device", "link that leads nowhere", "link to itself", "directory"]


def replace(path: Path, odd: str) -> None:
    path.unlink(missing_ok=True)
    if odd == "pipe":
        os.mkfifo(path)
    elif odd == "directory":
        path.mkdir()
    else:
        path.symlink_to({"link to a device": "/dev/zero", "link to itself": path.name}.get(odd, "gone"))


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["penstock.manifest", "model.safetensors.index.json"])
def test_special_file_as_index_is_rejected(sharded: Path, name: str, odd: str) -> None:
    if odd == "directory" and name != "penstock.manifest":
        pytest.skip("a directory of that name is no index, and what lies beside it is loaded")
    replace(sharded / name, odd)
    for verb in ("load", "inspect"):
        assert name in str(refused(lambda verb=verb: VERBS[verb](sharded)))  # type: ignore[misc]
    assert command("inspect", str(sharded)) == 3


@pytest.mark.parametrize("odd", ODD[:4])
@pytest.mark.parametrize("with_index", [True, False])
def test_error_for_special_file_as_shard_names_file(sharded: Path, odd: str, with_index: bool) -> None:
    """Without an index nothing else would tell that a part of the model is missing."""
    if not with_index:
        (sharded / "model.safetensors.index.json").unlink()
    shard = sorted(sharded.glob("*.safetensors"))[1]
    replace(shard, odd)
    for verb in ("load", "inspect", "stream"):
        error = refused(lambda verb=verb: VERBS[verb](sharded))  # type: ignore[misc]
        assert isinstance(error, NotFound | SourceUnavailable)
        assert shard.name in str(error)
    refused(lambda: penstock.load(f"{sharded}/*.safetensors"))


@pytest.mark.parametrize("odd", ODD[:3])
def test_special_file_as_signature_is_rejected(sharded: Path, tmp_path: Path, odd: str) -> None:
    assert command("manifest", str(sharded)) in {0, None}
    key = tmp_path / "key.pem"
    replace(key, odd)
    assert isinstance(refused(lambda: penstock.verify(sharded, public_key=key)), ConfigError)
    key.unlink()
    key.write_text("no key")
    replace(sharded / "penstock.manifest.sig", odd)
    assert "penstock.manifest.sig" in str(refused(lambda: penstock.verify(sharded, public_key=key)))


@pytest.mark.parametrize("odd", ODD[:3])
def test_special_file_as_token_file_is_refused(tmp_path: Path, odd: str) -> None:
    replace(tmp_path / "tokens", odd)
    assert isinstance(refused(lambda: first_token(tmp_path / "tokens")), ConfigError)


def test_special_file_as_config_fails_conversion(sharded: Path, tmp_path: Path) -> None:
    replace(sharded / "config.json", "pipe")
    assert "config.json" in str(refused(lambda: penstock.convert(sharded, tmp_path / "out")))
    assert not (tmp_path / "out").exists()


NAMES: list[Any] = ["model\0.safetensors", "", None, 7, 1.5, b"model.safetensors", "\ud800", object()]


@pytest.mark.parametrize("name", [*NAMES, ["a.safetensors", 7], [None]], ids=repr)
@pytest.mark.parametrize("verb", VERBS)
def test_invalid_model_name_raises_in_every_api_function(verb: str, name: Any) -> None:
    if verb == "fetch" and name is None:
        pytest.skip("None is no fallback there")
    assert isinstance(refused(lambda: VERBS[verb](name)), ConfigError)


def runai_file(name: Any) -> None:
    with FileStreamer() as streamer:
        streamer.stream_files([FileChunks(0, name, [0], [8])])


def runai_tensors(name: Any) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([name])


OTHERS: dict[str, Callable[[Any], object]] = {
    "safe_open": penstock.safe_open,
    "load_file": penstock.load_file,
    "convert from": lambda name: penstock.convert(name, "nowhere"),
    "convert to": lambda name: penstock.convert("nowhere", name),
    "public_key": lambda name: penstock.verify("nowhere", public_key=name),
    "trace": lambda name: penstock.load("nowhere", settings=penstock.ReadSettings(trace=name)),
    "runai files": runai_file,
    "runai tensors": runai_tensors,
}


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("verb", OTHERS)
def test_invalid_path_argument_raises_config_error(verb: str, name: Any) -> None:
    if name is None and verb in {"public_key", "trace"}:
        pytest.skip("None is none there")
    assert isinstance(refused(lambda: OTHERS[verb](name)), ConfigError)


def test_special_files_next_to_weights_are_ignored(sharded: Path, tmp_path: Path) -> None:
    """Only what would be read is held to be a file."""
    whole = penstock.load(sharded, settings=penstock.ReadSettings(copy=True))
    os.mkfifo(sharded / "notes.txt")
    (sharded / "README.md").symlink_to("gone")
    (sharded / "backup.safetensors.d").mkdir()
    again = penstock.load(sharded, settings=penstock.ReadSettings(copy=True))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    shutil.copytree(sharded, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns("notes.txt"))
    assert penstock.inspect(tmp_path / "copy").num_tensors == len(whole)
