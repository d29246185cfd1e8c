# SPDX-License-Identifier: Apache-2.0
"""The PTX that a process compiles for itself, as `validate` does, is found, and is the record's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import support
from fmha_gen.build import records
from fmha_gen.build.toolchain import environment_for

STEM = "sm90_d64_bf16_causal_bwd"  # several kernels in one module
PROCESS = """
import importlib, json, sys
from pathlib import Path
from fmha_gen.build import device_code

folder, kernels, stem = sys.argv[1:]
device_code.keep(Path(folder))
sys.path.insert(0, kernels)
importlib.import_module(stem).compile()
print(json.dumps(device_code.kept(Path(folder))))
"""


def test_what_a_process_compiles_is_what_the_record_is_about(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        PROCESS,
        str(tmp_path),
        str(support.GENERATED),
        STEM,
    ]
    environment = environment_for(sys.executable) | {"CUTE_DSL_ARCH": "sm_90a"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    record = records.load(support.GENERATED / records.path_of(STEM))
    assert record is not None
    assert found["ptx_sha256"] == record["compiled"]["ptx_sha256"]
    assert found.keys() == {"ptx_sha256", "ptx_version"}
