"""Workers of a job on a Ray cluster: each an actor that connects to the coordinator like any other worker.

In: a cluster's address. Out: a `Launcher`.
Not here: the worker itself (`process`), which is the same everywhere.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import MissingExtra, PeerLost

_SPAWN_S = 60.0
"""Time that an actor has to reach the coordinator."""


class RayLauncher:
    """One actor a worker, where the cluster has room: a GPU each for workers on `cuda`, a core each for the others.

    An actor for which there is no room (a node was lost, say) begins once there is.

    Args:
        address: of the cluster, as `ray.init` takes it; ignored if this process is connected to one already.

    Raises:
        MissingExtra: Ray is not installed. PeerLost: no cluster is there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("workers on Ray need Ray", hint="pip install 'penstock[ray]'") from error
        self._ray: Any = ray
        # A program that uses Ray itself keeps its connection; only one that was made here is closed at the end.
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise PeerLost(f"no Ray cluster is at {address}: {error}") from error
        self.listen: str | None = ray.util.get_node_ip_address()
        self._actors: dict[str, tuple[Any, Any]] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`."""
        # No restarts by Ray: the coordinator replaces lost workers itself, under new names, and counts how often.
        on_gpu = device.startswith("cuda")
        kind = self._ray.remote(num_cpus=0 if on_gpu else 1, num_gpus=1 if on_gpu else 0, max_restarts=0)(_Actor)
        actor = kind.remote()
        # Ray sets CUDA_VISIBLE_DEVICES to the actor's own GPU, so inside it that GPU is always the first.
        self._actors[worker] = actor, actor.work.remote(address, worker, "cuda:0" if on_gpu else device, secret)

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`. While the call has not returned, it may still be on its way to a node."""
        _, call = self._actors[worker]
        done, _ = self._ray.wait([call], timeout=0)
        return "its actor or its node has ended" if done else None

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`."""
        actor, _ = self._actors[worker]
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Leave the cluster if this object connected to it. Idempotent."""
        if self._connected:
            self._ray.shutdown()
        self._connected = False


class _Actor:
    """A worker's process on any node of the cluster."""

    def work(self, address: str, worker: str, device: str, secret: str) -> None:
        """See `process.serve`."""
        import torch

        from penstock.jobs.workers.process import connect, serve

        where = torch.device(device)
        if where.type == "cpu":
            torch.set_num_threads(1)
        serve(connect(address, timeout_s=_SPAWN_S), worker, secret, where)
