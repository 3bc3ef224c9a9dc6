"""Profiles in the configuration files of AWS tools. boto3 itself reads their credentials, see `object_stores`."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_GIVES_CREDENTIALS = frozenset(
    {
        "aws_access_key_id",
        "credential_process",
        "credential_source",
        "login_session",
        "role_arn",
        "source_profile",
        "sso_account_id",
        "sso_session",
        "sso_start_url",
        "web_identity_token_file",
    }
)
"""Profile settings from which boto3 obtains credentials. Source: the credentials guide of boto3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsProfile:
    """A profile from the AWS configuration files. Empty fields are not set.

    Attributes:
        is_named: whether the caller or the environment names the profile.
        gives_credentials: whether the files say how to obtain its credentials.
    """

    name: str
    is_named: bool
    gives_credentials: bool
    region: str
    endpoint: str
    ca_bundle: str


def read_profile(name: str | None, environ: Mapping[str, str]) -> AwsProfile:
    """Read a profile. A missing file counts as empty.

    Args:
        name: the profile. None uses the profile of the environment, or `default`.
        environ: the variables `AWS_*`.

    Raises:
        ConfigError: a file cannot be read or parsed.
    """
    named = name or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    profile = named or "default"
    config = _sections(environ.get("AWS_CONFIG_FILE", "~/.aws/config"), must_parse=named is not None)
    keys = _sections(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), must_parse=named is not None)
    section = f"profile {profile}"
    found = config.get(section) or (config.get("default", {}) if profile == "default" else {})
    # The credentials file takes precedence, as in boto3.
    found = {**found, **keys.get(profile, {})}
    endpoint = ""
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", found.get("ignore_configured_endpoint_urls", "")) != "true":
        services = config.get(f"services {found.get('services', '')}", {})
        nested = re.search(r"^\s*endpoint_url\s*=\s*(\S+)", services.get("s3", ""), re.MULTILINE)
        endpoint = nested[1] if nested else found.get("endpoint_url", "")
    return AwsProfile(
        name=profile,
        is_named=named is not None,
        gives_credentials=bool(_GIVES_CREDENTIALS & found.keys()),
        region=found.get("region", ""),
        endpoint=endpoint,
        ca_bundle=found.get("ca_bundle", ""),
    )


def _sections(path: str, *, must_parse: bool) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(default_section="", strict=False, allow_no_value=True)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        parser.read_string(text)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError, configparser.Error, RuntimeError) as error:
        # An unreadable file is an error only if the user named a profile.
        if not must_parse:
            return {}
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return {
        " ".join(name.replace('"', " ").replace("'", " ").split()): {
            key: value or "" for key, value in parser.items(name)
        }
        for name in parser.sections()
    }
