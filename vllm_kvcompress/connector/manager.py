"""The scheduler's side: which chunks are there to load, and which are to be stored."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_kvcompress import compat
from vllm_kvcompress.connector import fingerprint
from vllm_kvcompress.connector.lookup import Answer, SharedLookup
from vllm_kvcompress.connector.metrics import Sample, WorkerReport, connector_stats
from vllm_kvcompress.stores import Store

logger = init_logger(compat.LOGGER_NAME)

PENDING_SECONDS = 60.0
"""How long the engine is kept stepping for a store that no worker reports on."""

MAX_FAILED = 10_000
"""Failed chunks that are remembered before expired ones are dropped."""


@dataclass
class ChunkKeys(LoadStoreSpec):
    """The chunks of a transfer, in the order of vLLM's block ids."""

    keys: tuple[bytes, ...]
    """Keys without rank."""
    group_ids: tuple[int, ...]
    """The cache group of each chunk."""


class ChunkManager(OffloadingManager):
    """Tracks the chunks that workers hold, and asks the shared stores about all others.

    It is an optimist: a chunk may have gone between the lookup and the load. The worker then
    reports a failed load, the request is recomputed, and the chunk counts as a miss for
    ``retry_seconds``, so that a store that lists what it cannot give does not hold a request.
    """

    def __init__(
        self,
        server_fingerprint: bytes,
        ranks: int,
        shared_stores: Sequence[Store],
        workers_hold: bool,
        levels: int,
        retry_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        lookup_seconds: float = 0.25,
    ) -> None:
        self._server_fingerprint = server_fingerprint
        self._ranks = ranks
        self._shared_stores = list(shared_stores)
        self._lookup = SharedLookup(shared_stores, lookup_seconds, clock)
        self._store_errors = [0] * len(self._shared_stores)  # those that were counted
        self._workers_hold = workers_hold  # workers keep chunks in stores that only they see
        self._levels = levels
        self._retry_seconds = retry_seconds
        self._clock = clock

        self._epoch = b""
        self._reset_untold = False
        self._fingerprint: bytes | None = None
        self._pending: dict[bytes, float] = {}  # key -> when the engine stops waiting for it
        self._reported: Counter[bytes] = Counter()  # key -> ranks that stored it, while pending
        self._held: set[bytes] = set()  # every rank holds it, or is about to
        self._failed: dict[bytes, float] = {}  # key -> until when it counts as a miss
        self._broken: set[bytes] = set()  # failed to load, whatever a store says: store it anew
        self._counters: Counter[Sample] = Counter()
        self._gauges: dict[Sample, float] = {}
        self._raw_bytes = self._blob_bytes = 0.0
        self._warned_no_fingerprint = False

    def set_worker_fingerprints(self, digests: Sequence[bytes]) -> None:
        """Complete the fingerprint with the workers' own parts, in the order of their ranks.

        Until then nothing is looked up and nothing stored.
        """
        if len(digests) != self._ranks:
            logger.error(
                "KV offload is off: %d of %d workers told their fingerprint",
                len(digests),
                self._ranks,
            )
            return
        self._fingerprint = fingerprint.digest(self._server_fingerprint, *digests)

    def key_of(self, offload_key: OffloadKey) -> bytes | None:
        """The key of a chunk without rank; None while the fingerprint is not complete."""
        if self._fingerprint is None:
            if not self._warned_no_fingerprint:
                logger.error("KV offload is off: the workers' fingerprints did not arrive")
                self._warned_no_fingerprint = True
            return None
        return fingerprint.chunk_key(self._fingerprint, self._epoch, offload_key)

    # --- what vLLM's scheduler asks ---------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        result = self._find(key, req_context)
        if result is not LookupResult.RETRY:
            name = "lookup_hits" if result is LookupResult.HIT else "lookup_misses"
            self._counters[name, ()] += 1
        return result

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        chunk = self.key_of(key)
        return CacheHitSource.HOST if chunk in self._held else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkKeys:
        return self._spec(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        wanted = []
        now = self._clock()
        for key in keys:
            chunk = self.key_of(key)
            if chunk is None or chunk in self._held:
                continue
            if chunk not in self._broken and self._is_stored(chunk, req_context):
                continue
            wanted.append(key)
            self._held.add(chunk)
            self._pending[chunk] = now + PENDING_SECONDS
            self._failed.pop(chunk, None)
            self._broken.discard(chunk)
        return PrepareStoreOutput(
            keys_to_store=wanted, store_spec=self._spec(wanted), evicted_keys=[]
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def tell_namespace(self) -> bytes:
        """The namespace of the step's keys; workers forget what lies in another one."""
        self._reset_untold = False
        if self._fingerprint is None:
            return b""
        return fingerprint.namespace(self._fingerprint, self._epoch)

    def has_pending_work(self) -> bool:
        """Whether workers have stores to report or a reset to hear of; the engine steps on."""
        if self._reset_untold:
            return True
        now = self._clock()
        return any(deadline > now for deadline in self._pending.values())

    def reset_cache(self) -> None:
        """Forget every chunk, here and in the shared stores.

        A fresh epoch keeps apart what is stored from now on: the weights may have been replaced
        while the server runs, and no other server may take the new chunks for the old ones.
        """
        if self._fingerprint is not None:
            old = fingerprint.namespace(self._fingerprint, self._epoch)
            self._lookup.remove_prefix(old)
        self._epoch = os.urandom(8)
        self._reset_untold = True
        self._pending.clear()
        self._reported.clear()
        self._held.clear()
        self._failed.clear()
        self._broken.clear()

    def get_stats(self):
        for place, store in enumerate(self._shared_stores):
            errors = store.stats().errors
            if new := errors - self._store_errors[place]:
                self._counters["store_errors", (store.name, "scheduler")] += new
                self._store_errors[place] = errors
        if self._blob_bytes:
            self._gauges["compression_ratio", ()] = self._raw_bytes / self._blob_bytes
        stats = connector_stats(self._counters, self._gauges)
        self._counters, self._gauges = Counter(), {}
        return stats

    def shutdown(self) -> None:
        self._lookup.close()

    # --- what workers report ----------------------------------------------------------------

    def take_report(self, report: WorkerReport) -> None:
        """Learn what a step's workers stored, dropped and failed to load."""
        for chunk, ranks in report.stored.items():
            if chunk not in self._pending:
                continue
            self._reported[chunk] += ranks
            if self._reported[chunk] >= self._ranks:
                del self._reported[chunk], self._pending[chunk]
                if not self._workers_hold:
                    self._held.discard(chunk)
        for chunk in report.gone:
            self._forget(chunk)
        now = self._clock()
        if len(self._failed) > MAX_FAILED:
            self._failed = {chunk: until for chunk, until in self._failed.items() if until > now}
            self._broken &= self._failed.keys()
        for chunks in report.failed_loads.values():
            for chunk in chunks:
                self._forget(chunk)
                self._failed[chunk] = now + self._retry_seconds
                self._broken.add(chunk)
        for chunk in report.given_up:
            self._failed[chunk] = now + self._retry_seconds
        self._counters.update(report.counters)
        self._gauges.update(report.gauges)
        self._raw_bytes += report.counters["stored_raw_bytes", ()]
        self._blob_bytes += report.counters["stored_blob_bytes", ()]

    def _forget(self, chunk: bytes) -> None:
        self._held.discard(chunk)
        self._pending.pop(chunk, None)
        self._reported.pop(chunk, None)

    # --- where a chunk is -------------------------------------------------------------------

    def _find(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        chunk = self.key_of(key)
        if chunk is None:
            return LookupResult.MISS
        if self._failed:
            until = self._failed.get(chunk)
            if until is not None:
                if self._clock() < until:
                    return LookupResult.MISS
                del self._failed[chunk]
        allowed = req_context.load_tier_filter.allows
        if chunk in self._held and allowed(Medium.CPU, None):
            return LookupResult.HIT
        if not self._shared_stores or not allowed(Medium.STORAGE, None):
            return LookupResult.MISS
        answer = self._ask(chunk, req_context)
        if self._has_parts(answer, chunk, any):
            return LookupResult.HIT
        # Never for long: vLLM would hold the request as long as it is told to try again.
        return LookupResult.RETRY if answer.is_pending(self._clock()) else LookupResult.MISS

    def _ask(self, chunk: bytes, req_context: ReqContext) -> Answer:
        """What the shared stores say of a chunk, and of all others of the request with it."""
        answer = req_context.get_state(Answer)
        probe = fingerprint.blob_key(chunk, 0)
        if answer is None or probe not in answer.keys or answer.is_stale(self._clock()):
            chunks = {chunk: None}
            for key in compat.request_keys(req_context):
                other = self.key_of(key)
                if other is not None and other not in self._held:
                    chunks[other] = None
            answer = self._lookup.ask([key for each in chunks for key in self._parts(each)])
            req_context.set_state(answer)
        return answer

    def _is_stored(self, chunk: bytes, req_context: ReqContext) -> bool:
        """Whether all of a chunk was in the shared stores when the request was looked up."""
        answer = req_context.get_state(Answer)
        return answer is not None and self._has_parts(answer, chunk, all)

    def _parts(self, chunk: bytes) -> list[bytes]:
        """The keys of a chunk's blobs: rank by rank, each level."""
        return [
            fingerprint.blob_key(chunk, rank, level)
            for rank in range(self._ranks)
            for level in range(self._levels)
        ]

    def _has_parts(
        self, answer: Answer, chunk: bytes, enough: Callable[[Iterable[bool]], bool]
    ) -> bool:
        """Whether every rank's part is there, at ``any`` of the levels or at ``all`` of them."""
        there = [key in answer for key in self._parts(chunk)]
        return all(
            enough(there[part : part + self._levels]) for part in range(0, len(there), self._levels)
        )

    def _spec(self, keys: Collection[OffloadKey]) -> ChunkKeys:
        chunks = [self.key_of(key) for key in keys]
        assert None not in chunks  # nothing is offered before the fingerprint is complete
        return ChunkKeys(tuple(chunks), tuple(get_offload_group_idx(key) for key in keys))
