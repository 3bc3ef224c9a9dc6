"""The manifests under `deploy/` say what exists: commands and their options, mounted files, ports, labels, hooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from penstock.cli.main import app
from penstock.integrations import replica, vllm

yaml = pytest.importorskip("yaml")

PAGES = sorted((Path(__file__).resolve().parent.parent / "deploy" / "kubernetes").glob("*.yaml"))
OBJECTS = [(page, one) for page in PAGES for one in yaml.safe_load_all(page.read_text(encoding="utf-8"))]
FILE_OPTIONS = ("--token-file", "--cert", "--key", "--client-ca", "--redis-password-file")


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for _, one in OBJECTS:
        if one["kind"] in {"Deployment", "DaemonSet"}:
            yield one["metadata"]["name"], one["spec"]["template"]


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for _, template in pods():
        for container in template["spec"]["containers"]:
            yield template["spec"], container


def words_of(container: dict[str, Any]) -> list[str]:
    """The command line."""
    return [*container.get("command", []), *container.get("args", [])]


def options_of(container: dict[str, Any]) -> dict[str, str]:
    """`--name=value` of it."""
    return dict(word.split("=", 1) for word in words_of(container) if word.startswith("--") and "=" in word)


def names_of(kind: str) -> set[str]:
    return {one["metadata"]["name"] for _, one in OBJECTS if one["kind"] == kind}


def test_hub_keeper_and_engine_are_there() -> None:
    assert {page.stem for page in PAGES} == {"engine", "hub", "keeper"}
    hub = next(one for _, one in OBJECTS if (one["kind"], one["metadata"]["name"]) == ("Deployment", "penstock-hub"))
    assert hub["spec"]["replicas"] == 2
    assert all(one["apiVersion"] and one["metadata"]["name"] for _, one in OBJECTS)


def test_every_command_and_option_exists() -> None:
    commands = typer.main.get_command(app).commands
    seen = set()
    for _, container in containers():
        words = words_of(container)
        if words[0] != "penstock":
            continue
        command = commands[words[1]]
        seen.add(command.name)
        known = {option for parameter in command.params for option in parameter.opts}
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [option for option in given if option not in known] == []
    assert seen == {"hub", "keep"}


def test_the_engines_options_are_those_that_the_loader_takes() -> None:
    (engine,) = [container for _, container in containers() if words_of(container)[0] == "vllm"]
    options = options_of(engine)
    assert options["--load-format"] == vllm.LOAD_FORMAT
    extra = json.loads(options["--model-loader-extra-config"])
    found = replica.FleetOptions.read(vllm.read_options(extra))
    assert found is not None
    assert found.hub == "https://penstock-hub:7070"
    hook = engine["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert f"touch {found.drain_file};" in hook
    assert f"[ -e {found.drain_file}.done ]" in hook


def test_a_hook_waits_longer_than_readers_are_waited_for_and_ends_within_the_grace_period() -> None:
    for spec, container in containers():
        if "lifecycle" in container:
            turns = int(re.search(r"-ge (\d+)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[1])
            assert replica.DRAIN_S < turns * 0.5 < spec["terminationGracePeriodSeconds"]
        if (drain_s := options_of(container).get("--drain-s")) is not None:
            assert float(drain_s) < spec["terminationGracePeriodSeconds"]


def test_files_that_are_named_are_mounted() -> None:
    for spec, container in containers():
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        names = {volume["name"] for volume in spec.get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= names
        options = options_of(container)
        extra = json.loads(options.get("--model-loader-extra-config", "{}"))
        files = [options[name] for name in FILE_OPTIONS if name in options]
        files += [extra[name] for name in ("token_file", "drain_file") if name in extra]
        files += [one["value"] for one in container.get("env", []) if one["name"].endswith("_FILE")]
        assert [file for file in files if str(Path(file).parent) not in mounts] == []


def test_selectors_find_pods_and_ports_have_names() -> None:
    labels = [template["metadata"]["labels"] for _, template in pods()]
    ports = {port["name"] for _, container in containers() for port in container.get("ports", [])}
    for _, one in OBJECTS:
        spec = one["spec"]
        if one["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        selector = spec.get("selector", spec.get("podSelector", {}))
        selector = selector.get("matchLabels", selector)
        assert any(selector.items() <= found.items() for found in labels), one["metadata"]["name"]


def test_hubs_and_redis_are_named_as_their_services_are() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    hosts = set(re.findall(r"(?:https|redis)://([a-z-]+):\d+", text))
    assert hosts == {"penstock-hub", "penstock-redis"}
    assert hosts <= names_of("Service")
