"""Commands, options and environment variables are promises: adding one edits this list, which a reviewer sees."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from penstock.cli.main import add_commands, run
from penstock.config import environment

app = add_commands()

COMMANDS = {
    "load": "URI --device --names --memory-bytes --verify --no-verify --trace --cache --dry-run --format",
    "inspect": "URI --all --format",
    "verify": "URI --public-key --format",
    "manifest": "URI --sign --out --force --format",
    "cache": "URIS --model --device --hub --listen --data-port --token-file --memory-bytes --host-bytes --disk "
    "--disk-bytes --accept --max-readers --max-bytes-per-s --drain-s --format",
    "fetch": "MODEL --to --device --cache --fallback --revision --hub --listen --data-port --token-file "
    "--timeout-s --force --format",
    "convert": "PLACES --to --op --verify --no-verify --devices --workers --memory-bytes --task-bytes --shard-bytes "
    "--scratch --trace --force --ray --rates --hub --token-file --listen --data-port --list-ops --dry-run --format",
    "storage-initializer": "PAIRS --hub --token-file --format",
    "hub": "--listen --redis --redis-password-file --token-file --cert --key --client-ca --audit --audit-file",
    "ui": "--hub --token-file --port",
    "status": "MODEL --hub --token-file --watch --format",
    "why": "MODEL --member --hub --token-file --format",
    "drain": "MEMBER --undo --reason --hub --token-file",
    "run": "COMMAND --verbose",
    "doctor": "--path --format",
    "calibrate": "PATH --format",
    "version": "--format",
    "compile-cache restore": "URI --engine --config --device --at --model --public-key --hub --listen --data-port "
    "--token-file --format",
    "compile-cache save": "URI KEY --at --sign --format",
    "compile-cache list": "URI --at --public-key --cache --format",
    "plan load": "URI --names --memory-bytes --explain --format",
    "plan sync": "MODEL --trainers --receivers --shards --tp --whole-experts --fp8 --bucket-bytes --explain --format",
    "simulate sync": "MODEL --trainers --receivers --shards --tp --whole-experts --fp8 --direct --arena --one-node "
    "--bucket-bytes --watermark-bytes --cluster --rates --python-slowdown --seed --picture --format",
    "plan convert": "SOURCES --to --op --task-bytes --workers --cluster --rates --seed --picture --format",
    "simulate convert": "--tasks --task-bytes --shrink --nodes --cluster --rates --seed --picture --format",
    "simulate fetch": "--bytes --nodes --parts --holders --storage-gb-per-s --cluster --rates --python-slowdown --seed "
    "--picture --format",
    "bench fetch": "--device --total-gb --receivers --repeat --format",
    "bench load": "URI --device --names --memory-bytes --repeat --cold --format",
}

ENVIRONMENT = [
    "PENSTOCK_MEMORY_BYTES",
    "PENSTOCK_CHUNK_BYTES",
    "PENSTOCK_FETCH_THREADS",
    "PENSTOCK_STALL_S",
    "PENSTOCK_RETRIES",
    "PENSTOCK_CACHE_DIR",
    "PENSTOCK_CACHE_BYTES",
    "PENSTOCK_PROGRESS",
    "PENSTOCK_IO_URING",
    "PENSTOCK_SAFETENSORS_LOG",
    "PENSTOCK_NIXL_TLS",
    "PENSTOCK_CA_FILE",
    "PENSTOCK_CERT_FILE",
    "PENSTOCK_KEY_FILE",
    "PENSTOCK_HUB",
    "PENSTOCK_TOKEN_FILE",
    "PENSTOCK_RUNTIME_DIR",
    "PENSTOCK_COMPILE_CACHE_DIR",
    "PENSTOCK_COMPILE_CACHE_KEYS",
    "PENSTOCK_COMPILE_CACHE_SIGNING_KEY",
    "PENSTOCK_METRICS",
    "PENSTOCK_METRICS_TOKEN_FILE",
    "PENSTOCK_REDIS_URL",
    "PENSTOCK_REDIS_PASSWORD_FILE",
]


def commands(command, prefix: str = "") -> dict[str, Any]:
    """Every command by its full name."""
    found: dict[str, Any] = {}
    for name, child in command.commands.items():
        found |= commands(child, f"{prefix}{name} ") if hasattr(child, "commands") else {prefix + name: child}
    return found


ALL = commands(typer.main.get_command(app))


def spelt(command) -> str:
    """A command's arguments and options in order."""
    words = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            words.append(parameter.name.upper())
        else:
            words += [*parameter.opts, *parameter.secondary_opts]
    return " ".join(words)


def test_commands_and_options_match_snapshot() -> None:
    assert {name: spelt(command) for name, command in ALL.items()} == COMMANDS


@pytest.mark.parametrize("name", ALL)
def test_command_has_summary_and_valid_examples(name: str) -> None:
    command = ALL[name]
    summary = command.get_short_help_str(limit=1000)
    assert 0 < len(summary) < 50 and summary.endswith("."), summary
    with command.make_context(f"penstock {name}", [], resilient_parsing=True) as context:
        shown = command.get_help(context)
    assert "\n  Examples:\n    penstock " in shown
    examples = re.findall(r"^    (penstock .*)$", shown, re.MULTILINE)
    for example in examples:
        words = shlex.split(example)[1:]
        assert words[: len(name.split())] == name.split()
        if "--list-ops" in words:  # it prints them while it is parsed
            continue
        with command.make_context(example, words[len(name.split()) :]) as context:
            assert context.params


def test_convert_lists_operations_without_source_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["convert", "--list-ops"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert "slerp(t)" in lines and "ties(density, weights=(), scale=1.0)" in lines and len(lines) > 10


def test_python_m_penstock_runs_command() -> None:
    def out(*words: str, **environ: str) -> str:
        command = [sys.executable, "-m", "penstock", *words]
        env = {**os.environ, **environ}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    assert "Usage: penstock" in (shown := out("-h")) and "\n  load      " in shown
    assert out("--version").startswith("penstock ")
    # As the script of `--install-completion` asks.
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_CWORD": "1", "COMP_WORDS": "penstock conv"}
    assert out(**asked).split() == ["convert"]


def test_environment_variables_match_snapshot() -> None:
    assert [name for name, _, _ in environment({})] == ENVIRONMENT
