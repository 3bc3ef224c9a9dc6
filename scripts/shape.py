"""The shape of a tree: `python -m scripts.shape [TREE]`; `--list` names the offenders, `--files` sizes every file.

In: the sources below `src/` and `packages/*/src/`, read as syntax trees and never imported. Out: a table on stdout. The
table is a report and not a gate, so the exit status is 0.

The rules:

* Code lines have a token that is neither a comment nor a docstring.
* A name is exported by `__all__` of the package's `__init__`. It is written where it stands as a string or an import
  in a module at the top of the package that mentions at least half of the exported names.
* A class name has several meanings if several modules define it. Underscores make it private.
* Instance attributes are the names that methods store on `self`, and the fields of a class that is no frozen value.
* A pause is a number assigned at the top of a module to a name that ends in `_S`. Rates (`_PER_S`) are no pauses, nor
  are limits that are part of a promise: `TTL_S`, `DEADLINE_S` and `TIMEOUT_S`.
* A constructor does I/O if `__init__`, or a method of the class that it calls on `self`, calls something in `_IO`, a
  function of `os` other than those in `_PURE_OS`, `start` of a thread or a process, or `_ACQUIRERS` of a class. A
  class with a name in lower case is a function for its callers (`safe_open`), and may do I/O.
* Adapters are the modules below `integrations` and `compat`, and the distributions other than the core's.
* A module has one user if exactly one other module of the tree imports it.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scripts.source_roots import ROOT, modules

CORE = "penstock"
ADAPTERS = (f"{CORE}.integrations", f"{CORE}.compat")
FILE_LINES, FUNCTION_LINES = 700, 100
MAX_ATTRIBUTES, MAX_PARAMETERS = 20, 10
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_SOCKETS = {"socket", "create_connection", "create_server", "connect", "connect_ex", "connect_unix", "bind", "listen"}
_SOCKETS |= {"accept", "sendall", "recv", "request", "urlopen", "ask", "hello"}
_FILES = {"open", "fdopen", "mkdir", "touch", "unlink", "rename", "rmdir", "iterdir", "read_text", "read_bytes"}
_FILES |= {"write_text", "write_bytes", "is_file", "is_dir", "exists", "stat", "resolve", "flock", "mkdtemp"}
_IO = _SOCKETS | _FILES | {"mmap", "create_memfd", "Popen", "check_output", "fork", "sleep"}
_PURE_OS = {"fspath", "getpid", "cpu_count", "fsencode", "fsdecode", "environ", "getenv", "uname", "urandom"}
_PURE_OS |= {"sched_getaffinity"}
_ACQUIRERS = {"open", "join", "start", "bind", "map"}
"""Classmethods that acquire the resource of an object."""
_NO_PAUSES = ("_PER_S", "TTL_S", "DEADLINE_S", "TIMEOUT_S")
_STARTED = ("thread", "process", "timer")


@dataclass
class Module:
    """A module's source and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def lines(self) -> int:
        """Return the number of lines."""
        return self.text.count("\n")

    @cached_property
    def code_lines(self) -> int:
        """Return the number of lines with code."""
        docs: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _SKIPPED:
                found |= set(range(token.start[0], token.end[0] + 1))
        return len(found - docs)

    def imports(self, known: set[str]) -> set[str]:
        """Return the modules among `known` that it imports or imports a name from."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.name.split(".")[: -node.level + (self.path.name == "__init__.py") or None]
                    base = ".".join([*above, *([node.module] if node.module else [])])
                inner = {f"{base}.{alias.name}" for alias in node.names}
                found |= {name if name in known else base for name in inner}
        return found & known

    @property
    def distribution(self) -> str:
        """Return the directory of its distribution, or the name of its package."""
        parts = self.path.parts
        return parts[parts.index("packages") + 1] if "packages" in parts else self.name.partition(".")[0]

    @property
    def is_adapter(self) -> bool:
        """Return whether it adapts an engine or a framework."""
        return self.distribution != CORE or any(f"{self.name}.".startswith(f"{room}.") for room in ADAPTERS)

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield every class, including nested ones."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Yield every function with its class's name."""
        owners = {id(part): f"{node.name}." for node in self.classes() for part in node.body}
        for node in ast.walk(self.tree):
            if isinstance(node, _FUNCTIONS):
                yield f"{owners.get(id(node), '')}{node.name}", node


