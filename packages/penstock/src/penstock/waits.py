"""Waits that are aborted when their call exits early because of an error, Ctrl-C, or a signal handler that raises.

A call such as `load` waits for the network in many threads. If the call exits early, its threads must not wait for a
server's deadline. The threads therefore share a `Scope`, in which each wait registers a function that aborts it.
"""

from __future__ import annotations

import contextlib
import math
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import msgspec

from penstock import interrupts
from penstock.errors import Cancelled, DestinationError, SourceStalled

T = TypeVar("T")

JOIN_S = 1.0
"""Seconds that a pool waits for its threads after an error. A name lookup or a read from a dead NFS server cannot be
interrupted."""


class Scope:
    """The waits in the threads of one call. Thread-safe. Leaving a scope also leaves all scopes created inside it."""

    def __init__(self) -> None:
        self.is_left = False
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], object]] = {}
        self._next = 0
        self._outer = current()
        self._outer_number = None if self._outer is None else self._outer.add(self.leave)

    def add(self, end: Callable[[], object]) -> int | None:
        """Register the function that aborts a wait, and return its number. Return None if the scope was left."""
        with self._lock:
            if self.is_left:
                return None
            self._next += 1
            self._ends[self._next] = end
            return self._next

    def remove(self, number: int | None) -> None:
        """Remove a wait. After `remove`, the wait's `end` is not running and will not be called."""
        if number is not None:
            with self._lock:
                self._ends.pop(number, None)

    def leave(self) -> None:
        """Abort all waits and refuse later waits. Idempotent."""
        with self._lock:
            self.is_left = True
            # Hold the lock, so that `end` cannot abort a connection that its wait has already returned to the pool.
            for end in self._ends.values():
                end()
            self._ends.clear()

    def close(self) -> None:
        """Deregister from the outer scope."""
        if self._outer is not None:
            self._outer.remove(self._outer_number)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Make this the scope of the calling thread until the block ends."""
        before, _here.scope = current(), self
        try:
            yield
        finally:
            _here.scope = before


class _Here(threading.local):
    scope: Scope | None = None


_here = _Here()
# The operating system's generator has no state, so forked children draw different numbers.
_random = random.SystemRandom()


def current() -> Scope | None:
    """Return the scope of the calling thread, or None if nothing can end its waits."""
    return _here.scope


def require_wanted() -> None:
    """Raise Cancelled if the calling thread's scope was left, or KeyboardInterrupt if a SIGINT was noted."""
    scope = current()
    if scope is not None and scope.is_left:
        raise Cancelled("the call was cancelled, because its caller exited")
    interrupts.raise_if_noted()


@contextlib.contextmanager
def ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Run a block that waits. To abort the wait, another thread calls `end`, which must make the block fail.

    Cancelled replaces the error that `end` caused. In the main thread Ctrl-C raises KeyboardInterrupt at once.
    """
    scope = current()
    if scope is None:
        with interrupts.allow_interrupts():
            yield
        return
    number = scope.add(end)
    if number is None:
        raise Cancelled("the call was cancelled, because its caller exited")
    try:
        with interrupts.allow_interrupts():
            yield
    except Exception as error:
        if scope.is_left and not isinstance(error, Cancelled):
            raise Cancelled("the call was cancelled, because its caller exited") from error
        raise
    finally:
        scope.remove(number)


def jitter(low: float, high: float) -> float:
    """Return a random number between `low` and `high`, to spread requests, without the global generator of `random`."""
    return _random.uniform(low, high)


def pause(seconds: float) -> None:
    """Sleep for this time, or until the scope is left. Raises the errors of `require_wanted`."""
    over, until_s = threading.Event(), time.monotonic() + seconds
    with _registered(over.set):
        while (left_s := until_s - time.monotonic()) > 0:
            require_wanted()
            over.wait(interrupts.longest_wait_s(left_s))
    require_wanted()


@contextlib.contextmanager
def _registered(end: Callable[[], object]) -> Iterator[None]:
    scope = current()
    number = None if scope is None else scope.add(end)
    try:
        yield
    finally:
        if scope is not None:
            scope.remove(number)


@contextlib.contextmanager
def limited(wait_s: float, *, uri: str) -> Iterator[None]:
    """Limit the total time of the block's waits. Raise SourceStalled for `uri` at the deadline."""
    scope, is_over = Scope(), threading.Event()

    def end() -> None:
        is_over.set()
        scope.leave()

    timer = threading.Timer(wait_s, end)
    timer.daemon = True
    # The timer is optional, because each wait also has its own deadline.
    start_thread(timer, is_needed=False)
    try:
        with scope.inside():
            yield
    except Cancelled as error:
        if not is_over.is_set():
            raise
        hint = "raise stall_s if the source is slow but works"
        raise SourceStalled(f"the response was not complete after {wait_s:.3g} s", uri=uri, hint=hint) from error
    finally:
        timer.cancel()
        scope.close()


def in_helper(function: Callable[[], T]) -> T:
    """Run a function that cannot be interrupted in another thread, and return its result.

    If the wait is aborted, the thread is abandoned. The function must have deadlines and must not write to memory that
    the caller may free. Raises the function's errors and those of `require_wanted`.
    """
    done: Future[T] = Future()
    call = FutureCall(done, function, ())
    if not _started(call.run, "penstock-helper"):
        call.run()
    over = threading.Event()
    done.add_done_callback(lambda _: over.set())
    with _registered(over.set):
        while not done.done():
            require_wanted()
            over.wait(interrupts.longest_wait_s(3600.0))
    try:
        return done.result()
    finally:
        # Break the cycle between the error's frames and the future.
        del done, call


