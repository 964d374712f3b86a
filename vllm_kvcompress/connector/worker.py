"""The worker's side: pages to blobs to stores and back, beside the model."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

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
from vllm_kvcompress.connector.fingerprint import RANK_BYTES, rank_key
from vllm_kvcompress.connector.manager import ChunkKeys
from vllm_kvcompress.connector.metrics import WorkerReport
from vllm_kvcompress.layout import PageLayout
from vllm_kvcompress.stores import Store, StoreError, StoreStack

logger = init_logger(compat.LOGGER_NAME)


class LoadFailed(Exception):
    """A chunk cannot be loaded; the message is the cause, as the metrics label it."""


@dataclass
class Snapshot:
    """Copied pages ``[layers, blocks, bytes]``; on a GPU there once ``ready`` has passed."""

    pages: torch.Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """The pages, for work on the calling thread's stream."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            self.pages.record_stream(torch.cuda.current_stream())
        return self.pages


_thread = threading.local()


def beside_the_model(device: torch.device) -> AbstractContextManager[object]:
    """Let the calling thread's work on a GPU run on a stream of its own."""
    if device.type != "cuda":
        return nullcontext()
    if not hasattr(_thread, "stream"):
        _thread.stream = torch.cuda.Stream(device)
    return torch.cuda.stream(_thread.stream)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the calling thread has given to a GPU so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass
class CacheGroup:
    """One cache group on this worker: its layout and its layers' pages."""

    group_id: int
    layout: PageLayout
    pages: list[torch.Tensor]
    """Per layer ``[blocks, bytes]``, views of vLLM's own pool."""

    def snapshot(self, block_ids: list[int]) -> Snapshot:
        """Copy whole blocks, in the order of the model's own work on the device."""
        device = self.pages[0].device
        ids = torch.tensor(block_ids, dtype=torch.int64, device=device)
        out = torch.empty(
            (len(self.pages), len(block_ids), self.layout.page_bytes),
            dtype=torch.int8,
            device=device,
        )
        for layer, pages in enumerate(self.pages):
            torch.index_select(pages, 0, ids, out=out[layer])
        return Snapshot(out, _mark(device))


@dataclass
class ChunkBlocks:
    """One chunk of a transfer and the blocks that it takes part with."""

    group: CacheGroup
    key: bytes
    first_block: int
    """Index in the chunk of the first of ``block_ids``."""
    block_ids: list[int]


@dataclass
class _LoadJob:
    started: float
    remaining: int
    raw_bytes: int = 0
    futures: list = field(default_factory=list)


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
            result.append(ChunkBlocks(group, key, offset, block_ids[:take]))
            block_ids = block_ids[take:]
            offset = 0
    return result, unclear


