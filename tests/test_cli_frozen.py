"""Commands, options and environment variables are promises: adding one edits this list, which a reviewer sees."""

from __future__ import annotations

import typer.main

from penstock.cli.main import app
from penstock.config import environment

COMMANDS = {
    "load": "URI --device --names --memory-bytes --verify --no-verify --trace --dry-run --format",
    "inspect": "URI --all --format",
    "verify": "URI --public-key --format",
    "manifest": "URI --sign --out --format",
    "keep": "URIS --model --device --hub --listen --token-file --memory-bytes --host-bytes --disk --disk-bytes "
    "--drain-s --format",
    "pull": "MODEL --to --device --fallback --revision --hub --listen --token-file --wait-s --format",
    "convert": "PLACES --to --op --verify --no-verify --devices --workers --memory-bytes --task-bytes --shard-bytes "
    "--scratch --trace --ray --rates --hub --token-file --listen --dry-run --format",
    "storage-initializer": "PAIRS --hub --token-file --format",
    "hub": "--listen --redis --redis-password-file --token-file --cert --key --client-ca --audit --audit-file",
    "ui": "--hub --token-file --port",
    "status": "MODEL --hub --token-file --watch --format",
    "why": "MODEL --member --hub --token-file --format",
    "drain": "MEMBER --undo --reason --hub --token-file",
    "doctor": "--path --calibrate --format",
    "version": "--format",
    "plan load": "URI --names --memory-bytes --explain --format",
    "plan sync": "MODEL --trainers --receivers --shards --tp --whole-experts --fp8 --bucket-bytes --explain --format",
    "simulate sync": "MODEL --trainers --receivers --shards --tp --whole-experts --fp8 --direct --one-node "
    "--bucket-bytes --watermark-bytes --cluster --rates --seed --picture --format",
    "plan convert": "SOURCES --to --op --task-bytes --workers --cluster --rates --seed --picture --format",
    "simulate convert": "--tasks --task-bytes --shrink --nodes --cluster --rates --seed --picture --format",
    "simulate fetch": "--bytes --nodes --parts --holders --cluster --rates --seed --picture --format",
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
    "PENSTOCK_NIXL_TLS",
    "PENSTOCK_CA_FILE",
    "PENSTOCK_CERT_FILE",
    "PENSTOCK_KEY_FILE",
    "PENSTOCK_HUB",
    "PENSTOCK_TOKEN_FILE",
    "PENSTOCK_RUNTIME_DIR",
    "PENSTOCK_METRICS",
    "PENSTOCK_METRICS_TOKEN_FILE",
    "PENSTOCK_REDIS_URL",
    "PENSTOCK_REDIS_PASSWORD_FILE",
]


def commands(command, prefix: str = "") -> dict[str, str]:
    """Every command by its full name, with its arguments and options in order."""
    found: dict[str, str] = {}
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            found |= commands(child, f"{prefix}{name} ")
            continue
        spelt = []
        for parameter in child.params:
            if parameter.param_type_name == "argument":
                spelt.append(parameter.name.upper())
            else:
                spelt += [*parameter.opts, *parameter.secondary_opts]
        found[prefix + name] = " ".join(spelt)
    return found


def test_commands_and_options_are_these() -> None:
    assert commands(typer.main.get_command(app)) == COMMANDS


def test_environment_variables_are_these() -> None:
    assert [name for name, _, _ in environment({})] == ENVIRONMENT
