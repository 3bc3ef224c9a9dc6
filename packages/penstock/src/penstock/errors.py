"""Every error that Penstock raises. `PenstockError` is the root.

Four errors also derive from the built-in class that a caller would catch: ConfigError is a ValueError, MissingExtra an
ImportError, NotFound a FileNotFoundError and PermissionDenied a PermissionError. So code inside the package that
catches ValueError, ImportError or OSError must first re-raise PenstockError.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import msgspec

Blame = Literal["source", "destination", "plan", "config"]

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for malformed input: a wrong message type, invalid UTF-8, or deep nesting."""

_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>;]*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user, no password and no query."""
    # Remove every query, because any parameter may be a signature (`X-Amz-Signature`, `sig`, `token`).
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1", _USER.sub("", text))


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Escape control and invisible characters, so that the text cannot control a terminal or forge a log line.

    Use `keep_lines`, which keeps line breaks, only for text that Penstock composed.
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or (keep_lines and letter == "\n")
        else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


def sendable(text: str, limit: int) -> str:
    """Make a text safe to send to other processes: no secrets, at most `limit` characters, valid UTF-8."""
    # Python decodes a file name that is not UTF-8 to surrogates, which no message can contain.
    return without_secrets(text)[:limit].encode("utf-8", "replace").decode()


class PenstockError(Exception):
    """The root of all errors.

    Attributes:
        blame: the side at fault: `source`, `destination`, `plan` or `config`.
        mutated: True if the destination was changed, so that it must be loaded again before use.
        uri: the file, object or peer, if the error is about one.
        tensor: the tensor, if the error is about one.
        byte_range: `(start, stop)` in `uri`, if the error is about a range.
        hint: one sentence that tells the user what to do next.
    """

    blame: ClassVar[Blame] = "config"

    def __init__(
        self,
        message: str,
        *,
        mutated: bool = False,
        uri: str | None = None,
        tensor: str | None = None,
        byte_range: tuple[int, int] | None = None,
        hint: str | None = None,
    ) -> None:
        # Errors are logged and shown to other members, so no message may contain credentials.
        message = printable(without_secrets(message), keep_lines=True)
        super().__init__(message)
        self.message = message
        self.mutated = mutated
        self.uri = None if uri is None else printable(without_secrets(uri))
        self.tensor = tensor
        self.byte_range = byte_range
        self.hint = None if hint is None else printable(hint, keep_lines=True)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with its fields, notes and causes. Unpickling does not call the constructor."""
        state = dict(self.__dict__)
        for name in _OWN_FIELDS:
            # OSError and ImportError store the fields in `_OWN_FIELDS` outside `__dict__`.
            if getattr(self, name, None) is not None:
                state[name] = getattr(self, name)
        # Setting the cause also sets `__suppress_context__`, so that flag comes last.
        state["__context__"] = _sendable_cause(self.__context__)
        if self.__cause__ is not None:
            state["__cause__"] = _sendable_cause(self.__cause__)
        state["__suppress_context__"] = self.__suppress_context__
        return _made, (_bases_of(type(self)), self.args), state

    @property
    def summary(self) -> str:
        """Return the message and the affected file, object or peer, for lists of errors."""
        return self.message if self.uri is None else f"{self.message} in {self.uri}"

    def __str__(self) -> str:
        parts = [self.message]
        if self.uri is not None:
            where = self.uri if self.byte_range is None else f"{self.uri} [{self.byte_range[0]}, {self.byte_range[1]})"
            parts.append(f"in {where}")
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor!r}")
        parts.append(f"blame: {self.blame}; destination {'TOUCHED' if self.mutated else 'untouched'}")
        if self.hint is not None:
            parts.append(self.hint)
        return "; ".join(parts)


_OWN_FIELDS = ("errno", "strerror", "filename", "filename2", "name", "path")


class CauseText(Exception):
    """The text of an error's cause, sent in place of a cause whose class the receiving process may not know."""


def _sendable_cause(cause: BaseException | None) -> BaseException | None:
    if cause is None or isinstance(cause, PenstockError | CauseText):
        return cause
    # Every process knows the built-in classes, but their arguments may be objects of any class.
    if type(cause).__module__ == "builtins" and all(type(part) in _PLAIN for part in cause.args):
        return type(cause)(*cause.args) if vars(cause) else cause
    return CauseText(f"{type(cause).__qualname__}: {cause}")


_PLAIN = {str, int, float, bool, bytes, type(None)}

_classes: dict[tuple[type[BaseException], ...], type[PenstockError]] = {}
"""The classes that `also` has created, by their bases. Errors with the same bases share a class."""


def also(error: PenstockError, *others: type[Exception]) -> PenstockError:
    """Return `error` as an instance of its class and of `others`, unchanged if it already is such an instance.

    A program that catches the classes in `others`, which are another library's errors, also catches the result.
    """
    bases = _bases_of(type(error))
    missing = tuple(other for other in others if not isinstance(error, other))
    if not missing:
        return error
    made = _made((*bases, *missing), error.args)
    made.__dict__.update(error.__dict__)
    return made


def _bases_of(kind: type[PenstockError]) -> tuple[type[BaseException], ...]:
    return kind.__bases__ if kind in _classes.values() else (kind,)


def _made(bases: tuple[type[BaseException], ...], args: tuple[object, ...]) -> PenstockError:
    """Create an error of one class, or of a new class with several bases, without calling a constructor."""
    kind: type[PenstockError]
    first = kind = bases[0]  # type: ignore[assignment]
    if len(bases) > 1:
        if bases not in _classes:
            body = {"__module__": first.__module__, "__doc__": first.__doc__, "__qualname__": first.__qualname__}
            # Another thread may have added the class since the check, so do not overwrite it.
            _classes.setdefault(bases, type(first.__name__, bases, body))
        kind = _classes[bases]
    # Calling the class could fail, because a base from another library may require different arguments.
    error = kind.__new__(kind)
    error.args = args
    return error


