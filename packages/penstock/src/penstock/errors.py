"""Every error Penstock raises, with its cause, the state of the destination, and a hint.

PenstockError
  ConfigError             config       an argument, option or environment variable is wrong
    MissingExtra                       an optional package is not installed
  FormatError             source       a file breaks its format (names file, tensor, fault)
  SourceError             source
    NotFound  PermissionDenied  SourceChanged  SourceTruncated  SourceUnavailable  SourceStalled  StaleDescriptor
    SourceBusy                         a holder has its maximum number of readers; ask another
    GrantRefused                       (a PermissionDenied) a grant is forged, expired, replayed or for another read
    HubUnavailable  UnknownMember      the directory of the fleet; peers and their weights stay usable
  IntegrityError          source       bytes differ from their digest, revision or signature
  PlanError               plan         names, shapes or dtypes of the two sides do not fit
    BudgetTooSmall                     `minimum_bytes` is the least that would do
  BaseMismatch            plan         an adapter belongs to another base than the receiver's; names both
  DestinationError        destination
    DeviceOutOfMemory  DiskFull
  OperationFailed         config       an operation raised, or gave other tensors than it declared
  PeerLost                source       another rank or process failed or stopped answering
  VersionRefused          source       a version of a sync was withdrawn, or its check failed; it never goes live
  VersionNotLive          destination  a version of a sync that a request is pinned to is not the live one
  Cancelled               config       the caller cancelled, or abandoned an iterator

Four are also the class of Python that a caller would catch: ConfigError is a ValueError, MissingExtra an ImportError,
NotFound a FileNotFoundError, PermissionDenied a PermissionError. Inside the package, a block that catches one of those
from the system or a library therefore lets PenstockError pass first, where its body may raise one.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import msgspec

Blame = Literal["source", "destination", "plan", "config"]

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of msgspec for bytes that are no message of the wanted type, also for text that is no UTF-8 and for
lists nested too deep. Whatever decodes bytes of a file or of another process catches all three."""


_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>;]*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return a text without the parts of its URLs that hold secrets: user and password, and a web URL's query."""
    # Every query, not only those with known names: any of them may be a signature (`X-Amz-Signature`, `sig`, `token`).
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1", _USER.sub("", text))


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Return a text that cannot steer a terminal or a log: control and invisible characters are escaped.

    Names of files, answers of servers and messages of other members may have escape sequences, line breaks that forge a
    line of a log, and marks that turn the direction of writing.

    Args:
        keep_lines: leave line breaks, in texts that are composed here.
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
    """Return a text for others: without secrets, at most `limit` characters, and encodable as UTF-8."""
    # Names of files are bytes: one that is no UTF-8 has surrogates as a str, and no message could carry it.
    return without_secrets(text)[:limit].encode("utf-8", "replace").decode()


class PenstockError(Exception):
    """The root of all errors.

    Attributes:
        blame: the side at fault: `source`, `destination`, `plan` or `config`.
        mutated: True if the destination was touched; it must not be used until it is loaded again.
        uri: the file, object or peer, if the error is about one.
        tensor: the tensor, if the error is about one.
        byte_range: `(start, stop)` in `uri`, if the error is about a range.
        hint: the next step for the user, one sentence.
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
        # Errors are logged, and shown to other members: no message may carry credentials.
        message = printable(without_secrets(message), keep_lines=True)
        super().__init__(message)
        self.message = message
        self.mutated = mutated
        self.uri = None if uri is None else printable(without_secrets(uri))
        self.tensor = tensor
        self.byte_range = byte_range
        self.hint = None if hint is None else printable(hint, keep_lines=True)

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to make an equal error, in this process or another: with its fields, notes and causes.

        Worker processes, and the ranks of torch.distributed.checkpoint, send their errors to others. The constructor is
        not called again: it would need the arguments of the subclass.
        """
        state = dict(self.__dict__)
        for name in _OWN_FIELDS:
            # Of OSError and ImportError, which keep them outside of the dictionary.
            if getattr(self, name, None) is not None:
                state[name] = getattr(self, name)
        # In this order: to set the cause suppresses the context.
        state["__context__"] = _sendable_cause(self.__context__)
        if self.__cause__ is not None:
            state["__cause__"] = _sendable_cause(self.__cause__)
        state["__suppress_context__"] = self.__suppress_context__
        return _made, (_bases_of(type(self)), self.args), state

    @property
    def summary(self) -> str:
        """Return the message with the file, object or peer that it is about: for lists of errors."""
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
    """The text of a cause that was not sent with its error: its class may be unknown to the receiver."""


