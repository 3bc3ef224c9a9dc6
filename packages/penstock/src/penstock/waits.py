"""Waits that end when their call is left because of an error, Ctrl-C, or a signal handler that raises.

A verb waits for the network in many threads. When the verb is left early, its threads must not go on waiting until a
server's deadline. The threads of one call therefore share a `Scope`, and each wait registers a function that ends it.

    scope = Scope()
    thread: with scope.inside():                      caller: scope.leave()
                with ended_by(connection.cut):  <------------'  calls cut(), and later waits raise Cancelled at once
                    ...recv...

- `ended_by` is a block that waits for a socket.
- `pause` is a sleep.
- `limited` is a block with one deadline for all its waits.
- `in_helper` makes a library call that cannot be interrupted. A second thread makes the call and is left behind.
- `Threads` is a thread pool for the calls in one block. It also works while the interpreter shuts down, when the pool
  of the standard library refuses.
- `start_thread` starts a thread, or names the limit that forbids it.
"""

from __future__ import annotations

import contextlib
import random
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock import interrupts
from penstock.errors import Cancelled, DestinationError, SourceStalled

T = TypeVar("T")

JOIN_S = 1.0
"""Seconds that a pool waits for its threads after an error. Waits on sockets end in milliseconds. A name resolver or a
dead NFS server cannot be interrupted, and these threads use no memory that the caller frees."""


class Scope:
    """The waits in the threads of one call. Thread-safe.

    A scope created inside another scope is left together with it.

    Attributes:
        is_left: whether the call was left. New waits are refused then.
    """

    def __init__(self) -> None:
        self.is_left = False
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], object]] = {}
        self._next = 0
        self._outer = current()
        self._outer_number = None if self._outer is None else self._outer.add(self.leave)

    def add(self, end: Callable[[], object]) -> int | None:
        """Register the function that ends a wait, and return its number. Return None if the scope was left."""
        with self._lock:
            if self.is_left:
                return None
            self._next += 1
            self._ends[self._next] = end
            return self._next

    def remove(self, number: int | None) -> None:
        """Remove a wait. After this call its `end` is not running and will not be called."""
        if number is not None:
            with self._lock:
                self._ends.pop(number, None)

    def leave(self) -> None:
        """End all waits and refuse later ones. Idempotent."""
        with self._lock:
            self.is_left = True
            # Keep the lock, so that `end` cannot reach a connection after its wait returned it to the pool.
            for end in self._ends.values():
                end()
            self._ends.clear()

    def close(self) -> None:
        """Deregister from the outer scope, whose thread may create many scopes one after the other."""
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
# The operating system's generator has no state, so forked children get different numbers.
_random = random.SystemRandom()


def current() -> Scope | None:
    """Return the scope of the calling thread, or None if nothing can end its waits."""
    return _here.scope


def require_wanted() -> None:
    """Raise Cancelled if the calling thread's scope was left, or KeyboardInterrupt if a SIGINT was noted."""
    scope = current()
    if scope is not None and scope.is_left:
        raise Cancelled("the call was left")
    interrupts.raise_if_noted()