def without_frames(error: PenstockError) -> PenstockError:
    """Drop the tracebacks of an error and its causes. A stored traceback keeps every object in its frames alive."""
    # Causes may form a cycle, so remember the visited causes.
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is not None and cause not in seen:
            seen.append(cause.with_traceback(None))
            left += [cause.__cause__, cause.__context__]
    return error


class ConfigError(PenstockError, ValueError):
    """An argument, option or environment variable is wrong. Nothing was started."""


class MissingExtra(ConfigError, ImportError):
    """A feature needs an optional package. The hint gives the command that installs the package."""


class OperationFailed(PenstockError):
    """An operation in a conversion raised, hung, or returned tensors that differ from its declaration."""


class Cancelled(PenstockError):
    """The caller cancelled the run or abandoned its iterator. All reads have ended and all memory is released."""


class FormatError(PenstockError):
    """A header, index or manifest is malformed or contradicts its file. No memory was allocated for the weights."""

    blame: ClassVar[Blame] = "source"


class UnsafeFormat(FormatError):
    """The weights are a pickle, which runs code when read, and were not read. The hint gives the conversion command."""


class SourceError(PenstockError):
    """A source could not deliver the bytes that it promised."""

    blame: ClassVar[Blame] = "source"


class NotFound(SourceError, FileNotFoundError):
    """A file, object, shard or tensor does not exist."""


class PermissionDenied(SourceError, PermissionError):
    """The source refused the credentials, or the file mode forbids reading."""


class SourceBusy(SourceError):
    """A holder has reached its maximum number of readers. The holder's readers have, or will have, the same bytes."""


class GrantRefused(PermissionDenied):
    """A grant to read from a peer is forged, expired, replayed, or for a different reader, source or model."""


class HubUnavailable(SourceError):
    """The hub, or the store behind it, did not respond in time. Known peers stay usable."""


class UnknownMember(SourceError):
    """The hub does not know this member, because the member was silent too long or the hub restarted. Join again."""


class SourceChanged(SourceError):
    """The file or object changed during the read (its ETag, inode, size or times differ), or is being written to."""


class SourceTruncated(SourceError):
    """The source ended before the bytes its header promised."""


class SourceUnavailable(SourceError):
    """The source failed (EIO, 5xx, reset), and retries with back-off made no progress."""


class SourceStalled(SourceError):
    """The source sent no byte for `stall_s` seconds."""


class StaleDescriptor(SourceError):
    """The peer released or changed its memory after it issued this descriptor."""


class IntegrityError(PenstockError):
    """Bytes differ from their digest, the revision is not the requested one, or a signature is invalid."""

    blame: ClassVar[Blame] = "source"


class PlanError(PenstockError):
    """Names, shapes, dtypes or boxes of source and destination do not match. The message lists them."""

    blame: ClassVar[Blame] = "plan"


class BudgetTooSmall(PlanError):
    """`memory_bytes`, or another memory limit, is below the minimum that the plan needs.

    Attributes:
        minimum_bytes: the smallest sufficient limit.
    """

    def __init__(self, message: str, *, minimum_bytes: int, budget: str = "memory_bytes") -> None:
        super().__init__(message, hint=f"set {budget} >= {minimum_bytes}")
        self.minimum_bytes = minimum_bytes


class BaseMismatch(PenstockError):
    """An adapter was published for a different base model than the receiver's. No byte of the adapter was read.

    Attributes:
        expected: identity of the base that the adapter was published for.
        found: identity of the receiver's base.
    """

    blame: ClassVar[Blame] = "plan"

    def __init__(self, message: str, *, expected: str, found: str, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.expected = expected
        self.found = found


class DestinationError(PenstockError):
    """The destination could not accept the bytes."""

    blame: ClassVar[Blame] = "destination"


class DeviceOutOfMemory(DestinationError):
    """The device has too little free memory for the tensors. Memory allocated so far was released."""


class DiskFull(DestinationError):
    """The destination's file system is full."""


class PeerLost(PenstockError):
    """Another rank or process of the same job failed or stopped responding."""

    blame: ClassVar[Blame] = "source"


class VersionRefused(PenstockError):
    """A version of a sync was withdrawn or failed its check, and never goes live. The previous version stays live.

    Attributes:
        version: the version number.
        member: the member that refused the version, or empty if no single member refused the version.
        reason: why the version was refused.
    """

    blame: ClassVar[Blame] = "source"

    def __init__(self, message: str, *, version: int, member: str = "", reason: str = "", hint: str | None = None):
        super().__init__(message, hint=hint)
        self.version = version
        self.member = member
        self.reason = without_secrets(reason)


class VersionNotLive(PenstockError):
    """A request is pinned to a version that is not live, or that was replaced before the request ended.

    Attributes:
        live: the live version, or -1 if no version is live.
    """

    blame: ClassVar[Blame] = "destination"

    def __init__(self, message: str, *, live: int, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.live = live


def class_named(name: str, least: type[PenstockError]) -> type[PenstockError]:
    """Return the error class called `name`, which another process sent and which may be any text.

    If no subclass of `least` with this name can be constructed from a message alone, return `least`.
    """
    found = globals().get(name)
    if not isinstance(found, type) or not issubclass(found, least) or found.__init__ is not PenstockError.__init__:
        return least
    return found
