"""The bytes of every message between processes are frozen: today's code writes them, and reads them.

A change of a class's name or place changes a line of `messages.TABLE` and no fixture. A change of a message on purpose
(a field with a default, see docs/operate/upgrade.md) deletes its entry from `fixtures` and records it again:
`python -m tests.wire.record`. The reviewer then sees the bytes before and after.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import struct
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from tests.wire.frames import FRAMES, STRUCT_FORMATS
from tests.wire.messages import CODECS, MESSAGES, NOT_WIRE, PACKAGES, resolve
from tests.wire.record import read_fixtures, wire_of
from tests.wire.samples import build, plain

FIXTURES = read_fixtures()

TAKE_TYPES = {"Decoder", "prepare", "decode", "_ask", "_decode", "ask_hub", "from_json"}
"""Names of the calls that take the type that they decode."""
MODULES = ("messages", ".cluster")
"""Ends of the names of modules in which every Struct is a message or the content of a file."""


def test_each_message_has_one_fixture() -> None:
    assert sorted(FIXTURES) == sorted([*MESSAGES, *FRAMES])


@pytest.mark.parametrize("name", MESSAGES)
def test_message_encodes_to_recorded_bytes(name: str) -> None:
    value = build(FIXTURES[name]["value"], resolve(MESSAGES[name]))
    assert CODECS[name.rpartition("/")[2]].encode(value) == wire_of(FIXTURES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_recorded_bytes_decode_to_equal_message(name: str) -> None:
    decoded = CODECS[name.rpartition("/")[2]].decode(wire_of(FIXTURES[name]), resolve(MESSAGES[name]))
    assert plain(decoded) == FIXTURES[name]["value"]


@pytest.mark.parametrize("name", MESSAGES)
def test_wire_fixture_sets_every_field(name: str) -> None:
    # A field at its default would be frozen in one of its two forms only.
    value = build(FIXTURES[name]["value"], resolve(MESSAGES[name]))
    unset = [
        f"{type(part).__name__}.{field.name}"
        for part in parts_of(value)
        if isinstance(part, msgspec.Struct)
        for field in msgspec.structs.fields(part)
        if field.default is not msgspec.NODEFAULT and getattr(part, field.name) == field.default
    ]
    assert unset == []


@pytest.mark.parametrize("name", FRAMES)
def test_frame_encodes_to_recorded_bytes(name: str) -> None:
    assert FRAMES[name].write() == wire_of(FIXTURES[name])


@pytest.mark.parametrize("name", FRAMES)
def test_recorded_frame_decodes_to_recorded_value(name: str) -> None:
    read = FRAMES[name].read(wire_of(FIXTURES[name]))
    assert msgspec.json.decode(msgspec.json.encode(read)) == FIXTURES[name]["value"]


def parts_of(value: Any) -> Iterator[Any]:
    """Yield a value and all values in it."""
    yield value
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, msgspec.Struct):
        inner = [getattr(value, name) for name in value.__struct_fields__]
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        inner = []
    for part in inner:
        yield from parts_of(part)


def modules() -> tuple[list[ModuleType], list[str]]:
    """Return the modules of the packages, and the sources of those that need another package that is not here."""
    found, absent = [], []
    for package in PACKAGES:
        root = importlib.import_module(package)
        found.append(root)
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            try:
                found.append(importlib.import_module(info.name))
            except ModuleNotFoundError as error:
                assert error.name is not None and error.name.partition(".")[0] not in PACKAGES, error
                spec = info.module_finder.find_spec(info.name)  # type: ignore[call-arg, union-attr]
                assert spec is not None and spec.origin is not None
                absent.append(spec.origin)
    return found, absent


@pytest.fixture(scope="module")
def package() -> tuple[list[ModuleType], list[str]]:
    return modules()


def is_ours(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__.partition(".")[0] in PACKAGES


def structs(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from structs(child)


def decoded_types(module: ModuleType) -> Iterator[Any]:
    """Yield the types that a module gives to decoders, to requests and to registries of messages, by its source."""
    tree = ast.parse(inspect.getsource(module))
    names = dict(vars(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            # Some functions import the class themselves.
            names |= {
                one.name: getattr(importlib.import_module(str(node.module)), one.name, None) for one in node.names
            }
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = node.args if name in TAKE_TYPES else []
            given = [*given, *(word.value for word in node.keywords if word.arg in {"type", "takes", "gives"})]
        for expression in given:
            if isinstance(expression, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp):
                # A name of a function's own is not known here; what it stands for is given elsewhere.
                try:
                    yield eval(ast.unparse(expression), names)
                except (NameError, AttributeError, TypeError, KeyError):
                    continue


def classes_in(kind: Any) -> Iterator[type]:
    """Yield our classes that a type is made of, as msgspec sees it."""
    try:
        found = msgspec.inspect.type_info(kind)
    except TypeError:
        return
    todo: list[Any] = [found]
    while todo:
        part = todo.pop()
        if isinstance(part, msgspec.inspect.StructType | msgspec.inspect.DataclassType | msgspec.inspect.EnumType):
            yield part.cls
        if isinstance(part, msgspec.inspect.Type):
            for name in part.__struct_fields__:
                value = getattr(part, name)
                todo += value if isinstance(value, tuple) else [value]
        elif isinstance(part, msgspec.inspect.Field):
            todo.append(part.type)


def candidates(modules: list[ModuleType]) -> set[type]:
    """Return the classes that may be messages: those that a decoder reads, and every Struct in a module of messages.

    Other Structs are values of one process. Bytes that no decoder of ours reads need no fixture.
    """
    found = {kind for kind in structs(msgspec.Struct) if is_ours(kind) and kind.__module__.endswith(MODULES)}
    for module in modules:
        for kind in decoded_types(module):
            found |= {part for part in classes_in(kind) if is_ours(part)}
    return found


def covered() -> set[type]:
    """Return our classes that the fixtures contain."""
    values = (build(FIXTURES[name]["value"], resolve(path)) for name, path in MESSAGES.items())
    return {type(part) for value in values for part in parts_of(value) if is_ours(type(part))}


def test_each_message_class_is_in_table(package: tuple[list[ModuleType], list[str]]) -> None:
    named = {f"{kind.__module__}:{kind.__qualname__}" for kind in candidates(package[0]) - covered()}
    assert sorted(named - NOT_WIRE.keys()) == [], "record a fixture: see tests/wire/messages.py"
    assert sorted(NOT_WIRE.keys() - named) == [], "these are gone, or have a fixture"


def test_search_finds_every_message_in_table(package: tuple[list[ModuleType], list[str]]) -> None:
    # A decoder that `decoded_types` does not recognise would let a new message pass without a fixture.
    assert sorted(str(kind) for kind in covered() - candidates(package[0])) == []


def test_function_that_decodes_argument_type_is_known(package: tuple[list[ModuleType], list[str]]) -> None:
    found = set()
    for module in package[0]:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef):
                arguments = {one.arg for one in [*node.args.args, *node.args.kwonlyargs]}
                words = [word for call in ast.walk(node) if isinstance(call, ast.Call) for word in call.keywords]
                given = [word.value for word in words if word.arg == "type"]
                found |= {node.name for one in given if isinstance(one, ast.Name) and one.id in arguments}
    assert found
    assert found <= TAKE_TYPES


def test_unimported_modules_define_no_messages(package: tuple[list[ModuleType], list[str]]) -> None:
    for source in package[1]:
        with open(source, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        bases = [ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
        assert not [base for base in bases if base.endswith("Struct")], source


def test_each_struct_format_is_in_table(package: tuple[list[ModuleType], list[str]]) -> None:
    constants = {
        value.format for module in package[0] for value in vars(module).values() if isinstance(value, struct.Struct)
    }
    assert sorted(constants) == sorted(STRUCT_FORMATS)


def test_message_table_lists_all_route_classes() -> None:
    app = sys.modules[FRAMES["hub.routes"].write.__globals__["app"].__name__]
    classes = {kind for operation in app.OPERATIONS for kind in (operation.request_type, operation.reply_type) if kind}
    assert classes <= {resolve(path) for name, path in MESSAGES.items() if name.startswith("hub.")}
