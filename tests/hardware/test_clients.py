# SPDX-License-Identifier: Apache-2.0
"""The parts of clients.py on a Hopper GPU; skipped, with the reason, without one.

pytest tests/hardware/test_clients.py -s
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import validate

torch = pytest.importorskip("torch", reason="the clients use PyTorch")
clients = importlib.import_module(".clients", __package__)

pytestmark = pytest.mark.hardware


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        validate.require_gpu()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels vendored here are for sm90")
    folder = tmp_path_factory.mktemp("consumer") / "attention_of_clients"
    return clients.Setup(clients.imported(folder))


@pytest.mark.parametrize("part", clients.PARTS)
def test_a_client_is_served(part: str, setup: Any) -> None:
    found = clients.outcome(part, setup)
    print(found.line())
    if found.status == "absent":
        pytest.skip(found.said)
    assert found.status == "passed", found.said
