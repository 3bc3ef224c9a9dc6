"""Described clusters: what is none is refused, JSON goes both ways, GPUs find their links."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.errors import ConfigError, PlanError
from penstock.types import GB
from penstock_convert.plan.cluster import CLUSTERS, Cluster, Rates, from_json, slowdowns, to_json
from penstock_tools.links import ClusterLinks

H200 = CLUSTERS["h200"][0]


@pytest.mark.parametrize("name", CLUSTERS)
def test_named_clusters_round_trip_through_json(name: str) -> None:
    cluster, rates = CLUSTERS[name]
    cluster.check()
    rates.check()
    assert from_json(to_json(cluster), Cluster) == cluster
    assert from_json(to_json(rates), Rates) == rates
    assert {key for key, _ in rates.source} <= set(rates.__struct_fields__)


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"name": 3}', b"[1]", to_json(H200).replace(b'"name"', b'"nme"')])
def test_invalid_cluster_json_raises_config_error(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="not describe a Cluster"):
        from_json(raw, Cluster)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_nodes": 0},
        {"gpus_per_node": 0},
        {"num_nodes": 1 << 20},
        {"nic_gb_per_s": 0.0},
        {"storage_gb_per_s": -1.0},
        {"straggler_share": 1.5},
        {"straggler_slowdown": 0.5},
    ],
)
def test_out_of_range_cluster_field_raises_plan_error(fields) -> None:
    with pytest.raises(PlanError):
        msgspec.structs.replace(H200, **fields).check()


def test_out_of_range_cluster_rate_raises_plan_error() -> None:
    for field, value in (("digest_gb_per_s", 0.0), ("hop_s", -1.0)):
        with pytest.raises(PlanError):
            msgspec.structs.replace(CLUSTERS["h200"][1], **{field: value}).check()


def test_links_within_node_use_nvlink_rate() -> None:
    cluster = msgspec.structs.replace(H200, num_nodes=2, nics_per_node=4)
    links = ClusterLinks(cluster, np.ones(16))
    near, far, beside = links.between(np.array([0, 0, 1]), np.array([1, 8, 9]))
    assert links.capacity[near].tolist() == [392 * GB, 392 * GB, np.inf]
    assert links.capacity[far].tolist() == [50 * GB, 50 * GB, np.inf]
    assert far.tolist() == beside.tolist()  # two GPUs a NIC


def test_straggler_share_and_seed_select_slow_gpus() -> None:
    cluster = msgspec.structs.replace(H200, num_nodes=10, straggler_share=0.1, straggler_slowdown=3.0)
    slow = slowdowns(cluster, 7)
    assert (slow == 3.0).sum() == 8
    assert (slow == slowdowns(cluster, 7)).all() and (slow != slowdowns(cluster, 8)).any()
    assert ClusterLinks(cluster, slow).capacity[:80] == pytest.approx(392 * GB / slow)
