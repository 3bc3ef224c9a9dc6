"""Simulate a fetch: Penstock's relay on a described cluster, with each member modelled as a stream from its parent.

If the relay has two trees, a member is two streams with half of the chunks each. A stream begins a hop after its
parent's stream, stays at least a hop behind it, and catches up as fast as its links allow. Chunks are small compared
with the weights, so they are treated as a continuous flow. A hop is one step of bytes that a member has verified and
announced, so that its children can read them. Without a holder the members form a ring, in which each member reads its
share from storage and passes it on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PlanError
from penstock.hub.messages import NUM_TREES
from penstock.plan.schedule import CHUNK_BYTES
from penstock.types import GB, I64
from penstock_convert.plan.cluster import Cluster, Rates, slowdowns
from penstock_convert.plan.simulate import Prediction, Span, Stage, assumed, bottleneck
from penstock_hub.relay import Relay
from penstock_hub.relay_parents import Node
from penstock_tools.links import F64, ClusterLinks, Meter, fair_rates

PATIENCE_S = 0.5
"""Number of seconds for which a silent member delays its readers. Source: `fetch.upstream.PATIENCE_S`."""
READS_OF_ONE = 3
"""Number of reads in flight from one upstream, which share its link. Source: `fetch.run.READS_OF_ONE`."""
STEP_S = 0.02
"""Duration of a read in seconds at which reads stop growing. Source: `fetch.upstream.STEP_S`."""
MAX_STEP_CHUNKS = 128
"""Number of chunks in the largest read. Source: `fetch.upstream.MAX_STEP_CHUNKS`."""
_STEPS = 4000
"""Number of time steps into which the time of one copy is divided. Events within one step are handled together."""
_ROUNDS = 16
_NEAR_ENOUGH = 1e-6
_UNBOUND = np.finfo(np.float64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFleet:
    """The members of a fleet and their weights.

    GPU g of every node has part `g % parts`, and exchanges it with the other GPUs that have this part.
    """

    nbytes: int
    """Total size of all parts in bytes."""
    parts: int = 1
    """Number of ranks in a replica. 8 means tensor parallelism over a node's 8 GPUs. With 1, each GPU has all
    weights."""
    holders: int = 1
    """Number of replicas, on the first GPUs, that are complete at the start. With 0, each member reads from storage."""


def simulate_fetch(fleet: SimulatedFleet, cluster: Cluster, rates: Rates, *, seed: int = 0) -> Prediction:
    """Fill every GPU of the cluster.

    Args:
        fleet: the weights, their parts, and the holders at the start.
        cluster: the cluster, all of whose GPUs take part.
        rates: rates of the machine's stages.
        seed: seed for the order in which members join, the slow members, and the members that die.

    Raises:
        PlanError: the GPUs cannot be divided into replicas, or there is neither a holder nor storage.
    """
    cluster.check()
    rates.check()
    if fleet.nbytes < 1:
        raise PlanError(f"the weights have {fleet.nbytes} bytes, so there is nothing to fetch")
    if fleet.parts < 1 or cluster.num_gpus % fleet.parts:
        raise PlanError(f"{cluster.num_gpus} GPUs cannot be divided into replicas of {fleet.parts} GPUs")
    if not 0 <= fleet.holders <= cluster.num_gpus // fleet.parts:
        raise PlanError(f"{fleet.holders} holders do not fit in {cluster.num_gpus // fleet.parts} replicas")
    run = _FetchEvents(fleet, cluster, rates, seed)
    run.go()
    return run.prediction()


def step_bytes(bytes_per_s: F64) -> F64:
    """Return the number of bytes in one read of a stream with this rate.

    Reads double in size until one lasts `STEP_S`.
    """
    # `READS_OF_ONE` reads from one upstream share the rate of the upstream's link.
    chunks = np.maximum(bytes_per_s * STEP_S / READS_OF_ONE / CHUNK_BYTES, 1.0)
    least: F64 = np.minimum(2.0 ** np.ceil(np.log2(chunks)), MAX_STEP_CHUNKS) * CHUNK_BYTES
    return least


class _FetchEvents:
    """The events of one fetch. Arrays of streams have one row for each GPU, or two rows for each GPU with two trees."""

    def __init__(self, fleet: SimulatedFleet, cluster: Cluster, rates: Rates, seed: int) -> None:
        self.fleet = fleet
        self.cluster = cluster
        self.rates = rates
        self._links = ClusterLinks(cluster, slowdowns(cluster, seed))
        self.nominal = ClusterLinks(cluster, np.ones(cluster.num_gpus)).capacity
        self.meter = Meter(self._links)
        count = cluster.num_gpus
        self.line = -(-fleet.nbytes // fleet.parts)
        self.num_chunks = max(1, -(-self.line // CHUNK_BYTES))
        self.num_trees = 1
        self.gpu = np.arange(count)
        self.is_holder = self.gpu < fleet.holders * fleet.parts
        self.dead = np.zeros(count, bool)
        self.joined = np.random.default_rng((seed, 2)).permutation(count)
        # The arrays below have one row for each stream. A time is infinite until its event happens.
        self.have = np.where(self.is_holder, float(self.line), 0.0)
        self.start = np.where(self.is_holder, 0.0, np.inf)
        self.done = self.start.copy()
        self.rate_of = np.zeros(count)
        self.parent = np.full(count, -1)
        self.depth = np.zeros(count, np.int64)
        self.relinked: list[str] = []
        self._plan_relay()
        slowest = min(cluster.nic_gb_per_s, cluster.nvlink_gb_per_s) * GB
        # Derive the steps from the slowest link, so that they are small enough wherever the bottleneck is.
        copy_s = self.line / slowest
        self.quantum = copy_s / _STEPS
        self.deaths = self._deaths(copy_s, seed)
        self.storage_s = 0.0
        self.from_storage = np.zeros(count)

    def _deaths(self, copy_s: float, seed: int) -> list[tuple[float, int]]:
        """Return (time, member) for each member that dies during one copy, sorted by time."""
        chance = np.random.default_rng((seed, 3))
        count = chance.poisson(self.cluster.failures_per_gpu_hour * self.cluster.num_gpus * copy_s / 3600)
        who = chance.permutation(np.flatnonzero(~self.is_holder))[:count]
        return sorted(zip(chance.uniform(0.0, copy_s, len(who)).tolist(), who.tolist(), strict=True))

    @property
    def part_line(self) -> float:
        """Number of bytes that one stream transfers."""
        return self.line / self.num_trees

    def _of_gpus(self, of_streams: F64) -> F64:
        """Reshape the values of streams to [num_trees, num_gpus]."""
        return of_streams.reshape(self.num_trees, len(self.gpu))

    def _is_filled(self) -> np.ndarray:
        """Return whether each stream's member requires no data, because it was complete at the start or is dead."""
        return np.tile(self.is_holder | self.dead, self.num_trees)

    def _split(self) -> None:
        """Continue with two streams for each member.

        Each stream has half of the remaining bytes and half of the received bytes.
        """
        count, self.num_trees = len(self.gpu), NUM_TREES
        self.have, self.rate_of = np.tile(self.have / NUM_TREES, NUM_TREES), np.zeros(NUM_TREES * count)
        self.start, self.done = np.tile(self.start, NUM_TREES), np.tile(self.done, NUM_TREES)
        self.parent = np.concatenate(
            [np.where(self.parent >= 0, self.parent + t * count, -1) for t in range(NUM_TREES)]
        )

    def _plan_relay(self) -> None:
        """Get the parents for each part from Penstock's relay."""
        parts, per_node, count = self.fleet.parts, self.cluster.gpus_per_node, len(self.gpu)
        all_have = self._of_gpus(self.have).sum(axis=0)
        upstream = np.where(self.parent >= 0, self.parent % count, -1).reshape(self.num_trees, count)
        relays = []
        for part in range(parts):
            mine = self.gpu[part::parts]
            mine = mine[~self.dead[mine]]
            chunks = np.minimum(all_have[mine] / self.line * self.num_chunks, self.num_chunks).astype(np.int64)
            whole = all_have[mine] >= self.line * (1 - 1e-12)
            # Never count an incomplete member's last chunk, because a rounding error must not turn the member into a
            # holder.
            chunks = np.where(whole, self.num_chunks, np.minimum(chunks, self.num_chunks - 1))
            columns = (mine.tolist(), chunks.tolist(), self.joined[mine].tolist(), upstream[:, mine].T.tolist())
            nodes = [
                Node(
                    member=f"{gpu}",
                    host=f"node-{gpu // per_node}",
                    device=f"cuda:{gpu % per_node}",
                    joined=joined,
                    num_have=have,
                    num_chunks=self.num_chunks,
                    num_links=self.cluster.nics_per_node,
                    link=f"nic-{self._links.nic(gpu) % self.cluster.nics_per_node}",
                    parent=str(parents[0]) if parents[0] >= 0 else "",
                    second_parent=str(parents[-1]) if parents[-1] >= 0 else "",
                    follows_trees=True,
                )
                for gpu, have, joined, parents in zip(*columns, strict=True)
            ]
            relays.append(Relay(nodes))
        if self.num_trees < max(len(relay.trees) for relay in relays):
            self._split()
        self.parent[:] = -1
        for relay in relays:
            for tree in range(self.num_trees):
                # If a part's relay has only one tree, all chunks use that tree.
                for child, parent in relay.trees[min(tree, len(relay.trees) - 1)].items():
                    self.parent[tree * count + int(child)] = tree * count + int(parent)
        self._measure()

    def _measure(self) -> None:
        """Compute the streams' depths, and the duration of a hop over each link."""
        count = len(self.gpu)
        self.streams = np.flatnonzero((self.parent >= 0) & ~self._is_filled())
        parent = self.parent[self.streams]
        links = self._links.between(parent % count, self.streams % count)
        self.links = np.zeros((len(self.parent), links.shape[1]), np.int64)
        self.links[self.streams] = links
        at, self.depth = self.parent.copy(), (self.parent >= 0).astype(np.int64)
        # Skip this for a ring, because following its parents would never end.
        while self.fleet.holders and (at >= 0).any():
            at = np.where(at >= 0, self.parent[at], -1)
            self.depth += at >= 0
        share = self._links.capacity / np.maximum(
            np.bincount(links.reshape(-1), minlength=len(self._links.capacity)), 1
        )
        rate = share[links].min(axis=1)
        # In a ring, each step is one chunk, because storage sets the pace.
        step = np.full(len(self.parent), float(min(CHUNK_BYTES, self.line)))
        if self.fleet.holders:
            # A step is at most as large as the parent's step, because the parent announces that many bytes at a time.
            step[:] = np.inf
            step[self.streams] = np.minimum(step_bytes(rate), self.part_line)
            for depth in range(1, int(self.depth.max(initial=0)) + 1):
                some = self.streams[self.depth[self.streams] == depth]
                step[some] = np.minimum(step[some], step[self.parent[some]])
        self.digest_s = np.where(np.isfinite(step), step / self.rates.digest_gb_per_s / GB + self.rates.step_s, 0.0)
        self.hop = np.zeros(len(self.parent))
        # A holder has verified and announced all bytes. Any other member has to receive a step before its child can
        # read it.
        waits = ~self._is_filled()[parent] if self.fleet.holders else np.ones(len(parent), bool)
        self.hop[self.streams] = self.rates.hop_s + np.where(
            waits, step[self.streams] / rate + self.digest_s[self.streams], 0.0
        )

    def go(self) -> None:
        """Run until every live member has all data."""
        # Without a holder, all members finish at the same time, so there are no events to simulate.
        if self.fleet.holders:
            self._flow()
        else:
            self._ring()

    def _flow(self) -> None:
        """Advance from event to event. Streams begin, end and catch up, members die, and readers find new parents."""
        now, deaths = 0.0, list(self.deaths)
        relink_s = np.inf
        while True:
            self._begin(now)
            filling = self.streams[~np.isfinite(self.done[self.streams])]
            orphans = (self.parent < 0) & ~self._is_filled() & ~np.isfinite(self.done)
            if not len(filling) and not orphans.any():
                return
            ready = filling[self.start[filling] <= now]
            rate = self._rates(ready)
            waits = self.start[filling]
            flows = rate > 0
            left_s = float(((self.part_line - self.have[ready])[flows] / rate[flows]).min(initial=np.inf))
            until = now + min(left_s, self._caught_up_s(ready, rate))
            until = min(until, float(waits[waits > now].min(initial=np.inf)), relink_s)
            until = min(until, deaths[0][0]) if deaths else until
            assert np.isfinite(until), "a fetch that does not end"
            # Add a quantum, so that events at almost the same time form one step. This bounds the simulation's run
            # time.
            until = max(until, now) + self.quantum
            self._move(now, until, ready, rate)
            now = until
            while deaths and deaths[0][0] <= now:
                self._die(deaths.pop(0)[1], now)
                relink_s = now + PATIENCE_S
            if relink_s <= now:
                relink_s = np.inf
                self._plan_relay()

    def _begin(self, now: float) -> None:
        """Start the streams whose parents began at least a hop ago. The start time depends on the parent's start."""
        waiting = self.streams[~np.isfinite(self.start[self.streams])]
        while len(waiting):
            parent = self.parent[waiting]
            known = np.isfinite(self.start[parent]) & (self.start[parent] <= now)
            if not known.any():
                return
            some = waiting[known]
            self.start[some] = np.maximum(self.start[self.parent[some]], now - self.quantum) + self.hop[some]
            waiting = waiting[~known]

    def _rates(self, ready: I64) -> F64:
        """Return each stream's current rate: its share of the links, limited by its parent if it has caught up."""
        if not len(ready):
            return np.zeros(0)
        links, parent = self.links[ready], self.parent[ready]
        follows = self.have[parent] < self.part_line
        place = np.full(len(self.parent), -1)
        place[ready] = np.arange(len(ready))
        bound = np.full(len(ready), _UNBOUND)
        rate = np.zeros(len(ready))
        # Limiting one stream leaves link capacity for other streams, which may then catch up. Repeat until nothing
        # changes.
        for _ in range(_ROUNDS):
            rate = fair_rates(links, self._links.capacity, bound)
            theirs = np.where(place[parent] >= 0, rate[place[parent]], 0.0)
            behind = self.have[parent] - self.have[ready]
            # A stream stays at least one hop's bytes behind its parent. One byte is added for rounding errors.
            near = follows & (behind <= theirs * self.hop[ready] * (1 + _NEAR_ENOUGH) + 1.0)
            limit = np.where(near, self._least_above(rate, near, place[parent]), _UNBOUND)
            if np.array_equal(limit, bound) or np.allclose(limit, bound, rtol=_NEAR_ENOUGH):
                break
            bound = limit
        self.rate_of[:] = 0.0
        self.rate_of[ready] = rate
        return rate

    @staticmethod
    def _least_above(rate: F64, near: np.ndarray, parent: I64) -> F64:
        """Return the minimum rate of each stream's ancestors, up to the first ancestor that lags behind its parent."""
        own = np.append(rate, 0.0)
        above = np.append(np.where(near, parent, -1), -1)
        least = np.where(above >= 0, own[above], np.where(np.append(near, False), 0.0, _UNBOUND))
        while (above >= 0).any():
            least = np.minimum(least, np.where(above >= 0, least[above], _UNBOUND))
            above = np.where(above >= 0, above[above], -1)
        return least[:-1]

    def _caught_up_s(self, ready: I64, rate: F64) -> float:
        """Return the time until the first stream that is faster than its parent has caught up with its parent."""
        parent = self.parent[ready]
        theirs = self.rate_of[parent]
        gap = self.have[parent] - self.have[ready] - theirs * self.hop[ready]
        gains = (rate - theirs > 1.0) & (self.have[parent] < self.part_line) & (gap > 1.0)
        return float((gap[gains] / (rate - theirs)[gains]).min(initial=np.inf))

    def _move(self, now: float, until: float, ready: I64, rate: F64) -> None:
        left = self.part_line - self.have[ready]
        moved = np.minimum(rate * (until - now), left)
        over = (moved >= left * (1 - 1e-12)) & (rate > 0)
        self.meter.add(now, until, self.links[ready], moved)
        self.have[ready] += moved
        # Set the value exactly. With the rounding error of the sum, the stream would never count as complete.
        self.have[ready[over]] = self.part_line
        self.done[ready[over]] = now + left[over] / rate[over] + self.digest_s[ready[over]]

    def _die(self, who: int, now: float) -> None:
        """Stop a member. The member's readers get new parents after `PATIENCE_S`."""
        if self.dead[who]:
            return
        reads = (self.parent >= 0) & (self.parent % len(self.gpu) == who)
        below = len(np.unique(np.flatnonzero(reads) % len(self.gpu)))
        self.relinked.append(f"GPU {who} dies at {now:.3f} s; {below} of its readers read from other members")
        self.dead[who] = True
        self._of_gpus(self.rate_of)[:, who] = 0.0
        # The readers have no parent until `PATIENCE_S` has passed, and then get one from a new relay.
        self.parent[reads] = -1
        self._measure()

    def _ring(self) -> None:
        """Read storage once in total. The share of each member is proportional to its read rate.

        Then pass the shares around each ring at the rate of its slowest link.
        """
        cluster = self.cluster
        if not (cluster.node_storage_gb_per_s or cluster.storage_gb_per_s):
            hint = "set node_storage_gb_per_s or storage_gb_per_s in the cluster's description"
            raise PlanError("no member has the weights, and the cluster has no storage", hint=hint)
        read = fair_rates(self._links.from_storage(self.gpu), self._links.capacity)
        of_part = np.bincount(self.gpu % self.fleet.parts, weights=read)[self.gpu % self.fleet.parts]
        self.from_storage = self.line * read / of_part
        self.storage_s = float((self.from_storage / read).max())
        self.meter.add(0.0, self.storage_s, self._links.from_storage(self.gpu), self.from_storage)
        if not len(self.streams):
            # If each part has only one member, the member's bytes from storage are complete.
            self.start[:] = self.storage_s
            self.done[:] = self.storage_s
            return
        rate = fair_rates(self.links[self.streams], self._links.capacity)
        part = self.streams % self.fleet.parts
        # Every byte crosses every link of its ring once, so the slowest link sets the pace.
        slowest = np.full(self.fleet.parts, np.inf)
        np.minimum.at(slowest, part, rate)
        wanted = self.line - self.from_storage[self.streams]
        stream_s = np.maximum(wanted / slowest[part], self.storage_s)
        around = np.zeros(self.fleet.parts)
        np.add.at(around, part, self.hop[self.streams])
        self.start[:] = 0.0
        self.done[self.streams] = stream_s + around[part] - self.hop[self.streams]
        self.meter.add(0.0, float(stream_s.max()), self.links[self.streams], wanted)
        self.have[:] = self.line

    def prediction(self) -> Prediction:
        """Return the prediction. Call `go` first."""
        fleet, cluster = self.fleet, self.cluster
        alive = ~self.dead & ~self.is_holder
        all_done = self._of_gpus(self.done)
        done = all_done.max(axis=0)[alive]
        total_s = float(done.max(initial=0.0))
        loads = self.meter.loads(total_s)
        limit_s = self.meter.limit_s(self.nominal)
        one_copy_s = self.line / (cluster.nic_gb_per_s if cluster.num_nodes > 1 else cluster.nvlink_gb_per_s) / GB
        # The row number identifies the stream's GPU and its tree.
        last = int(np.where(np.tile(alive, self.num_trees), self.done, -1.0).argmax())
        name = f"GPU {last % len(self.gpu)}"
        # A stream starts one hop after its parent's stream, so the last stream's start time is the sum of the hops
        # above it.
        hops_s = float(self.start[last]) if fleet.holders and np.isfinite(self.start[last]) else 0.0
        stages = [Stage(name="hops", member=name, busy_s=hops_s, detail=f"{int(self.depth[last])} deep")]
        if self.storage_s:
            around_s = total_s - max(self.storage_s, one_copy_s)
            stages = [
                Stage(name="storage", member="all", busy_s=self.storage_s),
                Stage(name="hops", member=name, busy_s=max(around_s, 0.0), detail=f"ring of {len(done)}"),
            ]
        digest_s = self.line / self.rates.digest_gb_per_s / GB
        stages.append(Stage(name="digest and compare", member="each", busy_s=digest_s))
        shape = f", {self.num_trees} trees" if self.num_trees > 1 else ""
        what = (
            f"{fleet.holders} -> {cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs, {fleet.parts} parts{shape}"
        )
        return Prediction(
            kind="fetch",
            what=what,
            predicted_s=total_s,
            limit_s=min(limit_s, max(one_copy_s, self.storage_s)),
            bottleneck=bottleneck(stages, loads, total_s, "waiting for those before"),
            moved_bytes=round(float(self._of_gpus(self.have).sum(axis=0)[alive].sum())),
            num_receivers=int(alive.sum()),
            first_s=float(done.min(initial=total_s)),
            median_s=float(np.median(done)) if len(done) else 0.0,
            stages=tuple(stages),
            links=loads,
            timeline=self._timeline(last),
            failed=tuple(self.relinked),
            assumed=assumed(self.rates, ("digest_gb_per_s", "step_s", "hop_s")),
        )

    def _timeline(self, last: int) -> tuple[Span, ...]:
        """Return spans for the last member, its parent, the parent's parent, and so on."""
        spans: list[Span] = []
        at = last
        while at >= 0 and not self.is_holder[at % len(self.gpu)] and len(spans) < 64:
            gpu = at % len(self.gpu)
            lane = f"GPU {gpu}, {int(self.depth[at])} deep" if self.fleet.holders else f"GPU {gpu}"
            spans.append(Span(lane=lane, stage="wire", start_s=float(self.start[at]), stop_s=float(self.done[at])))
            at = int(self.parent[at]) if self.fleet.holders else -1
        return tuple(reversed(spans))
