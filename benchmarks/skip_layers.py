"""Layers left out of compressed pages: those that calibration chooses against others as many.

Each layer's loss is measured on one text; the lists are compared on others. Beside the chosen
layers stand random ones, the first and last ones, and none. The loss is the divergence of the
predictions from those after exact history, in nats a token.

    python benchmarks/skip_layers.py --data FILE [--count N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from rate_distortion import MODEL
from texts import chosen_texts

from vllm_kvcompress.calibration import sensitivity
from vllm_kvcompress.calibration.dump import load_model, tokenize
from vllm_kvcompress.calibration.samples import Source, load_samples


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--data", help="text that the layers are chosen on")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files to use")
    parser.add_argument("--count", type=int, default=4, help="layers left out (%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="to choose on (%(default)s)")
    parser.add_argument("--random", type=int, default=5, help="random lists (%(default)s)")
    parser.add_argument("--preset", default="kivi", help="of the KIVI pages (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if args.data is None:
        print("left out: no text to choose on was given (--data)")
        return

    model, tokenizer = load_model(args.model)
    size = sensitivity.WINDOW
    method = sensitivity.kivi_pages(preset=args.preset)
    windows = load_samples(Source(args.data), tokenizer, args.windows, size, seed=0)
    alone = sensitivity.measure(sensitivity.Probe(model, windows), method)["layers"]
    layers = range(len(alone))
    half = args.count // 2
    lists = {
        "none": [],
        "chosen": sorted(sorted(layers, key=lambda layer: -alone[layer])[: args.count]),
        "first and last": [*layers[: args.count - half], *layers[len(alone) - half :]],
    }
    for seed in range(args.random):
        chosen = random.Random(seed).sample(layers, args.count)
        lists[f"random {seed}"] = sorted(chosen)
    unseen = [
        piece
        for _, text in chosen_texts(args.text)
        for piece in tokenize(tokenizer, text, 2 * size).split(size)
    ]
    kept = [[layer for layer in layers if layer not in left_out] for left_out in lists.values()]
    found = sensitivity.Probe(model, unseen).divergences(method, kept)
    for (name, left_out), loss in zip(lists.items(), found, strict=True):
        print(f"{name:<16}{loss:>8.4f} nats a token, without {left_out}")
    drawn = [loss for name, loss in zip(lists, found, strict=True) if name.startswith("random")]
    if drawn:
        print(f"random, mean    {statistics.mean(drawn):>8.4f}, best {min(drawn):.4f}")
    if args.json:
        rows = [
            {"list": name, "layers": left_out, "divergence": loss}
            for (name, left_out), loss in zip(lists.items(), found, strict=True)
        ]
        args.json.write_text(json.dumps({"alone": alone, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
