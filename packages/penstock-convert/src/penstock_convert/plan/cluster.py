"""Input of a simulation: the description of a cluster, and the measured rates of a machine's stages."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from penstock.errors import MALFORMED, ConfigError, PlanError

T = TypeVar("T", bound=msgspec.Struct)

MAX_GPUS = 100_000


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster of identical nodes.

    Rates are in decimal GB/s for one direction. A rate of 0 means that the link does not exist.
    """

    name: str
    num_nodes: int = 1
    gpus_per_node: int = 8
    nvlink_gb_per_s: float
    """Rate from one GPU to the other GPUs of its node, and the same in the other direction."""
    nics_per_node: int = 8
    """Number of NICs in a node. The GPUs share them evenly, and neighbouring GPUs share a NIC."""
    nic_gb_per_s: float
    pcie_gb_per_s: float
    storage_gb_per_s: float = 0.0
    """Total rate at which all nodes can read from storage. 0 means that it is not a limit."""
    node_storage_gb_per_s: float = 0.0
    """Rate at which one node reads from storage. 0 means that it is not a limit."""
    straggler_share: float = 0.0
    """Fraction of the GPUs whose links are slower, by a factor of `straggler_slowdown`."""
    straggler_slowdown: float = 2.0
    failures_per_gpu_hour: float = 0.0
    source: str = ""
    """Origin of the numbers."""

    def check(self) -> None:
        """Raise PlanError if a number is out of range."""
        least = (self.num_nodes, self.gpus_per_node, self.nics_per_node)
        if min(least) < 1 or self.num_nodes * self.gpus_per_node > MAX_GPUS:
            raise PlanError(f"{self.name}: a cluster must have 1 to {MAX_GPUS} GPUs and at least one NIC in each node")
        rates = (self.nvlink_gb_per_s, self.nic_gb_per_s, self.pcie_gb_per_s)
        if min(rates) <= 0 or min(self.storage_gb_per_s, self.node_storage_gb_per_s, self.failures_per_gpu_hour) < 0:
            raise PlanError(
                f"{self.name}: the rates of NVLink, NIC and PCIe must be above 0, and other rates at least 0"
            )
        if not 0 <= self.straggler_share <= 1 or self.straggler_slowdown < 1:
            raise PlanError(f"{self.name}: straggler_share must be from 0 to 1, and straggler_slowdown at least 1")

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs in all nodes."""
        return self.num_nodes * self.gpus_per_node

    def with_gpus(self, num_gpus: int) -> Cluster:
        """Return the same cluster with as many nodes as `num_gpus` GPUs require."""
        return msgspec.structs.replace(self, num_nodes=max(1, -(-num_gpus // self.gpus_per_node)))


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates and costs of one machine's stages, except the network.

    Rates are in GB/s for one GPU. Costs are in seconds.
    """

    name: str
    quantise_gb_per_s: float
    """Rate at which the transform reads BF16 at the source."""
    operation_gb_per_s: dict[str, float] = {}
    """Bytes that each operation of a conversion reads. A key is the beginning of the operation's name, such as `linear`
    or `to fp8-block128`.

    The rate is that of the computation, or of the busiest stage for an operation that computes nothing, such as `copy`.
    An operation that is missing here runs at the rate of the transform.
    """
    digest_gb_per_s: float
    device_copy_gb_per_s: float
    """Rate of copies within one device, as in the flip of a staged update."""
    exchange_gb_per_s: float = 28_000.0
    """Rate at which the flip of an update makes bytes in an arena live by swapping memory. Measured: 30 GiB in 1.1
    ms."""
    step_s: float
    """Duration of one batch of work on a device, including its launch: a digest, a transform, or a copy
    of many runs."""
    slab_s: float = 0.0
    """Duration of each further `SLAB_BYTES` of a digest."""
    post_s: float
    """Time to post one read of one run."""
    run_s: float
    """Duration of each run of at least `SHORT_RUN_BYTES` in a read between nodes."""
    short_run_s: float
    """Duration of each shorter run in a read between nodes."""
    near_post_s: float = 0.0
    """Time to post one read of a sync with one run within a node. 0 means the same as `post_s`."""
    copy_s: float = 0.0
    """Time that the reader's host spends on posting a long run within a node."""
    gap_s: float = 0.0
    """Time for which a link within a node is idle after a long run."""
    gather_s: float = 0.0
    """Time to start a kernel that copies short runs within a node."""
    gather_gb_per_s: float = 0.0
    """Rate of that kernel. 0 means the rate of the link."""
    pack_gb_per_s: float = 0.0
    """Rate at which a source packs short runs for a reader on another node. 0 means that it packs nothing."""
    worker_gb_per_s: float = 0.0
    """Rate at which one worker of a conversion reads files that are in host memory while its other stages run. 0 means
    that it is not a limit."""
    host_gb_per_s: float = 0.0
    """The same rate in total for all workers of a host."""
    answer_s: float
    """Duration of a request to another member's server, including the response."""
    hop_s: float
    """Time from a chunk's arrival at a relay until the next member reads it: verification, announcement and posting."""
    source: tuple[tuple[str, str], ...] = ()
    """Source of each figure, by its name. The source of a figure that was not measured begins with `assumed: `."""

    def check(self) -> None:
        """Raise PlanError if a rate or a cost is out of range."""
        stages = self.quantise_gb_per_s, self.digest_gb_per_s, self.device_copy_gb_per_s, self.exchange_gb_per_s
        if min(stages) <= 0:
            raise PlanError(f"{self.name}: the rates of stages must be above 0")
        if min(self.operation_gb_per_s.values(), default=1.0) <= 0:
            raise PlanError(f"{self.name}: the rates of operations must be above 0")
        costs = (self.step_s, self.post_s, self.run_s, self.short_run_s, self.answer_s, self.hop_s)
        near = (self.slab_s, self.near_post_s, self.copy_s, self.gap_s, self.gather_s, self.gather_gb_per_s)
        if min(*costs, *near, self.worker_gb_per_s, self.host_gb_per_s, self.pack_gb_per_s) < 0:
            raise PlanError(f"{self.name}: costs must be at least 0 s")


