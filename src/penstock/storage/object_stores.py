"""Stores of obstore for s3://, gs:// and az:// URIs: found with the ecosystem's own credentials, their errors mapped.

In: a URI, `storage_options`, the environment by the ecosystem's names. Out: an `ObjectKey`: a store and a key in it.
Not here: what is done with them (`objects`), plain http(s) (`http`).

A store is cached by all that it was made of, so its connections and credentials serve every object of a bucket.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from penstock.config import Settings, ecosystem
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
from penstock.http.range_request import ATTEMPTS_PER_STALL

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3CredentialProvider

Store = S3Store | GCSStore | AzureStore

_SCHEMES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}

# Stores that stay, with their connections and credentials: more buckets than one process reads from at a time.
_STORES = 32
# In an error's text: the last place credentials are looked for, the instance's metadata, has none.
_NO_CREDENTIALS = "169.254.169.254"
# Seconds that obstore keeps an idle connection; its own 90 would take up descriptors long after a load.
_IDLE_S = 15.0
# What the kinds of obstore's HTTP errors mean. Source: `HttpErrorKind` of the object_store crate.
_KINDS = {
    "Timeout": "no answer in time",
    "Interrupted": "the connection broke off in the midst of an answer",
    "Connect": "the server cannot be reached",
}
# What its errors about an answer's headers mean. Source: `header::Error` of the object_store crate.
_HEADERS = {
    "MissingContentLength": "the answer tells no Content-Length",
    "MissingLastModified": "the answer tells no Last-Modified",
    "MissingEtag": "the answer tells no ETag",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKey:
    """A key in a store. `root` + a key is the URI of that key."""

    uri: str
    store: Store
    root: str
    key: str
    anonymous: bool
    """Whether requests go without credentials."""
    unsignable: str | None
    """Why reads cannot go by signed URL, if so."""


def locate_object(uri: str, *, settings: Settings, options: Mapping[str, str]) -> ObjectKey:
    """Return the store and key that `uri` names. No network.

    Args:
        uri: `s3://bucket/key`, `gs://bucket/key`, `az://container[@account.host]/key`.
        settings: bounds on retries and silence; `ca_file`.
        options: the store's own names (`access_key_id`, `endpoint`, `region`, `skip_signature`...), and `profile`
            for s3; they win over the environment.

    Raises:
        ConfigError: the URI or an option is wrong.
        MissingExtra: an AWS profile is named and boto3 is not installed.
    """
    check_process()
    scheme, _, rest = uri.partition("://")
    prefix = _SCHEMES.get(scheme)
    bucket, _, key = rest.partition("/")
    if prefix is None:
        hint = f"name one of {', '.join(f'{name}://' for name in _SCHEMES)}, or a local path"
        raise ConfigError(f"{scheme}:// is not an object store that can be written to", uri=uri, hint=hint)
    if not bucket:
        raise ConfigError("not an object's URI", uri=uri, hint="write it as s3://bucket/key")
    if key.startswith("/") or "//" in key:
        raise ConfigError("a key with an empty segment (//) cannot be read", uri=uri)
    root = f"{scheme}://{bucket}/"
    account = ""
    # Azure: the container, and the account's host, of which the first label is the account's name.
    if "@" in bucket:
        bucket, _, account = bucket.partition("@")
        account = account.partition(".")[0]
    environ = ecosystem(prefix)
    client = (settings.ca_file, settings.stall_s, settings.retries)
    _check_endpoints((*options.items(), *environ.items()))
    try:
        store = _store(prefix, bucket, account, _frozen(options), _frozen(environ), client)
    except PenstockError:
        # MissingExtra must not become a plain ConfigError.
        raise
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise ConfigError(_brief(error), uri=uri) from error
    anonymous = _is_on(
        options.get("skip_signature", options.get("aws_skip_signature", environ.get("AWS_SKIP_SIGNATURE")))
    )
    return ObjectKey(
        uri=uri, store=store, root=root, key=key, anonymous=anonymous, unsignable=_unsignable(prefix, options, environ)
    )


def anonymous_signing_store(place: ObjectKey, *, settings: Settings, options: Mapping[str, str]) -> Store:
    """Return a store that signs with made-up credentials: its URLs without query are an anonymous reader's URLs."""
    named = {name: value for name, value in options.items() if not name.endswith("skip_signature")}
    named |= {"access_key_id": "anonymous", "secret_access_key": "anonymous"}
    environ = {name: value for name, value in ecosystem("AWS_").items() if name != "AWS_PROFILE"}
    bucket = place.root.removesuffix("/").rpartition("/")[2]
    client = (settings.ca_file, settings.stall_s, settings.retries)
    with mapped(place.uri):
        return _store("AWS_", bucket, "", _frozen(named), _frozen(environ), client)