class ChunkWorker(OffloadingWorker):
    """Stores and loads chunks on threads; no step of the model waits for a codec or a store."""

    def __init__(
        self,
        groups: list[CacheGroup],
        blocks_per_chunk: int,
        codec: Codec,
        stores: StoreStack,
        rank: int,
        threads: int,
        staging_bytes: int,
    ) -> None:
        self._groups = groups
        self._blocks_per_chunk = blocks_per_chunk
        self._codec = codec
        self._stores = stores
        self._rank = rank
        self._staging_bytes = staging_bytes

        self._lock = threading.Lock()
        self._namespace = b""
        self._staged: dict[bytes, Snapshot] = {}  # key -> what waits for its encoder
        self._staged_bytes = 0
        self._load_jobs: dict[int, _LoadJob] = {}
        self._finished: list[TransferResult] = []
        self._report = WorkerReport()
        self._logged: set[str] = set()
        self._store_events = Counter()
        self._closed = False
        self._encoders = self._pool("kv-encode", threads)
        self._decoders = self._pool("kv-decode", threads)
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
            size = chunk.group.layout.block_bytes() * len(chunk.block_ids)
            if chunk.first_block + len(chunk.block_ids) != self._blocks_per_chunk:
                self._drop(chunk.key, "incomplete")  # its last blocks are not there
                continue
            with self._lock:
                fits = self._staged_bytes + size <= self._staging_bytes
                if fits:
                    self._staged_bytes += size
            if not fits:
                self._drop(chunk.key, "staging_full")
                continue
            snapshot = chunk.group.snapshot(chunk.block_ids)
            with self._lock:
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
            self._fail(job_id, key, "incomplete")
        job = _LoadJob(started=time.monotonic(), remaining=max(1, len(chunks)))
        # The blocks' earlier owners, and their zeroing, may still be at work on a GPU.
        written = _mark(self._groups[0].pages[0].device)
        with self._lock:
            self._load_jobs[job_id] = job
        if not chunks:
            self._load_done(job_id, 0)
        job.futures = [
            self._decoders.submit(self._load, job_id, chunk, written) for chunk in chunks
        ]
        return True

    def get_finished(self) -> list[TransferResult]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return when the loads among these jobs have written their last block.

        Stores need no waiting: their pages were copied when they were submitted.
        """
        with self._lock:
            futures = [f for j in job_ids if (job := self._load_jobs.get(j)) for f in job.futures]
        wait_for(futures)

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
        self._closed = True
        self._decoders.shutdown(wait=True, cancel_futures=True)
        self._encoders.shutdown(wait=True)
        self._stores.close()

    # --- on the threads ---------------------------------------------------------------------

    def _store(self, chunk: ChunkBlocks, snapshot: Snapshot, namespace: bytes) -> None:
        reason = None
        raw_bytes = snapshot.pages.numel()
        blob = b""
        seconds = 0.0
        try:
            key = rank_key(chunk.key, self._rank)
            started = time.thread_time()
            with beside_the_model(snapshot.pages.device):
                kv = chunk.group.layout.to_kv(snapshot.wait())
                blob = self._codec.encode(kv, fingerprint=key)
            seconds = time.thread_time() - started
            if namespace != self._namespace:
                reason = "reset"
            elif not self._stores.put(key, blob):
                reason = "refused"
            elif namespace != self._namespace:  # reset while it was being put
                self._remove(key)
                reason = "reset"
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
            count["stored_blob_bytes", ()] += len(blob)
            count["encode_seconds", ()] += seconds
            self._report.stored[chunk.key] += 1

    def _remove_namespace(self, store: Store, namespace: bytes) -> None:
        try:
            store.remove_prefix(namespace)
        except StoreError as error:
            self._log_once("reset", "store %s was not cleared: %s", store.name, error)
        self._measure_stores()

    def _load(self, job_id: int, chunk: ChunkBlocks, written: torch.cuda.Event | None) -> None:
        raw_bytes = 0
        try:
            if not self._closed:
                with beside_the_model(chunk.group.pages[0].device):
                    if written is not None:
                        torch.cuda.current_stream().wait_event(written)
                    raw_bytes = self._load_chunk(chunk)
        except LoadFailed as failure:
            self._fail(job_id, chunk.key, str(failure))
        except Exception:
            self._log_once("error", "loading a chunk failed", exc_info=True)
            self._fail(job_id, chunk.key, "error")
        finally:
            self._measure_stores()
            self._load_done(job_id, raw_bytes)

    def _load_chunk(self, chunk: ChunkBlocks) -> int:
        layout = chunk.group.layout
        with self._lock:
            staged = self._staged.get(chunk.key)
        if staged is not None:
            pages = staged.wait()
            for layer, place, page in self._targets(chunk, pages.shape[1]):
                page.copy_(pages[layer, place])
            _finish_writes(pages.device)
            return layout.block_bytes() * len(chunk.block_ids)

        key = rank_key(chunk.key, self._rank)
        try:
            blob = self._stores.get(key)
        except StoreError as error:
            self._log_once("store_error", "a store could not be read: %s", error)
            raise LoadFailed("store_error") from error
        if blob is None:
            raise LoadFailed("missing")
        device = chunk.group.pages[0].device
        started = time.thread_time()
        try:
            header = self._codec.inspect(blob)
            if header["fingerprint"] != key.hex():
                raise LoadFailed("foreign")
            kv = self._codec.decode(blob, device=device)
        except BlobError as error:
            self._log_once("corrupt", "a blob is corrupt and was removed: %s", error)
            self._remove(key)
            raise LoadFailed("corrupt") from error
        except LoadFailed:
            self._log_once("foreign", "a blob belongs to another key and was removed")
            self._remove(key)
            raise
        if not layout.fits(kv) or kv.shape[2] > self._blocks_per_chunk * layout.block_tokens:
            self._log_once("foreign", "a blob of another shape was removed")
            self._remove(key)
            raise LoadFailed("foreign")
        for layer, place, page in self._targets(chunk, kv.shape[2] // layout.block_tokens):
            layout.from_kv(kv, place, layer, page)
        _finish_writes(device)
        seconds = time.thread_time() - started
        raw_bytes = layout.block_bytes() * len(chunk.block_ids)
        with self._lock:
            count = self._report.counters
            count["loaded_chunks", ()] += 1
            count["loaded_raw_bytes", ()] += raw_bytes
            count["loaded_blob_bytes", ()] += len(blob)
            count["decode_seconds", ()] += seconds
        return raw_bytes

    def _targets(
        self, chunk: ChunkBlocks, held_blocks: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Each page to write, with its layer and its place among the blocks that are held.

        What is held are the last blocks of the chunk. Raises LoadFailed if more are wanted.
        """
        missing = self._blocks_per_chunk - held_blocks
        if chunk.first_block < missing:
            raise LoadFailed("incomplete")
        for layer, pages in enumerate(chunk.group.pages):
            for place, block in enumerate(chunk.block_ids, chunk.first_block - missing):
                yield layer, place, pages[block]

    def _remove(self, key: bytes) -> None:
        try:
            self._stores.remove([key])
        except StoreError as error:
            self._log_once("remove", "a damaged blob could not be removed: %s", error)

    # --- bookkeeping ------------------------------------------------------------------------

    def _load_done(self, job_id: int, raw_bytes: int) -> None:
        with self._lock:
            job = self._load_jobs[job_id]
            job.remaining -= 1
            job.raw_bytes += raw_bytes
            if job.remaining:
                return
            del self._load_jobs[job_id]
            self._finished.append(
                TransferResult(
                    job_id=job_id,
                    success=True,
                    transfer_size=job.raw_bytes,
                    transfer_time=time.monotonic() - job.started,
                )
            )

    def _fail(self, job_id: int, key: bytes, cause: str) -> None:
        with self._lock:
            self._report.failed_loads.setdefault(job_id, set()).add(key)
            self._report.counters["load_failures", (cause,)] += 1

    def _drop(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._report.gone.add(key)
            self._report.counters["dropped_chunks", (reason,)] += 1
        self._log_once(f"dropped {reason}", "a chunk was not stored: %s", reason)

    def _on_forget(self, key: bytes) -> None:
        with self._lock:
            self._report.gone.add(key[:-RANK_BYTES])

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
                for name, total in (("evictions", stats.evictions), ("store_errors", stats.errors)):
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