class _Result(Future[T]):
    """The future of a call in `Threads`. Ctrl-C aborts the wait for its result, even inside `deferred`."""

    def result(self, timeout: float | None = None) -> T:
        while interrupts.is_deferring() and timeout is None and not self.done():
            wait((self,), interrupts.LOOK_S)
            interrupts.raise_if_noted()
        return super().result(timeout)


class Threads:
    """A thread pool for the calls in one block, with the methods of `concurrent.futures.Executor`.

    The end of the block waits for the calls. An error aborts the waits of the running calls and drops the queued calls.
    If no thread can be started, `submit` makes the call in the calling thread. Unlike the standard library's pool,
    `Threads` also works while the interpreter shuts down.

    Args:
        waits_for_calls: after an error, wait for the running calls without a time limit. If `waits_for_calls` is False,
            a call that cannot be aborted may outlive the block (`JOIN_S`) and must use no memory that the caller frees.
    """

    def __init__(self, num_threads: int, thread_name_prefix: str, *, waits_for_calls: bool = False) -> None:
        self._waits_for_calls = waits_for_calls
        self._num_threads = num_threads
        self._name = thread_name_prefix
        self._scope = Scope()
        self._calls: SimpleQueue[FutureCall | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_posted = 0
        self._is_left = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call the function in one of the threads and return its future."""
        done: Future[T] = _Result()
        call = FutureCall(done, function, args)
        self._num_posted += 1
        if len(self._threads) < min(self._num_threads, self._num_posted):
            thread = _started(self._work, f"{self._name}-{len(self._threads)}")
            if thread is not None:
                self._threads.append(thread)
        if self._threads:
            self._calls.put(call)
        else:
            call.run()
        return done

    def map(self, function: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
        """Submit all calls at once, one for each set of arguments, and yield the results in order."""
        futures = [self.submit(function, *args) for args in zip(*arguments, strict=True)]
        return (future.result() for future in futures)

    def end(self) -> None:
        """Stop the threads after the submitted calls, without waiting for the calls."""
        for _ in self._threads:
            self._calls.put(None)

    def leave(self) -> None:
        """Abort the waits of running calls, and drop queued calls. Idempotent."""
        self._is_left = True
        self._scope.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.leave()
        self.close()

    def close(self) -> None:
        """Wait for the calls, and stop the threads. Idempotent."""
        self.end()
        until_s = time.monotonic() + JOIN_S
        try:
            for thread in self._threads:
                is_bounded = self._is_left and not self._waits_for_calls
                thread.join(max(0.0, until_s - time.monotonic()) if is_bounded else None)
        except BaseException:
            self.leave()
            raise
        finally:
            self._scope.close()

    def _work(self) -> None:
        with self._scope.inside():
            while (call := self._calls.get()) is not None:
                if self._is_left:
                    call.done.cancel()
                else:
                    call.run()
                # Drop the result, which may be large, before waiting for the next call.
                del call


class FutureCall(msgspec.Struct, eq=False):
    """A call whose result or error is stored in the future `done`."""

    done: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> None:
        """Make the call in this thread, unless the future was cancelled."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = self.function(*self.args)
        except BaseException as error:  # noqa: BLE001
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


def start_thread(thread: threading.Thread, *, is_needed: bool = True) -> bool:
    """Start a thread. On failure, raise DestinationError, or return False if `is_needed` is False."""
    try:
        thread.start()
    except RuntimeError as error:
        if not is_needed:
            return False
        # Python 3.12 has no separate exception type for a thread that is started in an exit handler.
        if "interpreter shutdown" in str(error):
            message = "cannot start a thread because the interpreter is shutting down"
            hint = "make this call before the program ends, because Python 3.12 starts no thread in an atexit handler"
        else:
            message = f"cannot start a thread ({_thread_limits()})"
            hint = "raise the limit (ulimit -u, or pids.max of the cgroup), or end other processes of this user"
        raise DestinationError(message, hint=hint) from error
    return True


def _thread_limits() -> str:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [f"RLIMIT_NPROC {'unlimited' if soft == resource.RLIM_INFINITY else soft}"]
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_bytes().decode().strip().rpartition("::")[2].lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        now, most = (group.joinpath(f"pids.{name}").read_bytes().decode().strip() for name in ("current", "max"))
        limits.append(f"cgroup pids {now} of {most}")
    return ", ".join(limits)


def _started(work: Callable[[], None], name: str) -> threading.Thread | None:
    # A daemon thread that hangs in a system call does not delay the end of the process.
    thread = threading.Thread(target=work, name=name, daemon=True)
    return thread if start_thread(thread, is_needed=False) else None


_CHECK_S = 0.2
"""Seconds between two checks of `until_stopped`."""


def until_stopped(
    stopped: threading.Event,
    check: Callable[[], None],
    timeout_s: float | None = None,
    ready: Callable[[], None] | None = None,
) -> bool:
    """Wait until any thread or a signal sets `stopped`. Return False after `timeout_s` seconds.

    `check` is called several times a second, and `ready` once after the signal handlers are installed.
    """
    before: dict[int, Any] = {}

    # The handler only sets the event, because it may interrupt code that holds a lock.
    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if ready is not None:
            ready()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not stopped.wait(min(_CHECK_S, max(0.0, deadline - time.monotonic()))):
            check()
            if time.monotonic() >= deadline:
                return False
        return True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
