# SPDX-License-Identifier: Apache-2.0
"""Stands in for the GPU process: a "kernel" says in its first lines what its process does.

Its ``events`` are written as they are; then it may ``sleep``, die of a ``signal`` or end with a
``status``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(kernel: str, events: str, *options: str) -> None:
    script = json.loads(Path(kernel).read_text(encoding="utf-8").splitlines()[0][1:])
    with Path(events).open("a", encoding="utf-8") as file:
        for event in script["events"]:
            file.write(json.dumps(event) + "\n")
        file.write(script.get("half_a_line", ""))
    print("options", *options)
    print("last words", file=sys.stderr, flush=True)
    time.sleep(script.get("sleep", 0))
    if "signal" in script:
        os.kill(os.getpid(), script["signal"])
    sys.exit(script.get("status", 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
