"""Decodes pickles without executing them. The interpreter builds a tree, and never calls, imports or looks up anything.

DCP stores its metadata in a pickle, and values other than tensors in torch.save archives, which contain pickles too.
Python's unpickler imports and calls the functions that a pickle names. This interpreter accepts only the opcodes in
pickles from DCP and torch.save. The interpreter raises FormatError for any other name, an unknown opcode or a malformed
argument. A call becomes a `PickleRecord`, which `distcp` interprets. `archive` writes plain values as a torch.save
archive.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from penstock.errors import FormatError, PlanError
from penstock.storage.safetensors import clip

MAX_VALUES = 1 << 20
"""Maximum number of parts in a value. A tiny pickle can contain nested references that expand to a billion parts."""

MAX_DEPTH = 64
"""Maximum nesting depth of a value, far below Python's recursion limit."""


_MAX_KEY_PARTS = 256
"""Maximum number of parts in a key or a set element. Python hashes keys recursively. Hashing a tuple with 100,000
levels would crash the process, and hashing a tuple whose 60 levels each refer twice to the next would take years."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function in a pickle. The name is never looked up."""

    module: str
    name: str


class PickleRecord:
    """An object that a pickle would create with a call: the callable's name, its arguments, state and items."""

    __slots__ = ("args", "call", "items", "state")

    def __init__(self, call: Global, args: tuple[Any, ...]) -> None:
        self.call = call
        self.args = args
        self.state: Any = None
        self.items: list[tuple[Any, Any]] = []


PERSISTENT = Global("", "persistent id")
"""The callable in a record for a persistent id. The record's only argument is the id."""

# Plain values that torch.save writes as calls. Source: archives from torch 2.8 to 2.13.
_SET, _SET_2 = Global("builtins", "set"), Global("__builtin__", "set")
_FROZENSET, _FROZENSET_2 = Global("builtins", "frozenset"), Global("__builtin__", "frozenset")
_ENCODE = Global("_codecs", "encode")
# Names in the pickle of an empty `bytes` object, which is written as a call without arguments.
_EMPTY, _EMPTY_2 = Global("builtins", "bytes"), Global("__builtin__", "bytes")
_ORDERED = Global("collections", "OrderedDict")
SIZE = Global("torch", "Size")
DTYPES: Mapping[Global, torch.dtype] = {
    Global("torch", name): value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}
"""Maps names in a pickle to dtypes."""

PLAIN = frozenset({_SET, _SET_2, _FROZENSET, _FROZENSET_2, _ENCODE, _EMPTY, _EMPTY_2, _ORDERED, SIZE, *DTYPES})
"""The names that `plain` understands."""


