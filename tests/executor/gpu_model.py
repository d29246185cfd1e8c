# SPDX-License-Identifier: Apache-2.0
"""Preloaded by a worker: it has a GPU as far as this package can tell."""

from bench.model import ModelGauge
from fmha_gen.evidence import validate
from fmha_gen.tune import command


def require_gpu(*, sanitizer: bool = False) -> str:
    return ModelGauge.driver


validate.require_gpu = require_gpu
command.require_gpu = require_gpu
command.find_gpu = ModelGauge
