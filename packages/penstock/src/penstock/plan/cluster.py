"""Description of a cluster and the measured rates of a machine's stages: the hardware model of a simulation.

In: numbers, or the JSON of one. Out: frozen `Cluster` and `Rates`; the links between two of its GPUs.
Not here: what moves (`sync`, `relay`), how flows share links (`simulate`), measuring (`penstock calibrate`).

    node: gpu 0 --nvlink--> gpu 1     gpu 0 --nic--> fabric --nic--> gpu of another node
          storage (all) --> storage of the node --> pcie of the gpu
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import MALFORMED, ConfigError, PlanError
from penstock.types import GB, I64

T = TypeVar("T", bound=msgspec.Struct)

MAX_GPUS = 100_000
WIDTH = 3
"""Most links of one flow: storage of all, storage of the node, PCIe; between GPUs there are two."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster of equal nodes. Rates are decimal GB/s one way, each direction by itself; 0: not there."""

    name: str
    num_nodes: int = 1
    gpus_per_node: int = 8
    nvlink_gb_per_s: float
    """From a GPU to others of its node, and the same into it."""
    nics_per_node: int = 8
    """GPUs of a node share them evenly, neighbours the same one."""
    nic_gb_per_s: float
    pcie_gb_per_s: float
    storage_gb_per_s: float = 0.0
    """Rate of storage to all nodes together; 0: no bound of its own."""
    node_storage_gb_per_s: float = 0.0
    """Rate at which one node reads from storage; 0: no bound of its own."""
    straggler_share: float = 0.0
    """Share of the GPUs whose links are slower, by `straggler_slowdown`."""
    straggler_slowdown: float = 2.0
    failures_per_gpu_hour: float = 0.0
    source: str = ""
    """Origin of the numbers."""

    def check(self) -> None:
        """Raise PlanError unless it describes something."""
        least = (self.num_nodes, self.gpus_per_node, self.nics_per_node)
        if min(least) < 1 or self.num_nodes * self.gpus_per_node > MAX_GPUS:
            raise PlanError(f"{self.name}: a cluster has 1 to {MAX_GPUS} GPUs, in nodes of at least one NIC")
        rates = (self.nvlink_gb_per_s, self.nic_gb_per_s, self.pcie_gb_per_s)
        if min(rates) <= 0 or min(self.storage_gb_per_s, self.node_storage_gb_per_s, self.failures_per_gpu_hour) < 0:
            raise PlanError(f"{self.name}: the rates of NVLink, NIC and PCIe must be above 0, the others at least 0")
        if not 0 <= self.straggler_share <= 1 or self.straggler_slowdown < 1:
            raise PlanError(f"{self.name}: stragglers are a share of the GPUs, slower by a factor of at least 1")

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    def with_gpus(self, num_gpus: int) -> Cluster:
        """Return the same cluster with as many nodes as `num_gpus` GPUs need."""
        return msgspec.structs.replace(self, num_nodes=max(1, -(-num_gpus // self.gpus_per_node)))


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates and costs of the stages other than the wire, on one machine. Rates are GB/s of one GPU, costs seconds."""

    name: str
    quantise_gb_per_s: float
    """BF16 read by the transform at the source."""
    operation_gb_per_s: dict[str, float] = {}
    """Of a conversion's operations: bytes read by each, by the beginning of its name, as `linear` or `to fp8-block128`.
    Where it computes; of its busiest stage if it computes nothing, as `copy`. One that is not here is as fast as the
    transform."""
    digest_gb_per_s: float
    device_copy_gb_per_s: float
    """Bytes copied within one device: the flip of a staged update."""
    exchange_gb_per_s: float = 28_000.0
    """Bytes that the flip of an update into an arena makes live, by an exchange of memory: 30 GiB in 1.1 ms."""
    step_s: float
    """Time of one batch of a device's work, from the call on: a digest, a transform, a copy of many runs."""
    slab_s: float = 0.0
    """Time of each further `SLAB_BYTES` of a digest."""
    post_s: float
    """Time to post one read of one run."""
    run_s: float
    """Beyond the node: time of each run of a read from `SHORT_RUN_BYTES` on."""
    short_run_s: float
    """Beyond the node: time of each shorter run."""
    near_post_s: float = 0.0
    """Within the node: time to post one read of a sync, of one run; 0: as `post_s`."""
    copy_s: float = 0.0
    """Within the node: time that posting a long run takes the reader's host."""
    gap_s: float = 0.0
    """Within the node: time that the link is idle after a long run."""
    gather_s: float = 0.0
    """Within the node: time to start a kernel that copies short runs."""
    gather_gb_per_s: float = 0.0
    """Rate of that kernel; 0: as much as the link."""
    pack_gb_per_s: float = 0.0
    """Beyond the node: bytes of short runs that a source packs for a reader; 0: it packs none."""
    worker_gb_per_s: float = 0.0
    """Rate at which a worker of a conversion reads files in the host's memory beside its other stages; 0: no bound."""
    host_gb_per_s: float = 0.0
    """The same of all workers of a host together."""
    answer_s: float
    """Time of a request to another member's server and its answer."""
    hop_s: float
    """Time from a chunk's arrival at a relay to the next member's read of it: verified, announced, posted."""
    source: tuple[tuple[str, str], ...] = ()
    """Source of each figure; `assumed: ...` where there is no measurement."""

    def check(self) -> None:
        """Raise PlanError unless every rate and cost can be one."""
        stages = self.quantise_gb_per_s, self.digest_gb_per_s, self.device_copy_gb_per_s, self.exchange_gb_per_s
        if min(stages) <= 0:
            raise PlanError(f"{self.name}: the rates of stages must be above 0")
        if min(self.operation_gb_per_s.values(), default=1.0) <= 0:
            raise PlanError(f"{self.name}: the rates of operations must be above 0")
        costs = (self.step_s, self.post_s, self.run_s, self.short_run_s, self.answer_s, self.hop_s)
        near = (self.slab_s, self.near_post_s, self.copy_s, self.gap_s, self.gather_s, self.gather_gb_per_s)
        if min(*costs, *near, self.worker_gb_per_s, self.host_gb_per_s, self.pack_gb_per_s) < 0:
            raise PlanError(f"{self.name}: costs must be at least 0 s")

    def slowed(self, times: float) -> Rates:
        """Return the same machine with a processor on which Python takes `times` times as long; see `PYTHON_COSTS`.

        Raises:
            ConfigError: the number is not above 0, or not finite.
        """
        if not 0 < times < math.inf:
            raise ConfigError(
                f"Python cannot take {times} times as long", hint="give a number above 0: 2 is half as fast"
            )
        if times == 1:
            return self
        how = f"Python {times:.3g} times as long"
        source = tuple((name, f"{text}; {how}" if name in PYTHON_COSTS else text) for name, text in self.source)
        costs = {name: times * getattr(self, name) for name in PYTHON_COSTS}
        # In the name too: a saved prediction says what it is of.
        return msgspec.structs.replace(self, name=f"{self.name}, {how}", source=source, **costs)


PYTHON_COSTS = (
    "step_s",
    "slab_s",
    "post_s",
    "run_s",
    "short_run_s",
    "near_post_s",
    "copy_s",
    "gather_s",
    "answer_s",
    "hop_s",
)
"""Costs that a host's processor determines: calls of Python, which queue a device's work or send requests."""


SHORT_RUN_BYTES = 256 << 10
"""From here on a run is a copy of its own. Source: `transport.cuda_ipc.SHORT_BYTES`."""
SLAB_BYTES = 1 << 30
"""Bytes that kernels digest at once. Source: `digest.cuda.Tuning`."""

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
        ("slab_s", "benchmarks/results/h100_202611/digest.md, host us a call: 4096 MiB beside 256 MiB"),
        ("post_s", "benchmarks/results/h200x2_202611/transport.md, one segment; assumed for NICs"),
        ("run_s", "benchmarks/results/h200x2_202611/transport.md, 16 MiB segments; assumed for NICs"),
        ("short_run_s", "benchmarks/results/h200x2_202611/transport.md, 4 KiB segments; assumed for NICs"),
        (
            "near_post_s",
            "benchmarks/results/h200x4_202611/sync.md: 0.4 to 0.8 ms, where what is read was laid out before",
        ),
        ("copy_s", "benchmarks/results/h200x2_202611/transport.md, 1 MiB segments: what posting them took, each"),
        ("gap_s", "benchmarks/results/h200x2_202611/transport.md, 1 MiB segments beside one of 16 GiB"),
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
STORAGE_GB_PER_S = 3.4
"""Rate at which a node is taken to read storage where a cluster names none. Source: docs/benchmarks.md, 14 GB from a
cold disk in 4.1 s."""

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
"""Clusters that `--cluster` knows by name, with the rates of their machines; any other is a file of JSON."""


def to_json(value: Cluster | Rates) -> bytes:
    """Return the value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def from_json(raw: bytes, kind: type[T]) -> T:
    """Return a value of `kind`. ConfigError where the bytes are none."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise ConfigError(f"the file does not describe a {kind.__name__}: {error}") from error


class ClusterLinks:
    """The links of a cluster, numbered, with their capacities in bytes per second.

    Attributes:
        capacity: [num_links]; the last one is no link: what a flow needs nothing of.
        classes: names of kinds of link, and the numbers `[start, stop)` of each.

    Args:
        slowdown: per GPU, what its links' rates are divided by.
    """

    def __init__(self, cluster: Cluster, slowdown: np.ndarray) -> None:
        cluster.check()
        self._cluster = cluster
        gpus, nics = cluster.num_gpus, cluster.num_nodes * cluster.nics_per_node
        gpu_slow = np.asarray(slowdown, np.float64)
        nic_slow = np.ones(nics)
        # A NIC that several GPUs share is as slow as the slowest of them.
        np.maximum.at(nic_slow, self.nic(np.arange(gpus)), gpu_slow)
        whole = cluster.storage_gb_per_s or np.inf
        sizes = (
            ("nvlink out", cluster.nvlink_gb_per_s / gpu_slow),
            ("nvlink in", cluster.nvlink_gb_per_s / gpu_slow),
            ("nic out", cluster.nic_gb_per_s / nic_slow),
            ("nic in", cluster.nic_gb_per_s / nic_slow),
            ("pcie in", cluster.pcie_gb_per_s / gpu_slow),
            ("storage of a node", np.full(cluster.num_nodes, cluster.node_storage_gb_per_s or np.inf)),
            ("storage", np.full(1, whole)),
        )
        # The last, infinite one pads flows of fewer links, so that all have WIDTH columns.
        self.capacity = np.concatenate([*(rates * GB for _, rates in sizes), [np.inf]])
        stops = np.cumsum([len(rates) for _, rates in sizes]).tolist()
        self.classes = {name: (stop - len(rates), stop) for (name, rates), stop in zip(sizes, stops, strict=True)}

    def nic(self, gpu: I64) -> I64:
        """Return the NIC of each GPU: neighbours share one where a node has fewer NICs than GPUs."""
        cluster = self._cluster
        local = gpu % cluster.gpus_per_node * cluster.nics_per_node // cluster.gpus_per_node
        nic: I64 = gpu // cluster.gpus_per_node * cluster.nics_per_node + local
        return nic

    def _at(self, name: str, number: I64) -> I64:
        """Return the numbers of links of one class."""
        link: I64 = self.classes[name][0] + number
        return link

    def near(self, source: I64, receiver: I64) -> npt.NDArray[np.bool_]:
        """Return whether each pair of GPUs is of one node."""
        is_near: npt.NDArray[np.bool_] = (
            source // self._cluster.gpus_per_node == receiver // self._cluster.gpus_per_node
        )
        return is_near

    def stretch(self, nbytes: I64, num_copies: I64, short_bytes: I64, rates: Rates) -> npt.NDArray[np.float64]:
        """Return by which factor reads take NVLink longer than their bytes do: gaps between copies, and short runs."""
        link = self._cluster.nvlink_gb_per_s
        short_rate = min(rates.gather_gb_per_s or link, link)
        took = (nbytes - short_bytes) / link + short_bytes / short_rate + num_copies * rates.gap_s * GB
        factor: npt.NDArray[np.float64] = np.where(nbytes > 0, took * link / np.maximum(nbytes, 1), 1.0)
        return factor

    def between(self, source: I64, receiver: I64) -> I64:
        """Return the [num_flows, WIDTH] links from GPUs to GPUs."""
        near = self.near(source, receiver)
        # No third link: the padding one bounds nothing.
        nowhere = np.full(len(source), len(self.capacity) - 1)
        # Switches and the fabric are taken to carry what all of their links bring: only the ends bound a flow.
        out = np.where(near, self._at("nvlink out", source), self._at("nic out", self.nic(source)))
        into = np.where(near, self._at("nvlink in", receiver), self._at("nic in", self.nic(receiver)))
        return np.stack((out, into, nowhere), axis=1)

    def from_storage(self, receiver: I64) -> I64:
        """Return the [num_flows, WIDTH] links from storage to GPUs."""
        node = receiver // self._cluster.gpus_per_node
        all_of_it = np.full(len(receiver), self.classes["storage"][0])
        return np.stack((all_of_it, self._at("storage of a node", node), self._at("pcie in", receiver)), axis=1)


def slowdowns(cluster: Cluster, seed: int) -> np.ndarray:
    """Return the slowdown of each GPU: 1, or the straggler's factor for those that the seed chooses."""
    chance = np.random.default_rng(seed)
    slow = chance.permutation(cluster.num_gpus) < round(cluster.straggler_share * cluster.num_gpus)
    return np.where(slow, cluster.straggler_slowdown, 1.0)
