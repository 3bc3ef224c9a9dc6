"""Errors also derive from built-in classes that callers would catch, and no handler of the package swallows them."""

from __future__ import annotations

import ast
import builtins
import copy
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock_convert
from penstock import errors
from penstock.errors import PenstockError
from penstock.http.range_request import _typed_errors
from penstock.storage import text_of
from penstock.storage.output import typed
from penstock_convert.operations.spec import function_of

SOURCES = [Path(package.__file__).parent for package in (penstock, penstock_convert)]


class Foreign(Exception):
    """An error class of another library."""


@pytest.mark.parametrize(
    ("ours", "pythons"),
    [
        (errors.ConfigError, ValueError),
        (errors.MissingExtra, ImportError),
        (errors.NotFound, FileNotFoundError),
        (errors.PermissionDenied, PermissionError),
        (errors.GrantRefused, PermissionError),
    ],
)
def test_typed_error_is_also_builtin_error(ours: type[PenstockError], pythons: type[Exception]) -> None:
    error = ours("it failed", uri="s3://user:secret@bucket/x", hint="do this")
    with pytest.raises(pythons) as caught:
        raise error
    assert str(caught.value) == f"it failed; in s3://bucket/x; blame: {ours.blame}; destination untouched; do this"
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is ours
        assert str(again) == str(error)


