"""The messages that processes exchange or keep for each other, by names that do not change when their classes move.

In: nothing. Out: `MESSAGES`, from `room.name/codec` to the class; `CODECS`; `NOT_WIRE`, structs that are no messages.
Not here: bytes that no class describes (`frames`).

A class that moves or gets another name changes its line here. The fixture keeps its name and its bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.plan import layout

PACKAGES = ("penstock", "penstock_convert", "penstock_dcp", "penstock_hub", "penstock_nixl")
"""The packages whose messages are frozen. A distribution that is split off is added here."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """The two directions of an encoding."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, type], Any]


CODECS = {
    "json": Codec(encode=msgspec.json.encode, decode=lambda raw, kind: msgspec.json.decode(raw, type=kind)),
    "msgpack": Codec(encode=msgspec.msgpack.encode, decode=lambda raw, kind: msgspec.msgpack.decode(raw, type=kind)),
    "columns": Codec(encode=layout.encode, decode=layout.decode),
}

MESSAGES = {
    "hub.announced_version/json": "penstock.hub.messages:AnnouncedVersion",
    "hub.hello/json": "penstock.hub.messages:Hello",
    "hub.welcome/json": "penstock.hub.messages:Welcome",
    "hub.identity/json": "penstock.hub.messages:Identity",
    "hub.holding_state/json": "penstock.hub.messages:HoldingState",
    "hub.fleet_decision/json": "penstock.hub.messages:FleetDecision",
    "hub.sync_state/json": "penstock.hub.messages:SyncState",
    "hub.drain/json": "penstock.hub.messages:Drain",
    "hub.failure_report/json": "penstock.hub.messages:FailureReport",
    "hub.beat/json": "penstock.hub.messages:Beat",
    "hub.beat_reply/json": "penstock.hub.messages:BeatReply",
    "hub.upstreams_request/json": "penstock.hub.messages:UpstreamsRequest",
    "hub.upstream/json": "penstock.hub.messages:Upstream",
    "hub.upstreams_reply/json": "penstock.hub.messages:UpstreamsReply",
    "hub.claim_request/json": "penstock.hub.messages:ClaimRequest",
    "hub.claim_reply/json": "penstock.hub.messages:ClaimReply",
    "hub.proof/json": "penstock.hub.messages:Proof",
    "hub.complaint/json": "penstock.hub.messages:FaultReport",
    "hub.sync_request/json": "penstock.hub.messages:SyncRequest",
    "hub.sync_member/json": "penstock.hub.messages:SyncMember",
    "hub.sync_reply/json": "penstock.hub.messages:SyncReply",
    "hub.decide_request/json": "penstock.hub.messages:DecideRequest",
    "hub.decide_reply/json": "penstock.hub.messages:DecideReply",
    "hub.member_status/json": "penstock.hub.messages:MemberStatus",
    "hub.job_status/json": "penstock.hub.messages:JobStatus",
    "hub.fleet_failure/json": "penstock.hub.messages:FleetFailure",
    "hub.status/json": "penstock.hub.messages:Status",
    "hub.replica/json": "penstock.hub.messages:Replica",
    "hub.why_request/json": "penstock.hub.messages:WhyRequest",
    "hub.why/json": "penstock.hub.messages:Why",
    "hub.fault/json": "penstock.hub.messages:Fault",
    "hub.boot/json": "penstock.phases:Boot",
    "hub.boot_error/json": "penstock.phases:BootError",
    "hub.phase/json": "penstock.phases:Phase",
    "hub.job_state/json": "penstock.hub.job_state:JobState",
    "hub.job_error/json": "penstock.hub.job_state:JobError",
    "hub.worker_state/json": "penstock.hub.job_state:WorkerState",
    "store.holding_entry/msgpack": "penstock_hub.snapshot:HoldingEntry",
    "store.member_entry/msgpack": "penstock_hub.snapshot:MemberEntry",
    "store.complaint_entry/msgpack": "penstock_hub.snapshot:ComplaintEntry",
    "store.sync_entry/msgpack": "penstock_hub.snapshot:SyncEntry",
    "store.claims/msgpack": "penstock_hub.claims:Claims",
    "store.failures_entry/msgpack": "penstock_hub.failures:FailuresEntry",
    "store.job_entry/msgpack": "penstock_hub.conversions:JobEntry",
    "store.hello/msgpack": "penstock.hub.messages:Hello",
    "store.holding_state/msgpack": "penstock.hub.messages:HoldingState",
    "store.identity/msgpack": "penstock.hub.messages:Identity",
    "store.drain/msgpack": "penstock.hub.messages:Drain",
    "store.complaint/msgpack": "penstock.hub.messages:FaultReport",
    "store.proof/msgpack": "penstock.hub.messages:Proof",
    "store.sync_state/msgpack": "penstock.hub.messages:SyncState",
    "store.fleet_failure/msgpack": "penstock.hub.messages:FleetFailure",
    "store.fleet_decision/msgpack": "penstock.hub.messages:FleetDecision",
    "store.boot/msgpack": "penstock.phases:Boot",
    "store.phase/msgpack": "penstock.phases:Phase",
    "store.boot_error/msgpack": "penstock.phases:BootError",
    "store.job_state/msgpack": "penstock.hub.job_state:JobState",
    "store.job_error/msgpack": "penstock.hub.job_state:JobError",
    "store.worker_state/msgpack": "penstock.hub.job_state:WorkerState",
    "peer.announced_version/msgpack": "penstock.hub.messages:AnnouncedVersion",
    "peer.holding_map/msgpack": "penstock.hub.messages:HoldingMap",
    "peer.lease_request/msgpack": "penstock.hub.messages:LeaseRequest",
    "peer.lease/msgpack": "penstock.hub.messages:Lease",
    "peer.log_reply/msgpack": "penstock.hub.messages:LogReply",
    "peer.session_request/msgpack": "penstock.hub.messages:SessionRequest",
    "peer.session/msgpack": "penstock.hub.messages:MemberSession",
    "peer.fault/msgpack": "penstock.hub.messages:Fault",
    "peer.member_fault/msgpack": "penstock.hub.messages:MemberFault",
    "peer.table/msgpack": "penstock.holding.weight_layout:TableMessage",
    "peer.grant/msgpack": "penstock.hub.grants:Grant",
    "sync.part_request/msgpack": "penstock.sync.messages:PartRequest",
    "sync.part_reply/msgpack": "penstock.sync.messages:PartReply",
    "sync.table_reply/msgpack": "penstock.sync.messages:TableReply",
    "sync.news_reply/msgpack": "penstock.sync.messages:NewsReply",
    "sync.digest_request/msgpack": "penstock.sync.messages:DigestRequest",
    "sync.digest_reply/msgpack": "penstock.sync.messages:DigestReply",
    "sync.pack_request/msgpack": "penstock.sync.messages:PackRequest",
    "sync.pack_reply/msgpack": "penstock.sync.messages:PackReply",
    "sync.pack_leases/msgpack": "penstock.sync.messages:PackLeases",
    "sync.begins_after/msgpack": "penstock.sync.messages:BeginsAfter",
    "sync.progress/msgpack": "penstock.sync.messages:RankProgress",
    "sync.decision/msgpack": "penstock.sync.messages:Decision",
    "sync.fleet_decision/msgpack": "penstock.hub.messages:FleetDecision",
    "sync.version_map/msgpack": "penstock.sync.local_version:VersionMap",
    "sync.check_value/msgpack": "penstock.sync.check:_Value",
    "sync.layout/columns": "penstock.plan.layout:Layout",
    "sync.part/columns": "penstock.plan.sync:ReceiverPlan",
    "transport.descriptor/msgpack": "penstock.transport.protocol:Descriptor",
    "transport.cuda_ipc_payload/msgpack": "penstock.transport.cuda_ipc:CudaPayload",
    "transport.shm_payload/msgpack": "penstock.transport.shm:ShmPayload",
    "transport.generation_address/msgpack": "penstock.transport.host_endpoint:GenerationAddress",
    "transport.located/msgpack": "penstock.transport.host_endpoint:_Located",
    "transport.http_payload/msgpack": "penstock.transport.http:_Payload",
    "transport.nixl_payload/msgpack": "penstock_nixl.reader:Payload",
    "transport.read_request/msgpack": "penstock.http.region_messages:ReadRequest",
    "job.job_spec/msgpack": "penstock_convert.messages:JobSpec",
    "job.hello/msgpack": "penstock_convert.messages:WorkerHello",
    "job.ready/msgpack": "penstock_convert.messages:Ready",
    "job.began/msgpack": "penstock_convert.messages:Began",
    "job.done/msgpack": "penstock_convert.messages:TaskDone",
    "job.beat/msgpack": "penstock_convert.messages:WorkerBeat",
    "job.failure/msgpack": "penstock_convert.messages:TaskFailure",
    "job.work/msgpack": "penstock_convert.messages:TaskWork",
    "job.stop/msgpack": "penstock_convert.messages:Stop",
    "job.announced_version/msgpack": "penstock_convert.messages:_Announced",
    "job.journal_head/json": "penstock_convert.result:_Head",
    "job.journal_entry/json": "penstock_convert.result:_FinishedTask",
    "job.stamp/json": "penstock_convert.result:_Stamp",
    "job.delta/json": "penstock_convert.operations.delta:DeltaOperation",
    "job.delta_changed/json": "penstock_convert.operations.delta:Changed",
    "keeper.hand_over/msgpack": "penstock.cache.engine_parameters:HandOver",
    "keeper.hand_over_state/msgpack": "penstock.cache.engine_parameters:HandOverState",
    "manifest.sidecar/msgpack": "penstock.storage.manifest:Sidecar",
    "manifest.file/msgpack": "penstock.storage.manifest:_File",
    "manifest.placed_files/json": "penstock.storage.place:_StampedFiles",
    "compile_cache.key/json": "penstock_compile_cache.key:Key",
    "compile_cache.description/json": "penstock_compile_cache.bundle:Description",
    "compile_cache.file/msgpack": "penstock_compile_cache.bundle:BundledFile",
    "compile_cache.frame/msgpack": "penstock_compile_cache.bundle:BundleFrame",
    "compile_cache.kernel/msgpack": "penstock.cuda.kernel_cache:StoredKernel",
    "plan.cluster/json": "penstock_convert.plan.cluster:Cluster",
    "plan.rates/json": "penstock_convert.plan.cluster:Rates",
}

NOT_WIRE = {
    "penstock.storage.hugging_face:_Info": "an answer of Hugging Face, only decoded",
    "penstock.storage.hugging_face:_Lfs": "part of an answer of Hugging Face, only decoded",
    "penstock.storage.hugging_face:_Sibling": "part of an answer of Hugging Face, only decoded",
    "penstock.storage.model_scope:_Answer": "an answer of ModelScope, only decoded",
    "penstock.storage.model_scope:_ListedFile": "part of an answer of ModelScope, only decoded",
    "penstock.storage.model_scope:_FileList": "part of an answer of ModelScope, only decoded",
    "penstock.storage.safetensors:_TensorEntry": "the header of safetensors, a format of others, only decoded",
    "penstock.storage.safetensors:_Index": "the index of safetensors, a format of others, only decoded",
    "penstock.storage.safetensors:_MetadataOnly": "the header of safetensors, a format of others, only decoded",
    "penstock.storage.safetensors:_DataOffsets": "the header of safetensors, a format of others, only decoded",
}
"""Structs that processes do not send to each other, with the reason."""


def resolve(path: str) -> type:
    """Return the class at `module:name`."""
    module, _, name = path.partition(":")
    kind: type = getattr(importlib.import_module(module), name)
    return kind
