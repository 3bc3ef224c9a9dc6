"""The manifests of `deploy/kubernetes`, rendered by kustomize, and their pods in containers on this host.

A pod runs as the kubelet would start it, with its environment, references, volumes, user, capabilities, read-only root
and init containers. Its image is this host's files. All pods share one network with a loopback device, so every pod has
the address 127.0.0.1. Resources are not limited.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.container import REPOSITORY, Container, Mount, Network
from tests.support.sources import source_path

from penstock.lifecycle import Closeable

MANIFESTS = REPOSITORY / "deploy" / "kubernetes"
POD_IP = "127.0.0.1"
Object = dict[str, Any]


def kubectl() -> str | None:
    """Return the path of kubectl from the interpreter's environment or from the host, or None if there is none."""
    return shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def render(
    directory: Path, resource: str, *, components: Sequence[str] = (), fleet: Mapping[str, str] | None = None
) -> list[Object]:
    """Return the objects of an overlay that a user would write.

    Args:
        directory: an empty directory for the overlay.
        resource: a path below `deploy/kubernetes`, such as `overlays/vllm`.
        components: names below `deploy/kubernetes/components`.
        fleet: values for the fleet's ConfigMap.
    """
    import yaml

    base = os.path.relpath(MANIFESTS, directory.resolve())
    overlay: Object = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{base}/{resource}"],
        "components": [f"{base}/components/{name}" for name in components],
    }
    if fleet:
        literals = [f"{name}={value}" for name, value in fleet.items()]
        generator = {"name": "penstock-fleet", "namespace": "penstock", "behavior": "merge", "literals": literals}
        overlay["configMapGenerator"] = [generator]
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    program = kubectl()
    assert program is not None
    done = subprocess.run([program, "kustomize", str(directory)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def find(objects: Sequence[Object], kind: str, name: str) -> Object:
    """Return the object of a kind with this name. kustomize may have appended its digest to the name."""
    pattern = re.compile(rf"{re.escape(name)}(-[a-z0-9]{{10}})?")
    (found,) = [one for one in objects if one["kind"] == kind and pattern.fullmatch(one["metadata"]["name"])]
    return found


def environment(container: Object, objects: Sequence[Object]) -> dict[str, str]:
    """Return the variables of a container, including ConfigMaps among the objects but no optional Secrets."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            variables |= find(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        else:
            assert source["secretRef"]["optional"]
    for entry in container.get("env", []):
        variables[entry["name"]] = entry.get("value", POD_IP)
        assert "value" in entry or entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    return {name: expand(value, variables) for name, value in variables.items()}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with `$(NAME)` replaced as the kubelet does. Unknown names remain."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def words_of(container: Object, objects: Sequence[Object] = ()) -> list[str]:
    """Return a container's command. The entry point of Penstock's images is `penstock`."""
    words = container.get("command") or (["penstock"] if "/penstock" in container["image"] else [])
    variables = environment(container, objects) if objects else {}
    return [expand(word, variables) for word in [*words, *container.get("args", [])]]


@dataclass(slots=True)
class Node(Closeable):
    """A node with its directories, manually created Secrets and ConfigMaps, and the network of its pods."""

    directory: Path
    objects: Sequence[Object]
    secrets: Mapping[str, Mapping[str, bytes]]
    """Files of each Secret and ConfigMap, by name."""
    programs: Mapping[str, Path] = field(default_factory=dict)
    """Programs in the pods' images that have another name here."""
    extra: Sequence[Mount] = ()
    """Further mounts for every pod."""
    network: Network = field(init=False)
    stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.network = self.stack.enter_context(Network())
        programs = self.directory / "programs"
        programs.mkdir(parents=True)
        for name, path in self.programs.items():
            (programs / name).symlink_to(path)

    def pod(self, kind: str, name: str) -> Pod:
        """Return the first pod of a workload. It has not started."""
        return Pod(self, find(self.objects, kind, name)["spec"]["template"]["spec"], self._new(f"pod-{name}"))

    def _new(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir()
        return path

    def close(self) -> None:
        """Kill all pods."""
        self.stack.close()


class Pod:
    """The volumes of a pod, and its containers as they start."""

    def __init__(self, node: Node, spec: Object, directory: Path) -> None:
        self._node, self._spec, self._directory = node, spec, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._group = spec["securityContext"]["fsGroup"]
        self._volumes = {volume["name"]: self._volume(volume) for volume in spec.get("volumes", [])}

    def _volume(self, volume: Object) -> Path:
        """Create a volume's directory as the kubelet does, and return it."""
        if "hostPath" in volume:
            path = self._node.directory / "host" / volume["hostPath"]["path"].lstrip("/")
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            return path
        path = self._directory / "volumes" / volume["name"]
        path.mkdir(parents=True)
        os.chown(path, 0, self._group)
        path.chmod(0o2777)
        source = volume.get("secret") or volume.get("configMap")
        if source:
            for name, data in self._node.secrets[source.get("secretName") or source["name"]].items():
                (path / name).write_bytes(data)
                (path / name).chmod(source.get("defaultMode", 0o644))
                os.chown(path / name, 0, self._group)
        return path

    def initialize(self, timeout_s: float = 60.0) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run the init containers one after another. Return their completed processes by name."""
        done = {}
        for container in self._spec.get("initContainers", []):
            words = self._command(container)
            done[container["name"]] = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
            assert done[container["name"]].returncode == 0, done[container["name"]].stderr
        return done

    def start(self) -> tuple[subprocess.Popen[bytes], Path]:
        """Start the pod's only container. Return its process and its log file."""
        (container,) = self._spec["containers"]
        log = self._directory / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(self._command(container), stdout=file, stderr=subprocess.STDOUT)
        self._process = process
        self._node.stack.callback(process.wait, 30)
        self._node.stack.callback(process.kill)
        return process, log

    def probe(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until a probe of the pod's container succeeds."""
        (container,) = self._spec["containers"]
        probe = container[name]
        request = probe.get("httpGet") or probe["tcpSocket"]
        (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == request["port"]]
        if "httpGet" in probe:
            words = ["curl", "-ksSf", f"{request.get('scheme', 'HTTP').lower()}://{POD_IP}:{port}{request['path']}"]
        else:
            words = ["bash", "-c", f"exec 3<>/dev/tcp/{POD_IP}/{port}"]
        deadline = time.monotonic() + timeout_s
        while (done := self._node.network.run(*words)).returncode:
            ended = self._process is not None and self._process.poll() is not None
            assert not ended and time.monotonic() < deadline, (
                f"{words}: {done.stderr}\n{(self._directory / 'log').read_text()}"
            )
            time.sleep(0.1)

    def _command(self, spec: Object) -> list[str]:
        """Create a container, and return the command that runs its process there."""
        security = {**self._spec["securityContext"], **spec["securityContext"]}
        mounts = [
            Mount(
                source=self._volumes[mount["name"]],
                target=mount["mountPath"],
                read_only=mount.get("readOnly", False),
            )
            for mount in spec.get("volumeMounts", [])
        ]
        directory = self._directory / spec["name"]
        directory.mkdir()
        services = [one["metadata"]["name"] for one in self._node.objects if one["kind"] == "Service"]
        container = self._node.stack.enter_context(
            Container(
                directory,
                network=self._node.network,
                mounts=[
                    Mount(source=self._node.directory / "programs", target="/opt/programs"),
                    *self._node.extra,
                    *mounts,
                ],
                hosts=services,
                is_read_only=security.get("readOnlyRootFilesystem", False),
            )
        )
        words = words_of(spec, self._node.objects)
        if words[0] == "penstock":
            words = [sys.executable, "-m", *words]
        path = f"/opt/programs:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin"
        image = {"PATH": path, "PYTHONPATH": source_path()}
        return container.command(
            words,
            environ={**image, **environment(spec, self._node.objects)},
            uid=security["runAsUser"],
            gid=security["runAsGroup"],
            capabilities=[name.lower() for name in security["capabilities"].get("add", [])],
        )
