"""The audit's result at ``/metrics``.

Workers find it, and the front end, another process, serves ``/metrics``; without a connector there
is no way for numbers between the two. So workers leave a small file each, in a folder that the
engine's instance names, and the front end reads them when it is asked.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

NAME = "vllm:kvcompress_kv_scale_layers"


def _folder(instance: str) -> Path:
    return Path(tempfile.gettempdir()) / f"vllm-kvcompress-audit-{instance}"


def publish(instance: str, rank: int, states: Iterable[str]) -> None:
    """Leave a worker's count of layers by state for the front end of this instance."""
    folder = _folder(instance)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{rank}.json").write_text(json.dumps(Counter(states)))
    except OSError:
        return  # a metric is not worth an engine


class _Collector(Collector):
    """Reads what the workers of the process's last engine have left."""

    instance: str | None = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            NAME, "Attention layers by what the audit of FP8 scales says.", labels=["rank", "state"]
        )
        if self.instance is not None:
            for path in sorted(_folder(self.instance).glob("*.json")):
                try:
                    counts = json.loads(path.read_text())
                except (OSError, ValueError):
                    continue
                for state, count in counts.items():
                    family.add_metric([path.stem, state], count)
        yield family


_collector = _Collector()


def serve(instance: str) -> None:
    """Let this process's metrics show what the workers of an instance publish, until it ends."""
    if _collector.instance is None:
        REGISTRY.register(_collector)
    if instance != _collector.instance:
        _collector.instance = instance
        atexit.register(shutil.rmtree, _folder(instance), ignore_errors=True)
