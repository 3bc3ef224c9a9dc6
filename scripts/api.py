"""Prints the public API and the command line as text:

`python -m scripts.api`, with `--check` or `--write` for the snapshot.

It prints a line for each name in `penstock.__all__`, in the modules that the documents name, and in the command: kind,
signature, methods, properties, fields, attributes and defaults. Top-level names appear without their modules, which may
change. Definitions are read from the source, so a module appears whether or not its engine is installed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
from scripts.source_roots import ROOT, modules

import penstock
from penstock import exports
from penstock.cli.main import add_commands

SNAPSHOT = ROOT / "tests" / "api" / "public_api.txt"
DOCUMENTS = ("README.md", "docs", "examples")
_IMPORT = re.compile(
    r"^\s*(?:>>> )?from (penstock(?:_convert|_hub)?\.[\w.]+|penstock_dcp) import ([^#\n(]+|\([^)]+\))", re.MULTILINE
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr


@cache
def paths() -> dict[str, Path]:
    """Return the path of every module by its name, or the path of its stub, which says where its names are defined."""
    stubs = {name: path.with_suffix(".pyi") for name, path in modules()}
    return {name: stubs[name] if stubs[name].exists() else path for name, path in modules()}


@cache
def names_in(module: str) -> dict[str, ast.stmt]:
    """Return the statements at the top of a module that bind names, including those for type checkers only."""
    bound: dict[str, ast.stmt] = {}
    todo: list[ast.stmt] = list(reversed(ast.parse(paths()[module].read_text(encoding="utf-8")).body))
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            bound[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            todo += reversed([*node.body, *getattr(node, "orelse", [])])
    return bound


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the module and the statement that define a name, or None if it is defined outside of the packages."""
    if module not in paths():
        return None
    node = names_in(module).get(name)
    if not isinstance(node, ast.ImportFrom):
        return None if node is None else (module, node)
    if node.level or node.module is None:
        return None
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return definition(node.module, original)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool = False) -> str:
    """Return parameters, defaults and the result's type."""
    arguments = ast.unparse(node.args)
    if is_method and not _has(node, "staticmethod"):
        arguments = arguments.partition(", ")[2] if ", " in arguments else ""
        arguments = arguments.removeprefix("/, ")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({arguments}){returns}"


def _marks(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(mark) for mark in node.decorator_list]


def _has(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, word: str) -> bool:
    return any(word in mark.partition("(")[0].split(".") for mark in _marks(node))


def lineage(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its bases in the packages, the class first."""
    yield module, node
    for base in node.bases:
        found = definition(module, ast.unparse(base).partition("[")[0])
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield from lineage(*found)


def attributes(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the public attributes that a method sets on `self`."""
    stored = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return [part.attr for part in stored if ast.unparse(part.value) == "self" and not part.attr.startswith("_")]


def members(module: str, node: ast.ClassDef) -> list[str]:
    """Return a line for each public method, property and field, including inherited ones, and for the constructor."""
    lines: dict[str, str] = {}
    for _, owner in lineage(module, node):
        for part in owner.body:
            if isinstance(part, _FUNCTIONS):
                if part.name.startswith("_") and part.name not in {"__init__", "__enter__", "__iter__", "__call__"}:
                    continue
                kind = next((k for k in ("property", "classmethod", "staticmethod") if _has(part, k)), "")
                is_value = kind == "property" or _has(part, "cached_property")
                if is_value:
                    text = f".{part.name}: {ast.unparse(part.returns) if part.returns else '?'} (property)"
                else:
                    text = f".{part.name}{signature(part, is_method=True)}" + (f" ({kind})" if kind else "")
                if not _has(part, "setter"):
                    lines.setdefault(part.name, text)
                for name in attributes(part) if part.name == "__init__" else ():
                    lines.setdefault(name, f".{name} (attribute)")
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                if not part.target.id.startswith("_"):
                    default = f" = {ast.unparse(part.value)}" if part.value is not None else ""
                    lines.setdefault(part.target.id, f".{part.target.id}: {ast.unparse(part.annotation)}{default}")
            elif isinstance(part, ast.Assign):
                for target in part.targets:
                    if isinstance(target, ast.Name) and not target.id.startswith("_"):
                        lines.setdefault(target.id, f".{target.id} = {ast.unparse(part.value)}")
    return [lines[name] for name in sorted(lines)]


def kind_of(module: str, node: ast.ClassDef) -> str:
    """Return whether a class is an error, a dataclass, a struct, a protocol or an enum, and how it is constructed."""
    owners = list(lineage(module, node))
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for _, owner in owners for base in owner.bases}
    names = [name for name in ("Exception", "Struct", "Protocol", "Enum", "StrEnum", "NamedTuple") if name in bases]
    word = {"Exception": "error", "StrEnum": "enum"}.get(names[0], names[0].lower()) if names else "class"
    if any(_has(owner, "dataclass") for _, owner in owners):
        word = "dataclass"
    public = [base for base in map(ast.unparse, node.bases) if base in penstock.__all__]
    flags = [
        *(ast.unparse(mark) for mark in node.decorator_list),
        *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords),
    ]
    return f"{word}{' of ' + ', '.join(public) if public else ''}{' [' + '; '.join(flags) + ']' if flags else ''}"


