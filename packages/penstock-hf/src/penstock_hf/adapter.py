"""Publish and receive versions of an adapter. Each version belongs to the base that it was trained on.

A version contains the adapter's tensors under PEFT's names. A version's metadata contains the base and
`adapter_config.json`. The metadata arrives before any tensor is read. A receiver with a different base raises
BaseMismatch before it reads a byte.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

import penstock
from penstock import ConnectionSettings, Hooks, PublishReport, UpdateReport
from penstock.errors import BaseMismatch, ConfigError, DestinationError, PlanError
from penstock.reports import InspectReport
from penstock.spi import (
    ADAPTERS,
    Closeable,
    OutputSet,
    Target,
    UpdateMode,
    dtype_of,
    private_directory,
    read_object,
    require_name,
    text_of,
    write_object,
    wrong_argument,
)
from penstock.sync import Publisher, Subscriber, SubscriberSettings
from penstock_convert.plan.tasks import Spec, lay_out

BASE = "adapter.base"
"""Metadata key for the identity of a version's base."""
CONFIG = "adapter.config"
"""Metadata key for a version's `adapter_config.json`."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""Files in an adapter's directory. Source: PEFT 0.21, utils/constants.py."""
_NONE = "none"
_EPOCH = " run="
"""Prefix of the epoch in the identity of a synced base. Other members compare identities, so the prefix must not
change."""


@runtime_checkable
class Revised(Protocol):
    """A report that contains a revision of weights, such as `LoadReport`, `FetchReport` and `VerifyReport`."""

    @property
    def revision(self) -> str:
        """Return the revision of the weights."""
        ...


Base = str | Publisher | Subscriber | PublishReport | UpdateReport | InspectReport | Revised | Callable[[], str]
"""The base of an adapter. See `base_identity`."""


def base_identity(base: Base) -> str:
    """Return the string that identifies a base when trainers and receivers compare their bases.

    Args:
        base: a string, a function that returns a string, or a report with a revision from `load`, `inspect`, `verify`
            or `fetch`. A `Publisher` or `Subscriber` of the base, or its report, yields `NAME:VERSION run=EPOCH` for
            the current version. A restarted trainer has a different epoch, and therefore a different base, even if the
            version number is the same. A `base` of any other type raises ConfigError.
    """
    if isinstance(base, str):
        identity = base
    elif isinstance(base, Publisher | Subscriber | PublishReport | UpdateReport):
        is_whole = base.version >= 0 and not getattr(base, "is_dirty", False)
        epoch = base.revision.rpartition(":")[0]
        identity = f"{base.name}:{base.version}{_EPOCH}{epoch}" if is_whole else _NONE
    elif isinstance(base, InspectReport):
        identity = base.manifest.revision
    elif isinstance(base, Revised):
        identity = base.revision
    elif callable(base):
        identity = base()
    else:
        identity = ""
    if not isinstance(identity, str) or not identity:
        raise wrong_argument(
            "base", base, "a string, a report with a revision, or the Publisher or Subscriber of the base"
        )
    return identity


def is_same_base(expected: str, found: str) -> bool:
    """Return whether two identities refer to the same base.

    Epochs are compared only if both identities contain an epoch. Identities from vLLM contain no epoch.
    """
    if _EPOCH in expected and _EPOCH in found:
        return expected == found
    return expected.partition(_EPOCH)[0] == found.partition(_EPOCH)[0]


