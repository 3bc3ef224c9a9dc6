"""Verbs and commands use `PENSTOCK_HUB` and `PENSTOCK_TOKEN_FILE` with a hub that requires a token."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
import torch
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.main import add_commands
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

app = add_commands()

TOKEN = "all-models-0123456789"
OTHER = "other-models-0123456789"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n{OTHER} other*\n")
    return path


@pytest.fixture
def hub(token_file: Path) -> Iterator[str]:
    """Return the address of a hub that requires a token."""
    auth = Auth.of(token_file=token_file)
    running = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    running.start()
    yield running.url
    running.stop()


@pytest.fixture
def variables(hub: str, token_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A hub on this host would be found here. Its absence shows that the variable was used.
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("PENSTOCK_HUB", hub)
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(token_file))


def test_api_functions_read_hub_and_token_from_environment(variables: None, hub: str, tmp_path: Path) -> None:
    weights = {"w": torch.arange(4096.0)}
    with (
        ps.join("m") as fleet,
        ps.cache.WeightCache() as keeper,
        ps.publisher("policy", weights) as publisher,
        ps.subscriber("policy", {"w": torch.zeros(4096)}) as subscriber,
    ):
        fleet.offer(weights)
        joined = {one.id for one in (fleet.member, keeper.member, publisher.member, subscriber.member)}
        assert joined == {one.member for one in ps.hub.status().members}
        assert ps.hub.why("m").lines
        # The request reached the hub with the token.
        with pytest.raises(ps.NotFound, match="no weight cache on this host has 'm'"):
            ps.cache.attach("m", timeout_s=0.0)
        explicit = ps.ConnectionSettings(hub=hub, token=TOKEN)
        assert joined == {one.member for one in ps.hub.status(connection=explicit).members}
    assert not (tmp_path / "none").exists() or not list((tmp_path / "none").glob("hub*.sock"))


def test_argument_overrides_environment(variables: None, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ps.errors.PermissionDenied, match="token"):
        ps.hub.status("m", connection=ps.ConnectionSettings(token=OTHER))
    with pytest.raises(ps.errors.PermissionDenied, match="token"):
        ps.hub.status(connection=ps.ConnectionSettings(token="not-one-of-the-hub-0123"))
    monkeypatch.setenv("PENSTOCK_HUB", "http://127.0.0.1:9")  # no process listens there
    assert ps.hub.status(connection=hub).members == ()


def test_commands_read_environment_variables(variables: None, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.join("m") as fleet:
        fleet.offer({"w": torch.zeros(16)})
        done = CliRunner().invoke(app, ["status", "m"])
        assert done.exit_code == 0 and fleet.member.id[:8] in done.stdout
        monkeypatch.setenv("PENSTOCK_HUB", "http://127.0.0.1:9")
        done = CliRunner().invoke(app, ["status", "m", "--hub", hub])
        assert done.exit_code == 0 and fleet.member.id[:8] in done.stdout


def test_conversion_into_cache_joins_hub_from_options(hub: str, token_file: Path, tmp_path: Path) -> None:
    source = tmp_path / "llama"
    write_llama(source, total_bytes=2 * MIB)
    options = ["--hub", hub, "--token-file", str(token_file), "--devices", "cpu", "--workers", "1"]
    command = [sys.executable, "-m", "penstock.cli.main", "convert", str(source), "cache:f32", "--to", "cast:F32"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while "keeping f32" not in (line := process.stderr.readline()):
                assert line, "it ended"
            members = ps.hub.status("f32", connection=ps.ConnectionSettings(hub=hub, token=TOKEN)).members
            assert [one.name.rpartition(":")[2] for one in members] == [str(process.pid)]
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_conversion_token_without_hub_raises(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path), str(tmp_path / "out"), "--token-file", str(tmp_path / "token")]
    )
    assert isinstance(done.exception, ps.ConfigError) and "--hub" in str(done.exception)


def test_conversion_into_directory_refuses_listen_address(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(tmp_path), str(tmp_path / "out"), "--listen", "127.0.0.1:0"])
    assert isinstance(done.exception, ps.ConfigError) and "cache:MODEL" in str(done.exception)
