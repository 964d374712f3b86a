"""The streaming policy over bandwidth traces, in simulated time, with a plot.

    python benchmarks/streaming_simulation.py --svg streaming.svg

Each trace is played against the policy, against every level alone and against recomputing. The
traces are synthetic, and one was recorded (``--record``: a connection over loopback while the
machine is at work, scaled to the mean that the others have).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vllm_kvcompress.streaming import Prior, Speeds, Stream, StreamChunk

RECORDED = Path(__file__).with_name("streaming_trace.json")
TICK = 0.01
"""How often a waiting load is looked at, in seconds."""


@dataclass(frozen=True)
class Trace:
    """Bytes a second, of intervals of equal length; the last one goes on for ever."""

    name: str
    rates: Sequence[float]
    interval: float = 0.1

    def rate(self, now: float) -> float:
        return self.rates[min(int(now / self.interval), len(self.rates) - 1)]

    def arrival(self, now: float, size: float) -> float:
        """When the last of so many bytes that are asked for now arrives; infinite for never."""
        place = min(int(now / self.interval), len(self.rates) - 1)
        while True:
            rate = self.rates[place]
            if place == len(self.rates) - 1:
                return now + size / rate if rate else math.inf
            end = (place + 1) * self.interval
            if size <= rate * (end - now):
                return now + size / rate
            size -= rate * max(0.0, end - now)
            now, place = end, place + 1


@dataclass(frozen=True)
class LevelSpeed:
    """A level as it is: how much smaller its blobs are, and bytes of KV decoded a second."""

    name: str
    ratio: float
    decode: float


@dataclass(frozen=True)
class Context:
    """What is loaded: chunks of KV, and how fast they could be computed instead."""

    chunks: int = 32
    tokens: int = 256
    raw_bytes: int = 5_898_240
    """SmolLM2-135M: 256 tokens of 30 layers, K and V, 3 heads of 64 channels in bf16."""
    recompute: float = 5000.0
    """Tokens a second; 0: it cannot be recomputed."""

    @property
    def chunk_seconds(self) -> float:
        return self.tokens / self.recompute if self.recompute else math.inf

    @property
    def recompute_seconds(self) -> float:
        return self.chunks * self.chunk_seconds


@dataclass
class Outcome:
    seconds: float = 0.0
    """Until everything is loaded or recomputed."""
    levels: list[str] = field(default_factory=list)
    """Of the chunks that were loaded, in order; the others were recomputed."""
    bandwidths: list[tuple[float, float]] = field(default_factory=list)
    """(time, bytes a second) as they were believed when a chunk was chosen."""


def simulate(
    trace: Trace,
    levels: Sequence[LevelSpeed],
    context: Context,
    deadline: float = math.inf,
    known: bool = False,
) -> Outcome:
    """Play one load: one fetch at a time, decoding beside it on one thread. ``known`` says whether
    an earlier load has measured the link as it is at the start."""
    speeds = Speeds([Prior(level.ratio, level.decode) for level in levels], threads=1)
    speeds.loads, speeds.recompute = 1, context.recompute
    chunks = [
        StreamChunk(context.tokens, context.raw_bytes, set(range(len(levels))))
        for _ in range(context.chunks)
    ]
    if known:
        speeds.link.fetched(trace.rate(0.0), -1.0, 0.0)
    stream = Stream(speeds, chunks, deadline, now=0.0)
    outcome = Outcome()
    decoding: list[tuple[float, int, int]] = []  # when done, chunk, level
    now = busy_until = 0.0

    def decode_until(moment: float) -> None:
        while decoding and decoding[0][0] <= moment:
            _, place, level = decoding.pop(0)
            stream.decoded(place, level, context.raw_bytes / levels[level].decode)

    for place in range(context.chunks):
        decode_until(now)
        level = stream.choose(place, now)
        outcome.bandwidths.append((now, speeds.link.bandwidth()))
        if level is None:
            break
        size = context.raw_bytes / levels[level].ratio
        began, arrival = now, trace.arrival(now, size)
        if arrival == math.inf and not context.recompute:
            return Outcome(math.inf)
        while now < arrival and not stream.is_late(place, now):
            now = min(now + TICK, arrival)
            decode_until(now)
        if now < arrival:
            speeds.link.fetched(0, began, now)
            break
        speeds.link.fetched(size, began, now)
        stream.fetched(place, level)
        busy_until = max(busy_until, now) + context.raw_bytes / levels[level].decode
        decoding.append((busy_until, place, level))
        outcome.levels.append(levels[level].name)
    left = context.chunks - len(outcome.levels)
    outcome.seconds = max(now, busy_until) + (left * context.chunk_seconds if left else 0.0)
    return outcome


# --- traces --------------------------------------------------------------------------------------


def synthetic_traces(mean: float) -> list[Trace]:
    """Links of every temper around a mean of so many bytes a second."""
    noise = random.Random(1)
    walk = [mean]
    for _ in range(199):
        walk.append(min(4 * mean, max(mean / 8, walk[-1] * math.exp(noise.gauss(0, 0.4)))))
    return [
        Trace("steady", [mean]),
        Trace("drop", [2 * mean] * 4 + [mean / 10]),
        Trace("rise", [mean / 10] * 4 + [2 * mean]),
        Trace("square", ([2 * mean] * 3 + [mean / 10] * 3) * 40),
        Trace("walk", walk),
        Trace("outage", [mean] * 3 + [0.0]),
    ]


def recorded_trace(mean: float) -> Trace:
    """The recorded link, scaled to a mean."""
    found = json.loads(RECORDED.read_text())
    scale = mean / (sum(found["rates"]) / len(found["rates"]))
    return Trace("recorded", [scale * rate for rate in found["rates"]], found["interval"])


def record(seconds: float, interval: float) -> None:
    """Record what a connection over loopback carries."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        with socket.create_connection(listener.getsockname()) as link:
            data = bytes(1 << 16)
            end = time.monotonic() + seconds + 1
            with suppress(ConnectionError):
                while time.monotonic() < end:
                    link.sendall(data)

    threading.Thread(target=send, daemon=True).start()
    connection, _ = listener.accept()
    rates = []
    with connection, listener:
        for _ in range(int(seconds / interval)):
            began, got = time.monotonic(), 0
            while time.monotonic() < began + interval:
                got += len(connection.recv(1 << 16))
            rates.append(round(got / (time.monotonic() - began)))
    RECORDED.write_text(json.dumps({"interval": interval, "rates": rates}) + "\n")