H200_RATES = Rates(
    name="h200",
    quantise_gb_per_s=1932.0,
    digest_gb_per_s=2306.0,
    device_copy_gb_per_s=2118.0,
    step_s=110e-6,
    slab_s=44e-6,
    post_s=0.65e-3,
    run_s=1.06e-6,
    short_run_s=0.2e-6,
    near_post_s=0.6e-3,
    copy_s=0.59e-6,
    gap_s=0.13e-6,
    gather_s=0.2e-3,
    gather_gb_per_s=350.0,
    pack_gb_per_s=1140.0,
    worker_gb_per_s=12.8,
    host_gb_per_s=29.9,
    answer_s=1e-3,
    hop_s=3.5e-3,
    source=(
        ("quantise_gb_per_s", "benchmarks/results/h200_202611/transform.md, fp8-block128, large tensors"),
        ("digest_gb_per_s", "benchmarks/results/h200x1_202611/load-history.md, row f"),
        ("device_copy_gb_per_s", "benchmarks/results/h200x2_202611/transport.md, same device"),
        ("exchange_gb_per_s", "benchmarks/results/h200x2_202611/sync.md, 30 GiB in one piece"),
        ("step_s", "benchmarks/results/h100_202611/digest.md, host us a call"),
        ("slab_s", "benchmarks/results/h100_202611/digest.md, host us a call: 4096 MiB compared with 256 MiB"),
        ("post_s", "benchmarks/results/h200x2_202611/transport.md, one segment; assumed for NICs"),
        ("run_s", "benchmarks/results/h200x2_202611/transport.md, 16 MiB segments; assumed for NICs"),
        ("short_run_s", "benchmarks/results/h200x2_202611/transport.md, 4 KiB segments; assumed for NICs"),
        (
            "near_post_s",
            "benchmarks/results/h200x4_202611/sync.md: 0.4 to 0.8 ms, where what is read was laid out before",
        ),
        ("copy_s", "benchmarks/results/h200x2_202611/transport.md, 1 MiB segments: what posting them took, each"),
        ("gap_s", "benchmarks/results/h200x2_202611/transport.md, 1 MiB segments compared with one of 16 GiB"),
        ("gather_s", "penstock.transport.cuda_ipc.MANY"),
        ("gather_gb_per_s", "benchmarks/results/h200x2_202611/strips.md, runs of 4 to 64 KiB, less one post"),
        (
            "pack_gb_per_s",
            "benchmarks/results/h200x2_202611/strips.md: digests of gapped runs, which pack them first; assumed "
            "for runs below 4 KiB",
        ),
        ("worker_gb_per_s", "benchmarks/results/h200x2_202611/convert.md, two workers on 32 cores"),
        ("host_gb_per_s", "benchmarks/results/h200x4_202611/convert.md, four workers on 64 cores"),
        ("answer_s", "assumed: a small request to a member's server"),
        ("hop_s", "penstock.plan.schedule: 3 to 4 ms between two processes on two busy cores"),
    ),
)
CPU_RATES = Rates(
    name="cpu-pair",
    quantise_gb_per_s=2.0,
    digest_gb_per_s=10.0,
    device_copy_gb_per_s=12.0,
    step_s=20e-6,
    post_s=50e-6,
    run_s=1.7e-6,
    short_run_s=1.7e-6,
    pack_gb_per_s=5.2,
    answer_s=1e-3,
    hop_s=3.5e-3,
    source=(
        ("run_s", "benchmarks/results/cpu2_202611/transport.md, 4 KiB segments"),
        ("pack_gb_per_s", "benchmarks/results/cpu2_202611/packing.md, runs of 256 bytes"),
        ("device_copy_gb_per_s", "benchmarks/results/cpu2_202611/transport.md, one memmove"),
        ("hop_s", "penstock.plan.schedule: 3 to 4 ms between two processes on two busy cores"),
        ("quantise_gb_per_s", "assumed; so are the others"),
    ),
)

