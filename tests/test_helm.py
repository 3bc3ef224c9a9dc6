"""The Helm chart says what kustomize renders, in every setting, and its values go where they should."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.container import REPOSITORY
from tests.support.kubernetes import Object, environment, kubectl, render, words_of

yaml = pytest.importorskip("yaml")
helm_python = pytest.importorskip("helm_python")

ENGINES = {"vllm": "overlays/vllm", "sglang": "overlays/sglang", "none": "base"}
DIGEST = re.compile(r"\bpenstock-fleet-[a-z0-9]{10}\b")


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if kubectl() is None:
        pytest.skip("kubectl is not installed")
    directory = tmp_path_factory.mktemp("chart") / "penstock"
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "helm_chart.py", directory], check=True, timeout=120)
    assert helm_python.lint(str(directory))["errors"] == []
    with helm_python.Chart.load(str(directory)) as loaded:
        yield loaded


def objects_of(chart: Any, values: Object) -> dict[tuple[str, str], Object]:
    text = "\n---\n".join(chart.render(values=values, name="fleet", namespace="weights").values())
    objects = [one for one in yaml.safe_load_all(text) if one is not None]
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects), "an object is there twice"
    return found


@pytest.mark.parametrize(("monitoring", "gpu"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("engine", ENGINES)
def test_helm_chart_renders_same_objects_as_kustomize(
    chart: Any, tmp_path: Path, engine: str, monitoring: bool, gpu: bool
) -> None:
    components = ["monitoring"] * monitoring + ["gpu-cache"] * gpu
    expected = {}
    for one in render(tmp_path, ENGINES[engine], components=components):
        if one["kind"] != "Namespace":
            one = yaml.safe_load(DIGEST.sub("penstock-fleet", yaml.safe_dump(one)))
            one["metadata"].pop("namespace")
            expected[one["kind"], one["metadata"]["name"]] = one
    rendered = objects_of(chart, {"engine": engine, "monitoring": monitoring, "gpuCache": gpu})
    for one in rendered.values():
        if "template" in one.get("spec", {}):
            assert len(one["spec"]["template"]["metadata"].pop("annotations")["penstock/fleet"]) == 64
    assert rendered == expected


def test_helm_values_appear_in_rendered_objects(chart: Any) -> None:
    values = {
        "model": "1.0",
        "weights": "gs://else/where/",
        "replicas": 7,
        "hub": {"replicas": 3},
        "cache": {"memoryBytes": "80G", "memory": "90Gi"},
        "images": {name: f"here/{name}:2" for name in ("hub", "members", "redis", "vllm")},
    }
    objects = objects_of(chart, values)
    everything = list(objects.values())
    keeper = objects["DaemonSet", "penstock-cache"]["spec"]["template"]["spec"]["containers"][0]
    assert environment(keeper, everything)["MODEL"] == "1.0"
    assert {"gs://else/where/", "--model=1.0", "--memory-bytes=80G"} <= {*words_of(keeper, everything)}
    assert keeper["resources"]["limits"]["memory"] == keeper["resources"]["requests"]["memory"] == "90Gi"
    assert objects["Deployment", "vllm"]["spec"]["replicas"] == 7
    assert objects["Deployment", "penstock-hub"]["spec"]["replicas"] == 3
    images = {
        container["image"]
        for one in everything
        if "template" in one.get("spec", {})
        for kind in ("initContainers", "containers")
        for container in one["spec"]["template"]["spec"].get(kind, [])
    }
    assert images == set(values["images"].values())
    # Pods are replaced when what they read at their start changes.
    other = objects_of(chart, {**values, "model": "2.0"})
    for name in (("DaemonSet", "penstock-cache"), ("Deployment", "vllm")):
        digests = {str(some[name]["spec"]["template"]["metadata"]["annotations"]) for some in (objects, other)}
        assert len(digests) == 2


@pytest.mark.parametrize("values", [{"engine": "vlm"}, {"modle": "x"}, {"replicas": "4"}, {"images": {"keeper": "x"}}])
def test_invalid_helm_values_are_rejected(chart: Any, values: Object) -> None:
    with pytest.raises(helm_python.errors.HelmError, match=r"schema|values"):
        chart.render(values=values, name="fleet", namespace="weights")
