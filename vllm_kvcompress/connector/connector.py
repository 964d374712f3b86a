"""``KVCompressConnector``: vLLM's offloading connector with compressed blobs in stores.

vLLM's own scheduler side decides what to store and to load and when; this class gives it our
manager and worker, and adds what it lacks: loads that may fail, fingerprints from the workers,
and a cache reset that reaches them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vllm_kvcompress import compat
from vllm_kvcompress.config import PASSED_TO_VLLM, OffloadSettings
from vllm_kvcompress.connector.manager import ChunkManager
from vllm_kvcompress.connector.metrics import WorkerReport
from vllm_kvcompress.connector.spec import KVCompressSpec, chunk_blocks
from vllm_kvcompress.connector.worker import ChunkWorker
from vllm_kvcompress.streaming import RecomputeSpeed


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """A step's transfers, and the namespace that their keys belong to."""

    namespace: bytes = b""
    recompute_speed: float = 0.0
    """Tokens of prefill a second, 0 where loads are not to be weighed against it."""
    idle: bool = False
    """Nothing is computed in this step."""


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What only the worker knows of its pages' meaning."""

    fingerprint: bytes


class _WorkerSide(OffloadingConnectorWorker):
    """vLLM's worker side, with loads that may fail and our own report."""

    spec: KVCompressSpec
    worker: ChunkWorker

    def __init__(
        self, spec: KVCompressSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.failed_requests: set[str] = set()
        self._report = WorkerReport()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.spec.find_layouts(kv_caches)
        super().register_kv_caches(kv_caches)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        loads = dict(self._load_jobs)
        sent, received = super().get_finished(finished_req_ids)
        # After the transfers, so that no failure of a finished load is left for later.
        self._report = self.worker.take_report()
        self.failed_requests = {loads[job] for job in self._report.usable_blocks if job in loads}
        return sent, received

    def build_connector_worker_meta(self) -> WorkerReport | None:
        done = self._connector_worker_meta
        report, self._report = self._report, WorkerReport()
        report.completed_jobs = done.completed_jobs
        report.transfer_stats = done.transfer_stats
        if report.is_empty():
            return None
        self._connector_worker_meta = WorkerReport()
        return report


class KVCompressConnector(OffloadingConnector):
    """Offload KV blocks, compressed, to a stack of stores; see the README for the settings."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        if compat.inside_multi_connector():
            raise ValueError(
                "KVCompressConnector does not work inside MultiConnector, which keeps its own "
                "kv_load_failure_policy and drops the workers' fingerprints; use it alone"
            )
        transfer = vllm_config.kv_transfer_config
        settings = OffloadSettings.parse(transfer.kv_connector_extra_config)
        # A chunk that cannot be loaded is recomputed; vLLM's default fails the request.
        transfer.kv_load_failure_policy = "recompute"

        passed = {
            name: value
            for name, value in transfer.kv_connector_extra_config.items()
            if name in PASSED_TO_VLLM
        }
        groups = compat.offload_groups(kv_cache_config)
        blocks = chunk_blocks(
            settings, max(part.block_tokens for parts in groups for part in parts)
        )
        config = build_offloading_config(
            compat.with_offload_config(vllm_config, {**passed, "blocks_per_chunk": blocks}),
            kv_cache_config,
        )
        self._canonical_layout = False
        spec = KVCompressSpec(config, settings, vllm_config, kv_cache_config)
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: _WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OffloadingConnectorScheduler(
                spec, vllm_config, kv_cache_config
            )
        else:
            self.connector_worker = _WorkerSide(spec, vllm_config, kv_cache_config)
        self._streaming = settings.streaming
        self._recompute_speed = RecomputeSpeed()
        self._usable_blocks: dict[str, int] = {}  # request -> what its load gave before a gap

    @property
    def _manager(self) -> ChunkManager:
        manager = self.scheduler.manager
        assert isinstance(manager, ChunkManager)
        return manager

    # --- worker side ------------------------------------------------------------------------

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        if self.connector_worker is None:
            return None
        return WorkerHandshake(self.connector_worker.spec.worker_fingerprint())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.connector_worker is not None and isinstance(connector_metadata, StepMetadata)
        worker = self.connector_worker.worker
        worker.set_namespace(connector_metadata.namespace)
        worker.begin_step(connector_metadata.recompute_speed, connector_metadata.idle)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self.connector_worker.failed_requests
        return results

    # --- scheduler side ---------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        told = [metadata[rank] for rank in sorted(metadata)]
        self._manager.set_worker_fingerprints(
            [handshake.fingerprint for handshake in told if isinstance(handshake, WorkerHandshake)]
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        self._recompute_speed.step_begins(
            scheduler_output.total_num_scheduled_tokens, time.monotonic()
        )
        step = super().build_connector_meta(scheduler_output)
        assert isinstance(step, OffloadingConnectorMetadata)
        return StepMetadata(
            load_jobs=step.load_jobs,
            store_jobs=step.store_jobs,
            jobs_to_flush=step.jobs_to_flush,
            namespace=self._manager.tell_namespace(),
            recompute_speed=self._recompute_speed.value if self._streaming else 0.0,
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._recompute_speed.step_ends(time.monotonic())
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._manager.take_report(report)
            for job_id, blocks in report.usable_blocks.items():
                self._take_gap(job_id, blocks, failed=job_id in report.failed_loads)
        for request_id in connector_output.failed_recving:
            self._keep_what_came(request_id)
        for request_id in connector_output.finished_recving or ():
            self._usable_blocks.pop(request_id, None)
        super().update_connector_output(connector_output)

    def _take_gap(self, job_id: int, blocks: int, failed: bool) -> None:
        """Remember what a load gave; after a failure its request stores all chunks again."""
        scheduler = self.scheduler
        job = scheduler._jobs.get(job_id)
        request = None if job is None else scheduler._req_status.get(job.req_id)
        if request is None:
            return
        known = self._usable_blocks.get(job.req_id, blocks)
        self._usable_blocks[job.req_id] = min(known, blocks)
        if failed:
            for group in request.group_states:
                group.next_stored_chunk_idx = 0

    def _keep_what_came(self, request_id: str) -> None:
        """Let a request go on from the first gap of its load; vLLM would begin it anew.

        With several cache groups it has to: what a window needs of the end of the prompt is not
        what it needs anywhere before.
        """
        groups = self.scheduler.config.kv_group_configs
        status = self.scheduler._req_status.get(request_id)
        if (
            len(groups) > 1
            or status is None
            or status.req.status != RequestStatus.WAITING_FOR_REMOTE_KVS
        ):
            return
        request = status.req
        request.num_computed_tokens = (
            self._usable_blocks.get(request_id, 0) * groups[0].tokens_per_block
        )
        if request.prefill_stats and request.num_preemptions <= 0:
            own = min(status.num_locally_computed_tokens, request.num_computed_tokens)
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=own,
                num_external_cached_tokens=request.num_computed_tokens - own,
            )

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        spec = {"spec_name": KVCompressSpec.__name__, "spec_module_path": KVCompressSpec.__module__}
        return super().build_prom_metrics(
            compat.with_offload_config(vllm_config, spec),
            metric_types,
            labelnames,
            per_engine_labelvalues,
        )
