"""The worker's side: pages to blobs to stores and back, beside the model."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from vllm_kvcompress import compat
from vllm_kvcompress.codecs import BlobError, Codec
from vllm_kvcompress.connector.fingerprint import blob_key, split_blob_key
from vllm_kvcompress.connector.groups import (
    CacheGroup,
    Content,
    ForeignBlob,
    Snapshot,
    beside_the_model,
    mark,
)
from vllm_kvcompress.connector.loading import LoadFailed, Loads
from vllm_kvcompress.connector.manager import ChunkKeys
from vllm_kvcompress.connector.metrics import WorkerReport
from vllm_kvcompress.stores import Store, StoreError, StoreStack
from vllm_kvcompress.streaming import Speeds, StreamChunk

logger = init_logger(compat.LOGGER_NAME)


@dataclass(frozen=True)
class Level:
    """One way in which chunks are stored."""

    name: str
    codec: Codec


@dataclass
class ChunkBlocks:
    """One chunk of a transfer and the blocks that it takes part with."""

    group: CacheGroup
    key: bytes
    first_block: int
    """Index in the chunk of the first of ``block_ids``."""
    block_ids: list[int]
    index: int
    """Index in the sequence of the first of ``block_ids``."""
    written: torch.cuda.Event | None = None
    """When the blocks may be written: their earlier owners, and their zeroing, may still be at
    work on a GPU."""


def _finish_writes(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def split_into_chunks(
    groups: list[CacheGroup], blocks_per_chunk: int, blocks: GPULoadStoreSpec, chunks: ChunkKeys
) -> tuple[list[ChunkBlocks], list[bytes]]:
    """Assign the blocks of a transfer to its chunks.

    vLLM lists the blocks group by group, and says per group where in its sequence the first one
    lies: a chunk may lack its first blocks, which left a sliding window. Returns the chunks, and
    the keys of those whose blocks cannot be told apart, as more than the first lacks some.
    """
    result: list[ChunkBlocks] = []
    unclear: list[bytes] = []
    position = 0
    ids = blocks.block_ids.tolist()
    for group, count, first in zip(groups, blocks.group_sizes, blocks.block_indices, strict=True):
        block_ids = ids[position : position + count]
        position += count
        keys = [
            key
            for key, group_id in zip(chunks.keys, chunks.group_ids, strict=True)
            if group_id == group.group_id
        ]
        offset = first % blocks_per_chunk
        if len(keys) != -(-(offset + count) // blocks_per_chunk):
            unclear += keys
            continue
        for key in keys:
            take = blocks_per_chunk - offset
            result.append(ChunkBlocks(group, key, offset, block_ids[:take], first))
            block_ids = block_ids[take:]
            first += take
            offset = 0
    return result, unclear


class ChunkWorker(OffloadingWorker):
    """Stores and loads chunks on threads; no step of the model waits for a codec or a store."""

    def __init__(
        self,
        groups: list[CacheGroup],
        blocks_per_chunk: int,
        levels: Sequence[Level],
        stores: StoreStack,
        rank: int,
        threads: int,
        staging_bytes: int,
        speeds: Speeds,
        deadline: float,
    ) -> None:
        self._groups = groups
        self._blocks_per_chunk = blocks_per_chunk
        self._levels = levels
        self._stores = stores
        self._rank = rank
        self._staging_bytes = staging_bytes

        self._lock = threading.Lock()
        self._namespace = b""
        self._idle = False
        self._staged: dict[bytes, Snapshot] = {}  # key -> what waits for its encoder
        self._staged_bytes = 0
        self._deferred: list[Callable[[], None]] = []  # what loads leave for the model's thread
        self._finished: list[TransferResult] = []
        self._report = WorkerReport()
        self._logged: set[str] = set()
        self._store_events = Counter()
        self._encoders = self._pool("kv-encode", threads)
        self._speeds = speeds
        # Of several groups all or nothing can be used: a window's blocks are those before the end.
        self._loads: Loads[ChunkBlocks, bytes | Snapshot] = Loads(
            self, speeds, threads, deadline, salvage=len(groups) == 1, make_pool=self._pool
        )
        stores.on_forget = self._on_forget
        self._measure_stores()

    @staticmethod
    def _pool(name: str, threads: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, name, initializer=compat.release_cpu_affinity)

    # --- what vLLM's worker asks ------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Snapshot the pages and hand them to an encoder. The job is over when they are copied:
        from then on vLLM may write into the blocks again."""
        assert isinstance(dst_spec, ChunkKeys)
        chunks, unclear = split_into_chunks(
            self._groups, self._blocks_per_chunk, src_spec, dst_spec
        )
        for key in unclear:
            self._drop(key, "incomplete")
        for chunk in chunks:
            if chunk.first_block + len(chunk.block_ids) != self._blocks_per_chunk:
                self._drop(chunk.key, "incomplete")  # its last blocks are not there
                continue
            size = chunk.group.block_bytes * len(chunk.block_ids)
            if self._staged_bytes + size > self._staging_bytes:
                self._drop(chunk.key, "staging_full")
                continue
            snapshot = chunk.group.snapshot(chunk.block_ids)
            with self._lock:
                self._staged_bytes += snapshot.nbytes
                self._staged[chunk.key] = snapshot
            self._encoders.submit(self._store, chunk, snapshot, self._namespace)
        with self._lock:
            self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, ChunkKeys)
        chunks, unclear = split_into_chunks(
            self._groups, self._blocks_per_chunk, dst_spec, src_spec
        )
        for key in unclear:
            self._fail(job_id, key, 0, "incomplete")
        written = mark(self._groups[0].device)
        for chunk in chunks:
            chunk.written = written
            # Groups share block numbers and memory: what another group remembers of these blocks
            # is of their former life.
            for group in self._groups:
                group.prepare_load(chunk.block_ids)
        if chunks:
            self._loads.begin(job_id, chunks, self._plan(chunks))
        else:
            self.done(job_id, 0, 0.0)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._loads.give_up_late()
        if self._idle:
            self._loads.wait_a_little()
        with self._lock:
            finished, self._finished = self._finished, []
        # After that: a load that ends in between is reported, with its rest done, the next time.
        self._finish_deferred()
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return when the loads among these jobs have written their last block.

        Stores need no waiting: their pages were copied when they were submitted.
        """
        self._loads.wait(job_ids)
        self._finish_deferred()

    def _finish_deferred(self) -> None:
        with self._lock:
            deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    def begin_step(self, recompute_speed: float, idle: bool) -> None:
        """Hear of a step: what recomputing would do in tokens a second, 0 as long as that is not
        known, and whether nothing is computed in this step."""
        self._speeds.recompute = recompute_speed
        self._idle = idle

    def set_namespace(self, namespace: bytes) -> None:
        """Forget everything stored under another namespace (after a reset of the cache)."""
        if namespace == self._namespace:
            return
        with self._lock:
            old, self._namespace = self._namespace, namespace
            self._staged.clear()
        for store in self._stores.stores:
            if not store.shared:
                store.clear()
            elif old:
                self._encoders.submit(self._remove_namespace, store, old)

    def take_report(self) -> WorkerReport:
        """What happened since the last call."""
        with self._lock:
            report, self._report = self._report, WorkerReport()
            if report.gauges:
                report.gauges["staged_bytes", (str(self._rank),)] = self._staged_bytes
        return report

    def shutdown(self) -> None:
        """Finish what is being stored, write what only a volatile store holds, end the threads."""
        self._loads.shutdown()
        self._encoders.shutdown(wait=True)
        self._stores.close()

    def _plan(self, chunks: list[ChunkBlocks]) -> list[StreamChunk]:
        """What is known of the chunks of a load."""
        blocks = Counter(chunk.group.group_id for chunk in chunks for _ in chunk.block_ids)
        longest = max(blocks, key=lambda group_id: blocks[group_id])
        plan = []
        for chunk in chunks:
            everywhere = set(range(len(self._levels)))
            here = everywhere
            if chunk.key not in self._staged:
                keys = {level: blob_key(chunk.key, self._rank, level) for level in everywhere}
                here = {level for level, key in keys.items() if self._is_here(key)}
            plan.append(
                StreamChunk(
                    # Groups cover the same tokens, which are recomputed once.
                    tokens=len(chunk.block_ids) * chunk.group.block_tokens
                    if chunk.group.group_id == longest
                    else 0,
                    raw_bytes=chunk.group.block_bytes * self._blocks_per_chunk,
                    levels=everywhere,
                    here=here,
                )
            )
        return plan

    # --- on the threads ---------------------------------------------------------------------

    def _store(self, chunk: ChunkBlocks, snapshot: Snapshot, namespace: bytes) -> None:
        reason = None
        raw_bytes = snapshot.nbytes
        blob_bytes = 0
        seconds = 0.0
        try:
            for number, level in enumerate(self._levels):
                key = blob_key(chunk.key, self._rank, number)
                started = time.thread_time()
                with beside_the_model(chunk.group.device):
                    blob = chunk.group.encode(snapshot, level.codec, key)
                seconds += time.thread_time() - started
                self._loads.blob_seen(number, raw_bytes, len(blob))
                blob_bytes += len(blob)
                if namespace != self._namespace:
                    reason = "reset"
                elif not self._put(number, key, blob):
                    reason = "refused"
                elif namespace != self._namespace:  # reset while it was being put
                    self._remove(key)
                    reason = "reset"
                if reason is not None:
                    break
        except StoreError as error:
            reason = "store_error"
            self._log_once(reason, "storing a chunk failed: %s", error)
        except Exception:
            reason = "encode_error"
            self._log_once(reason, "encoding a chunk failed", exc_info=True)
        with self._lock:
            self._staged_bytes -= raw_bytes
            if self._staged.get(chunk.key) is snapshot:
                del self._staged[chunk.key]
        self._measure_stores()
        if reason is not None:
            self._drop(chunk.key, reason)
            return
        with self._lock:
            count = self._report.counters
            count["stored_chunks", ()] += 1
            count["stored_raw_bytes", ()] += raw_bytes
            count["stored_blob_bytes", ()] += blob_bytes
            count["encode_seconds", ()] += seconds
            self._report.stored[chunk.key] += 1

    def _remove_namespace(self, store: Store, namespace: bytes) -> None:
        try:
            store.remove_prefix(namespace)
        except StoreError as error:
            self._log_once("reset", "store %s was not cleared: %s", store.name, error)
        self._measure_stores()

    def fetch(self, chunk: ChunkBlocks, level: int) -> tuple[bytes | Snapshot, int] | None:
        with self._lock:
            staged = self._staged.get(chunk.key)
        if staged is not None:
            return staged, 0
        key = blob_key(chunk.key, self._rank, level)
        here = self._is_here(key)
        try:
            blob = self._stores.get(key)
        except StoreError as error:
            self._log_once("store_error", "a store could not be read: %s", error)
            raise LoadFailed("store_error") from error
        except Exception as error:
            self._log_once("error", "loading a chunk failed", exc_info=True)
            raise LoadFailed("error") from error
        return None if blob is None else (blob, 0 if here else len(blob))

    def place(self, job_id: int, chunk: ChunkBlocks, level: int, fetched: bytes | Snapshot) -> int:
        try:
            with beside_the_model(chunk.group.device):
                if chunk.written is not None:
                    torch.cuda.current_stream().wait_event(chunk.written)
                if isinstance(fetched, Snapshot):
                    raw_bytes = self._write(chunk, fetched)
                    self._count_load(raw_bytes)
                    return raw_bytes
                return self._decode(chunk, level, fetched)
        except LoadFailed:
            raise
        except Exception as error:
            self._log_once("error", "loading a chunk failed", exc_info=True)
            raise LoadFailed("error") from error
        finally:
            self._measure_stores()

    def _decode(self, chunk: ChunkBlocks, level: int, blob: bytes) -> int:
        key = blob_key(chunk.key, self._rank, level)
        started = time.thread_time()
        try:
            content = chunk.group.decode(blob, self._levels[level].codec, key)
            if content.blocks > self._blocks_per_chunk:
                raise ForeignBlob(f"a blob of {content.blocks} blocks")
        except BlobError as error:
            self._log_once("corrupt", "a blob is corrupt and was removed: %s", error)
            self._remove(key)
            raise LoadFailed("corrupt") from error
        except ForeignBlob as error:
            self._log_once("foreign", "%s; it was removed", error)
            self._remove(key)
            raise LoadFailed("foreign") from error
        raw_bytes = self._write(chunk, content)
        self._count_load(raw_bytes, len(blob), time.thread_time() - started)
        with self._lock:
            self._report.counters["loaded_level_chunks", (self._levels[level].name,)] += 1
        return raw_bytes

    def _count_load(self, raw_bytes: int, blob_bytes: int = 0, seconds: float = 0) -> None:
        with self._lock:
            count = self._report.counters
            count["loaded_chunks", ()] += 1
            count["loaded_raw_bytes", ()] += raw_bytes
            count["loaded_blob_bytes", ()] += blob_bytes
            count["decode_seconds", ()] += seconds

    def _write(self, chunk: ChunkBlocks, content: Content) -> int:
        """Write a chunk's blocks into vLLM's pool; returns their bytes.

        What is held are the last blocks of the chunk. Raises LoadFailed if more are wanted.
        """
        missing = self._blocks_per_chunk - content.blocks
        if chunk.first_block < missing:
            raise LoadFailed("incomplete")
        for offset, block in enumerate(chunk.block_ids):
            place = chunk.first_block - missing + offset
            deferred = content.write(place, block, chunk.index + offset == 0)
            if deferred is not None:
                with self._lock:
                    self._deferred.append(deferred)
        _finish_writes(chunk.group.device)
        return content.nbytes * len(chunk.block_ids) // content.blocks

    def _put(self, level: int, key: bytes, blob: bytes) -> bool:
        """The first level goes to all stores. The others are for links: what a store of this
        process alone holds needs none."""
        if level == 0:
            return self._stores.put(key, blob)
        return any([store.put(key, blob) for store in self._stores.stores if store.shared])

    def _is_here(self, key: bytes) -> bool:
        return any(store.contains([key])[0] for store in self._stores.stores if not store.shared)

    def _remove(self, key: bytes) -> None:
        try:
            self._stores.remove([key])
        except StoreError as error:
            self._log_once("remove", "a damaged blob could not be removed: %s", error)

    # --- bookkeeping ------------------------------------------------------------------------

    def done(self, job_id: int, raw_bytes: int, seconds: float) -> None:
        result = TransferResult(
            job_id=job_id, success=True, transfer_size=raw_bytes, transfer_time=seconds
        )
        with self._lock:
            self._finished.append(result)

    def failed(self, job_id: int, chunk: ChunkBlocks, cause: str) -> None:
        self._fail(job_id, chunk.key, chunk.index, cause)

    def given_up(self, job_id: int, chunks: Sequence[ChunkBlocks]) -> None:
        with self._lock:
            for chunk in chunks:
                self._report.given_up.add(chunk.key)
                self._report.counters["given_up_chunks", ()] += 1
                self._report.has_gap(job_id, chunk.index)

    def _fail(self, job_id: int, key: bytes, index: int, cause: str) -> None:
        with self._lock:
            self._report.failed_loads.setdefault(job_id, set()).add(key)
            self._report.has_gap(job_id, index)
            self._report.counters["load_failures", (cause,)] += 1

    def _drop(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._report.gone.add(key)
            self._report.counters["dropped_chunks", (reason,)] += 1
        self._log_once(f"dropped {reason}", "a chunk was not stored: %s", reason)

    def _on_forget(self, key: bytes) -> None:
        chunk, level = split_blob_key(key)
        if level:  # such blobs are no reason for the scheduler to count a chunk as held
            return
        with self._lock:
            self._report.gone.add(chunk)

    def _measure_stores(self) -> None:
        """Take the stores' statistics, on a thread that may wait for a store."""
        rank = str(self._rank)
        for store in self._stores.stores:
            stats = store.stats()
            where = (stats.name, rank)
            with self._lock:
                gauges, count = self._report.gauges, self._report.counters
                gauges["store_bytes", where] = stats.bytes_held
                gauges["store_entries", where] = stats.entries
                gauges["store_capacity_bytes", where] = stats.capacity_bytes
                for name, total in (
                    ("evictions", stats.evictions),
                    ("store_errors", stats.errors),
                    ("rejected_blobs", stats.rejected),
                ):
                    delta = total - self._store_events[name, where]
                    if delta > 0:
                        count[name, where] += delta
                        self._store_events[name, where] = total
            if stats.errors:
                self._log_once(f"errors of {store.name}", "store %s fails", store.name)

    def _log_once(self, cause: str, message: str, *args: object, exc_info: bool = False) -> None:
        with self._lock:
            first = cause not in self._logged
            self._logged.add(cause)
        log: Callable[..., None] = logger.warning if first else logger.debug
        log(f"KV offload: {message}", *args, exc_info=exc_info)