def _sendable_cause(cause: BaseException | None) -> BaseException | None:
    """Return a cause for a copy of an error, in another process perhaps: itself, or its text."""
    if cause is None or isinstance(cause, PenstockError | CauseText):
        return cause
    # Python's own classes are known everywhere; their arguments may still hold anything.
    if type(cause).__module__ == "builtins" and all(type(part) in _PLAIN for part in cause.args):
        return type(cause)(*cause.args) if vars(cause) else cause
    return CauseText(f"{type(cause).__qualname__}: {cause}")


_PLAIN = {str, int, float, bool, bytes, type(None)}

_classes: dict[tuple[type[BaseException], ...], type[PenstockError]] = {}
"""The classes made by `also`, so that two errors of one kind have one class."""


def also(error: PenstockError, *others: type[Exception]) -> PenstockError:
    """Return `error` as an instance of its own class and of `others`; itself if it is all of them already.

    A program that catches the errors of another library then catches Penstock's error for the same fault.
    """
    bases = _bases_of(type(error))
    missing = tuple(other for other in others if not isinstance(error, other))
    if not missing:
        return error
    made = _made((*bases, *missing), error.args)
    made.__dict__.update(error.__dict__)
    return made


def _bases_of(kind: type[PenstockError]) -> tuple[type[BaseException], ...]:
    """Return the classes of which `also` made a class, the first of them Penstock's; itself for any other class."""
    return kind.__bases__ if kind in _classes.values() else (kind,)


def _made(bases: tuple[type[BaseException], ...], args: tuple[object, ...]) -> PenstockError:
    """Return an error of a class, or of the class that `also` makes of several, without calling a constructor."""
    kind: type[PenstockError]
    first = kind = bases[0]  # type: ignore[assignment]
    if len(bases) > 1:
        if bases not in _classes:
            body = {"__module__": first.__module__, "__doc__": first.__doc__, "__qualname__": first.__qualname__}
            # Not assigned: another thread may have made it meanwhile.
            _classes.setdefault(bases, type(first.__name__, bases, body))
        kind = _classes[bases]
    # Not by calling the class: a foreign base may require other arguments, or none.
    error = kind.__new__(kind)
    error.args = args
    return error


def without_frames(error: PenstockError) -> PenstockError:
    """Drop the frames of an error and its causes, for an error that is stored: frames keep all of the stack alive."""
    # A loop over a list: causes may refer to each other in a circle.
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is not None and cause not in seen:
            seen.append(cause.with_traceback(None))
            left += [cause.__cause__, cause.__context__]
    return error


class ConfigError(PenstockError, ValueError):
    """An argument, option or environment variable is wrong; nothing was started."""


class MissingExtra(ConfigError, ImportError):
    """A feature needs an optional package; the hint names the extra to install."""


class OperationFailed(PenstockError):
    """An operation of a conversion (a user's function, perhaps) raised, hung, or gave other tensors than declared."""


class Cancelled(PenstockError):
    """The caller cancelled the run or abandoned its iterator; everything was drained and freed."""


class FormatError(PenstockError):
    """A header, index or manifest is malformed or contradicts its file; nothing was allocated from its numbers."""

    blame: ClassVar[Blame] = "source"


class UnsafeFormat(FormatError):
    """The weights are a pickle, which runs code when it is read; it was not read. The hint converts it."""


class SourceError(PenstockError):
    """A source could not give the bytes it promised."""

    blame: ClassVar[Blame] = "source"