def adapter_metadata(base: Base, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata for publishing a version of an adapter.

    `config` is the content of `adapter_config.json`. A base without a version, or a configuration that is not valid
    JSON, raises ConfigError.
    """
    identity = base_identity(base)
    if identity == _NONE:
        raise ConfigError("the adapter's base has no version yet", hint="publish or receive the base first")
    try:
        # Sort sets and keys, because all ranks must publish the same text.
        text = write_object(msgspec.to_builtins(_plain(config)), indent=None, sort_keys=True).decode()
    except TypeError as error:
        raise ConfigError(f"the adapter's configuration cannot be written as JSON: {error}") from error
    return {BASE: identity, CONFIG: text}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _config_of(name: str, version: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the adapter's configuration from a version's metadata."""
    if BASE not in metadata or CONFIG not in metadata:
        raise PlanError(
            f"version {version} of {name!r} is not an adapter, because it has no base and no configuration",
            hint="publish the adapter with penstock_hf.peft.adapter_publisher",
        )
    return read_object(metadata[CONFIG].encode(), f"the configuration of version {version} of the adapter {name!r}")


class AdapterSubscriber(Closeable):
    """A receiver of an adapter's versions, created by `adapter_subscriber`. A context manager. Not thread-safe.

    Attributes:
        subscriber: the sync's subscriber, which receives the versions.
        tensors: the adapter's tensors under PEFT's names. Except during an update, the tensors hold the live version.
    """

    def __init__(
        self,
        base: Base,
        check: Callable[[Mapping[str, Any]], None] | None,
        hooks: Hooks,
        check_target: Callable[[], None] | None = None,
        follow_target: Callable[[], None] | None = None,
    ) -> None:
        self.subscriber: Subscriber
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._base = base
        self._check = check
        self._check_target = check_target
        self._follow_target = follow_target
        self._hooks = hooks
        # Base of the version that is being received.
        self._expected = ""

    @property
    def name(self) -> str:
        """Return the name of the sync."""
        return self.subscriber.name

    @property
    def version(self) -> int:
        """Return the live version, or -1 before the first version."""
        return self.subscriber.version

    @property
    def config(self) -> dict[str, Any]:
        """Return the live version's `adapter_config.json`. Raise ConfigError if no version is live."""
        if self.version < 0:
            raise ConfigError(f"no version of {self.name!r} has been received yet", hint="call update()")
        return _config_of(self.name, self.version, self.subscriber.metadata)

    @property
    def base(self) -> str:
        """Return the identity of the live version's base, or an empty string if no version is live."""
        return self.subscriber.metadata.get(BASE, "")

    def update(self, version: int | None = None, timeout_s: float | None = None) -> UpdateReport:
        """Receive a version and make it live. See `penstock.sync.Subscriber.update`.

        Raises:
            BaseMismatch: the version's base differs from this receiver's base, and no byte was read. If the receiver's
                base changed during the read, BaseMismatch is also raised, and the previous version stays live.
            PlanError: the version's configuration does not fit the target.
        """
        self._follow()
        return self.subscriber.update(version, timeout_s)

    def stage(self, version: int | None = None, timeout_s: float | None = None) -> int:
        """Receive and verify a version for `commit`, and return its number. Raise the same errors as `update`."""
        self._follow()
        return self.subscriber.stage(version, timeout_s)

    def _follow(self) -> None:
        if self._follow_target is not None:
            self._follow_target()

    def commit(self) -> UpdateReport:
        """Make the staged version live. Raise the same errors as `penstock.sync.Subscriber.commit` and `update`."""
        return self.subscriber.commit()

    def hooks(self) -> Hooks:
        """Return hooks that first run this adapter's checks, and then the caller's hooks."""
        return replace(self._hooks, before_read=self._before_read, before_pause=self._before_pause)

    def _before_read(self, version: int, metadata: Mapping[str, str]) -> None:
        config = _config_of(self.name, version, metadata)
        self._expected = metadata[BASE]
        self._check_here(version)
        if self._check is not None:
            self._check(config)
        if self._hooks.before_read is not None:
            self._hooks.before_read(version, metadata)

    def _before_pause(self, version: int) -> None:
        # Other syncs may have changed the base and the target after the version was staged.
        self._check_here(version)
        if self._hooks.before_pause is not None:
            self._hooks.before_pause(version)

    def _check_here(self, version: int) -> None:
        """Raise an error unless this receiver's base and target match the version."""
        if self._check_target is not None:
            self._check_target()
        found = base_identity(self._base)
        if not is_same_base(self._expected, found):
            raise BaseMismatch(
                f"version {version} of the adapter {self.name!r} is for the base {self._expected!r}, but this receiver "
                f"has the base {found!r}",
                expected=self._expected,
                found=found,
                hint="update the base first, or publish an adapter for this base",
            )

    def close(self) -> None:
        """Leave the sync, and leave the adapter's tensors unchanged. Idempotent."""
        self.subscriber.close()


def adapter_subscriber(
    name: str,
    *,
    base: Base,
    target: Target | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
    check_target: Callable[[], None] | None = None,
    follow_target: Callable[[], None] | None = None,
    hooks: Hooks | None = None,
    connection: ConnectionSettings | str | None = None,
    mode: UpdateMode = "staged",
    rank: tuple[int, int] | None = None,
    settings: SubscriberSettings | None = None,
    device: str | torch.device = "cpu",
) -> AdapterSubscriber:
    """Receive the versions of an adapter that is published under a name.

    Raises the same errors as `penstock.subscriber`.

    Args:
        name: name of the sync.
        base: base of this receiver. Each update compares this base with the base of the version.
        target: tensors to fill, by PEFT's names, or None to allocate new tensors.
        check: function that is called with the configuration before a byte is read, and raises an error to
            refuse the version.
        check_target: function that is called before a byte is read and before a version goes live, and raises an
            error to refuse the version.
        follow_target: function that is called before each update, to look up tensors of `target` that have moved.
        hooks, connection, mode, rank, settings: see `penstock.subscriber`.
        device: device of new tensors.
    """
    require_name("name", name)
    base_identity(base)
    received = AdapterSubscriber(base, check, hooks or Hooks(), check_target, follow_target)

    def made(published: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        # This function is called again if the trainer's adapter gets different tensors, for example after a change of
        # the LoRA rank.
        received.tensors = {
            tensor_name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for tensor_name, tensor in published.items()
        }
        return received.tensors

    if isinstance(target, Mapping):
        received.tensors = target  # type: ignore[assignment]
    received.subscriber = penstock.subscriber(
        name,
        made if target is None else target,
        connection=connection,
        mode=mode,
        hooks=received.hooks(),
        rank=rank,
        settings=settings,
    )
    return received


class AdapterDirectory(Closeable):
    """Writes each version of an adapter to a directory, in the layout of PEFT's `save_pretrained`.

    Each directory is complete when it appears. A directory's name contains the trainer's epoch and the version. The
    content of a directory never changes, because engines key their caches by the path.

    Args:
        received: subscription to the adapter's versions.
        root: parent of the directories. The default is `/dev/shm`, or the runtime directory if `/dev/shm` is not
            writable. `close` removes all directories.
        keep: number of newest versions whose directories are kept. An engine that has evicted an adapter reads its
            directory again for the next request.
    """

    def __init__(self, received: AdapterSubscriber, root: Path | str | None = None, *, keep: int = 8) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, not {keep}", hint="pass keep=1 to keep one version")
        self._received = received
        self._keep = keep
        self._root = None if root is None else Path(text_of(root))
        self._own: Path | None = None
        self._versions: list[Path] = []

    def write(self) -> Path:
        """Return the directory of the adapter's live version, and write the directory if it does not exist.

        Raises:
            DestinationError, DiskFull: the version could not be written, or the written file has different bytes.
            ConfigError: no version has been received.
        """
        config, received = self._received.config, self._received
        # Include the epoch in the name, because a restarted trainer reuses version numbers for different bytes.
        epoch = received.subscriber.revision.partition(":")[0]
        into = self._place() / f"{received.name.replace('/', '_')}-{epoch[:12]}-{received.version}"
        if into in self._versions:
            return into
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in received.tensors.items()}
        specs = [Spec(name=name, dtype=dtype_of(one.dtype), shape=tuple(one.shape)) for name, one in tensors.items()]
        files = lay_out(specs, shard_bytes=1 << 62)
        growing = into.with_name(f"{into.name}.penstock-{secrets.token_hex(4)}")
        out = OutputSet(growing, files.table, files.body_nbytes, {"format": "pt"})
        out.names = [WEIGHTS_FILE]
        try:
            out.create()
            out.open()
            for row, (name, at) in enumerate(zip(files.table.names, files.table.offset.tolist(), strict=True)):
                data = memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
                out.write(0, at, data)
                again = bytearray(int(files.table.nbytes[row]))
                out.read(0, at, memoryview(again))
                # The received bytes were verified in memory. Also check that engines will read the same bytes from the
                # file.
                if again != data:
                    raise DestinationError("the written file has different bytes", uri=str(growing), tensor=name)
            out.publish(into, {CONFIG_FILE: write_object(config)})
        except BaseException:
            out.remove()
            raise
        finally:
            out.close()
        self._versions.append(into)
        for old in self._versions[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        del self._versions[: -self._keep]
        return into

    def _place(self) -> Path:
        if self._own is None:
            if self._root is None:
                # `/dev/shm` is only the parent of a directory that `mkdtemp` creates.
                memory = Path("/dev/shm")  # nosec B108
                root = memory if os.access(memory, os.W_OK) else private_directory()
            else:
                root = self._root
                root.mkdir(parents=True, exist_ok=True)
            # `mkdtemp` creates a directory for this user only. With a `root`, engines of other users may read the
            # directory too.
            self._own = Path(tempfile.mkdtemp(prefix=ADAPTERS, dir=root))
            if self._root is not None:
                self._own.chmod(0o755)
        return self._own

    def close(self) -> None:
        """Remove all directories. Idempotent."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        self._versions = []
