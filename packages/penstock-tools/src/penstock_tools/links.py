"""The links of a described cluster, max-min fair sharing of their rates between flows, and a meter for their load.

GPUs of a node are connected by NVLink, and nodes by their NICs and a fabric. Bytes from storage reach a GPU over the
link shared by all storage, the node's storage link and PCIe.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.types import GB, I64
from penstock_convert.plan.cluster import Cluster, Rates
from penstock_convert.plan.simulate import NUM_BINS, LinkLoad

F64 = npt.NDArray[np.float64]
WIDTH = 3
"""Maximum number of links that a flow uses. A read from storage uses three (the link of all storage, the node's storage
link and PCIe), and a flow between GPUs uses two."""


class ClusterLinks:
    """The numbered links of a cluster, with their capacities in bytes per second.

    Attributes:
        capacity: [num_links] bytes per second. The last entry is infinite and serves as padding for flows that use
            fewer links.
        classes: range `[start, stop)` of link numbers for each kind of link, by the kind's name.

    `slowdown` contains, for each GPU, the factor by which the rates of its links are divided.
    """

    def __init__(self, cluster: Cluster, slowdown: np.ndarray) -> None:
        cluster.check()
        self._cluster = cluster
        gpus, nics = cluster.num_gpus, cluster.num_nodes * cluster.nics_per_node
        gpu_slow = np.asarray(slowdown, np.float64)
        nic_slow = np.ones(nics)
        # A NIC that several GPUs share is as slow as the slowest of these GPUs.
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
        # The infinite entry pads flows that use fewer links, so that all flows have WIDTH columns.
        self.capacity = np.concatenate([*(rates * GB for _, rates in sizes), [np.inf]])
        stops = np.cumsum([len(rates) for _, rates in sizes]).tolist()
        self.classes = {name: (stop - len(rates), stop) for (name, rates), stop in zip(sizes, stops, strict=True)}

    def nic(self, gpu: I64) -> I64:
        """Return the number of each GPU's NIC. Neighbouring GPUs share a NIC if a node has fewer NICs than GPUs."""
        cluster = self._cluster
        local = gpu % cluster.gpus_per_node * cluster.nics_per_node // cluster.gpus_per_node
        nic: I64 = gpu // cluster.gpus_per_node * cluster.nics_per_node + local
        return nic

    def _at(self, name: str, number: I64) -> I64:
        """Convert numbers that count links of one kind into the cluster's link numbers."""
        link: I64 = self.classes[name][0] + number
        return link

    def near(self, source: I64, receiver: I64) -> npt.NDArray[np.bool_]:
        """Return whether the two GPUs of each pair are in the same node."""
        is_near: npt.NDArray[np.bool_] = (
            source // self._cluster.gpus_per_node == receiver // self._cluster.gpus_per_node
        )
        return is_near

    def stretch(self, nbytes: I64, num_copies: I64, short_bytes: I64, rates: Rates) -> npt.NDArray[np.float64]:
        """Return the factor by which each NVLink read is slowed by short runs and by gaps between copies."""
        link = self._cluster.nvlink_gb_per_s
        short_rate = min(rates.gather_gb_per_s or link, link)
        took = (nbytes - short_bytes) / link + short_bytes / short_rate + num_copies * rates.gap_s * GB
        factor: npt.NDArray[np.float64] = np.where(nbytes > 0, took * link / np.maximum(nbytes, 1), 1.0)
        return factor

    def between(self, source: I64, receiver: I64) -> I64:
        """Return the [num_flows, WIDTH] links from GPUs to GPUs."""
        near = self.near(source, receiver)
        # A flow between GPUs has no third link, so use the padding entry.
        nowhere = np.full(len(source), len(self.capacity) - 1)
        # The model assumes that switches and the fabric can carry any load, so only the links at the endpoints limit a
        # flow.
        out = np.where(near, self._at("nvlink out", source), self._at("nic out", self.nic(source)))
        into = np.where(near, self._at("nvlink in", receiver), self._at("nic in", self.nic(receiver)))
        return np.stack((out, into, nowhere), axis=1)

    def from_storage(self, receiver: I64) -> I64:
        """Return the [num_flows, WIDTH] links from storage to GPUs."""
        node = receiver // self._cluster.gpus_per_node
        all_of_it = np.full(len(receiver), self.classes["storage"][0])
        return np.stack((all_of_it, self._at("storage of a node", node), self._at("pcie in", receiver)), axis=1)