@contextlib.contextmanager
def ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Run a block that waits. To end the wait, another thread calls `end`, which makes the block fail.

    Raises:
        Cancelled: the call was left before or during the block. It replaces the error that `end` caused.
        KeyboardInterrupt: raised at once in the main thread.
    """
    scope = current()
    if scope is None:
        with interrupts.allow_interrupts():
            yield
        return
    number = scope.add(end)
    if number is None:
        raise Cancelled("the call was left")
    try:
        with interrupts.allow_interrupts():
            yield
    except Exception as error:
        if scope.is_left and not isinstance(error, Cancelled):
            raise Cancelled("the call was left") from error
        raise
    finally:
        scope.remove(number)


def jitter(low: float, high: float) -> float:
    """Return a random number in this range, with which many processes spread their requests.

    It does not draw from the global generator of `random`: a program that has set its seed gets the same numbers with
    Penstock's threads as without them.
    """
    return _random.uniform(low, high)


def pause(seconds: float) -> None:
    """Sleep until the time is over or the call is left. Raise what `require_wanted` raises."""
    scope, over = current(), threading.Event()
    number = None if scope is None else scope.add(over.set)
    try:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            require_wanted()
            over.wait(interrupts.longest_wait_s(left_s))
    finally:
        if scope is not None:
            scope.remove(number)
    require_wanted()


@contextlib.contextmanager
def limited(wait_s: float, *, uri: str) -> Iterator[None]:
    """Give all waits of the calling thread inside the block one deadline.

    Args:
        wait_s: seconds that the whole block may take.
        uri: source that the error names.

    Raises:
        SourceStalled: the time is over.
        Cancelled: the call was left.
    """
    scope, is_over = Scope(), threading.Event()

    def end() -> None:
        is_over.set()
        scope.leave()

    timer = threading.Timer(wait_s, end)
    timer.daemon = True
    # If the timer's thread cannot start, each wait still has a deadline.
    start_thread(timer, is_needed=False)
    try:
        with scope.inside():
            yield
    except Cancelled as error:
        if not is_over.is_set():
            raise
        hint = "raise stall_s if the source is slow but works"
        raise SourceStalled(f"the answer was not complete after {wait_s:.3g} s", uri=uri, hint=hint) from error
    finally:
        timer.cancel()
        scope.close()


def in_helper(function: Callable[[], T]) -> T:
    """Make a call that cannot be interrupted in another thread, and return its result.

    If the wait for the result ends early, the thread is left behind. The function must have deadlines and must not
    write to memory that the caller may free.

    Raises:
        Cancelled, KeyboardInterrupt: raised as by `require_wanted`.
        BaseException: whatever the function raises.
    """
    done: Future[T] = Future()
    call = _Call(done, function, ())
    if not _started(call.run, "penstock-helper"):
        call.run()
    over = threading.Event()
    done.add_done_callback(lambda _: over.set())
    scope = current()
    number = None if scope is None else scope.add(over.set)
    try:
        while not done.done():
            require_wanted()
            over.wait(interrupts.longest_wait_s(3600.0))
    finally:
        if scope is not None:
            scope.remove(number)
    try:
        return done.result()
    finally:
        # Otherwise the error's frames would refer to the future, which refers to the error.
        del done, call


class _Result(Future[T]):
    """The future of a call in `Threads`. Ctrl-C ends the wait for its result, even inside `deferred`."""

    def result(self, timeout: float | None = None) -> T:
        """See `Future.result`."""
        while interrupts.is_deferring() and timeout is None and not self.done():
            wait((self,), interrupts.LOOK_S)
            interrupts.raise_if_noted()
        return super().result(timeout)


class Threads:
    """A thread pool for the calls in one block, with the methods of `concurrent.futures.Executor`.

    Leaving the block waits for the calls. An error ends the waits of the running calls and drops those that have not
    begun. If no thread can be started, `submit` makes the call in the calling thread.

    After an error, a call whose wait cannot be ended may still run when the block has ended (see `JOIN_S`). Such calls
    must not use memory or files that the caller frees, unless `waits_for_calls` is set.

    Args:
        waits_for_calls: after an error, wait until the running calls have ended, without a time limit.
    """

    def __init__(self, num_threads: int, thread_name_prefix: str, *, waits_for_calls: bool = False) -> None:
        self._waits_for_calls = waits_for_calls
        self._num_threads = num_threads
        self._name = thread_name_prefix
        self._scope = Scope()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_posted = 0
        self._is_left = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Make a call in one of the threads and return its future."""
        done: Future[T] = _Result()
        call = _Call(done, function, args)
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
        """Submit one call for each set of arguments at once, and yield the results in order."""
        futures = [self.submit(function, *args) for args in zip(*arguments, strict=True)]
        return (future.result() for future in futures)

    def end(self) -> None:
        """Tell the threads to end after the submitted calls. Does not wait."""
        for _ in self._threads:
            self._calls.put(None)

    def leave(self) -> None:
        """End the waits of running calls, and drop calls that have not begun. Idempotent."""
        self._is_left = True
        self._scope.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.leave()
        self.close()

    def close(self) -> None:
        """Wait for the calls, and end the threads. Idempotent."""
        self.end()
        until_s = time.monotonic() + JOIN_S
        try:
            for thread in self._threads:
                is_bounded = self._is_left and not self._waits_for_calls
                thread.join(max(0.0, until_s - time.monotonic()) if is_bounded else None)
        except BaseException:
            # An interrupt arrived during the wait for the last calls.
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
                # The result may be large. Drop it before waiting for the next call.
                del call


class _Call:
    """A call and the future for its result."""

    __slots__ = ("args", "done", "function")

    def __init__(self, done: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.done = done
        self.function = function
        self.args = args

    def run(self) -> None:
        """Make the call, unless its future was cancelled. Never raises."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = self.function(*self.args)
        except BaseException as error:  # noqa: BLE001
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


def start_thread(thread: threading.Thread, *, is_needed: bool = True) -> bool:
    """Start a thread. Return False if it cannot start and is not needed.

    Raises:
        DestinationError: a needed thread cannot start, because a limit is reached or the interpreter shuts down.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if not is_needed:
            return False
        # Python 3.12 refuses new threads from the first exit handler on, and 3.13 after the last one. Python 3.12 has
        # no separate exception type for this.
        if "interpreter shutdown" in str(error):
            message = "cannot start a thread because the interpreter is shutting down"
            hint = "make this call before the program ends, because Python 3.12 starts no thread in an atexit handler"
        else:
            message = f"cannot start a thread ({_thread_limits()})"
            hint = "raise the limit (ulimit -u, or pids.max of the cgroup), or end other processes of this user"
        raise DestinationError(message, hint=hint) from error
    return True


def _thread_limits() -> str:
    """Describe the limits on this process's threads, for an error message."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [f"RLIMIT_NPROC {'unlimited' if soft == resource.RLIM_INFINITY else soft}"]
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_bytes().decode().strip().rpartition("::")[2].lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        now, most = (group.joinpath(f"pids.{name}").read_bytes().decode().strip() for name in ("current", "max"))
        limits.append(f"cgroup pids {now} of {most}")
    return ", ".join(limits)


def _started(work: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a daemon thread, or return None if it cannot start."""
    # A thread that hangs in a system call (a dead NFS server) must not keep the process alive at its end.
    thread = threading.Thread(target=work, name=name, daemon=True)
    return thread if start_thread(thread, is_needed=False) else None
