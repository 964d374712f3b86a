"""An engine on a shared store that does what it is told, a line of JSON a request, until its input
ends: the second of two servers in a test.

A script of its own, as a process holds one engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.engine.conftest import running_engine


def main(model: str, offload: str) -> None:
    with running_engine(Path(model), json.loads(offload)) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("forget"):
                engine.forget_local()
            answers = engine.generate(*request["prompts"], **request.get("params", {}))
            engine.settle()
            print(
                "answer "
                + json.dumps(
                    {"answers": [vars(answer) for answer in answers], "metrics": engine.metrics()}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
