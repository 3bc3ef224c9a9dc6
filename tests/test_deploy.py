"""The manifests under `deploy/kubernetes` are valid, and say what exists: options, variables, files, ports, labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main
from tests.support.kubernetes import MANIFESTS, Object, environment, find, kubectl, render, words_of

from penstock.cli.main import add_commands
from penstock.config import Settings
from penstock.config import environment as known_variables
from penstock.fetcher.storage_initializer import FLEET_PREFIX
from penstock.spi import engine_weights as replica
from penstock.storage.source import is_registered
from penstock_vllm import plugin as vllm

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = ("1.29", "1.33", "1.37")
"""Of Kubernetes, whose schemas the objects are held to."""
FILE_OPTIONS = ("--token-file", "--cert", "--key", "--client-ca", "--redis-password-file")
TUTORIAL = MANIFESTS.parent.parent / "docs" / "tutorials" / "kubernetes.md"


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def objects(engine: str, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """An overlay with every component."""
    if kubectl() is None:
        pytest.skip("kubectl is not installed")
    components = sorted(path.name for path in (MANIFESTS / "components").iterdir())
    return render(tmp_path_factory.mktemp(engine), f"overlays/{engine}", components=components)


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    for one in objects:
        if one["kind"] in {"Deployment", "DaemonSet"}:
            yield one["metadata"]["name"], one["spec"]["template"]


def containers(objects: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """The spec of the pod, and a container of it."""
    for _, template in pods(objects):
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            yield template["spec"], container


def options_of(words: Sequence[str]) -> dict[str, str]:
    """`--name=value` of a command line."""
    return dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)


def test_kustomize_overlay_deploys_fleet_and_engine(engine: str, objects: list[Object]) -> None:
    assert {name for name, _ in pods(objects)} == {"penstock-redis", "penstock-hub", "penstock-cache", engine}
    assert find(objects, "Deployment", "penstock-hub")["spec"]["replicas"] == 2
    for kind, names in {
        "PodDisruptionBudget": {"penstock-hub", engine},
        "NetworkPolicy": {"penstock-redis", "penstock-hub", "penstock-members", "penstock-monitoring", engine},
        "Service": {"penstock-redis", "penstock-hub", engine},
    }.items():
        assert {one["metadata"]["name"] for one in objects if one["kind"] == kind} == names
    assert {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"} == {"penstock"}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_kubernetes_schemas(objects: list[Object], version: str) -> None:
    checked = 0
    for one in objects:
        if not one["apiVersion"].startswith("monitoring.coreos.com"):
            kubernetes_validate.validate(one, version, strict=True)
            checked += 1
    assert checked >= 15


class Selector(msgspec.Struct, forbid_unknown_fields=True):
    matchLabels: dict[str, str]


class KeyOf(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    key: str


class Authorization(msgspec.Struct, forbid_unknown_fields=True):
    credentials: KeyOf


class Authority(msgspec.Struct, forbid_unknown_fields=True):
    configMap: KeyOf


class Tls(msgspec.Struct, forbid_unknown_fields=True):
    ca: Authority
    serverName: str


class Endpoint(msgspec.Struct, forbid_unknown_fields=True):
    port: str
    path: str
    interval: str
    authorization: Authorization
    scheme: str = "http"
    tlsConfig: Tls | None = None


class ServiceMonitor(msgspec.Struct, forbid_unknown_fields=True):
    selector: Selector
    endpoints: list[Endpoint]


class PodMonitor(msgspec.Struct, forbid_unknown_fields=True):
    selector: Selector
    podMetricsEndpoints: list[Endpoint]


def test_prometheus_monitors_select_existing_ports(objects: list[Object]) -> None:
    """No package has the schemas of the Prometheus operator; these are the parts of them that are used."""
    services = [one for one in objects if one["kind"] == "Service"]
    (one,) = [one for one in objects if one["kind"] == "ServiceMonitor"]
    monitor = msgspec.convert(one["spec"], ServiceMonitor)
    (service,) = [
        x for x in services if monitor.selector.matchLabels.items() <= x["metadata"].get("labels", {}).items()
    ]
    assert {end.port for end in monitor.endpoints} <= {port["name"] for port in service["spec"]["ports"]}
    assert {end.scheme for end in monitor.endpoints} == {"https"}
    (one,) = [one for one in objects if one["kind"] == "PodMonitor"]
    members = msgspec.convert(one["spec"], PodMonitor)
    selected = [t for _, t in pods(objects) if members.selector.matchLabels.items() <= t["metadata"]["labels"].items()]
    ports = {port["name"] for t in selected for c in t["spec"]["containers"] for port in c.get("ports", [])}
    assert {end.port for end in members.podMetricsEndpoints} <= ports


def test_deployed_commands_and_options_exist(engine: str, objects: list[Object]) -> None:
    commands = typer.main.get_command(add_commands()).commands
    seen = set()
    for _, container in containers(objects):
        words = words_of(container, objects)
        if words[0] == "penstock":
            assert not [word for word in words if "$(" in word]
            # Types and values too, as far as the command line checks them.
            commands[words[1]].make_context(words[1], words[2:])
            seen.add(words[1])
    assert seen == {"hub", "cache"} | ({"storage-initializer"} if engine == "sglang" else set())


def test_deployed_environment_variables_are_known_and_valid(objects: list[Object]) -> None:
    known = {name for name, _, _ in known_variables({})}
    for _, container in containers(objects):
        variables = environment(container, objects)
        given = {name: value for name, value in variables.items() if name.startswith("PENSTOCK_")}
        assert given.keys() <= known
        Settings.read(given)
    keeper = find(objects, "DaemonSet", "penstock-cache")["spec"]["template"]["spec"]["containers"][0]
    assert environment(keeper, objects)["PENSTOCK_RUNTIME_DIR"] == "/run/penstock"


def test_members_on_one_node_share_directory_and_user(objects: list[Object]) -> None:
    sharing = set()
    for name, template in pods(objects):
        spec = template["spec"]
        assert not {"hostPID", "hostIPC", "hostNetwork"} & spec.keys()
        volumes = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for mount in container["volumeMounts"]:
                if mount["name"] in volumes:
                    sharing.add(
                        (name, spec["securityContext"]["runAsUser"], volumes[mount["name"]], mount["mountPath"])
                    )
    assert len({name for name, *_ in sharing}) == 2
    assert {rest for _, *rest in map(list, sharing) for rest in [tuple(rest)]} == {
        (10001, "/run/penstock", "/run/penstock")
    }


def test_every_container_is_sandboxed_with_resource_limits(objects: list[Object]) -> None:
    for spec, container in containers(objects):
        security = {**spec["securityContext"], **container["securityContext"]}
        is_set_up = container["name"] == "runtime-directory"
        assert security["runAsNonRoot"] is not is_set_up
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["capabilities"].get("add", []) == (["CHOWN", "FOWNER"] if is_set_up else [])
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security.get("readOnlyRootFilesystem") or container["name"] in {"vllm", "sglang"}
        assert container["resources"]["requests"] and "memory" in container["resources"]["limits"]
        assert spec["automountServiceAccountToken"] is False
        assert not re.search(r":latest$|/[^:]*$", container["image"]), "an image needs a version"


def test_long_running_containers_have_probes(objects: list[Object]) -> None:
    for _, template in pods(objects):
        for container in template["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe := container.get(name):
                    assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports
            assert "livenessProbe" in container


def test_deployed_vllm_options_are_accepted_by_loader(engine: str, objects: list[Object]) -> None:
    if engine != "vllm":
        return
    (container,) = find(objects, "Deployment", "vllm")["spec"]["template"]["spec"]["containers"]
    options = options_of(words_of(container, objects))
    assert options["--load-format"] == vllm.LOAD_FORMAT
    extra = replica.read_options(json.loads(options["--model-loader-extra-config"]))
    # Another model than the fleet's name says: the name is the option's.
    fleet = replica.FleetOptions.read(extra, "/models/another")
    assert fleet is not None
    assert fleet.fleet == "llama-3-8b"
    hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert f"touch {fleet.drain_file};" in hook
    assert f"[ -e {fleet.drain_file}.done ]" in hook
    # Not in the directory that all pods of the node share.
    assert str(Path(str(fleet.drain_file)).parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert not str(fleet.drain_file).startswith("/run/penstock")


def test_pre_stop_hook_waits_for_readers_within_grace_period(
    objects: list[Object],
) -> None:
    for spec, container in containers(objects):
        if "lifecycle" in container:
            turns = int(re.search(r"-ge (\d+)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[1])
            assert replica.DRAIN_S < turns * 0.5 < spec["terminationGracePeriodSeconds"]
        if (drain_s := options_of(words_of(container)).get("--drain-s")) is not None:
            assert float(drain_s) < spec["terminationGracePeriodSeconds"]


def test_files_named_in_options_are_mounted(objects: list[Object]) -> None:
    for spec, container in containers(objects):
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in spec["volumes"]}
        # The engine of SGLang has the fleet's variables and no Penstock in it.
        if container["name"] == "sglang":
            continue
        options = options_of(words_of(container, objects))
        files = [options[name] for name in FILE_OPTIONS if name in options]
        files += [value for name, value in environment(container, objects).items() if name.endswith("_FILE")]
        assert [file for file in files if str(Path(file).parent) not in mounts] == []


def test_tutorial_creates_every_secret_used_by_pods(objects: list[Object]) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    created = set(re.findall(r"kubectl create (?:secret \w+|configmap) (\S+)", text))
    used = set[str]()
    for _, template in pods(objects):
        for volume in template["spec"]["volumes"]:
            used |= {volume[kind][name] for kind, name in NAMES_OF_VOLUMES.items() if kind in volume}
        for container in template["spec"]["containers"]:
            used |= {source["secretRef"]["name"] for source in container.get("envFrom", []) if "secretRef" in source}
    assert used == created


def test_only_hub_mounts_all_tokens(engine: str, objects: list[Object]) -> None:
    mounting: dict[str, set[str]] = {}
    for name, template in pods(objects):
        # In whatever way the pod takes a Secret: a volume, a projected volume, a variable.
        for secret in ("penstock-tokens", "penstock-member"):
            if f'"{secret}"' in json.dumps(template["spec"]):
                mounting.setdefault(secret, set()).add(name)
    assert mounting == {"penstock-tokens": {"penstock-hub"}, "penstock-member": {"penstock-cache", engine}}


NAMES_OF_VOLUMES = {"secret": "secretName", "configMap": "name"}


def test_selectors_match_pods_and_named_ports(objects: list[Object]) -> None:
    labels = [template["metadata"]["labels"] for _, template in pods(objects)]
    ports = {port["name"] for _, container in containers(objects) for port in container.get("ports", [])}
    for one in objects:
        spec: Any = one.get("spec", {})
        if one["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if one["kind"] == "NetworkPolicy":
            assert {port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])} <= ports
        if one["kind"] in {"Service", "NetworkPolicy", "PodDisruptionBudget"}:
            selector = spec.get("selector", spec.get("podSelector", {}))
            selector = selector.get("matchLabels", selector)
            if "matchExpressions" not in selector:
                assert any(selector.items() <= found.items() for found in labels), one["metadata"]["name"]


def test_hub_and_redis_addresses_resolve_to_services(objects: list[Object]) -> None:
    hosts = set(re.findall(r"(?:https|redis)://([a-z-]+):\d+", json.dumps(objects)))
    assert hosts == {"penstock-hub", "penstock-redis"}
    assert hosts <= {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}


def test_kserve_container_starts_storage_initializer() -> None:
    (one,) = yaml.safe_load_all((MANIFESTS / "kserve" / "storage-container.yaml").read_text(encoding="utf-8"))
    assert (one["apiVersion"], one["kind"]) == ("serving.kserve.io/v1alpha1", "ClusterStorageContainer")
    assert one["spec"].keys() == {"container", "supportedUriFormats"}
    container = one["spec"]["container"]
    # KServe merges the container into one of this name, and gives it SRC and DEST as arguments.
    assert container["name"] == "storage-initializer" and "args" not in container
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [container]}}
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)
    command = typer.main.get_command(add_commands()).commands[container["command"][1]]
    command.make_context("", [*container["command"][2:], "penstock+s3://bucket/model", "/mnt/models"])
    prefixes = [entry["prefix"] for entry in one["spec"]["supportedUriFormats"]]
    for prefix in prefixes:
        assert prefix.startswith(FLEET_PREFIX) and is_registered(prefix[len(FLEET_PREFIX) : -len("://")])