# --- report --------------------------------------------------------------------------------------

LEVELS = [LevelSpeed("high", 4.12, 0.85e9), LevelSpeed("low", 9.93, 0.85e9)]
COLOURS = {"policy": "#d62728", "high": "#1f77b4", "low": "#2ca02c", "recompute": "#888888"}


def seconds_of(trace: Trace, context: Context, deadline: float) -> dict[str, float]:
    """Seconds of the policy, of each level alone, and of recomputing."""
    never = Context(context.chunks, context.tokens, context.raw_bytes, recompute=0.0)
    found = {"policy": simulate(trace, LEVELS, context, deadline).seconds}
    for level in LEVELS:
        found[level.name] = simulate(trace, [level], never).seconds
    return {**found, "recompute": context.recompute_seconds}


def svg(traces: Sequence[Trace], context: Context, deadline: float) -> str:
    """A row a trace: the link and what was believed of it, the levels, and the seconds."""
    width, height, left = 640, 120, 90
    parts = []
    for row, trace in enumerate(traces):
        outcome = simulate(trace, LEVELS, context, deadline)
        results = seconds_of(trace, context, deadline)
        span = max(outcome.seconds, 0.1)
        top = row * (height + 30) + 20
        peak = max(trace.rates) * 1.1

        def x(now: float, span: float = span) -> float:
            return left + width * min(now, span) / span

        def y(rate: float, top: float = top, peak: float = peak) -> float:
            return top + height * (1 - min(rate, peak) / peak)

        times = [span * i / 400 for i in range(401)]
        link = " ".join(f"{x(t):.1f},{y(trace.rate(t)):.1f}" for t in times)
        believed = " ".join(f"{x(t):.1f},{y(b):.1f}" for t, b in outcome.bandwidths)
        parts.append(f'<text x="4" y="{top + 14}">{trace.name}</text>')
        parts.append(f'<polyline points="{link}" fill="none" stroke="#bbbbbb"/>')
        parts.append(f'<polyline points="{believed}" fill="none" stroke="#000000"/>')
        for (began, _), level in zip(outcome.bandwidths, outcome.levels, strict=False):
            parts.append(
                f'<circle cx="{x(began):.1f}" cy="{top + height}" r="3" fill="{COLOURS[level]}"/>'
            )
        for i, (name, needed) in enumerate(results.items()):
            shown = f"{needed:.2f} s" if needed < math.inf else "never"
            parts.append(
                f'<text x="{left + width + 10}" y="{top + 20 + 20 * i}" '
                f'fill="{COLOURS[name]}">{name} {shown}</text>'
            )
    total = len(traces) * (height + 30) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 150}" height="{total}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean", type=float, default=0.2, help="mean bandwidth in Gbit/s")
    parser.add_argument("--deadline", type=float, default=2.0, help="deadline in seconds")
    parser.add_argument("--recompute", type=float, default=5000.0, help="tokens a second")
    parser.add_argument("--svg", type=Path, help="write the plot here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="record the trace anew")
    arguments = parser.parse_args()
    if arguments.record:
        record(10.0, 0.1)
    context = Context(recompute=arguments.recompute)
    mean = arguments.mean * 1e9 / 8
    traces = [*synthetic_traces(mean), recorded_trace(mean)]
    figures = []
    print("seconds    policy      high       low recompute   levels of the policy")
    for trace in traces:
        outcome = simulate(trace, LEVELS, context, arguments.deadline)
        found = seconds_of(trace, context, arguments.deadline)
        row = "".join(
            f"{needed:10.2f}" if needed < math.inf else "     never" for needed in found.values()
        )
        counts = ", ".join(f"{outcome.levels.count(v.name)} {v.name}" for v in LEVELS)
        recomputed = context.chunks - len(outcome.levels)
        print(f"{trace.name:9s}{row}   {counts}, {recomputed} recomputed")
        finite = {name: needed if needed < math.inf else None for name, needed in found.items()}
        figures.append({"trace": trace.name, **finite, "levels": outcome.levels})
    if arguments.svg:
        arguments.svg.write_text(svg(traces, context, arguments.deadline))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
