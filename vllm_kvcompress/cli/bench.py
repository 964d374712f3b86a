"""What compression does to latency and throughput, in servers side by side.

Starts `vllm serve` of every setting and sends the same requests to each, with the functions of
`vllm bench serve`, in rounds that change places, so that whatever else the machine does disturbs
all settings alike. Prompts are sent cold, then again (warm, from vLLM's own prefix cache), and with
an offload once more after that cache was emptied (restored, from the stores). Ratios are to the
model's own dtype in the same round, those of restored prompts to its cold ones: the median, with
the bounds that 95% of resampled rounds keep, or the extremes of fewer than six rounds.

Every option that is not one of these is passed on to `vllm serve`.

  vllm-kvcompress bench MODEL --settings kivi_2bit offload:cachegen/high --json > bench.json
  vllm-kvcompress bench MODEL --contexts 2048 8192 --concurrencies 1 8 --gpu-memory-utilization 0.4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.cli.options import add_comparison, add_counts, log_aside
from vllm_kvcompress.evaluation import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the settings and the load."""
    parser.usage = "%(prog)s MODEL [options] [options of vllm serve]"
    add_comparison(parser, ("kivi_2bit", "offload:cachegen/high"))
    add_counts(
        parser,
        (
            ("contexts", [1024], "tokens of a prompt"),
            ("concurrencies", [1, 4], "requests at a time"),
            ("requests", 4, "requests of each context and concurrency in a round, at least"),
            ("output-tokens", 32, "tokens of an answer"),
            ("rounds", 3, "rounds"),
        ),
    )
    parser.add_argument(
        "--one-at-a-time",
        action=argparse.BooleanOptionalAction,
        help="start the servers one after another, again in every round, instead of all at once; "
        "default: on a GPU, whose memory a server fills",
    )
    parser.set_defaults(rest=[])


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises ValueError for a server that does not start or answer."""
    log_aside(arguments.verbose)
    chosen = settings.parse_settings(arguments.settings)

    from vllm_kvcompress import compat
    from vllm_kvcompress.evaluation.server import ServerError
    from vllm_kvcompress.evaluation.speed import Load, bench
    from vllm_kvcompress.evaluation.text import read_texts

    load = Load(
        tuple(arguments.contexts),
        tuple(arguments.concurrencies),
        arguments.requests,
        arguments.output_tokens,
        arguments.rounds,
    )
    options, one_at_a_time = list(arguments.rest), arguments.one_at_a_time
    if one_at_a_time is None:
        one_at_a_time = not compat.is_cpu()
    if compat.is_cpu() and "--no-enforce-eager" not in options:
        # Compiling takes a minute or two a server there.
        options.append("--enforce-eager")
    texts = read_texts(arguments.text)
    try:
        found = bench(arguments.model, chosen, load, texts, options, one_at_a_time)
    except ServerError as error:
        raise ValueError(str(error)) from error
    if arguments.json:
        print(json.dumps(found))
    else:
        print_bench(found)
    return 0


def print_bench(found: Mapping[str, Any]) -> None:
    """A table a context and concurrency, for a person."""
    load = found["load"]
    print(
        f"{found['model']}: {load['rounds']} rounds of {load['requests']} requests or more, "
        f"{load['output_tokens']} tokens an answer"
    )
    width = max(len("setting"), *(len(name) for name in found["settings"]))
    cells = dict.fromkeys((row["context"], row["concurrency"]) for row in found["rows"])
    for context, concurrency in cells:
        print(f"\n{context} tokens of context, {concurrency} at a time")
        print(
            f"{'setting':{width}}  {'prompt':8}  {'first token':>11}  {'ratio':>18}  "
            f"{'next':>8}  {'p99':>8}  {'tokens/s':>8}  {'ratio':>18}"
        )
        for row in found["rows"]:
            if (row["context"], row["concurrency"]) != (context, concurrency):
                continue
            print(
                f"{row['setting']:{width}}  {row['phase']:8}  {row['ttft_ms']:8,.0f} ms  "
                f"{_ratio(row, 'ttft'):>18}  {row['tpot_ms']:5,.0f} ms  "
                f"{row['itl_p99_ms']:5,.0f} ms  {row['output_tokens_s']:8,.1f}  "
                f"{_ratio(row, 'output_tokens_s'):>18}".rstrip()
            )
    print(
        "\nratio: to the first setting in the same round, and its spread; that of restored prompts "
        "is to\nits cold ones. next: time of a further token. p99: between two tokens, the slowest "
        "in a hundred."
    )


def _ratio(row: Mapping[str, Any], name: str) -> str:
    ratio = row.get(f"{name}_ratio")
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""
