"""Networks that others wrote keep the promises of :mod:`zoo.contract`.

``make test`` goes through a few of them, ``make test-zoo``, with timm, through all.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from zoo.architectures import TIMM, TRANSFORMERS, Architecture
from zoo.contract import check

pytest.importorskip("transformers")


def marked(case: Architecture):
    return pytest.param(case, id=str(case), marks=[] if case.usual else pytest.mark.zoo)


@pytest.mark.parametrize("case", [marked(case) for case in (*TRANSFORMERS, *TIMM)])
def test_a_network_of_others_keeps_every_promise(case, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of other libraries while they are imported
            reference = case.build()
        check(reference, case.inputs(), tmp_path)
