"""Certificates of a hub's client come from the environment where a caller gives none."""

import pytest

from penstock.errors import ConfigError
from penstock.fleet.client import HubClient

pytest.importorskip("httpx")


@pytest.mark.parametrize("name", ["PENSTOCK_CA_FILE", "PENSTOCK_CERT_FILE"])
def test_a_certificate_of_the_environment_is_used(name: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(name, str(tmp_path / "absent.pem"))
    with (
        HubClient.connect("https://127.0.0.1:1", timeout_s=0.2) as hub,
        pytest.raises(ConfigError, match="certificate"),
    ):
        hub.status()
