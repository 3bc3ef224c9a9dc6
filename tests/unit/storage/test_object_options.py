"""Options and errors of object stores name the variables of their cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import Settings
from penstock.errors import ConfigError
from penstock.storage.object_stores import locate_object


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"client_kwargs": {"endpoint_url": "http://x"}}, "write endpoint and region"),
        ({"key": "k", "secret": "s"}, "write access_key_id"),
        ({"anon": True}, "write skip_signature"),
        ({"region": ["eu"]}, "pass a str"),
        ({"acces_key_id": "k"}, "access_key_id, secret_access_key"),
        ({1: "k"}, "use the name of an option"),
        ({"endpoint": True}, "http://host:port"),
        ({"access_key_id": "k\n"}, "line break at their end"),
        ({"aws_session_token": "t\x00"}, "line break at their end"),
        ({"region": "a b"}, "write it as us-east-1"),
        ({"aws_region": ""}, "write it as us-east-1"),
        ({"endpoint": "http://x", "endpoint_url": "http://x"}, "pass only one of the two names"),
    ],
)
def test_unknown_storage_option_error_suggests_name(options: dict[Any, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate_object("s3://b/k", settings=Settings(), options=options)
    assert hint in str(caught.value.hint)


def test_missing_azure_account_error_names_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="Account must be specified") as caught:
        locate_object("az://c/x", settings=Settings(), options={})
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(caught.value.hint)


def test_unreadable_aws_bundle_error_names_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match="AWS_CA_BUNDLE"):
        locate_object("s3://b/k", settings=Settings(), options={})
