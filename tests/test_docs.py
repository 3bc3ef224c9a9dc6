"""What the documents say is so: their Python and console blocks run, their links lead somewhere.

A block runs unless `<!-- not run: reason -->` stands on the line before it. The blocks of one file share a directory,
which holds a small checkpoint, `llama`; its Python blocks share their names. `$ command  # exit 3` expects that code.
"""

from __future__ import annotations

import code
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import typer.main
from tests.support import commands
from tests.support.fork_server import ForkServer

import penstock as ps
from penstock import errors
from penstock.cli.main import add_commands
from penstock.config import environment
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

app = add_commands()

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "design"),
]
RESULTS = sorted((ROOT / "benchmarks").rglob("*.md"))
SHELLS = {"|", "&", "&&", "||", ";", "<", ">", ">>", "2>&1"}
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<kind>python|console)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block that runs."""

    kind: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(kind=found["kind"], text=found["text"], line=text[: found.start("text")].count("\n") + 1)
        for found in FENCE.finditer(text)
        if not found["reason"]
    ]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def run_command(command: str, fork_server: ForkServer) -> subprocess.CompletedProcess[str]:
    """As a shell would; `penstock` itself without the seconds of its imports."""
    words = shlex.split(command)
    if words[0] == "penstock" and not SHELLS & {*words}:
        return commands.run(fork_server, words[1:])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PATH": path},
    )


def run_console(block: Block, page: Path, fork_server: ForkServer) -> None:
    for line in block.text.splitlines():
        if not line.startswith("$ "):
            continue
        command, _, comment = line[2:].partition("  # exit ")
        done = run_command(command, fork_server)
        assert done.returncode == int(comment or 0), f"{page.name}:{block.line}: {command}\n{done.stdout}{done.stderr}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Iterator[None]:
    """A directory to work in, and a hub of its own, whose path must be short enough for a socket."""
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(prefix="ps-") as runtime:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
        yield


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_documentation_code_blocks_run(page: Path, place, fork_server: ForkServer) -> None:
    write_llama("llama", total_bytes=2 * MIB, shards=2)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.kind == "console":
            run_console(block, page, fork_server)
            continue
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)


def test_quickstart_can_be_pasted_line_by_line(place, capsys) -> None:
    console = code.InteractiveConsole()
    for line in next(block for block in blocks(ROOT / "README.md") if block.kind == "python").text.splitlines():
        assert not console.push(line), f"waits for more after: {line}"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_documentation_links_point_to_existing_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_public_name_is_in_reference() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^::: penstock\.(\w+)$", page, re.M))
    assert described == set(ps.__all__) - {"__version__"}


def test_documentation_chart_matches_benchmark_results() -> None:
    """The pictures are those that the results' files give: nobody has edited one without the other."""
    done = subprocess.run([sys.executable, ROOT / "scripts" / "chart.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_error_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.PenstockError) and value is not errors.PenstockError:
            first = (value.__doc__ or "").splitlines()[0]
            assert f"| `{name}` | {value.blame} | {first} |" in page


@pytest.mark.parametrize("report", [ps.PublishReport, ps.UpdateReport])
def test_every_sync_report_field_is_documented(report: type[msgspec.Struct]) -> None:
    page = (ROOT / "docs" / "train" / "sync.md").read_text(encoding="utf-8").partition("## How to read the reports")[2]
    assert [name for name in report.__struct_fields__ if f"`{name}`" not in page] == []


def test_every_command_option_and_variable_is_documented() -> None:
    page = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("cli*.md")))

    def walk(command, prefix: str) -> None:
        for name, child in command.commands.items():
            if hasattr(child, "commands"):
                walk(child, f"{prefix}{name} ")
                continue
            assert f"penstock {prefix}{name}" in page
            for parameter in child.params:
                for option in [*parameter.opts, *parameter.secondary_opts]:
                    assert not option.startswith("--") or f"`{option}" in page, f"{prefix}{name} {option}"

    walk(typer.main.get_command(app), "")
    tuning = (ROOT / "docs" / "operate" / "tuning.md").read_text(encoding="utf-8")
    assert [name for name, _, _ in environment({}) if f"`{name}`" not in tuning] == []
