"""The names of the connector's metrics, and their way from the workers to ``/metrics``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

PREFIX = "vllm:kvcompress_"

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stored_raw_bytes": ("Bytes of KV that were stored, before encoding.", ()),
    "stored_blob_bytes": ("Bytes of the blobs that were stored.", ()),
    "loaded_raw_bytes": ("Bytes of KV that were loaded, after decoding.", ()),
    "loaded_blob_bytes": ("Bytes of the blobs that were loaded.", ()),
    "stored_chunks": ("Chunks that were stored.", ()),
    "loaded_chunks": ("Chunks that were loaded.", ()),
    "encode_seconds": ("Seconds that threads spent encoding.", ()),
    "decode_seconds": ("Seconds that threads spent decoding.", ()),
    "loaded_level_chunks": ("Chunks that were loaded, by level.", ("level",)),
    "given_up_chunks": ("Chunks that were recomputed, as that was faster than their link.", ()),
    "lookup_hits": ("Looked up chunks that were there.", ()),
    "lookup_misses": ("Looked up chunks that were not there.", ()),
    "dropped_chunks": ("Chunks that were not stored, by reason.", ("reason",)),
    "load_failures": ("Chunks that failed to load and were recomputed, by cause.", ("cause",)),
    "evictions": ("Blobs that a store evicted.", ("store", "rank")),
    "store_errors": ("Errors that a store met.", ("store", "rank")),
    "rejected_blobs": ("Blobs that a store's seal_key did not open.", ("store", "rank")),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "compression_ratio": ("Bytes of all stored KV over the bytes of its blobs.", ()),
    "staged_bytes": ("Bytes of KV that wait for their encoder.", ("rank",)),
    "store_bytes": ("Bytes that a store holds.", ("store", "rank")),
    "store_entries": ("Blobs that a store holds.", ("store", "rank")),
    "store_capacity_bytes": ("Bytes that a store may hold.", ("store", "rank")),
}

Sample = tuple[str, tuple[str, ...]]
"""A metric's name, without the prefix, and the values of its labels."""


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM's front end has to declare before a value may arrive."""
    return {
        **{PREFIX + name: OffloadingCounterMetadata(*spec) for name, spec in COUNTERS.items()},
        **{PREFIX + name: OffloadingGaugeMetadata(*spec) for name, spec in GAUGES.items()},
    }


def connector_stats(
    counters: Counter[Sample], gauges: dict[Sample, float]
) -> OffloadingConnectorStats | None:
    """The statistics of an interval, or None if nothing happened."""
    if not counters and not gauges:
        return None
    stats = OffloadingConnectorStats()
    for (name, labels), value in counters.items():
        stats.increase_counter(PREFIX + name, value, labels)
    for (name, labels), value in gauges.items():
        stats.set_gauge(PREFIX + name, value, labels)
    return stats


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """What a worker tells the scheduler after a step; reports of several ranks are added up."""

    stored: Counter[bytes] = field(default_factory=Counter)
    """Chunk key → ranks that can now load it."""
    gone: set[bytes] = field(default_factory=set)
    """Chunk keys that some rank dropped, failed to store, or evicted."""
    failed_loads: dict[int, set[bytes]] = field(default_factory=dict)
    """Load job → chunk keys that could not be loaded."""
    given_up: set[bytes] = field(default_factory=set)
    """Chunk keys that are there, and that recomputing was faster than loading."""
    usable_blocks: dict[int, int] = field(default_factory=dict)
    """Load job that did not load everything → blocks of its sequence before the first gap."""
    counters: Counter[Sample] = field(default_factory=Counter)
    gauges: dict[Sample, float] = field(default_factory=dict)

    def has_gap(self, job_id: int, blocks: int) -> None:
        """A load lacks what comes after so many blocks of its sequence."""
        self.usable_blocks[job_id] = min(blocks, self.usable_blocks.get(job_id, blocks))

    def is_empty(self) -> bool:
        return not (
            self.completed_jobs
            or self.stored
            or self.gone
            or self.failed_loads
            or self.usable_blocks
            or self.counters
            or self.gauges
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata)
        failed = {job: set(keys) for job, keys in self.failed_loads.items()}
        for job, keys in other.failed_loads.items():
            failed.setdefault(job, set()).update(keys)
        both = WorkerReport(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            stored=self.stored + other.stored,
            gone=self.gone | other.gone,
            failed_loads=failed,
            given_up=self.given_up | other.given_up,
            usable_blocks=dict(self.usable_blocks),
            counters=self.counters + other.counters,
            gauges={**self.gauges, **other.gauges},
        )
        for job, blocks in other.usable_blocks.items():
            both.has_gap(job, blocks)
        return both