def fair_rates(links: I64, capacity: F64, bound: F64 | None = None) -> F64:
    """Return the rate of each flow in bytes per second when links are shared max-min fairly.

    Args:
        links: [num_flows, width] links that each flow crosses, each link at most once.
        capacity: capacity of each link. An infinite capacity limits nothing.
        bound: maximum rate of each flow, or None for no maximum.

    Each round costs time that is linear in the number of flows. There are as many rounds as distinct rates.
    """
    # A link's share is its remaining capacity per flow, and a flow's rate is the minimum of the shares of its links. A
    # link is full if all of its flows get its share, and all full links are settled in the same round.
    num_flows, num_links = len(links), len(capacity)
    rates = np.zeros(num_flows)
    open_flows = np.arange(num_flows)
    left = capacity.astype(np.float64).copy()
    while len(open_flows):
        mine = links[open_flows]
        users = np.bincount(mine.reshape(-1), minlength=num_links)
        share = np.full(num_links, np.inf)
        used = users > 0
        # Rounding can leave a full link slightly below zero.
        share[used] = np.maximum(left[used], 0.0) / users[used]
        least = share[mine].min(axis=1)
        if bound is not None:
            least = np.minimum(least, bound[open_flows])
        assert np.isfinite(least).all(), "a flow that nothing bounds"
        # Minimum rate of any flow over a link. If this minimum is the link's own share, the link is settled.
        lowest = np.full(num_links, np.inf)
        # Process the columns one by one, because `minimum.at` with a flat index would require the values repeated for
        # each link.
        for column in mine.T:
            np.minimum.at(lowest, column, least)
        # Without the tolerance, a rounding error could leave a link just above its share, and cost one round per flow.
        settled = used & (lowest >= share * (1 - 1e-12))
        done = settled[mine].any(axis=1)
        if bound is not None:
            # A flow's bound acts like a link with one flow. The bound settles the flow if no link has a smaller share.
            done |= least >= bound[open_flows]
        fixed = open_flows[done]
        rates[fixed] = least[done]
        for column in mine[done].T:
            np.subtract.at(left, column, least[done])
        open_flows = open_flows[~done]
    return rates


class Meter:
    """A record of the bytes that each link carried, and of the load on each kind of link over time."""

    def __init__(self, links: ClusterLinks) -> None:
        self._links = links
        self.nbytes: F64 = np.zeros(len(links.capacity))
        self._steps: list[tuple[float, float]] = []
        self._carried: list[F64] = []
        self._starts = [start for start, _ in links.classes.values()]

    def add(self, start_s: float, stop_s: float, flows: I64, moved: F64) -> None:
        """Record the bytes that flows moved over their links between two points in time."""
        if stop_s <= start_s or not len(flows):
            return
        carried = np.bincount(
            flows.reshape(-1), weights=np.repeat(moved, flows.shape[1]), minlength=len(self._links.capacity)
        )
        self.nbytes += carried
        self._steps.append((start_s, stop_s))
        # Omit the padding entry at the end. Store one sum for each kind, because a simulation has thousands of steps
        # and links.
        self._carried.append(np.add.reduceat(carried[:-1], self._starts))

    def limit_s(self, nominal: F64) -> float:
        """Return the time in seconds that the busiest link takes at its nominal capacity."""
        return float((self.nbytes / nominal).max(initial=0.0))

    def loads(self, total_s: float) -> tuple[LinkLoad, ...]:
        """Return the load over time of each kind of link that carried bytes."""
        # Count only the capacity of links that carried bytes. Otherwise a ring over two nodes would seem idle if a
        # thousand other nodes are unused.
        edges = np.linspace(0.0, total_s, NUM_BINS + 1)
        steps = np.array(self._steps).reshape(-1, 2)
        carried = np.array(self._carried).reshape(-1, len(self._starts))
        kinds = []
        for kind, (name, (start, stop)) in enumerate(self._links.classes.items()):
            mine, capacity = self.nbytes[start:stop], self._links.capacity[start:stop]
            used = mine > 0
            if not used.any():
                continue
            most = int(mine.argmax())
            room = capacity[used].sum() * total_s / NUM_BINS
            load = _binned(steps, carried[:, kind], edges) / room if np.isfinite(room) else np.zeros(NUM_BINS)
            kinds.append(
                LinkLoad(
                    name=name,
                    most_bytes=round(mine[most]),
                    total_bytes=round(mine.sum()),
                    num_used=int(used.sum()),
                    busiest_s=float((mine / capacity).max()),
                    load=tuple(np.round(load, 4).tolist()),
                )
            )
        return tuple(kinds)


def _binned(steps: F64, carried: F64, edges: F64) -> F64:
    """Return the bytes carried in each bin, with the bytes of a step spread evenly over its duration."""
    # Interpolating the running sum spreads each step's bytes over the bins that it crosses without losing any.
    at = np.concatenate(([0.0], np.cumsum(carried)))
    times = np.concatenate((steps[:1, 0], steps[:, 1]))
    return np.diff(np.interp(edges, times, at))