class NotFound(SourceError, FileNotFoundError):
    """A file, object, shard or tensor does not exist."""


class PermissionDenied(SourceError, PermissionError):
    """The source refused these credentials, or the file mode forbids reading."""


class SourceBusy(SourceError):
    """A holder has its maximum number of readers; each of them has, or will have, the same bytes."""


class GrantRefused(PermissionDenied):
    """A grant to read a peer is forged, expired, replayed, or for another reader, source or model."""


class HubUnavailable(SourceError):
    """The hub, or the store behind it, did not answer in time; known peers stay usable."""


class UnknownMember(SourceError):
    """The hub does not know this member: it was silent too long, or the hub is new; register again."""


class SourceChanged(SourceError):
    """The file or object is not the one first seen (ETag, inode, size or times differ), or is being written to."""


class SourceTruncated(SourceError):
    """The source ended before the bytes its header promised."""


class SourceUnavailable(SourceError):
    """The source failed (EIO, 5xx, reset) and retries with back-off made no progress."""


class SourceStalled(SourceError):
    """The source gave no byte for `stall_s` seconds."""


class StaleDescriptor(SourceError):
    """The peer released its memory, or changed its content, after it issued this descriptor."""


class IntegrityError(PenstockError):
    """Bytes differ from their digest, a revision from the requested one, or a signature is not valid."""

    blame: ClassVar[Blame] = "source"


class PlanError(PenstockError):
    """Names, shapes, dtypes or boxes of source and destination do not match; the message lists them."""

    blame: ClassVar[Blame] = "plan"


class BudgetTooSmall(PlanError):
    """`memory_bytes`, or another budget, cannot hold the least the plan needs.

    Attributes:
        minimum_bytes: the least that would do.

    Args:
        budget: the argument that sets it, for the hint.
    """

    def __init__(self, message: str, *, minimum_bytes: int, budget: str = "memory_bytes") -> None:
        super().__init__(message, hint=f"give {budget} >= {minimum_bytes}")
        self.minimum_bytes = minimum_bytes


class BaseMismatch(PenstockError):
    """An adapter belongs to another base than the receiver's; no byte of it was read.

    Attributes:
        expected: the base that the adapter was published for.
        found: the receiver's base.
    """

    blame: ClassVar[Blame] = "plan"

    def __init__(self, message: str, *, expected: str, found: str, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.expected = expected
        self.found = found


class DestinationError(PenstockError):
    """The destination could not take the bytes."""

    blame: ClassVar[Blame] = "destination"


class DeviceOutOfMemory(DestinationError):
    """The device has no room for the tensors; what was allocated is freed."""


class DiskFull(DestinationError):
    """The destination's file system has no room left."""


class PeerLost(PenstockError):
    """Another rank or process of the same work failed or stopped answering."""

    blame: ClassVar[Blame] = "source"


class VersionRefused(PenstockError):
    """A version of a sync was withdrawn, or failed its check; it never goes live, and the version before is served.

    Attributes:
        version: the version.
        member: the member that refused it; empty: it was not refused by one member.
        reason: why.
    """

    blame: ClassVar[Blame] = "source"

    def __init__(self, message: str, *, version: int, member: str = "", reason: str = "", hint: str | None = None):
        super().__init__(message, hint=hint)
        self.version = version
        self.member = member
        self.reason = without_secrets(reason)


class VersionNotLive(PenstockError):
    """The version of a sync that a request is pinned to is not the live one, or did not stay so long enough.

    Attributes:
        live: the version that is live; -1: none.
    """

    blame: ClassVar[Blame] = "destination"

    def __init__(self, message: str, *, live: int, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.live = live


def class_named(name: str, least: type[PenstockError]) -> type[PenstockError]:
    """Return the class that another process named in its error; `least` unless it is a kind of that.

    Args:
        name: from a message, so it may be anything.
        least: the class to use otherwise. Also for classes whose errors need more than a message.
    """
    found = globals().get(name)
    if not isinstance(found, type) or not issubclass(found, least) or found.__init__ is not PenstockError.__init__:
        return least
    return found
