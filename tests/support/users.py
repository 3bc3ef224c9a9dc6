"""Another user of the same host, for tests of who is let in.

In: a function, a user id. Out: what the function returns there, as JSON. Needs root.
Not here: processes of the same user (`fork_server`, `commands`).
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

STRANGER = 65534
"""`nobody`, which owns nothing on a usual system."""


def run_as(uid: int, function: Callable[[], Any]) -> Any:
    """Call a function in a forked child of another user and return its result; everything it imports must be there.

    The child is forked, not executed: the interpreter may lie where that user cannot read it.

    Raises:
        RuntimeError: the function raised; the message is the child's traceback.
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
