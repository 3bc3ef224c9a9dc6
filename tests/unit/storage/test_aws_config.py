"""Profiles in the configuration files of AWS tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.storage.object_stores import read_profile

CONFIG = """
[default]
region = eu-west-9
endpoint_url = http://default:1
[profile work]
region=eu-west-2
services = inner
ca_bundle = /work.pem
credential_process = /bin/true
[services inner]
s3 =
  endpoint_url = http://inner:2
dynamodb =
  endpoint_url = http://other:3
[profile "quoted"]
sso_session = x
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "credentials").write_text("[keys]\naws_access_key_id = k\nregion = us-west-1\n")
    return {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}


@pytest.mark.parametrize(
    ("name", "more", "found"),
    [
        (None, {}, ("default", False, False, "eu-west-9", "http://default:1", "")),
        ("work", {}, ("work", True, True, "eu-west-2", "http://inner:2", "/work.pem")),
        (None, {"AWS_PROFILE": "work"}, ("work", True, True, "eu-west-2", "http://inner:2", "/work.pem")),
        (None, {"AWS_DEFAULT_PROFILE": "keys"}, ("keys", True, True, "us-west-1", "", "")),
        ("quoted", {}, ("quoted", True, True, "", "", "")),
        ("absent", {}, ("absent", True, False, "", "", "")),
        (None, {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, ("default", False, False, "eu-west-9", "", "")),
        (None, {"AWS_CONFIG_FILE": "/nowhere"}, ("default", False, False, "", "", "")),
    ],
)
def test_aws_profile_settings_are_read(
    environ: dict[str, str], name: str | None, more: dict[str, str], found: tuple[str, bool, bool, str, str, str]
) -> None:
    profile = read_profile(name, environ | more)
    assert (
        profile.name,
        profile.is_named,
        profile.gives_credentials,
        profile.region,
        profile.endpoint,
        profile.ca_bundle,
    ) == found


def test_malformed_aws_config_raises_only_for_named_profile(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config").write_text("no section\n")
    assert read_profile(None, environ).region == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile("work", environ)
