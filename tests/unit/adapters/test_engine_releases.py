"""The tables in the docs have a row for each tested release of an engine, and the plug-ins name the tested range."""

from __future__ import annotations

import pytest
from tests.engines.releases import SGLANG, VLLM, documented

from penstock.spi.host_plugin import HostPlugin
from penstock_sglang.plugin import PLUGIN as SGLANG_PLUGIN
from penstock_vllm.plugin import PLUGIN as VLLM_PLUGIN


@pytest.mark.parametrize(("host", "releases"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_docs_list_exactly_the_tested_releases(host: str, releases: dict[str, str]) -> None:
    rows = documented(host)
    assert [*rows] == [*releases]
    assert all(f"| `{releases[release]}` |" in row for release, row in rows.items())


@pytest.mark.parametrize(
    ("plugin", "releases"), [(VLLM_PLUGIN, [*VLLM][1:]), (SGLANG_PLUGIN, [*SGLANG])], ids=["vllm", "sglang"]
)
def test_tested_range_covers_the_tested_releases(plugin: HostPlugin, releases: list[str]) -> None:
    oldest, newest = plugin.tested
    assert releases[0].startswith(oldest) and releases[-1].startswith(newest)