class _Decoder:
    """An interpreter for one pickle, with its stack and memo."""

    def __init__(self, raw: bytes, allowed: frozenset[Global], uri: str) -> None:
        self.raw = raw
        self.allowed = allowed
        self.uri = uri
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def fail(self, fault: str) -> NoReturn:
        raise FormatError(f"cannot read a pickle: {fault}, at byte {self.at}", uri=self.uri)

    def take(self, count: int) -> bytes:
        stop = self.at + count
        if stop > len(self.raw):
            self.fail("it ends too early")
        part = self.raw[self.at : stop]
        self.at = stop
        return part

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def text(self, nbytes: int) -> str:
        # Decode as pickle does, because file names may contain surrogates.
        return self.take(nbytes).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        stop = self.raw.find(b"\n", self.at, self.at + 512)
        if stop < 0:
            self.fail("a name has no end")
        part = self.take(stop - self.at)
        self.at += 1
        return part.decode("ascii")

    def name(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            self.fail("a name is not text")
        named = Global(module, name)
        if named not in self.allowed:
            self.fail(f"it refers to {clip(module)}.{clip(name)}, which this format does not allow")
        return named

    def keys(self, values: list[Any]) -> list[Any]:
        """Return the values after checking that each value is small enough to be hashed."""
        for value in values:
            if isinstance(value, tuple | frozenset):
                left, parts = _MAX_KEY_PARTS, [value]
                while parts:
                    part = parts.pop()
                    left -= len(part)
                    if left < 0:
                        self.fail("a key has too many parts")
                    parts += [inner for inner in part if isinstance(inner, tuple | frozenset)]
        return values

    def mark(self) -> None:
        """Begin a new stack, so that opcodes after a mark cannot pop values from below the mark."""
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """Remove the stack of the last mark, and return its values."""
        if not self.below:
            self.fail("a mark is missing")
        values, self.stack = self.stack, self.below.pop()
        return values

    def pop(self) -> Any:
        return self.stack.pop()

    def call(self) -> None:
        args, call = self.pop(), self.pop()
        if not isinstance(call, Global) or not isinstance(args, tuple):
            self.fail("it calls something that is not a name")
        self.stack.append(PickleRecord(call, args))

    def build(self) -> None:
        state, record = self.pop(), self.stack[-1]
        if not isinstance(record, PickleRecord) or record.state is not None:
            self.fail("it sets the state of something that has none")
        record.state = state

    def put(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if len(pairs) % 2:
            self.fail("a key has no value")
        both = zip(pairs[::2], pairs[1::2], strict=True)
        if isinstance(target, dict):
            self.keys(pairs[::2])
            target.update(both)
        elif isinstance(target, PickleRecord):
            target.items.extend(both)
        else:
            self.fail("it adds items to something that is not a dict")

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            self.fail("it adds values to something that is not a list")
        self.stack[-1].extend(values)

    def add(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            self.fail("it adds values to something that is not a set")
        self.stack[-1].update(self.keys(values))

    def run(self) -> Any:
        raw, memo, steps, size = self.raw, self.memo, _STEPS, len(self.raw)
        stack, at = self.stack, 0
        push = stack.append
        # Handle the most frequent opcodes inline, with the position in a local variable. A large checkpoint's metadata
        # has a million of these opcodes, and handling them inline halves the decoding time.
        while at < size:
            code = raw[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                push(memo[raw[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                push(memo[int.from_bytes(raw[at : at + 4], "little")])
                at += 4
            elif code == 0x4B:  # BININT1
                push(raw[at])
                at += 1
            elif code == 0x4D and at + 2 <= size:  # BININT2
                push(raw[at] | raw[at + 1] << 8)
                at += 2
            elif code == 0x8C and at < size and at + 1 + raw[at] <= size:  # SHORT_BINUNICODE
                stop = at + 1 + raw[at]
                push(str(raw[at + 1 : stop], "utf-8", "surrogatepass"))
                at = stop
            elif code == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x29:  # EMPTY_TUPLE
                push(())
            elif code == 0x7D:  # EMPTY_DICT
                push({})
            else:
                self.at = at
                if code == 0x2E:  # STOP
                    value = stack.pop()
                    if stack or self.below or at != size:
                        self.fail("there are bytes or values after its end")
                    return value
                step = steps.get(code)
                if step is None:
                    self.fail(f"unknown opcode {code:#04x}")
                step(self)
                at = self.at
                if stack is not self.stack:
                    stack = self.stack
                    push = stack.append
        self.at = at
        return self.fail("it has no end")


def _memoize(decoder: _Decoder, nbytes: int) -> None:
    decoder.memo[decoder.number(nbytes)] = decoder.stack[-1]


def _push(make: Callable[[_Decoder], Any]) -> Callable[[_Decoder], None]:
    return lambda decoder: decoder.stack.append(make(decoder))


def _tuple(count: int) -> Callable[[_Decoder], None]:
    return _push(lambda decoder: tuple([decoder.pop() for _ in range(count)][::-1]))


def _marked(make: Callable[[list[Any]], Any]) -> Callable[[_Decoder], None]:
    # Pop the values first, because the result is pushed to the stack below the mark.
    def step(decoder: _Decoder) -> None:
        value = make(decoder.marked())
        decoder.stack.append(value)

    return step


def _frozenset(decoder: _Decoder) -> None:
    value = frozenset(decoder.keys(decoder.marked()))
    decoder.stack.append(value)


def _stack_global(decoder: _Decoder) -> Global:
    name, module = decoder.pop(), decoder.pop()
    return decoder.name(module, name)


def _signed(decoder: _Decoder, nbytes: int) -> int:
    return int.from_bytes(decoder.take(nbytes), "little", signed=True)


# Source: the opcode descriptions in Python's `pickletools`.
_STEPS: dict[int, Callable[[_Decoder], Any]] = {
    0x80: lambda d: d.number(1) <= 5 or d.fail("its protocol is newer than 5"),
    0x95: lambda d: d.number(8),  # FRAME: a hint for streaming readers
    ord("N"): _push(lambda d: None),
    0x88: _push(lambda d: True),
    0x89: _push(lambda d: False),
    ord("J"): _push(lambda d: _signed(d, 4)),
    ord("M"): _push(lambda d: d.number(2)),
    0x8A: _push(lambda d: _signed(d, d.number(1))),
    ord("G"): _push(lambda d: struct.unpack(">d", d.take(8))[0]),
    ord("X"): _push(lambda d: d.text(d.number(4))),
    0x8D: _push(lambda d: d.text(d.number(8))),
    ord("C"): _push(lambda d: d.take(d.number(1))),
    ord("B"): _push(lambda d: d.take(d.number(4))),
    0x8E: _push(lambda d: d.take(d.number(8))),
    ord("}"): _push(lambda d: {}),
    ord("]"): _push(lambda d: []),
    ord(")"): _push(lambda d: ()),
    0x8F: _push(lambda d: set()),
    ord("("): lambda d: d.mark(),
    ord("t"): _marked(tuple),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x91: _frozenset,
    ord("a"): lambda d: d.extend([d.pop()]),
    ord("e"): lambda d: d.extend(d.marked()),
    ord("s"): lambda d: d.put([d.pop(), d.pop()][::-1]),
    ord("u"): lambda d: d.put(d.marked()),
    0x90: lambda d: d.add(d.marked()),
    ord("c"): _push(lambda d: d.name(d.line(), d.line())),
    0x93: _push(_stack_global),
    ord("R"): lambda d: d.call(),
    0x81: lambda d: d.call(),
    ord("b"): lambda d: d.build(),
    ord("q"): lambda d: _memoize(d, 1),
    ord("r"): lambda d: _memoize(d, 4),
    ord("Q"): _push(lambda d: PickleRecord(PERSISTENT, (d.pop(),))),
}


def decode(raw: bytes, allowed: frozenset[Global], *, uri: str) -> Any:
    """Return the tree of one pickle.

    Args:
        raw: the bytes of the pickle, without any other bytes.
        allowed: names that the pickle may contain.
        uri: URI for error messages.

    Raises:
        FormatError: the pickle is malformed or contains a name that is not allowed.

    Even for a malicious pickle, memory use is at most proportional to its length. Each opcode takes about 0.4 us.
    """
    decoder = _Decoder(raw, allowed, uri)
    try:
        return decoder.run()
    except (IndexError, KeyError, TypeError, UnicodeDecodeError, OverflowError) as error:
        # The stack is empty, a memo entry is missing, a key cannot be hashed, or a string has an invalid encoding.
        raise FormatError(f"the pickle is malformed at byte {decoder.at}: {error}", uri=uri) from error


def plain(value: Any, *, uri: str) -> Any:
    """Replace each record in a decoded value with the plain Python or torch value that it describes.

    Raises:
        FormatError: the value contains a record that is not a plain value, has too many parts, or is nested too deeply.
    """
    try:
        return _plain(value, uri, [MAX_VALUES], 0)
    except TypeError as error:
        # A key or a set element cannot be hashed.
        raise FormatError(f"a value is malformed: {error}", uri=uri) from error


def _plain(value: Any, uri: str, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        fault = f"a value has more than {MAX_VALUES} parts or {MAX_DEPTH} levels of nesting"
        raise FormatError(fault, uri=uri)

    def inner(part: Any) -> Any:
        return _plain(part, uri, left, depth + 1)

    if isinstance(value, dict):
        return {inner(key): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(inner, value))
    if isinstance(value, Global):
        if value in DTYPES:
            return DTYPES[value]
        raise FormatError(f"{value.module}.{value.name} is not a plain value", uri=uri)
    if not isinstance(value, PickleRecord):
        return value
    args = inner(value.args)
    # Check the number and the types of the arguments exactly, because a record may have arguments that do not suit its
    # call.
    if value.state is None and not (value.items and value.call != _ORDERED):
        if value.call == _ORDERED and not args:
            return OrderedDict((inner(key), inner(item)) for key, item in value.items)
        if value.call in {_EMPTY, _EMPTY_2} and not args:
            return b""
        if value.call in {_SET, _SET_2, _FROZENSET, _FROZENSET_2} and len(args) <= 1:
            make = set if value.call in {_SET, _SET_2} else frozenset
            if all(isinstance(part, list | tuple) for part in args):
                return make(*args)
        if value.call == _ENCODE and len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1":
            return args[0].encode("latin1")
        if value.call == SIZE and len(args) == 1 and is_sizes(args[0]):
            return torch.Size(args[0])
    raise FormatError(f"a value contains an unknown call of {value.call.module}.{value.call.name}", uri=uri)


def is_sizes(value: Any) -> bool:
    """Return whether a decoded value is a sequence of non-negative integers that fit in 64 bits."""
    return isinstance(value, tuple | list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def archive(value: Any) -> bytes:
    """Return plain values as a torch.save archive that contains only names in `PLAIN`.

    Raises:
        PlanError: a value is not plain, has too many parts, or is nested too deeply.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, data in (("data.pkl", _pickle(value)), ("byteorder", b"little"), ("version", b"3\n")):
            # Use a fixed date, so that equal values have equal bytes.
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return buffer.getvalue()


def copy_of(value: Any) -> Any:
    """Return a deep copy of a plain value. Raise the same errors as `archive`."""
    if type(value) in {bool, float, str, bytes, type(None)}:
        return value
    return plain(decode(_pickle(value), PLAIN, uri="value"), uri="value")


def _pickle(value: Any) -> bytes:
    """Return the pickle of a plain value. Raise the same errors as `archive`."""
    out = bytearray(b"\x80\x02")
    _encode(value, out, [MAX_VALUES], 0)
    return bytes(out + b".")


_DTYPE_NAMES = {dtype: named for named, dtype in DTYPES.items()}


def _named(out: bytearray, name: Global) -> None:
    out += f"c{name.module}\n{name.name}\n".encode()


def _encode(value: Any, out: bytearray, left: list[int], depth: int) -> None:
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise PlanError(f"a value has more than {MAX_VALUES} parts or {MAX_DEPTH} levels of nesting")

    def inner(parts: Iterable[Any]) -> None:
        for part in parts:
            _encode(part, out, left, depth + 1)

    kind = type(value)
    if value is None or kind is bool:
        out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif kind is int:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise PlanError("an integer has more than 2039 bits")
        out += b"\x8a" + bytes([len(raw)]) + raw
    elif kind is float:
        out += b"G" + struct.pack(">d", value)
    elif kind is str:
        raw = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(raw)) + raw
    elif kind is bytes:
        _named(out, _ENCODE)
        inner((value.decode("latin1"), "latin1"))
        out += b"\x86R"
    elif kind is tuple:
        out += b"("
        inner(value)
        out += b"t"
    elif kind is list:
        out += b"]("
        inner(value)
        out += b"e"
    elif kind in {dict, OrderedDict}:
        if kind is dict:
            out += b"}"
        else:
            _named(out, _ORDERED)
            out += b")R"
        out += b"("
        inner(part for pair in value.items() for part in pair)
        out += b"u"
    elif kind in {set, frozenset}:
        _named(out, _SET_2 if kind is set else _FROZENSET_2)
        inner((list(value),))
        out += b"\x85R"
    elif kind is torch.Size:
        _named(out, SIZE)
        inner((tuple(value),))
        out += b"\x85R"
    elif kind is torch.dtype:
        _named(out, _DTYPE_NAMES[value])
    else:
        raise PlanError(f"a value of type {kind.__module__}.{kind.__qualname__} is not plain data")
