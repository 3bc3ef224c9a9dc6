"""`penstock simulate` and `penstock plan`: shapes by name or from headers, clusters by name or from a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.long_running import long_running
from typer.testing import CliRunner

from penstock.cli.main import add_commands
from penstock.errors import ConfigError, DestinationError
from penstock.testing.checkpoints import write_llama
from penstock_convert.plan.cluster import CLUSTERS, Rates, from_json, to_json
from penstock_tools.calibrate import operation_gb_per_s

app = add_commands()

SMALL = ["--trainers", "4", "--receivers", "2", "--tp", "2", "--shards", "4"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("llama")
    write_llama(str(place), total_bytes=4 << 20, shards=2)
    return str(place)


def test_simulate_sync_command_reports_prediction_and_limit(llama: str, tmp_path: Path) -> None:
    picture = tmp_path / "sync.svg"
    found = json.loads(run("simulate", "sync", llama, *SMALL, "--format", "json", "--picture", str(picture)))
    assert found["kind"] == "sync" and found["num_receivers"] == 2
    assert found["predicted_s"] >= found["limit_s"] > 0
    assert found["of_limit"] == pytest.approx(found["limit_s"] / found["predicted_s"])
    assert picture.read_text().startswith("<svg")
    for word in ("predicted", "limit", "bottleneck", "nic in", "assumed, not measured"):
        assert word in run("simulate", "sync", llama, *SMALL)


def test_simulate_fetch_command_accepts_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_bytes(to_json(CLUSTERS["cpu-pair"][0]))
    by_file = run("simulate", "fetch", "--bytes", "1G", "--nodes", "3", "--cluster", str(file), "--format", "json")
    assert json.loads(by_file)["num_receivers"] == 2
    told = run("simulate", "fetch", "--bytes", "1G", "--nodes", "3", "--cluster", "cpu-pair")
    for word in ("predicted", "hops", "nic out"):
        assert word in told


def test_invalid_cluster_raises_config_error(tmp_path: Path) -> None:
    for name, match in (("no-such", "cannot read"), (str(tmp_path / "bad"), "not describe a Cluster")):
        (tmp_path / "bad").write_text("{}")
        with pytest.raises(ConfigError, match=match):
            CliRunner().invoke(app, ["simulate", "fetch", "--cluster", name], catch_exceptions=False)


@long_running
def test_simulate_command_applies_calibrated_rates(tmp_path: Path, llama: str) -> None:
    file = tmp_path / "rates.json"
    run("calibrate", str(file))
    rates = from_json(file.read_bytes(), Rates)
    rates.check()
    said = dict(rates.source)
    assert set(said) == set(rates.__struct_fields__) - {"name", "source"}
    assert "measured" in said["digest_gb_per_s"]
    # Copying files is slower than no work.
    assert max(rates.operation_gb_per_s.values()) < 1000
    assert "compute nothing" in said["operation_gb_per_s"]
    if rates.slab_s == 0:
        assert said["slab_s"] == "assumed: 0, not measured on a CPU"
    slow = tmp_path / "slow.json"
    slow.write_bytes(to_json(CLUSTERS["cpu-pair"][1]).replace(b'"post_s": 0.00005', b'"post_s": 2.0'))
    found = json.loads(run("simulate", "sync", llama, *SMALL, "--rates", str(slow), "--format", "json"))
    assert found["predicted_s"] > 2.0


@pytest.mark.parametrize(
    ("busy_s", "gb_per_s"),
    [
        ({"fetch": 2.0, "compute": 0.5, "send": 1.0}, 8.0),
        # A copy has no step that computes.
        ({"fetch": 2.0, "compute": 0.0, "send": 1.0}, 2.0),
        ({"fetch": 0.0, "compute": 0.0, "send": 0.0}, 1.0),
    ],
)
def test_operation_rate_uses_compute_time_if_measured(busy_s: dict[str, float], gb_per_s: float) -> None:
    report = SimpleNamespace(read_bytes=4 * 10**9, busy_s=busy_s, phases={"move": 4.0})
    assert operation_gb_per_s(cast(Any, report)) == pytest.approx(gb_per_s)


def test_python_slowdown_increases_predicted_time(llama: str) -> None:
    for command in (("sync", llama, *SMALL), ("fetch", "--bytes", "1G", "--nodes", "2")):
        once, twice = (
            json.loads(run("simulate", *command, "--python-slowdown", times, "--format", "json"))["predicted_s"]
            for times in ("1", "2")
        )
        assert once < twice < 2.1 * once


@pytest.mark.parametrize("times", ["0", "-1", "nan", "inf"])
def test_zero_python_slowdown_is_refused(llama: str, times: str) -> None:
    with pytest.raises(ConfigError, match="not a finite number"):
        run("simulate", "sync", llama, *SMALL, "--python-slowdown", times)


def test_simulate_command_shows_plan(llama: str) -> None:
    assert "reads" in run("plan", "load", llama)
    assert "read 0:" in run("plan", "load", llama, "--explain")
    assert json.loads(run("plan", "load", llama, "--format", "json"))["num_reads"] > 0
    assert "engine-0: " in run("plan", "sync", llama, *SMALL, "--explain")
    facts = json.loads(run("plan", "sync", llama, *SMALL, "--format", "json", "--explain"))
    assert facts["num_sources"] == 4 and "explain" in facts


@pytest.mark.parametrize("group", ["plan", "simulate"])
def test_tensor_parallel_size_above_receiver_count_is_refused(group: str, llama: str) -> None:
    with pytest.raises(ConfigError, match="--tp 3 is more than the 2 receivers"):
        CliRunner().invoke(app, [group, "sync", llama, "--receivers", "2", "--tp", "3"], catch_exceptions=False)


def test_task_bytes_below_leaf_size_are_rejected(llama: str) -> None:
    for command in (["plan", "convert", llama], ["convert", llama, "out"]):
        with pytest.raises(ConfigError, match="--task-bytes 1 is too small"):
            CliRunner().invoke(app, [*command, "--to", "cast:F32", "--task-bytes", "1"], catch_exceptions=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "--shrink", "nan"),
        ("convert", "--shrink", "inf"),
        ("convert", "--task-bytes", "0"),
        ("sync", "kimi-k2", "--watermark-bytes", "1K"),
    ],
)
def test_invalid_simulation_option_raises_config_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=arguments[-2]):
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def test_unwritable_picture_raises_destination_error(tmp_path: Path) -> None:
    command = ["simulate", "fetch", "--bytes", "1G", "--picture", str(tmp_path)]
    with pytest.raises(DestinationError, match="picture"):
        CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
def test_cold_start_simulation_accepts_named_clusters(cluster: str) -> None:
    words = ["simulate", "fetch", "--bytes", "8G", "--nodes", "2", "--holders", "0", "--cluster", cluster]
    found = json.loads(run(*words, "--format", "json"))
    assert found["predicted_s"] > 1 and any("--storage-gb-per-s" in note for note in found["assumed"])
    fast = json.loads(run(*words, "--storage-gb-per-s", "100", "--format", "json"))
    assert fast["predicted_s"] <= found["predicted_s"]
    assert not any("node_storage" in note for note in fast["assumed"])