def _check_endpoints(named: Iterable[tuple[str, str]]) -> None:
    """Refuse an endpoint that is no URL: obstore panics on one without a scheme.

    Raises:
        ConfigError: see above. Its value is not repeated, for there may be a password in it.
    """
    for name, value in named:
        word = name.lower()
        if not word.endswith(("endpoint", "endpoint_url", "endpoint_url_s3", "base_url")) or "fabric" in word:
            continue
        try:
            url = urlsplit(value)
            is_url = url.scheme in {"http", "https"} and bool(url.hostname) and (url.port or 1) > 0
        except ValueError:
            is_url = False
        if not is_url:
            hint = "write it as http://host:port or https://host"
            raise ConfigError(f"{name} is not the URL of a server", hint=hint)


def _frozen(options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return options as a value that `_store` is cached by."""
    return tuple(sorted(options.items()))


def _is_on(value: str | None) -> bool:
    """Return whether an option is set, as obstore reads it."""
    return str(value).lower() in {"1", "true", "yes", "on"}


def _unsignable(prefix: str, options: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return the option that a signed URL cannot carry, as a reason; None: there is none."""
    names = {name.lower() for name in (*options, *environ)}
    for word in ("request_payer", "sse_customer_key", "s3_express"):
        if prefix == "AWS_" and any(word in name for name in names):
            return f"{word} needs signed headers"
    return None


@functools.lru_cache(maxsize=_STORES)
def _store(
    prefix: str,
    bucket: str,
    account: str,
    options: tuple[tuple[str, str], ...],
    environ: tuple[tuple[str, str], ...],
    client: tuple[Path | None, float, int],
) -> Store:
    """Make a store, or return the one that these options made before."""
    config: dict[str, Any] = dict(options)
    ca_file, stall_s, retries = client
    endpoints = [v for n, v in (*options, *environ) if "endpoint" in n.lower() or "base_url" in n.lower()]
    client_options: ClientConfig = {
        "connect_timeout": timedelta(seconds=stall_s / ATTEMPTS_PER_STALL),
        "read_timeout": timedelta(seconds=stall_s / ATTEMPTS_PER_STALL),
        "pool_idle_timeout": timedelta(seconds=_IDLE_S),
        # Of a whole answer, which may take hours: it is silence that `read_timeout` bounds.
        "timeout": timedelta(days=1),
        "allow_http": any(endpoint.lower().startswith("http://") for endpoint in endpoints),
    }
    if ca_file is not None:
        try:
            client_options["root_certificate"] = ca_file.read_bytes()
        except OSError as error:
            raise ConfigError(f"ca_file {ca_file} does not load: {error.strerror}") from error
    retry: RetryConfig = {"max_retries": retries, "retry_timeout": timedelta(seconds=stall_s)}
    if prefix == "GOOGLE_":
        return GCSStore(bucket, config=config, client_options=client_options, retry_config=retry)  # type: ignore[arg-type]
    if prefix == "AZURE_":
        if account:
            config.setdefault("account_name", account)
        return AzureStore(bucket, config=config, client_options=client_options, retry_config=retry)  # type: ignore[arg-type]
    profile = _profile(config, dict(environ))
    provider = None if profile is None else _profile_credentials(profile, config)
    # Once more, since a profile may name the endpoint.
    if str(config.get("endpoint", "")).lower().startswith("http://"):
        client_options["allow_http"] = True
    return S3Store(
        bucket,
        config=config,  # type: ignore[arg-type]
        client_options=client_options,
        retry_config=retry,
        credential_provider=provider,
    )


def _profile(config: dict[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return the AWS profile that gives the credentials, in boto3's order of precedence; None if none does."""
    if "profile" in config:
        return str(config.pop("profile"))
    options = {name.lower().removeprefix("aws_") for name in (*config, *environ)}
    if {"access_key_id", "skip_signature"} & options:
        return None
    if "AWS_PROFILE" in environ:
        return environ["AWS_PROFILE"]
    # obstore uses a web identity by itself, and in boto3's order it comes before the credentials file.
    if "web_identity_token_file" in options:
        return None
    file = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    try:
        # Without a default profile the instance's role is next, which obstore asks for by itself.
        return "default" if "[default]" in file.read_text() else None
    except (OSError, UnicodeError):
        return None


def _profile_credentials(profile: str, config: dict[str, Any]) -> S3CredentialProvider:
    """Return the credentials of an AWS profile through boto3; set its region and endpoint in `config`."""
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingExtra(f"AWS profile {profile!r} needs boto3", hint=install_hint("aws")) from error
    boto_error: type[Exception] = importlib.import_module("botocore.exceptions").BotoCoreError
    try:
        session = boto3.Session(profile_name=profile)
        provider = Boto3CredentialProvider(session)
        endpoint = session.client("s3").meta.endpoint_url
    except (boto_error, ValueError) as error:
        raise ConfigError(f"AWS profile {profile!r} gives no credentials: {error}") from error
    if session.region_name:
        config.setdefault("region", session.region_name)
    # AWS' own endpoints follow from the region; only one that the profile names has to be passed on.
    if ".amazonaws.com" not in endpoint:
        config.setdefault("endpoint", endpoint)
    return provider


_first_pid: int | None = None


def check_process() -> None:
    """Raise if this process was forked after a store was used: obstore's threads do not survive a fork.

    Raises:
        ConfigError: stores were used before this process was forked off.
    """
    global _first_pid
    # Before the first request, not at the fork: a process that forks and never touches a store is fine.
    if _first_pid is None:
        _first_pid = os.getpid()
    elif _first_pid != os.getpid():
        raise ConfigError(
            "object stores were used before this process was forked",
            hint="start workers with 'spawn', or open object stores first in the children",
        )


@contextlib.contextmanager
def mapped(uri: str, byte_range: tuple[int, int] | None = None) -> Iterator[None]:
    """Map obstore's errors to errors of penstock."""
    try:
        yield
    except PenstockError:
        # NotFound and PermissionDenied are OSErrors too, and must not be mapped a second time.
        raise
    except FileNotFoundError as error:
        hint = "look at bucket and key, and at storage_options: endpoint and region say whose store it is"
        raise NotFound("no such object or bucket", uri=uri, byte_range=byte_range, hint=hint) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionDenied(_brief(error), uri=uri, hint="check the credentials and what they may read") from error
    except exceptions.PreconditionError as error:
        raise SourceChanged("the object is not the one first seen", uri=uri, byte_range=byte_range) from error
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
    """Return the error for what obstore has no type for, by the HTTP status in its text (listing: every status)."""
    text = str(error)
    match = re.search(r"status code: (\d{3})", text)
    status = int(match[1]) if match else 0
    if _NO_CREDENTIALS in text:
        return PermissionDenied(
            "no credentials found",
            uri=uri,
            hint="set AWS_ACCESS_KEY_ID..., AWS_PROFILE (or the store's own variables) or storage_options; "
            "skip_signature=true reads public buckets",
        )
    # The text is searched because obstore gives these statuses no type of their own. 400 is S3's answer to HEAD for an
    # expired token or another region, without a word of explanation.
    if status in {400, 401, 403}:
        return PermissionDenied(
            _brief(error), uri=uri, hint="check the credentials, what they may read, and the region"
        )
    if status == 404:
        return NotFound(_brief(error), uri=uri, byte_range=byte_range)
    if not status and "kind: Timeout" in text:
        hint = "raise stall_s if the source is only slow"
        return SourceStalled(_KINDS["Timeout"], uri=uri, byte_range=byte_range, hint=hint)
    # 301 and 307: S3's answers for a bucket of another region.
    region = "the bucket may be in another region: set AWS_REGION" if status in {301, 307} else None
    return SourceUnavailable(_brief(error), uri=uri, byte_range=byte_range, hint=region)


def _brief(error: Exception) -> str:
    """Return one line of a message: status and code, or its first line without queries, which hold signatures."""
    text = str(error)
    status, code = re.search(r"status code: (\d{3})", text), re.search(r"<Code>(\w{1,64})</Code>", text)
    if status:
        return f"HTTP {status[1]}" + (f" {code[1]}" if code else "")
    known = [words for name, words in _HEADERS.items() if name in text]
    known += [words for name, words in _KINDS.items() if f"kind: {name}," in text]
    if known:
        return known[0]
    return re.sub(r"^Generic \w+ error: |\?\S+", "", text.partition("\n")[0])[:300]
