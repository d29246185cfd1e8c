# SPDX-License-Identifier: Apache-2.0
"""Run by the tests, isolated: a vendored package where only PyTorch and the DSL are installed.

Arguments: the site-packages folder, the package's folder. Prints JSON.
"""

import importlib
import importlib.util
import json
import site
import sys
from pathlib import Path

site.addsitedir(sys.argv[1])
folder = Path(sys.argv[2])
sys.path.insert(0, str(folder.parent))


def refusal_of(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def main():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    package = importlib.import_module(folder.name)
    imported = [name for name in ("cutlass", "fmha_gen") if name in sys.modules]
    with FakeTensorMode():
        q = torch.empty(2, 100, 3, 128, device="cuda", dtype=torch.bfloat16)
        out, lse = package.fmha_lse(q, q, q, causal=True)
        traced = refusal_of(package.fmha, q, q, q)
    refusal = refusal_of(
        package.fmha, *[torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16)] * 3
    )
    (name,) = package.KERNELS
    compiled = package.load(name).compile
    compiled()
    report = {
        "kernels": list(package.KERNELS),
        "imported": imported,
        "fake": [list(out.shape), str(out.device), list(lse.shape), str(lse.dtype)],
        "refusal": refusal,
        "traced": traced,
        "compiled": compiled.cache_info().misses == 1,
        "importable": [
            name
            for name in ("torch", "cutlass", "fmha_gen", "pydantic", "typer", "black")
            if importlib.util.find_spec(name)
        ],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