_HOPPER = "400 Gb/s a GPU; NVLink and PCIe: benchmarks/results/h200x2_202611/transport.md, h200x1_202611/load.md"

CLUSTERS: dict[str, tuple[Cluster, Rates]] = {
    "h200": (
        Cluster(name="h200", nvlink_gb_per_s=392.0, nic_gb_per_s=50.0, pcie_gb_per_s=55.5, source=_HOPPER),
        H200_RATES,
    ),
    "h100": (
        Cluster(
            name="h100",
            nvlink_gb_per_s=392.0,
            nic_gb_per_s=50.0,
            pcie_gb_per_s=55.5,
            source=f"as h200, assumed: {_HOPPER}",
        ),
        H200_RATES,
    ),
    "cpu-pair": (
        Cluster(
            name="cpu-pair",
            num_nodes=2,
            gpus_per_node=1,
            nics_per_node=1,
            nvlink_gb_per_s=11.0,
            nic_gb_per_s=1.25,
            pcie_gb_per_s=12.0,
            source="benchmarks/results/cpu2_202611/hosts.md, transport.md",
        ),
        CPU_RATES,
    ),
}
"""Clusters that `--cluster` knows by name, with the rates of their machines. Any other cluster is read from a JSON
file."""


def to_json(value: Cluster | Rates) -> bytes:
    """Return the value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def from_json(raw: bytes, kind: type[T]) -> T:
    """Decode a value of `kind`. Raise ConfigError if the bytes do not contain a valid value."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise ConfigError(f"the file does not describe a {kind.__name__}: {error}") from error


def slowdowns(cluster: Cluster, seed: int) -> np.ndarray:
    """Return the slowdown of each GPU, which is above 1 only for the stragglers that the seed selects."""
    slow = np.random.default_rng(seed).permutation(cluster.num_gpus) < round(cluster.straggler_share * cluster.num_gpus)
    return np.where(slow, cluster.straggler_slowdown, 1.0)
