"""The systemd units are valid and sandboxed, their commands exist, and they start the right processes."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from tests.support import container
from tests.support.container import REPOSITORY, Container, Mount, Network
from tests.support.sources import source_path

from penstock.cli.main import add_commands
from penstock.config import Settings, environment
from penstock.testing.checkpoints import write_llama

app = add_commands()

UNITS = REPOSITORY / "deploy" / "systemd"
HUB, CACHE = "penstock-hub.service", "penstock-cache@.service"
MAX_EXPOSURE = 25
"""Limit for `systemd-analyze security`, from 0 to 100. A service without restrictions has 96."""


def variables(path: Path) -> dict[str, str]:
    """Return the variables in an environment file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def value_of(unit: str, key: str) -> list[str]:
    """Return all values of a key in a unit."""
    return re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(encoding="utf-8"), re.M)


def command_of(unit: str, environ: dict[str, str]) -> list[str]:
    """Return the words of ExecStart as systemd expands them: `${NAME}` in a word, `$NAME` into words."""
    (line,) = value_of(unit, "ExecStart")
    words = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$[A-Z_]+", word):
            words += environ.get(word[1:], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: environ[match[1]], word))
    return words


EXAMPLE = variables(UNITS / "cache-example.env")


@pytest.mark.parametrize(("unit", "environ"), [(HUB, {}), (CACHE, EXAMPLE)], ids=["hub", "cache"])
def test_systemd_units_use_existing_commands_and_variables(unit: str, environ: dict[str, str]) -> None:
    _, name, *words = command_of(unit, environ)
    typer.main.get_command(add_commands()).commands[name].make_context(name, words)
    known = {name for name, _, _ in environment({})}
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(UNITS.iterdir()))
    named = set(re.findall(r"\bPENSTOCK_[A-Z_]+", text))
    assert named and named <= known
    if (drain_s := dict(word.split("=", 1) for word in words if "=" in word).get("--drain-s")) is not None:
        assert float(drain_s) < float(value_of(unit, "TimeoutStopSec")[0])


def test_commented_settings_parse_as_fleet_options() -> None:
    text = (UNITS / "cache-example.env").read_text(encoding="utf-8")
    fleet = dict(line[1:].split("=", 1) for line in text.splitlines() if re.match(r"#[A-Z_]+=", line))
    Settings.read({name: value for name, value in fleet.items() if name.startswith("PENSTOCK_")})
    _, name, *words = command_of(CACHE, {**EXAMPLE, **fleet})
    context = typer.main.get_command(add_commands()).commands[name].make_context(name, words)
    assert context.params["listen"] == "10.0.0.7:7071"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Container]:
    """Return a host with Penstock in /opt/penstock, its units in systemd's directory, and its user made by sysusers."""
    if (why := container.missing()) is not None:
        pytest.skip(why)
    absent = [name for name in ("systemd-analyze", "systemd-sysusers") if shutil.which(name) is None]
    if absent:
        pytest.skip(f"systemd is not installed: {', '.join(absent)}")
    programs, settings, runtime, layers = (tmp_path / name for name in ("bin", "etc", "run", "layers"))
    for path in (programs, settings, runtime, layers):
        path.mkdir()
    start = f'#!/bin/sh\nPYTHONPATH={source_path()} exec {sys.executable} -m penstock "$@"\n'
    (programs / "penstock").write_text(start)
    (programs / "penstock").chmod(0o755)
    write_llama(settings / "llama", total_bytes=2_000_000)
    settings.chmod(0o755)
    # systemd creates the RuntimeDirectory= of the unit.
    shutil.chown(runtime, 10001, 10001)
    runtime.chmod(int(value_of(CACHE, "RuntimeDirectoryMode")[0], 8))
    mounts = [
        Mount(source=programs, target="/opt/penstock/bin", read_only=True),
        Mount(source=UNITS, target="/etc/systemd/system", read_only=True),
        Mount(source=settings, target="/etc/penstock", read_only=True),
        Mount(source=runtime, target="/run/penstock"),
    ]
    with Network() as network, Container(layers, network=network, mounts=mounts) as running:
        yield running


PATH = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}


def run(host: Container, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(host.command(words, environ=PATH), capture_output=True, text=True, timeout=60)


def test_systemd_units_are_valid_and_sandboxed(host: Container) -> None:
    for unit in (HUB, CACHE.replace("@", "@llama")):
        done = run(host, "systemd-analyze", "verify", "--man=no", f"/etc/systemd/system/{unit}")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        path = f"/etc/systemd/system/{unit.replace('@llama', '@')}"
        limit = f"--threshold={MAX_EXPOSURE}"
        done = run(host, "systemd-analyze", "security", "--offline=true", "--no-pager", limit, path)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_cache_service_runs_unprivileged_and_drains(host: Container, tmp_path: Path) -> None:
    done = run(host, "systemd-sysusers", "/etc/systemd/system/penstock.sysusers.conf")
    assert done.returncode == 0, done.stderr
    user = run(host, "id", "penstock").stdout
    assert user.startswith("uid=10001(penstock) gid=10001(penstock)")
    settings = {**EXAMPLE, "WEIGHTS": "/etc/penstock/llama"}
    fixed = dict(word.split("=", 1) for word in value_of(CACHE, "Environment")[0].split())
    environ = {**PATH, **fixed, **settings}
    words = host.command(command_of(CACHE, settings), environ=environ, uid=10001, gid=10001, capabilities=[])
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as keeper:
        deadline = time.monotonic() + 60
        while "keeping llama-3-8b" not in (said := (tmp_path / "log").read_text()):
            assert keeper.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        Container.send_signal(keeper, signal.SIGTERM)
        assert keeper.wait(30) == 0, (tmp_path / "log").read_text()