def describe(shown: str, module: str, node: ast.stmt) -> list[str]:
    """Return the lines for one name."""
    if isinstance(node, _FUNCTIONS):
        return [f"{shown}: function {signature(node)}"]
    if isinstance(node, ast.ClassDef):
        return [f"{shown}: {kind_of(module, node)}", *(f"    {line}" for line in members(module, node))]
    value = getattr(node, "value", None)
    return [f"{shown}: value = {ast.unparse(value) if value is not None else '?'}"]


def top_level() -> list[str]:
    """Return the lines for `penstock.__all__`."""
    lines: list[str] = []
    for name in sorted(penstock.__all__):
        value: Any = getattr(penstock, name)
        if inspect.ismodule(value):
            lines += [f"penstock.{name}: module", *public_names(value.__name__)]
            continue
        found = definition(getattr(value, "__module__", "") or "", getattr(value, "__qualname__", name))
        lines += [f"penstock.{name}: value"] if found is None else describe(f"penstock.{name}", *found)
    return lines


def public_names(module: str) -> list[str]:
    """Return the lines for a module's own public names, from `__all__` or else its definitions without underscore."""
    bound = names_in(module)
    every = bound.get("__all__")
    if isinstance(every, ast.Assign | ast.AnnAssign) and every.value is not None:
        names = ast.literal_eval(every.value)
    else:
        names = [
            name for name, node in bound.items() if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and name[0] != "_"
        ]
    lines: list[str] = []
    for name in sorted(names):
        found = definition(module, name)
        lines += [f"{module}.{name}: value"] if found is None else describe(f"{module}.{name}", *found)
    return lines


def documented() -> dict[str, set[str]]:
    """Return the names below the top level that documents and examples import, by module."""
    found: dict[str, set[str]] = {}
    for place in DOCUMENTS:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in {".md", ".py"}):
            if "design" in file.parts:
                continue
            for module, names in _IMPORT.findall(file.read_text(encoding="utf-8")):
                words = (word.strip().partition(" as ")[0] for word in names.strip("()\n ").split(","))
                found.setdefault(module, set()).update(word for word in words if re.fullmatch(r"\w+", word))
    return found


def below() -> list[str]:
    """Return the lines for the documented names in modules below the top level."""
    lines: list[str] = []
    for module, names in sorted(documented().items()):
        for name in sorted(names):
            shown, found = f"{module}.{name}", definition(module, name)
            if f"{module}.{name}" in paths():
                lines.append(f"{shown}: module")
            else:
                lines += [f"{shown}: not found"] if found is None else describe(shown, *found)
    return lines


def commands(command: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command by its full name."""
    for name, child in sorted(command.commands.items()):
        if hasattr(child, "commands"):
            yield from commands(child, f"{prefix}{name} ")
        else:
            yield prefix + name, child


def type_text(annotation: Any) -> str:
    """Return a parameter's type as text. A choice is shown by its values."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(member.value) for member in annotation)
    return annotation.__name__ if type(annotation) is type else str(annotation)


def command_line() -> list[str]:
    """Return the lines for the commands: arguments and options with type, default and variable."""
    lines: list[str] = []
    for name, command in commands(typer.main.get_command(add_commands())):
        lines.append(f"$ penstock {name}")
        for parameter in command.params:
            words = "/".join([*parameter.opts, *parameter.secondary_opts])
            word = words if words.startswith("-") else parameter.name.upper()
            kind = type_text(parameter.type_descriptor.annotation)
            flags = [flag for flag in ("required", "multiple", "is_flag", "hidden") if getattr(parameter, flag, False)]
            default = parameter.default() if callable(parameter.default) else parameter.default
            variable = f" ${parameter.envvar}" if parameter.envvar else ""
            lines.append(f"    {word}: {kind} = {default!r} {' '.join(flags)}".rstrip() + variable)
    return lines


def report() -> str:
    """Return the whole text."""
    names = [*(f"penstock.{name}" for name in sorted(exports.MODULES)), "penstock_convert"]
    lines = [line for name in names for line in public_names(name)]
    parts = [("Top level", top_level()), ("Public modules", lines), ("For adapters", public_names("penstock.spi"))]
    parts += [("Below it, in documents", below()), ("Command line", command_line())]
    return "\n".join(f"# {title}\n\n" + "\n".join(lines) + "\n" for title, lines in parts)


def main() -> int:
    """Print, compare or write."""
    parser = argparse.ArgumentParser(description="print the public API and the command line")
    parser.add_argument("--check", action="store_true", help="compare with the snapshot; exit 1 where it differs")
    parser.add_argument("--write", action="store_true", help="replace the snapshot")
    options = parser.parse_args()
    text = report()
    if options.write:
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(text, encoding="utf-8")
    elif options.check:
        before = SNAPSHOT.read_text(encoding="utf-8")
        changed = difflib.unified_diff(before.splitlines(), text.splitlines(), "snapshot", "today", lineterm="", n=1)
        print("\n".join(changed))
        return int(before != text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
