"""Create obstore stores for s3://, gs:// and az:// URIs with each cloud's usual credentials, and map their errors.

Stores are cached by all of their options, so the objects of a bucket share connections and credentials.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from penstock.config import Settings, ecosystem, network_environment
from penstock.entry_points import install_hint
from penstock.errors import (
    ConfigError,
    MissingExtra,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceStalled,
    SourceUnavailable,
)
from penstock.http.network import CERTIFICATE_HINT, NOBODY, Bundle, bundles, exclusions, proxy_of, read_bundle
from penstock.http.pool import wrong_proxy_user
from penstock.http.range_request import ATTEMPTS_PER_STALL

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3CredentialProvider

Store = S3Store | GCSStore | AzureStore

_SCHEMES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}

_STORES = 32
# Addresses of instance metadata, the last source of credentials. Errors with these addresses mean "no credentials".
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal")
# Error text of a failed TLS handshake. Source: rustls, `Error::InvalidCertificate`.
_CERTIFICATE = "InvalidCertificate("
# Deadline for a whole short response, as a multiple of `stall_s`.
_WHOLE_ANSWER = 2
_MAIN_OPTIONS = {
    "s3": "access_key_id, secret_access_key, session_token, endpoint, region, profile, skip_signature",
    "gs": "service_account_path, application_credentials, base_url, skip_signature",
    "az": "account_name, account_key, sas_key, endpoint, skip_signature",
}
_CREDENTIAL_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or storage_options (access_key_id...); "
    "skip_signature=true reads public buckets",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT to a file of credentials, or storage_options "
    "(service_account_path...); skip_signature=true reads public buckets",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_KEY), or storage_options "
    "(account_name...); az://container@account.blob.core.windows.net/ names the account too",
}
# Seconds that obstore keeps an idle connection. The default of obstore is 90.
_IDLE_S = 15.0
# Source: `HttpErrorKind` of the object_store crate.
_KINDS = {
    "Timeout": "no answer in time",
    "Interrupted": "the connection was closed during an answer",
    "Connect": "the server cannot be reached",
}
# Source: `header::Error` of the object_store crate.
_HEADERS = {
    "MissingContentLength": "the answer has no Content-Length",
    "MissingLastModified": "the answer has no Last-Modified",
    "MissingEtag": "the answer has no ETag",
    "BareRedirect": "the server sent a redirect without a Location",
}


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


class AwsProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile from the AWS configuration files. A field is empty if the profile does not set it.

    Attributes:
        is_named: whether the caller or the environment names the profile.
        gives_credentials: whether the files specify how to obtain credentials for the profile.
    """

    name: str
    is_named: bool
    gives_credentials: bool
    region: str
    endpoint: str
    ca_bundle: str


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for obstore's HTTP client. `proxy` is an address and a list of exclusions."""

    trusted: tuple[Bundle, ...]
    stall_s: float
    retries: int
    proxy: tuple[str, str] | None


class ObjectKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key in a store. `root` followed by any key of the store is the URI of that key."""

    uri: str
    store: Store
    """Store for short responses, each with a deadline."""
    streaming: Callable[[], Store]
    """Return the store for reading and writing large objects."""
    root: str
    key: str
    anonymous: bool
    unsignable: str | None
    """Why reads cannot use signed URLs, or None if they can."""
    trusted: tuple[Bundle, ...]
    """Certificates for reads with signed URLs."""


def locate_object(uri: str, *, settings: Settings, options: Mapping[str, str]) -> ObjectKey:
    """Return the store and key that `uri` names, without network access. Raises ConfigError or MissingExtra.

    Args:
        uri: `s3://bucket/key`, `gs://bucket/key`, `az://container[@account.host]/key`.
        options: options under the store's own names (`access_key_id`, `endpoint`, `region`, `skip_signature`...), and
            `profile` for s3. The options take precedence over the environment.
    """
    check_process()
    scheme, _, rest = uri.partition("://")
    prefix = _SCHEMES.get(scheme)
    bucket, _, key = rest.partition("/")
    if prefix is None:
        hint = f"use {', '.join(f'{name}://' for name in _SCHEMES)}, or a local path"
        raise ConfigError(f"cannot write to {scheme}://, which is not a supported object store", uri=uri, hint=hint)
    if not bucket:
        raise ConfigError("the URI names no bucket", uri=uri, hint="write it as s3://bucket/key")
    if key.startswith("/") or "//" in key:
        raise ConfigError("a key with an empty segment (//) cannot be read", uri=uri)
    root = f"{scheme}://{bucket}/"
    account = ""
    # Azure URIs name the container and the account's host, whose first label is the account's name.
    if "@" in bucket:
        bucket, _, account = bucket.partition("@")
        account = account.partition(".")[0]
    environ = ecosystem(prefix)
    _check_options(scheme, options.items())
    _check_values((*options.items(), *environ.items()))
    profile = None
    if prefix == "AWS_":
        profile = read_profile(options.get("profile"), environ)
        options = _with_profile(profile, options, environ)
    trusted = bundles(settings)
    if prefix == "AWS_":
        name, path = "AWS_CA_BUNDLE", environ.get("AWS_CA_BUNDLE", "")
        if not path and profile is not None and profile.ca_bundle:
            name, path = f"ca_bundle of the AWS profile {profile.name}", profile.ca_bundle
        trusted = (*trusted, Bundle(name=name, path=Path(path).expanduser())) if path else trusted
    client = Client(
        trusted=trusted,
        stall_s=settings.stall_s,
        retries=settings.retries,
        proxy=_proxy(prefix, bucket, options, environ),
    )
    arguments = (prefix, bucket, account, _frozen(options), _frozen(environ), client, profile)
    try:
        store = _store(*arguments)
    except PenstockError:
        raise
    except exceptions.UnknownConfigurationKeyError as error:
        raise ConfigError(_brief(error), uri=uri, hint=f"the main options are {_MAIN_OPTIONS[scheme]}") from error
    except (exceptions.BaseError, ValueError, TypeError) as error:
        if (duplicate := re.match(r"Duplicate key (\w+) provided", fault := _brief(error))) is not None:
            fault = f"storage_options has {duplicate[1]} under two names"
            raise ConfigError(fault, uri=uri, hint="pass only one of the two names") from error
        raise ConfigError(fault, uri=uri, hint=_CREDENTIAL_HINTS[scheme]) from error
    names = " ".join(name.lower() for name in (*options, *environ)) if prefix == "AWS_" else ""
    word = next((word for word in ("request_payer", "sse_customer_key", "s3_express") if word in names), None)
    skip = options.get("skip_signature", options.get("aws_skip_signature", environ.get("AWS_SKIP_SIGNATURE")))
    return ObjectKey(
        uri=uri,
        store=store,
        streaming=partial(_store, *arguments, is_streaming=True),
        root=root,
        key=key,
        # obstore accepts these values as true.
        anonymous=str(skip).lower() in {"1", "true", "yes", "on"},
        unsignable=None if word is None else f"{word} needs signed headers",
        trusted=trusted,
    )


def anonymous_signing_store(place: ObjectKey, *, settings: Settings, options: Mapping[str, str]) -> Store:
    """Return a store that signs URLs with fake credentials. For anonymous reads, callers remove the query."""
    environ = ecosystem("AWS_")
    options = _with_profile(read_profile(options.get("profile"), environ), options, environ)
    named = {name: value for name, value in options.items() if not name.endswith(("skip_signature", "profile"))}
    named |= {"access_key_id": "anonymous", "secret_access_key": "anonymous"}
    bucket = place.root.removesuffix("/").rpartition("/")[2]
    client = Client(trusted=(), stall_s=settings.stall_s, retries=settings.retries, proxy=None)
    with mapped(place.uri):
        return _store("AWS_", bucket, "", _frozen(named), _frozen(environ), client, None)


_IN_HEADERS = ("access_key_id", "session_token", "security_token", "token", "region")
"""Suffixes of the names of options that obstore sends in headers."""


def _check_values(named: Iterable[tuple[str, str]]) -> None:
    """Reject values on which obstore panics. The ConfigError omits values that may contain a password."""
    for name, value in named:
        word = name.lower()
        if word.endswith(_IN_HEADERS) and re.search(r"[\x00-\x1f\x7f]", str(value)):
            hint = "remove it: files and secrets often have a line break at their end"
            raise ConfigError(f"{name} has a line break or another control character", hint=hint)
        if word.endswith("region") and not re.fullmatch(r"[\w-]+", str(value), re.ASCII):
            raise ConfigError(f"{name} is {value!r}, which is not a region name", hint="write it as us-east-1")
        if not word.endswith(("endpoint", "endpoint_url", "endpoint_url_s3", "base_url")) or "fabric" in word:
            continue
        try:
            url = urlsplit(str(value))
            is_url = url.scheme in {"http", "https"} and bool(url.hostname) and (url.port or 1) > 0
        except ValueError:
            is_url = False
        if not is_url:
            raise ConfigError(f"{name} is not the URL of a server", hint="write it as http://host:port or https://host")


def _frozen(options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(options.items()))


@functools.lru_cache(maxsize=_STORES)
def _store(
    prefix: str,
    bucket: str,
    account: str,
    options: tuple[tuple[str, str], ...],
    environ: tuple[tuple[str, str], ...],
    client: Client,
    profile: AwsProfile | None,
    *,
    is_streaming: bool = False,
) -> Store:
    config: dict[str, Any] = dict(options)
    stall_s = client.stall_s
    endpoints = [v for n, v in (*options, *environ) if "endpoint" in n.lower() or "base_url" in n.lower()]
    client_options: ClientConfig = {
        "connect_timeout": timedelta(seconds=stall_s / ATTEMPTS_PER_STALL),
        "read_timeout": timedelta(seconds=stall_s / ATTEMPTS_PER_STALL),
        "pool_idle_timeout": timedelta(seconds=_IDLE_S),
        # A large object may take hours. `read_timeout` limits only pauses, so a short response also needs a deadline,
        # or it could arrive byte by byte.
        "timeout": timedelta(days=1) if is_streaming else timedelta(seconds=_WHOLE_ANSWER * stall_s),
        "allow_http": any(endpoint.lower().startswith("http://") for endpoint in endpoints),
    }
    if client.trusted:
        client_options["root_certificate"] = b"\n".join(map(read_bundle, client.trusted))
    if client.proxy is not None:
        client_options["proxy_url"], client_options["proxy_excludes"] = client.proxy
    retry: RetryConfig = {"max_retries": client.retries, "retry_timeout": timedelta(seconds=stall_s)}
    if prefix == "GOOGLE_":
        return GCSStore(bucket, config=config, client_options=client_options, retry_config=retry)  # type: ignore[arg-type]
    if prefix == "AZURE_":
        if account:
            config.setdefault("account_name", account)
        return AzureStore(bucket, config=config, client_options=client_options, retry_config=retry)  # type: ignore[arg-type]
    config.pop("profile", None)
    provider = None
    if profile is not None and _uses_profile(profile, options, environ):
        provider = _profile_credentials(profile.name)
    return S3Store(
        bucket,
        config=config,  # type: ignore[arg-type]
        client_options=client_options,
        retry_config=retry,
        credential_provider=provider,
    )


def _with_profile(profile: AwsProfile, options: Mapping[str, str], environ: Mapping[str, str]) -> Mapping[str, str]:
    given = {name.lower().removeprefix("aws_") for name in (*options, *environ)}
    named = dict(options)
    if profile.region and not {"region", "default_region"} & given:
        named["region"] = profile.region
    if profile.endpoint and not {"endpoint", "endpoint_url", "endpoint_url_s3"} & given:
        _check_values([("endpoint_url", profile.endpoint)])
        named["endpoint"] = profile.endpoint
    return named


def _uses_profile(profile: AwsProfile, options: Iterable[tuple[str, str]], environ: Iterable[tuple[str, str]]) -> bool:
    if any(name == "profile" for name, _ in options):
        return True
    given = {name.lower().removeprefix("aws_") for name, _ in (*options, *environ)}
    if {"access_key_id", "skip_signature"} & given:
        return False
    if profile.is_named:
        return True
    # boto3 tries a web identity before the profile files. obstore supports a web identity itself, without a profile.
    return profile.gives_credentials and "web_identity_token_file" not in given


def _profile_credentials(profile: str) -> S3CredentialProvider:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingExtra(f"AWS profile {profile!r} needs boto3", hint=install_hint("aws")) from error
    boto_error: type[Exception] = importlib.import_module("botocore.exceptions").BotoCoreError
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except (boto_error, ValueError) as error:
        raise ConfigError(f"cannot get credentials from AWS profile {profile!r}: {error}") from error


def _proxy(prefix: str, bucket: str, options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str] | None:
    named = {name.lower().removeprefix("aws_"): value for name, value in (*environ.items(), *options.items())}
    region = named.get("region") or named.get("default_region") or "us-east-1"
    host = {
        "AWS_": f"{bucket}.s3.{region}.amazonaws.com",
        "GOOGLE_": "storage.googleapis.com",
        "AZURE_": f"{bucket}.blob.core.windows.net",
    }[prefix]
    endpoints = ("endpoint_url_s3", "endpoint_url", "endpoint", "google_base_url", "base_url", "azure_endpoint")
    endpoint = next((named[name] for name in endpoints if name in named), f"https://{host}")
    if (proxy := proxy_of(urlsplit(endpoint))) is not None:
        return proxy.url, exclusions()
    # Without a proxy option, obstore would read the environment, and its rules for proxies differ from Penstock's.
    return ("http://127.0.0.1:9", NOBODY) if network_environment().proxies else None


_FSSPEC = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "anon": "skip_signature",
    "client_kwargs": "endpoint and region",
    "config_kwargs": "virtual_hosted_style_request",
}
"""Options of fsspec's file systems, with the names of the same options in obstore."""


