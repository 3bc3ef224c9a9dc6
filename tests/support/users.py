"""Runs a function as another user on the same host, for tests of access control. It needs root."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

STRANGER = 65534
"""The user `nobody`, which usually owns no files."""


def run_as(uid: int, function: Callable[[], Any]) -> Any:
    """Call a function in a forked child as another user and return its result as JSON.

    The child is only forked, because that user may not be able to read the interpreter. Modules that it needs must be
    imported before.

    Raises:
        RuntimeError: the function raised. The message is the child's traceback.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receiving)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                answer = {"result": function()}
            except BaseException:
                answer = {"error": traceback.format_exc()}
                raise
            finally:
                with os.fdopen(sending, "w") as pipe:
                    json.dump(answer, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(text)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]
