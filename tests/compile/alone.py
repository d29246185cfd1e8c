# SPDX-License-Identifier: Apache-2.0
"""Run by the tests, isolated: what one kernel does where only the DSL and TVM-FFI are installed.

Arguments: the site-packages folder, the kernel's file. Prints JSON.
"""

import importlib.util
import inspect
import json
import site
import sys
from pathlib import Path

site.addsitedir(sys.argv[1])


class Tensor:
    """As much of a DLPack tensor as is looked at before its memory is."""

    def __init__(self, shape, device):
        self.shape, self.device = shape, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise BufferError("holds no memory")


CPU, CUDA = (1, 0), (2, 0)
# The first tensor, and all others that come by position.
BAD_CALLS = {
    "no tensor": (None, Tensor((1, 8, 8, 8), CPU)),
    "three sizes": (Tensor((8, 8, 8), CUDA), Tensor((1, 8, 8, 8), CUDA)),
    "on the CPU": (Tensor((1, 8, 8, 8), CPU), Tensor((1, 8, 8, 8), CPU)),
    "no memory": (Tensor((1, 8, 8, 8), CUDA), Tensor((1, 8, 8, 8), CUDA)),
}


def main():
    path = Path(sys.argv[2])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    # The entry has the operation's name; of the forward pass, none of its own.
    function = getattr(module, module.SPEC["op"], None) or module.fmha
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.default is x.empty]
    refusals = {}
    for what, (first, other) in BAD_CALLS.items():
        try:
            function(first, *(other for _ in names[1:]))
        except ValueError as error:
            refusals[what] = [names[0], str(error)]
    compiled_by_bad_calls = module.compile.cache_info().currsize
    module.compile()
    module.compile()
    report = {
        "refusals": refusals,
        "bad_calls": len(BAD_CALLS),
        "compiled_by_bad_calls": compiled_by_bad_calls,
        "compiled_once": module.compile.cache_info().misses == 1,
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        "documented": bool(module.__doc__ and function.__doc__),
    }
    print(json.dumps(report))


main()