def _check_options(scheme: str, options: Iterable[tuple[object, object]]) -> None:
    for name, value in options:
        if not isinstance(name, str):
            fault, use = f"the name {name!r} in storage_options is not a str", "use the name of an option"
        elif name in _FSSPEC:
            fault, use = f"storage_options[{name!r}] is an option of fsspec", f"write {_FSSPEC[name]}"
        elif not isinstance(value, str | bool | int):
            fault, use = f"storage_options[{name!r}] is a {type(value).__name__}, not a str", "pass a str"
        else:
            continue
        raise ConfigError(fault, hint=f"{use}; the main options for {scheme}:// are {_MAIN_OPTIONS[scheme]}")


_first_pid: int | None = None


def check_process() -> None:
    """Raise ConfigError if this process was forked after a store was used. obstore's threads do not survive a fork."""
    global _first_pid
    if _first_pid is None:
        _first_pid = os.getpid()
    elif _first_pid != os.getpid():
        raise ConfigError(
            "object stores were used before this process was forked",
            hint="start workers with 'spawn', or open object stores only in the children",
        )


@contextlib.contextmanager
def mapped(uri: str, byte_range: tuple[int, int] | None = None) -> Iterator[None]:
    """Map obstore's errors to Penstock's errors."""
    try:
        yield
    except PenstockError:
        # NotFound and PermissionDenied are OSErrors too.
        raise
    except FileNotFoundError as error:
        hint = "check the bucket, the key, and endpoint and region in storage_options"
        raise NotFound("the object or bucket does not exist", uri=uri, byte_range=byte_range, hint=hint) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionDenied(_brief(error), uri=uri, hint="check the credentials and their permissions") from error
    except exceptions.PreconditionError as error:
        raise SourceChanged("the object has changed since it was opened", uri=uri, byte_range=byte_range) from error
    except (
        exceptions.UnknownConfigurationKeyError,
        exceptions.InvalidPathError,
        exceptions.NotSupportedError,
        ValueError,
        TypeError,
    ) as error:
        raise ConfigError(_brief(error), uri=uri) from error
    except (exceptions.BaseError, OSError) as error:
        raise _by_status(error, uri, byte_range) from error


