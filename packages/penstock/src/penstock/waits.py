"""Waits that end when the call they belong to is left: by an error, Ctrl-C, or a signal handler that raises.

A verb waits for the network in many threads. When it is left early, its threads must not wait on until a server's
deadline is over. So the threads of one call share a `Scope`, and whatever waits in them says how its wait is ended.

    scope = Scope()
    thread: with scope.inside():                      caller: scope.leave()
                with ended_by(connection.cut):  <------------'  cuts; later waits raise Cancelled at once
                    ...recv...

- `ended_by`: a block that waits for a socket.    - `pause`: a sleep.
- `limited`: a block whose waits end after some seconds, however many there are.
- `in_helper`: a call of a library that nothing can end: it runs in another thread, which is left behind.
- `Threads`: a pool for the calls of one block. It also works while the interpreter ends, where the standard library's
  pool refuses.
- `start_thread`: starts any thread, or says which limit allows none.
"""

from __future__ import annotations

import contextlib
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
"""Seconds that a pool which is left early waits for its threads. Reason: waits on sockets end in milliseconds. Others
(a resolver of names, a dead NFS server) cannot be ended, and their threads hold nothing that the caller frees."""


class Scope:
    """The waits in the threads of one call. Any thread may use it.

    A scope that is made in a thread of another scope is left with it.

    Attributes:
        is_left: whether the call was left: nothing new may wait.
    """

    def __init__(self) -> None:
        self.is_left = False
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], object]] = {}
        self._next = 0
        self._outer = current()
        self._outer_number = None if self._outer is None else self._outer.add(self.leave)

    def add(self, end: Callable[[], object]) -> int | None:
        """Note how a wait is ended; return its number. None: the scope was left, and `end` was not noted."""
        with self._lock:
            if self.is_left:
                return None
            self._next += 1
            self._ends[self._next] = end
            return self._next

    def remove(self, number: int | None) -> None:
        """Forget a wait. Its `end` is not being called any more when this returns."""
        if number is not None:
            with self._lock:
                self._ends.pop(number, None)

    def leave(self) -> None:
        """End all waits, and those that would begin later. Idempotent."""
        with self._lock:
            self.is_left = True
            # With the lock held: an end must not reach a connection that its wait has given back already.
            for end in self._ends.values():
                end()
            self._ends.clear()

    def close(self) -> None:
        """Forget the outer scope, whose thread may have many of these one after the other."""
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


def current() -> Scope | None:
    """Return the scope of the calling thread; None: nothing ends its waits."""
    return _here.scope


def require_wanted() -> None:
    """Raise Cancelled if the call that the calling thread works for was left; KeyboardInterrupt if one was noted."""
    scope = current()
    if scope is not None and scope.is_left:
        raise Cancelled("the call was left")
    interrupts.raise_if_noted()


@contextlib.contextmanager
def ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Run a block that waits; `end` makes its wait fail, and is called from another thread.

    Raises:
        Cancelled: the call was left before the block, or in it: whatever the block raised because it was ended.
        KeyboardInterrupt: in the main thread, at once.
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


def pause(seconds: float) -> None:
    """Sleep, at most until the call is left. Raises as `require_wanted`."""
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
    """End the waits of the calling thread in a block after some seconds.

    Args:
        wait_s: longest time for the whole block.
        uri: for the error.

    Raises:
        SourceStalled: the time is over. Cancelled: the call was left.
    """
    scope, is_over = Scope(), threading.Event()

    def end() -> None:
        is_over.set()
        scope.leave()

    timer = threading.Timer(wait_s, end)
    timer.daemon = True
    # Without a thread each wait still has its own deadline.
    start_thread(timer, is_needed=False)
    try:
        with scope.inside():
            yield
    except Cancelled as error:
        if not is_over.is_set():
            raise
        hint = "raise stall_s if the source is only slow"
        raise SourceStalled(f"it was not complete after {wait_s:.3g} s", uri=uri, hint=hint) from error
    finally:
        timer.cancel()
        scope.close()


def in_helper(function: Callable[[], T]) -> T:
    """Return the result of a call that nothing can end: another thread makes it, and is left behind if need be.

    The function must have its own deadlines, and must not write to memory that the caller may free.

    Raises:
        Cancelled, KeyboardInterrupt: as `require_wanted`. BaseException: of the function.
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
        # The error's frames would refer to the future, which refers to the error.
        del done, call


class _Result(Future[T]):
    """The future of a call in `Threads`. Ctrl-C ends the wait for it, also where it is only noted."""

    def result(self, timeout: float | None = None) -> T:
        """See `Future.result`."""
        while interrupts.is_deferring() and timeout is None and not self.done():
            wait((self,), interrupts.LOOK_S)
            interrupts.raise_if_noted()
        return super().result(timeout)


class Threads:
    """A pool of threads for the calls of one block; the methods are those of `concurrent.futures.Executor`.

    Leaving the block waits for the calls. With an error it ends their waits, and drops the calls that have not begun.
    Where the system or an ending interpreter allows no thread, `submit` makes the call itself.

    After an error a call may still run when the block has ended, if nothing can end its wait: see `JOIN_S`. So calls
    must not use memory or files that the caller frees then, except with `waits_for_calls`.

    Args:
        waits_for_calls: after an error, wait for the calls that run, however long that takes.
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
        """Make a call in one of the threads; return its future."""
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
        """Make a call for each of the arguments; yield the results in order. All begin at once."""
        futures = [self.submit(function, *args) for args in zip(*arguments, strict=True)]
        return (future.result() for future in futures)

    def end(self) -> None:
        """Have the threads end after the calls that were submitted. Does not wait."""
        for _ in self._threads:
            self._calls.put(None)

    def leave(self) -> None:
        """End the waits of the calls under way, and drop the others. Idempotent."""
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
            # An interrupt while the last calls were waited for.
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
                # Its result may be large, and the thread waits for the next one.
                del call


class _Call:
    """A call, and the future of its result."""

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
    """Start a thread; False if there can be no more of them and this one is not needed.

    Raises:
        DestinationError: it is needed, and the system's limit is reached or the interpreter ends.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if not is_needed:
            return False
        # Python 3.12 refuses from the first exit handler on, 3.13 after the last. 3.12 has no type of error for it.
        if "interpreter shutdown" in str(error):
            message = "no thread can be started: the interpreter is ending"
            hint = "make this call before the program ends: Python 3.12 starts no thread in an atexit handler"
        else:
            message = f"no thread can be started ({_thread_limits()})"
            hint = "raise the limit (ulimit -u, or pids.max of the cgroup), or end other processes of this user"
        raise DestinationError(message, hint=hint) from error
    return True


def _thread_limits() -> str:
    """Return the limits of this process's threads, for a message."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [f"RLIMIT_NPROC {'unlimited' if soft == resource.RLIM_INFINITY else soft}"]
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_bytes().decode().strip().rpartition("::")[2].lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        now, most = (group.joinpath(f"pids.{name}").read_bytes().decode().strip() for name in ("current", "max"))
        limits.append(f"cgroup pids {now} of {most}")
    return ", ".join(limits)


def _started(work: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a thread; None if there can be none."""
    # A daemon: one that hangs in a system call (a dead NFS server) must not keep an ending process alive.
    thread = threading.Thread(target=work, name=name, daemon=True)
    return thread if start_thread(thread, is_needed=False) else None
