"""The text that ``print`` shows of an ensemble."""

import torch
from torch import nn

import embens


def test_the_repr_names_family_members_parameters_and_executor():
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    ensemble = embens.batch_ensemble(net, 3, p=0.5)
    representation = repr(ensemble)
    for part in ("batch_ensemble", "members=3", "shared parameters=114", "runs folded"):
        assert part in representation


def test_printing_before_the_first_call_traces_once(monkeypatch):
    traces = []
    trace = torch.fx.Tracer.trace

    def count(self, *args, **kwargs):
        traces.append(1)
        return trace(self, *args, **kwargs)

    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), 3)
    monkeypatch.setattr(torch.fx.Tracer, "trace", count)
    assert repr(ensemble) == repr(ensemble)
    assert len(traces) == 1
    ensemble.eval()
    repr(ensemble)
    assert len(traces) == 2