def _by_status(error: Exception, uri: str, byte_range: tuple[int, int] | None) -> PenstockError:
    text = str(error)
    match = re.search(r"status code: (\d{3})", text)
    status = int(match[1]) if match else 0
    if any(place in text for place in _NO_CREDENTIALS):
        return PermissionDenied("found no credentials", uri=uri, hint=_CREDENTIAL_HINTS.get(uri.partition("://")[0]))
    # S3 replies 400 to HEAD without an explanation if a token has expired or the bucket is in another region.
    if status in {400, 401, 403}:
        return PermissionDenied(_brief(error), uri=uri, hint="check the credentials, their permissions, and the region")
    if status == 404:
        return NotFound(_brief(error), uri=uri, byte_range=byte_range)
    if not status and "kind: Timeout" in text:
        hint = "raise stall_s if the storage is only slow"
        return SourceStalled(_KINDS["Timeout"], uri=uri, byte_range=byte_range, hint=hint)
    if _CERTIFICATE in text:
        why = re.search(r"InvalidCertificate\(\s*(\w+)", text)
        message = f"the server's certificate cannot be verified{f': {why[1]}' if why else ''}"
        return SourceUnavailable(message, uri=uri, byte_range=byte_range, hint=CERTIFICATE_HINT)
    if "ProxyAuthRequired" in text or status == 407:
        return wrong_proxy_user()
    # S3 replies 301 and 307 without a Location if the bucket is in another region.
    is_elsewhere = status in {301, 307} or "BareRedirect" in text
    region = "the bucket may be in another region: set AWS_REGION" if is_elsewhere else None
    return SourceUnavailable(_brief(error), uri=uri, byte_range=byte_range, hint=region)


def _brief(error: Exception) -> str:
    """Return an error as one line, without the queries of URLs, which contain signatures."""
    text = str(error)
    status, code = re.search(r"status code: (\d{3})", text), re.search(r"<Code>(\w{1,64})</Code>", text)
    if status:
        return f"HTTP {status[1]}" + (f" {code[1]}" if code else "")
    known = [words for name, words in _HEADERS.items() if name in text]
    known += [words for name, words in _KINDS.items() if f"kind: {name}," in text]
    if known:
        return known[0]
    return re.sub(r"^Generic \w+ error: |\?\S+", "", text.partition("\n")[0])[:300]


def read_profile(name: str | None, environ: Mapping[str, str]) -> AwsProfile:
    """Read a profile, by default the profile in the environment. A missing file counts as empty. Raises ConfigError."""
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
        parser.read_string(Path(path).expanduser().read_text(encoding="utf-8"))
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
