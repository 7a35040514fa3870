"""ONNX: a member, a collapsed network and a whole ensemble, checked with onnxruntime."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

import embens

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

EXPORTED = ("mlp", "paper's cnn", "residual", "grouped", "transformer")
CASES = [case for case in ARCHITECTURES if case.name in EXPORTED]


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("what", ["member", "collapsed", "ensemble"])
def test_an_exported_network_gives_the_same_outputs(case, what, tmp_path):
    reference, x = case.build().eval(), case.inputs(torch.Generator().manual_seed(0))
    if what == "collapsed":
        network: nn.Module = embens.last_layer_dropout(reference, 4).collapse()
    else:
        ensemble = embens.batch_ensemble(reference, 3)
        network = ensemble if what == "ensemble" else ensemble.member(1)
    network.eval()
    path = tmp_path / "network.onnx"
    torch.onnx.export(network, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(outputs), network(x), rtol=1e-4, atol=1e-5)
