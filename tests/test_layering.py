"""The house stands: imports go down only, and each floor keeps to its materials. Rules by AST, nothing is imported.

Adding a room, a thread root or an exception to a rule edits a list here, which a reviewer sees.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import pytest

from penstock.exports import MODULES, PUBLIC, SPI

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "packages"
SRC = PACKAGES / "penstock" / "src" / "penstock"

# Adapters import the public names and modules, the errors and the interface for adapters. These packages may import
# rooms of the core, too.
MAY_IMPORT_ROOMS: dict[str, frozenset[str]] = {
    # A bundle is a signed checkpoint: it is written, placed, uploaded and verified as the core does it.
    "penstock_compile_cache": frozenset(
        {"arguments", "config", "entry_points", "exports", "lifecycle", "logs", "report", "types", "waits"}
        | {"storage", "loader", "fetcher", "cuda", "cli"}
    ),
    # A conversion reads, checks and writes weights with the same rooms as a load, and reports to the same hub.
    "penstock_convert": frozenset(
        {"arguments", "config", "descriptors", "entry_points", "exports", "lifecycle", "logs", "report", "types"}
        | {"cli", "cuda", "digest", "engine", "hub", "loader", "memory", "net", "plan", "storage", "telemetry"}
        | {"transform", "waits"}
    ),
    # A checkpoint of DCP is read with the stages of a load, and written as the core writes its files.
    "penstock_dcp": frozenset(
        {"arguments", "config", "digest", "engine", "entry_points", "interrupts", "lifecycle", "loader", "memory"}
        | {"plan", "storage", "telemetry", "types", "waits"}
    ),
    # The hub serves the messages that the core's client sends, on the core's listener.
    "penstock_hub": frozenset(
        {"cli", "config", "descriptors", "entry_points", "hub", "lifecycle", "logs", "net", "phases", "plan", "report"}
        | {"types", "units", "waits"}
    ),
    # A transport registers, fences and reads memory as the core's transports do.
    "penstock_nixl": frozenset({"config", "entry_points", "lifecycle", "segments", "transport", "types", "waits"}),
    # Simulations, calibration and benches look at the parts of the core one by one.
    "penstock_tools": frozenset(
        {"arguments", "config", "report", "segments", "totals", "types", "waits", "logs"}
        | {"cli", "cuda", "digest", "engine", "hub", "http", "loader", "memory", "plan", "storage"}
        | {"testing", "transform", "transport"}
    ),
}

# Rooms of one floor do not import each other, save by SAME_FLOOR.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"units"}),
    frozenset(
        {"types", "errors", "arguments", "config", "entry_points", "report", "lifecycle", "interrupts", "timing"}
    ),
    frozenset({"descriptors", "exports", "logs", "phases", "segments", "totals", "waits"}),
    frozenset({"cuda", "net", "ranks"}),
    frozenset({"digest", "transform", "http"}),
    frozenset({"plan"}),
    frozenset({"memory"}),
    frozenset({"storage", "transport"}),
    frozenset({"engine", "hub"}),
    frozenset({"telemetry"}),
    frozenset({"loader"}),
    frozenset({"holding"}),
    frozenset({"peer"}),
    frozenset({"transfer"}),
    frozenset({"fetcher"}),
    frozenset({"cache", "sync"}),
    frozenset({"modules", "reports", "spi", "cli", "testing"}),
    frozenset({"__main__"}),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SAME_FLOOR = {
    ("arguments", "errors"),
    ("config", "errors"),
    ("entry_points", "errors"),
    ("errors", "types"),
}
# Settings check their types as arguments are checked.
SAME_FLOOR |= {("config", "arguments")}

# Where torch may not be imported at module level: these run on machines without it, and start quickly.
NO_TORCH = (
    "types.py",
    "errors.py",
    "config.py",
    "__init__.py",
    "plan/",
    "storage/",
    "transport/protocol.py",
    "transport/loopback.py",
    "transport/host_endpoint.py",
    "transport/shm.py",
    "transport/mapped_region.py",
    "transport/into_device.py",
    "transport/choose.py",
    "transport/cuda_ipc.py",
    "cuda/driver.py",
    "transport/fd_server.py",
    "http/compression.py",
    "transport/http.py",
    "transport/http_reader.py",
    "http/server.py",
    "http/region_server.py",
    "http/connection.py",
    "http/region_messages.py",
    "penstock_nixl/transport.py",
    "penstock_nixl/reader.py",
    "memory/arena.py",
    "memory/mapping.py",
    "memory/memfd.py",
    "cli/",
    "digest/leaf.py",
    "penstock_convert/__init__.py",
    "penstock_convert/command.py",
    "penstock_convert/convert.py",
    "penstock_convert/operations/delta.py",
    "penstock_convert/operations/formats.py",
    "penstock_convert/operations/spec.py",
    "penstock_convert/operations/lora.py",
    "penstock_convert/operations/merge.py",
    "penstock_convert/operations/operation.py",
    "penstock_convert/operations/reshard.py",
    "penstock_convert/coordinator.py",
    "penstock_convert/plan/",
    "penstock_convert/workers/fork_server.py",
    "transform/formats.py",
    "transform/select.py",
)

# `plan` is pure: no I/O, no clock, no threads, no chance. So are the hub's choices of upstreams.
PURE = frozenset({"penstock_hub/relay.py", "penstock_hub/relay_parents.py"})
IMPURE = frozenset(
    {"os", "io", "sys", "time", "datetime", "random", "secrets", "socket", "threading", "subprocess", "asyncio"}
    | {"pathlib", "tempfile", "shutil", "mmap"}
)

PICKLES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})

# `config` reads the environment; `penstock run` hands it, changed, to the process that it starts.
ENVIRONMENT = frozenset({"config.py", "cli/bench_boot.py", "penstock_hf/run_command.py"})

# The only places that may hold on to any exception: the CLI's entry, and the first function of each thread (which hands
# the exception to whoever waits). Cleaning up and re-raising at the end of the handler is allowed everywhere.
BROAD_EXCEPT = frozenset(
    {
        ("cli/main.py", "run"),
        # A hook in programs that are not ours: an exception there would end an engine.
        ("spi/host_plugin.py", "register"),
        ("penstock_hf/startup/sitecustomize.py", "_begin"),
        ("penstock_hf/safetensors.py", "_add_hint"),  # a program's own error is raised, and not one about its hint
        ("penstock_dcp/writer.py", "_value"),  # the pickling of a user's class; raised again as PlanError
        ("engine/run.py", "guarded"),  # an executor's thread; the ticket's waiter raises it
        # An operation's config(), perhaps a user's. It is raised again as OperationFailed.
        ("penstock_convert/result.py", "config_of"),
        # An operation, perhaps a user's function. It is raised again as OperationFailed.
        ("penstock_convert/workers/worker.py", "_operating"),
        ("sync/recording/loader_run.py", "user_code"),  # an engine's loader; raised again as a PlanError
        ("sync/check.py", "fault_of"),  # a user's check of a version; raised again as VersionRefused
        ("waits.py", "run"),  # a thread of a pool; whoever asks for the result gets it
        ("http/range_request.py", "_send"),  # closes the connection; re-raises all but a stale connection's failure
    }
)

# The only rooms (or files) that open sockets, speak HTTP or call C. Everything else asks one of these rooms.
SOCKETS = frozenset({"net", "http", "hub", "peer", "transport", "testing", "penstock_hub"})
MAY_IMPORT: dict[str, frozenset[str]] = {
    "socket": SOCKETS
    | {
        "penstock_convert/messages.py",
        "penstock_convert/workers/process.py",
        "penstock_convert/workers/fork_server.py",
    }  # socket pairs to own processes
    | {"storage/cache_directory.py"},  # an abstract socket's name says that this process fetches a chunk
    "ssl": SOCKETS | {"sync/membership.py"},
    "http.client": frozenset({"testing", "cli/bench_boot.py"}),  # the errors of a request to a user's program
    "http.server": frozenset({"testing", "penstock_tools/calibrate.py"}),
    "h11": frozenset(),
    "httptools": frozenset({"http", "penstock_hub"}),
    "httpx": frozenset(),
    "fastapi": frozenset(),
    "starlette": frozenset({"penstock_hub"}),
    "uvicorn": frozenset({"penstock_hub"}),
    "ctypes": frozenset({"cuda", "memory", "transport", "testing"})
    | {"storage/io_uring.py", "storage/local.py"}  # system calls that Python has no name for
    | {"digest/strip.py"}  # host memory at an address, as an array
    | {"penstock_convert/workers/fork_server.py"},  # prctl(2)
}


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed file; `path` is below the core's directory, or begins with an adapter's package. `name` is dotted."""

    path: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imported(self) -> list[tuple[int, str]]:
        return list(imports(self, self.nodes))

    @property
    def name(self) -> str:
        parts = self.path.removesuffix(".py").split("/")
        if not parts[0].startswith("penstock_"):
            parts = ["penstock", *parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """First part below the package; "" for `penstock/__init__.py` itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return parse(SRC)


@pytest.fixture(scope="module")
def adapters() -> list[Module]:
    return [module for root in sorted(PACKAGES.glob("penstock-*/src/penstock_*")) for module in parse(root)]


def imports(module: Module, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports, relative ones resolved; `from a import b` gives `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".") if module.path.endswith("__init__.py") else module.name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: function bodies and `if TYPE_CHECKING:` left out."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (node for other in child.orelse for node in (other, *at_import(other)))
            continue
        yield child
        yield from at_import(child)


def is_attribute(node: ast.AST, name: str, attributes: set[str]) -> TypeGuard[ast.Attribute]:
    """Whether this is `name.attribute`."""
    if not isinstance(node, ast.Attribute) or node.attr not in attributes:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == name


def upward_imports(module: Module) -> list[str]:
    if module.room and module.room not in FLOOR:
        return [f"{module.path}: the room {module.room!r} stands on no floor of FLOORS"]
    mine = FLOOR.get(module.room, FLOOR["spi"])
    found = []
    for line, name in module.imported:
        parts = name.split(".")
        if parts[0] != "penstock" or len(parts) < 2 or parts[1] == module.room:
            continue
        theirs = FLOOR.get(parts[1])
        if theirs is None:
            # `from penstock import load`: the public namespace, which is the api's.
            theirs = FLOOR["spi"] - (0.5 if module.room else 1)
        if theirs >= mine and (module.room, parts[1]) not in SAME_FLOOR:
            found.append(f"{module.path}:{line}: {module.room or 'penstock'} imports {name}, which is not below it")
    return found


def torch_at_import(module: Module) -> list[str]:
    if not any(module.path == place or (place.endswith("/") and module.path.startswith(place)) for place in NO_TORCH):
        return []
    return [
        f"{module.path}:{line}: imports {name} when it is itself imported"
        for line, name in imports(module, at_import(module.tree))
        if name.split(".")[0] in {"torch", "triton"}
    ]


def impurities(module: Module) -> list[str]:
    if module.room != "plan" and module.path not in PURE:
        return []
    found = [f"{module.path}:{n}: {name}" for n, name in module.imported if name.split(".")[0] in IMPURE | {"torch"}]
    for node in module.nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"open", "print", "input"}
        ):
            found.append(f"{module.path}:{node.lineno}: calls {node.func.id}")
    return found


def environment_reads(module: Module) -> list[str]:
    if module.path in ENVIRONMENT:
        return []
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = [f"{module.path}:{n}: imports {name}" for n, name in module.imported if name in {f"os.{x}" for x in names}]
    for node in module.nodes:
        if is_attribute(node, "os", names):
            found.append(f"{module.path}:{node.lineno}: uses {ast.unparse(node)}")
    return found


def pickles(module: Module) -> list[str]:
    found = [f"{module.path}:{n}: imports {name}" for n, name in module.imported if name.split(".")[0] in PICKLES]
    for node in module.nodes:
        if isinstance(node, ast.Call) and is_attribute(node.func, "torch", {"load", "save"}):
            found.append(f"{module.path}:{node.lineno}: calls {ast.unparse(node.func)}")
    return found


def broad_excepts(module: Module) -> list[str]:
    found = []

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler) and (module.path, function) not in BROAD_EXCEPT:
            caught = {"BaseException"} if node.type is None else set(ast.unparse(node.type).strip("()").split(", "))
            last = node.body[-1]
            reraises = isinstance(last, ast.Raise) and last.exc is None
            if caught & {"Exception", "BaseException"} and not reraises:
                found.append(f"{module.path}:{node.lineno}: {function or 'module'} holds on to any exception")
        for child in ast.iter_child_nodes(node):
            walk(child, function)

    walk(module.tree, "")
    return found


def foreign_imports(module: Module) -> list[str]:
    """Return the imports of sockets, HTTP libraries and ctypes in files that MAY_IMPORT does not name."""
    broken = []
    for line, name in module.imported:
        library = next((library for library in MAY_IMPORT if f"{name}.".startswith(f"{library}.")), None)
        package = module.path.partition("/")[0]
        if library and not MAY_IMPORT[library] & {module.room, module.path, package}:
            broken.append(f"{module.path}:{line}: imports {name}; MAY_IMPORT names the rooms that may")
    return broken


def cycles(modules: list[Module]) -> set[tuple[str, ...]]:
    """Return the groups of files that import each other, directly or through others, anywhere in their text."""
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {
        # `from a import b` names a module `a.b`, or something in the module `a`.
        module.name: {name if name in names else name.rpartition(".")[0] for _, name in module.imported}
        & (names - {module.name})
        for module in modules
    }

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = edges[left.pop()] - found
            found |= new
            left.extend(new)
        return frozenset(found)

    return {
        tuple(sorted({start} | {other for other in reached(start) if start in reached(other)}))
        for start in names
        if start in reached(start)
    }


def parse(root: Path) -> list[Module]:
    """Return the files below a package's directory."""
    prefix = "" if root == SRC else f"{root.name}/"
    return [
        Module(path=prefix + path.relative_to(root).as_posix(), tree=ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(root.rglob("*.py"))
    ]


def core_imports(module: Module) -> list[str]:
    """Return an adapter's imports of the core beside its public names and the interface for adapters."""
    rooms = MAY_IMPORT_ROOMS.get(module.name.partition(".")[0], frozenset())
    tables = {"spi": SPI, **MODULES}
    found = []
    for line, name in module.imported:
        parts = name.split(".")
        if parts[0] != "penstock" or len(parts) == 1 or parts[1] in {"errors", *PUBLIC, *rooms}:
            continue
        # `penstock.spi.a`: a name of the table, and not a file below.
        names = tables.get(parts[1])
        if names is None or len(parts) > 3 or (len(parts) == 3 and parts[2] not in names):
            found.append(f"{module.path}:{line}: imports {name}; an adapter imports penstock.spi and public names")
    return found


RULES = [upward_imports, torch_at_import, impurities, environment_reads, pickles, broad_excepts, foreign_imports]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_core_imports_follow_layering_rule(rule, modules: list[Module]) -> None:
    broken = [fault for module in modules for fault in rule(module)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "rule",
    [core_imports, environment_reads, pickles, broad_excepts, torch_at_import, impurities, foreign_imports],
    ids=lambda rule: rule.__name__,
)
def test_adapter_imports_follow_layering_rule(rule, adapters: list[Module]) -> None:
    broken = [fault for module in adapters for fault in rule(module)]
    assert not broken, "\n".join(broken)


def test_core_imports_no_adapter(modules: list[Module]) -> None:
    found = [f"{m.path}:{line}: {name}" for m in modules for line, name in m.imported if name.startswith("penstock_")]
    assert not found


def test_every_adapter_interface_name_is_used(adapters: list[Module]) -> None:
    """A name that no adapter, test, example or page uses is none of the interface."""
    places = [*PACKAGES.glob("penstock-*/src/**/*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("docs/**/*.md")]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in places)
    assert [name for name in SPI if not re.search(rf"\b{name}\b", texts)] == []


def test_each_engine_plugin_is_declared_by_its_package() -> None:
    owners = {"vllm": "penstock-vllm", "sglang": "penstock-sglang"}
    found = {}
    for file in PACKAGES.glob("*/pyproject.toml"):
        for group in tomllib.loads(file.read_text())["project"].get("entry-points", {}):
            engine = group.partition(".")[0]
            assert engine == "penstock" or owners.get(engine) == file.parent.name, (file, group)
            found[engine] = file.parent.name
    assert found.items() >= owners.items()


def test_package_declares_its_imported_dependencies(adapters: list[Module]) -> None:
    for file in sorted(PACKAGES.glob("penstock-*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        own = file.parent.name.replace("-", "_")
        wanted = {
            name.partition(".")[0]
            for module in adapters
            if module.path.startswith(f"{own}/")
            for _, name in module.imported
            if name.startswith("penstock") and name.partition(".")[0] != own
        }
        given = {re.match(r"[\w-]+", text).group().replace("-", "_") for text in project["dependencies"]}  # type: ignore[union-attr]
        for extra in project.get("optional-dependencies", {}).values():
            given |= {re.match(r"[\w-]+", text).group().replace("-", "_") for text in extra}  # type: ignore[union-attr]
        assert wanted <= given, (file.parent.name, wanted - given)


def test_files_have_no_import_cycles(modules: list[Module], adapters: list[Module]) -> None:
    found = sorted(cycles([*modules, *adapters]))
    assert not found, f"import cycles between files, imports inside functions counted: {found}"


def test_import_cycle_inside_functions_is_detected() -> None:
    texts = {
        "a.py": "def f():\n    from penstock.b import g",
        "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock import c",
        "c.py": "import penstock.a",
        "d.py": "from penstock.a import f",
    }
    parsed = [Module(path=path, tree=ast.parse(text)) for path, text in texts.items()]
    assert cycles(parsed) == {("penstock.a", "penstock.b", "penstock.c")}


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (foreign_imports, "loader/load.py", "def f():\n    import socket"),
        (foreign_imports, "storage/files.py", "from http.client import HTTPConnection"),
        (foreign_imports, "http/client.py", "import http.client"),
        (foreign_imports, "sync/planner.py", "import httpx"),
        (foreign_imports, "peer/server.py", "from http.server import BaseHTTPRequestHandler"),
        (foreign_imports, "engine/run.py", "from ctypes import CDLL"),
        (foreign_imports, "penstock_hub/store.py", "import ctypes.util"),
        (upward_imports, "plan/tasks.py", "from penstock.storage import Source"),
        (upward_imports, "plan/tasks.py", "from penstock import load"),
        (upward_imports, "memory/staging.py", "import penstock.storage.files"),
        (upward_imports, "loader/load.py", "def f():\n    from .. import api"),
        (upward_imports, "types.py", "from .errors import ConfigError"),
        (upward_imports, "api.py", "from penstock.cli.main import run"),
        (upward_imports, "__init__.py", "from penstock.testing import checkpoints"),
        (upward_imports, "attic/old.py", "import os"),
        (torch_at_import, "storage/files.py", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        (torch_at_import, "cli/main.py", "class A:\n    from torch import nn"),
        (impurities, "plan/tasks.py", "def f():\n    import time"),
        (impurities, "plan/tasks.py", "print(1)"),
        (environment_reads, "cli/main.py", "import os\nos.environ.get('A')"),
        (environment_reads, "cli/main.py", "from os import getenv"),
        (pickles, "penstock_hub/app.py", "def f():\n    from pickle import loads"),
        (pickles, "loader/load.py", "import torch\ntorch.load('x')"),
        (broad_excepts, "engine/run.py", "def f():\n    try:\n        g()\n    except Exception:\n        pass"),
        (broad_excepts, "engine/run.py", "try:\n    g()\nexcept (OSError, BaseException) as e:\n    raise X from e"),
        (broad_excepts, "cli/load.py", "def run():\n    try:\n        g()\n    except:\n        return 1"),
        (core_imports, "penstock_x/a.py", "from penstock.storage import Source"),
        (core_imports, "penstock_x/a.py", "def f():\n    import penstock.peer.member"),
        (core_imports, "penstock_x/a.py", "from penstock.spi.host_plugin import HostPlugin"),
        (core_imports, "penstock_x/a.py", "from penstock.spi import NoSuchName"),
        (core_imports, "penstock_compile_cache/a.py", "from penstock.hub.client import HubClient"),
        (environment_reads, "penstock_x/config.py", "import os\nos.environ.get('A')"),
    ],
)
def test_layering_rule_rejects_forbidden_import(rule, path: str, text: str) -> None:
    assert rule(Module(path=path, tree=ast.parse(text)))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (upward_imports, "storage/files.py", "from penstock.types import MIB\nfrom . import Source\nimport os"),
        (upward_imports, "cli/load.py", "import penstock\nfrom penstock import load"),
        (upward_imports, "__init__.py", "from penstock import load\nfrom penstock.errors import FormatError"),
        (upward_imports, "config.py", "from penstock.errors import ConfigError"),
        (torch_at_import, "storage/files.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        (torch_at_import, "storage/files.py", "def f():\n    import torch"),
        (torch_at_import, "loader/load.py", "import torch"),
        (broad_excepts, "engine/run.py", "try:\n    g()\nexcept BaseException:\n    free()\n    raise"),
        (foreign_imports, "http/client.py", "import httptools\nimport socket"),
        (foreign_imports, "storage/io_uring.py", "import ctypes"),
        (foreign_imports, "loader/load.py", "from penstock.http.pool import Pool\nfrom http import HTTPStatus"),
        (broad_excepts, "cli/main.py", "def run():\n    try:\n        g()\n    except Exception:\n        return 3"),
        (core_imports, "penstock_x/a.py", "import penstock\nfrom penstock import load\nfrom penstock.spi import Log"),
        (core_imports, "penstock_x/a.py", "from penstock.cache import attach\nfrom penstock.errors import PeerLost"),
    ],
)
def test_layering_rule_accepts_allowed_import(rule, path: str, text: str) -> None:
    assert not rule(Module(path=path, tree=ast.parse(text)))
