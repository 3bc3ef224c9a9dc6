"""Runs the Dockerfile's steps in namespaces over this host's files, and the commands of the image."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support import container
from tests.support.container import REPOSITORY, Container
from tests.support.long_running import long_running

dockerfile_parse = pytest.importorskip("dockerfile_parse")
pytestmark = long_running
PACKAGED = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables with which this host reaches a package index. docker would receive them as build arguments."""


@dataclass(slots=True)
class Stage:
    """A stage of a build, with its files and the settings of its last instructions."""

    container: Container
    environ: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: tuple[int, int] = (0, 0)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def words(self, words: list[str], environ: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that runs `words` in the image, with its user's own root directory."""
        uid, gid = self.user
        variables = {**self.environ, **(environ or {})}
        capabilities = None if uid == 0 else []
        return self.container.command(
            words, environ=variables, uid=uid, gid=gid, capabilities=capabilities, directory=self.directory
        )

    def run(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(list(words)), capture_output=True, text=True, timeout=timeout_s)


def build(directory: Path, arguments: Mapping[str, str], stack: ExitStack) -> Stage:
    """Run the Dockerfile and return its last stage. Unknown instructions are errors."""
    parser = dockerfile_parse.DockerfileParser(path=str(REPOSITORY / "deploy" / "Dockerfile"))
    stages: dict[str, Stage] = {}
    bases: dict[str, str] = {}
    stage: Stage | None = None
    for step in parser.structure:
        name, value = step["instruction"], step["value"]
        if name == "COMMENT":
            continue
        if stage is None and name == "ARG":
            key, _, default = value.partition("=")
            bases[f"${{{key}}}"] = default
        elif name == "FROM":
            base, *alias = value.split(" AS ")
            # The image is this host, so it needs only an interpreter, pip and the tools of Debian.
            assert bases.get(base, base).startswith("python:3.")
            own = directory / str(len(stages))
            own.mkdir()
            path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
            stage = Stage(stack.enter_context(Container(own)), {"PATH": path, "HOME": "/root"})
            stages[alias[0] if alias else ""] = stage
        elif stage is None:
            raise AssertionError(f"{name} before FROM")
        elif name == "ARG":
            key, _, default = value.partition("=")
            stage.arguments[key] = arguments.get(key, default)
        elif name == "WORKDIR":
            stage.directory = value
            stage.container.path(value).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = value.split()
            origin = REPOSITORY
            if sources[0].startswith("--from="):
                origin = stages[sources.pop(0).removeprefix("--from=")].container.path("/")
            for source in sources:
                copy(origin / source.lstrip("/"), stage.container.path(f"{stage.directory}/"), target)
        elif name == "RUN":
            index = {key: text for key, text in os.environ.items() if key.upper().startswith(PACKAGED)}
            # Compiling modules that these tests do not import would take half of their time.
            index["PIP_NO_COMPILE"] = "1"
            words = stage.words(["/bin/sh", "-c", value], {**stage.arguments, **index})
            done = subprocess.run(words, capture_output=True, text=True, timeout=170)
            if done.returncode and ("No matching distribution" in done.stderr or "connection" in done.stderr.lower()):
                pytest.skip(f"no package index answers here: {done.stderr[-300:]}")
            assert done.returncode == 0, f"{value}\n{done.stdout}{done.stderr}"
        elif name == "ENV":
            for word in shlex.split(value):
                key, _, text = word.partition("=")
                stage.environ[key] = text.replace("$PATH", stage.environ["PATH"])
        elif name == "USER":
            uid, gid = value.split(":")
            stage.user = int(uid), int(gid)
        elif name in {"ENTRYPOINT", "CMD"}:
            setattr(stage, {"ENTRYPOINT": "entrypoint", "CMD": "command"}[name], json.loads(value))
        else:
            raise AssertionError(f"the test does not know {name}")
    assert stage is not None
    return stage


def copy(source: Path, directory: Path, target: str) -> None:
    """Copy a file into a directory, or a directory's content to a path, as COPY does."""
    place = Path(f"{directory}/{target}") if not target.startswith("/") else Path(f"{root_of(directory)}{target}")
    if source.is_dir():
        shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, place)


def root_of(path: Path) -> Path:
    """Return the container's root for a path from `Container.path`."""
    parts = path.parts
    return Path(*parts[: parts.index("root", 4) + 1])


def require_container() -> None:
    if (why := container.missing()) is not None:
        pytest.skip(why)
    if shutil.which("python", path=f"{sys.base_prefix}/bin") is None:
        pytest.skip("the interpreter of this host has no `python` beside it, as the base image has")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    require_container()
    with ExitStack() as stack:
        yield build(tmp_path_factory.mktemp("build"), {}, stack)


def test_image_contains_requested_adapters(tmp_path: Path) -> None:
    require_container()
    with ExitStack() as stack:
        asked = {"EXTRAS": "metrics", "ADAPTERS": "penstock-convert penstock-tools penstock-compile-cache"}
        image = build(tmp_path, asked, stack)
        done = image.run(*image.entrypoint, "--help")
        assert done.returncode == 0 and {"simulate", "compile-cache", "convert", "load"} <= {*done.stdout.split()}, (
            done.stderr
        )


def test_image_runs_command_as_unprivileged_user(image: Stage) -> None:
    assert image.user == (10001, 10001)
    done = image.run(*image.entrypoint, *image.command)
    assert done.returncode == 0 and "penstock" in done.stdout, done.stderr
    done = image.run(*image.entrypoint, "--version")
    assert done.returncode == 0 and done.stdout.startswith("penstock 0."), done.stderr
    who = image.run("sh", "-c", "id --user --name; touch /opt/penstock/bin/x")
    assert who.stdout == "penstock\n" and "Permission denied" in who.stderr
    # The package is installed from the wheel, and no build files remain.
    where = image.run("python", "-c", "import penstock, sys; print(penstock.__file__, 'torch' in sys.modules)")
    assert where.stdout.startswith("/opt/penstock/lib/python3"), where.stderr
    assert not image.container.path("/source").exists() and not image.container.path("/wheels").exists()


def test_hub_in_image_responds(image: Stage) -> None:
    token = image.container.path("/opt/tokens")
    token.write_text("a-token-of-the-image\n")
    token.chmod(0o644)
    words = image.words([*image.entrypoint, "hub", "--listen=127.0.0.1:0", "--token-file=/opt/tokens"])
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout is not None and hub.stderr is not None
            url = hub.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), hub.stderr.read()
            done = image.run(*image.entrypoint, "status", "--hub", url, "--token-file=/opt/tokens")
            assert (done.returncode, done.stdout) == (0, "no members\n"), done.stderr
        finally:
            image.container.send_signal(hub, signal.SIGTERM)
    assert hub.returncode == 0
