"""Penstock's errors, catchable also as the class that another library raises for the same fault.

In: an error and the other classes. Out: an error of the same name and content that is all of them.
Not here: which fault is which library's error (`safe_open`, `compat`).
"""

from __future__ import annotations

from penstock.errors import PenstockError

_classes: dict[tuple[type[Exception], ...], type[PenstockError]] = {}


def also(error: PenstockError, *others: type[Exception]) -> PenstockError:
    """Return `error` as an instance of its own class and of `others`; itself if it is all of them already."""
    ours = type(error)
    missing = tuple(other for other in others if not issubclass(ours, other))
    if not missing:
        return error
    key = (ours, *missing)
    if key not in _classes:
        body = {"__module__": ours.__module__, "__doc__": ours.__doc__, "__qualname__": ours.__qualname__}
        # Kept, so that two errors of one kind are of one class.
        _classes[key] = type(ours.__name__, key, body)
    instance = _classes[key].__new__(_classes[key])
    # Not by calling the class: a foreign base may want other arguments, or none.
    PenstockError.__init__(
        instance,
        error.message,
        mutated=error.mutated,
        uri=error.uri,
        tensor=error.tensor,
        byte_range=error.byte_range,
        hint=error.hint,
    )
    instance.__dict__.update(error.__dict__)
    return instance