def read_tree(tree: Path) -> list[Module]:
    """Return the modules of a tree."""
    found = []
    for name, path in modules(tree):
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return found


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the instance attributes of a class."""
    marks = " ".join(map(ast.unparse, [*node.decorator_list, *(word.value for word in node.keywords)]))
    is_frozen = "frozen=True" in marks or any(word.arg == "frozen" for word in node.keywords)
    fields = [
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    found = set() if is_frozen else set(fields)
    for method in node.body:
        if isinstance(method, _FUNCTIONS):
            for part in ast.walk(method):
                is_stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                if is_stored and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.add(part.attr)
    return found


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters without `self` and `cls`."""
    spec = node.args
    names = [arg.arg for arg in [*spec.posonlyargs, *spec.args]]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(spec.kwonlyargs) + bool(spec.vararg) + bool(spec.kwarg)


def _is_number(node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _is_pause(name: str) -> bool:
    return name.endswith("_S") and not name.endswith(_NO_PAUSES)


def pauses_of(module: Module) -> list[str]:
    """Return the pauses at the top of a module."""
    found = []
    for node in module.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            pairs = [(target, getattr(node, "value", None))]
            if isinstance(target, ast.Tuple) and isinstance(pairs[0][1], ast.Tuple):
                pairs = list(zip(target.elts, pairs[0][1].elts, strict=False))
            found += [t.id for t, v in pairs if isinstance(t, ast.Name) and _is_pause(t.id) and _is_number(v)]
    return found


def io_calls(node: ast.ClassDef) -> list[str]:
    """Return the calls in a class's constructor that do I/O. The rule is in this module's docstring."""
    if node.name[0].islower():
        return []
    methods = {part.name: part for part in node.body if isinstance(part, _FUNCTIONS)}
    todo, seen, found = ["__init__"], set[str](), list[str]()
    while todo:
        name = todo.pop()
        if name in seen or name not in methods:
            continue
        seen.add(name)
        for call in _own_calls(methods[name]):
            func = call.func
            word = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            owner = ast.unparse(func.value) if isinstance(func, ast.Attribute) else ""
            if owner == "self" and word in methods:
                todo.append(word)
            is_started = word == "start" and any(kind in owner.lower() for kind in _STARTED)
            acquires = word in _ACQUIRERS and owner.rpartition(".")[2][:1].isupper()
            if word in _IO or is_started or acquires or (owner == "os" and word not in _PURE_OS):
                found.append(f"{owner.partition('(')[0]}.{word}".lstrip("."))
    return found


def _own_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that a function makes itself, without those in nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.Lambda)):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _own_calls(child)


def exported(tree: list[Module]) -> dict[str, int]:
    """Return how often each exported name of the core is written."""
    tops = [m for m in tree if m.name == CORE or (m.name.count(".") == 1 and m.name.startswith(f"{CORE}."))]
    root = next((m for m in tops if m.name == CORE), None)
    if root is None:
        return {}
    tables = {
        target.id: node.value
        for node in root.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    names: set[str] = set()
    todo: list[ast.AST] = [tables["__all__"]] if "__all__" in tables else []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.Dict):
            todo += [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Name) and node.id in tables:
            todo.append(tables.pop(node.id))
        else:
            todo += ast.iter_child_nodes(node)
    counts: Counter[str] = Counter()
    for module in tops:
        written = Counter(
            word
            for node in ast.walk(module.tree)
            for word in (
                [a.asname or a.name for a in node.names] if isinstance(node, ast.ImportFrom) else [_text(node)]
            )
            if word in names
        )
        if len(written) * 2 >= len(names):
            counts += written
    return {name: counts[name] for name in sorted(names)}


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def users(tree: list[Module]) -> dict[str, set[str]]:
    """Return, for each module, the other modules that import it."""
    known = {module.name for module in tree}
    found: dict[str, set[str]] = defaultdict(set)
    for module in tree:
        for name in module.imports(known) - {module.name}:
            found[name].add(module.name)
    return found


@dataclass
class Row:
    """A row of the table: a measure, its value, and the offenders."""

    measure: str
    value: str
    offenders: list[str] = field(default_factory=list)