def kinds(root: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    yield root
    for kind in root.__subclasses__():
        # Classes that tests of this process have created are unknown by name.
        if kind.__module__.startswith("penstock."):
            yield from kinds(kind)


SPECIAL: dict[str, dict[str, Any]] = {
    "BudgetTooSmall": {"minimum_bytes": 7},
    "BaseMismatch": {"expected": "a", "found": "b"},
    "VersionRefused": {"version": 3, "member": "m", "reason": "why"},
    "VersionNotLive": {"live": 4},
}


def make_error(kind: type[PenstockError]) -> PenstockError:
    """Return an error with fields, a note, and two causes of which only one can be pickled."""
    if kind.__name__ in SPECIAL:
        error = kind("it failed", **SPECIAL[kind.__name__])
    else:
        error = kind("it failed", mutated=True, uri="file:///x", tensor="w", byte_range=(1, 2), hint="do this")
    error.add_note("while it was tested")
    error.__cause__ = errors.NotFound("gone", uri="s3://b/x")
    error.__cause__.__cause__ = OSError(2, "no such file")
    error.__cause__.__cause__.__cause__ = ValueError("never sent")
    error.__context__ = RuntimeError(threading.Lock())
    return error


def sent(error: PenstockError, protocol: int | None = None) -> Any:
    """Return an error after pickling and unpickling."""
    return pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - made here


def are_equal(ours: BaseException, theirs: BaseException | None) -> bool:
    fields = ("args", "__notes__", "message", "mutated", "uri", "tensor", "byte_range", "hint", "minimum_bytes")
    fields += ("expected", "found", "version", "member", "reason", "live")
    return (
        type(ours) is type(theirs)
        and str(ours) == str(theirs)
        and all(getattr(ours, name, None) == getattr(theirs, name, None) for name in fields)
    )


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_error_survives_copy_and_pickle(kind: type[PenstockError]) -> None:
    error = make_error(kind)
    for again in (copy.copy(error), copy.deepcopy(error), *(sent(error, protocol) for protocol in range(6))):
        assert are_equal(error, again) and again.__suppress_context__
        assert error.__cause__ is not None and are_equal(error.__cause__, again.__cause__)
        assert again.__cause__ is not None and isinstance(again.__cause__.__cause__, OSError)
        assert again.__cause__.__cause__.errno == 2
        assert "RuntimeError" in str(again.__context__)


def test_circular_causes_survive_pickle() -> None:
    first, second = errors.PeerLost("one"), errors.PlanError("two")
    first.__cause__, second.__cause__ = second, first
    again = sent(first)
    assert are_equal(second, again.__cause__) and again.__cause__.__cause__ is again


def test_user_error_class_survives_pickle() -> None:
    error = UsersError(1, reason="because")
    again = sent(error)
    assert type(again) is UsersError and (again.number, str(again)) == (1, str(error))


class UsersError(errors.OperationFailed):
    """A class with a different constructor."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number} {reason}")
        self.number = number


@pytest.mark.parametrize("others", [(Foreign, OSError), (TypeError,), (Foreign, TypeError)], ids=str)
def test_error_with_two_bases_survives_pickle(others: tuple[type[Exception], ...]) -> None:
    error = errors.also(errors.SourceUnavailable("gone", uri="x", hint="wait"), *others)
    error.add_note("a note")
    twice = errors.also(error, LookupError)
    for one in (error, twice, errors.also(twice, *others)):
        for again in (copy.copy(one), copy.deepcopy(one), sent(one)):
            assert are_equal(one, again) and all(isinstance(again, other) for other in others)
            assert isinstance(again, errors.SourceUnavailable)


def test_worker_process_errors_survive_pickling() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(errors.ConfigError, match="NoneType is not a path or URI"):
            pool.submit(text_of, None).result(timeout=60)
        # The pool still works. An error that cannot be unpickled would break it.
        assert pool.submit(text_of, "x").result(timeout=60) == "x"


def test_untyped_penstock_errors_are_not_builtin_errors(tmp_path: Path) -> None:
    for ours in (errors.SourceUnavailable, errors.FormatError, errors.PlanError, errors.DestinationError):
        assert not issubclass(ours, OSError | ValueError | ImportError)
    with pytest.raises(FileNotFoundError):
        penstock.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="NoneType is not a path or URI"):
        penstock.load(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("ours", [errors.NotFound("gone"), errors.PermissionDenied("closed")])
def test_system_error_mapping_leaves_penstock_errors_unchanged(ours: PenstockError, tmp_path: Path) -> None:
    with pytest.raises(PenstockError) as caught, typed(tmp_path):
        raise ours
    assert caught.value is ours
    with pytest.raises(PenstockError) as caught, _typed_errors("http://host/x"):
        raise ours
    assert caught.value is ours


def test_missing_extra_error_from_user_module_propagates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacks_an_extra.py").write_text(
        'from penstock.errors import MissingExtra\nraise MissingExtra("it needs scipy", hint="pip install scipy")\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(errors.MissingExtra, match="it needs scipy"):
        function_of("lacks_an_extra:f")


def _caught(handler: ast.ExceptHandler) -> Iterator[type]:
    """Return the built-in classes and Penstock's classes that a handler names."""
    if handler.type is None:
        yield BaseException
        return
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    for kind in kinds:
        name = ast.unparse(kind)
        found = getattr(errors, name, None) or getattr(builtins, name, None)
        if isinstance(found, type):
            yield found


def _raised(body: list[ast.stmt]) -> Iterator[type]:
    """Return Penstock's errors that the body of a `try` raises, or any of them if it yields to a caller's block."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found = getattr(errors, ast.unparse(node.exc.func), None)
            if isinstance(found, type):
                yield found
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and node.value.value is None:
            yield from (errors.NotFound, errors.PermissionDenied, errors.ConfigError, errors.MissingExtra)


def swallowed(source: str) -> list[int]:
    """Return the lines of handlers of built-in classes that would catch Penstock's errors."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Try):
            continue
        left = list(_raised(node.body))
        for handler in node.handlers:
            for caught in _caught(handler):
                if not issubclass(caught, PenstockError) and caught not in (Exception, BaseException):
                    lines += [handler.lineno for ours in left if issubclass(ours, caught)]
                left = [ours for ours in left if not issubclass(ours, caught)]
    return lines


def test_builtin_handlers_never_catch_penstock_errors() -> None:
    wrong = "try:\n    raise NotFound('x')\nexcept OSError:\n    pass\n"
    assert swallowed(wrong) == [3]
    assert swallowed("try:\n    yield\nexcept ValueError:\n    pass\n")
    assert not swallowed(wrong.replace("except OSError", "except PenstockError:\n    raise\nexcept OSError"))
    found = {path: swallowed(path.read_text(encoding="utf-8")) for source in SOURCES for path in source.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("name", "least", "kind"),
    [
        ("GrantRefused", errors.PermissionDenied, errors.GrantRefused),
        ("PermissionDenied", errors.PermissionDenied, errors.PermissionDenied),
        ("NotFound", errors.PermissionDenied, errors.PermissionDenied),
        ("IntegrityError", errors.PenstockError, errors.IntegrityError),
        # The constructor needs more than a message.
        ("BudgetTooSmall", errors.PlanError, errors.PlanError),
        ("partial", errors.PenstockError, errors.PenstockError),
        ("no such thing", errors.PenstockError, errors.PenstockError),
        ("__builtins__", errors.PenstockError, errors.PenstockError),
    ],
)
def test_unknown_error_class_from_peer_becomes_base_class(name: str, least: type, kind: type) -> None:
    assert errors.class_named(name, least) is kind


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b31m", "\r", "\x00", "\u202e", "\u2066", "\u2028", "\ufeff", "\udc80"])
def test_foreign_text_cannot_control_terminal(text: str) -> None:
    error = errors.NotFound(f"a name {text}", uri=f"s3://b/{text}\nforged: line", tensor=text, hint=f"look at {text}")
    shown = str(error)
    assert shown.isprintable()
    assert text not in shown
    assert "\\nforged" in shown


def test_line_breaks_in_penstock_messages_are_preserved() -> None:
    assert str(errors.PlanError("first:\n  second")).startswith("first:\n  second")