def rows(tree: list[Module]) -> list[Row]:
    """Return the table."""
    table = []
    for name in sorted({module.distribution for module in tree}):
        own = [module for module in tree if module.distribution == name]
        rooms: Counter[str] = Counter()
        for module in own:
            parts = module.name.split(".")
            rooms[".".join(parts[:2]) if len(parts) > 2 or module.path.name == "__init__.py" else parts[0]] += (
                module.lines
            )
        lines, code = sum(m.lines for m in own), sum(m.code_lines for m in own)
        listed = [f"{count:>7} {room}" for room, count in rooms.most_common()]
        table.append(Row(f"lines of {name} (code), modules", f"{lines} ({code}), {len(own)}", listed))
    written = exported(tree)
    mean = sum(written.values()) / max(1, len(written))
    table.append(Row("exported names, times each is written", f"{len(written)}, {mean:.1f}", _counted(written)))
    for is_private in (False, True):
        places: dict[str, list[str]] = defaultdict(list)
        for module in tree:
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and node.name.startswith("_") is is_private:
                    places[node.name].append(module.name)
        many = {name: found for name, found in places.items() if len(found) > 1}
        word = "private" if is_private else "public"
        listed = [f"{name}: {', '.join(many[name])}" for name in sorted(many, key=lambda n: (-len(many[n]), n))]
        table.append(Row(f"{word} class names with several meanings", str(len(many)), listed))
    sizes = {f"{m.name}.{node.name}": len(attributes_of(node)) for m in tree for node in m.classes()}
    table.append(_above(f"classes with more than {MAX_ATTRIBUTES} instance attributes", sizes, MAX_ATTRIBUTES))
    counts = {f"{m.name}.{name}": num_parameters(node) for m in tree for name, node in m.functions()}
    table.append(_above(f"functions with more than {MAX_PARAMETERS} parameters", counts, MAX_PARAMETERS))
    pauses = [f"{module.name}.{name}" for module in tree for name in pauses_of(module)]
    table.append(Row("pauses in seconds at the top of modules", str(len(pauses)), pauses))
    doing = {f"{m.name}.{node.name}": io_calls(node) for m in tree for node in m.classes()}
    listed = [f"{name}: {', '.join(dict.fromkeys(calls))}" for name, calls in sorted(doing.items()) if calls]
    table.append(Row("constructors with I/O", str(len(listed)), listed))
    adapters = [module for module in tree if module.is_adapter]
    core = {module.name for module in tree if not module.is_adapter}
    used = Counter(name for module in adapters for name in module.imports(core))
    lines = sum(module.lines for module in adapters)
    table.append(Row("adapter modules (lines)", f"{len(adapters)} ({lines})", [m.name for m in adapters]))
    table.append(Row("core modules that adapters import", str(len(used)), _counted(used)))
    by = users(tree)
    single = [f"{m.name} <- {next(iter(by[m.name]))}" for m in tree if len(by[m.name]) == 1]
    table.append(Row("modules that one other module imports", str(len(single)), single))
    return table


def _above(measure: str, values: dict[str, int], limit: int) -> Row:
    above = {name: value for name, value in values.items() if value > limit}
    return Row(measure, str(len(above)), _counted(above))


def _counted(values: dict[str, int]) -> list[str]:
    return [f"{value:>4} {name}" for name, value in sorted(values.items(), key=lambda item: (-item[1], item[0]))]


def print_files(tree: list[Module]) -> None:
    """Print every file with its lines and its longest function. Mark sizes above a budget."""
    print(f"{'module':<56} {'lines':>6}  {'longest function':<44} {'lines':>5}")
    marked = 0
    for module in tree:
        longest = max((((n.end_lineno or 0) - n.lineno + 1, name) for name, n in module.functions()), default=(0, ""))
        past = ["file"] * (module.lines > FILE_LINES) + ["function"] * (longest[0] > FUNCTION_LINES)
        marked += bool(past)
        mark = f"past: {', '.join(past)}" if past else ""
        print(f"{module.name:<56} {module.lines:>6}  {longest[1]:<44} {longest[0]:>5}  {mark}".rstrip())
    print(
        f"{len(tree)} files, {sum(m.lines for m in tree)} lines, {marked} past the budget of {FILE_LINES} lines a file "
        f"and {FUNCTION_LINES} a function"
    )


def print_table(table: Iterable[Row], *, offenders: bool) -> None:
    """Print the table, with the offenders if requested."""
    for row in table:
        print(f"{row.measure:<56} {row.value}")
        if offenders:
            print("".join(f"    {line}\n" for line in row.offenders), end="")


def main() -> int:
    """Print the report that the options choose."""
    parser = argparse.ArgumentParser(description="print the shape of a tree")
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--list", action="store_true", help="name the offenders")
    parser.add_argument("--files", action="store_true", help="print the size of every file instead")
    options = parser.parse_args()
    tree = read_tree(options.tree)
    if options.files:
        print_files(tree)
    else:
        print_table(rows(tree), offenders=options.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
