"""Gradients that are accumulated chunk by chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embens


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("make", [embens.batch_ensemble, embens.last_layer_dropout])
def test_gradients_are_those_of_one_pass(make, chunk):
    ensemble = make(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 3).double()
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    loss = ensemble.objective(ensemble(x), target)
    parameters = list(ensemble.parameters())
    expected = torch.autograd.grad(loss, parameters)

    torch.testing.assert_close(ensemble.backward(x, target, chunk=chunk), loss.detach())
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_memory_of_backward_is_that_of_one_chunk():
    reference = embens.networks.cnn((8, 16), inputs=3, outputs=5, image=16)
    ensemble = embens.batch_ensemble(reference, 8)
    x, target = torch.randn(16, 3, 16, 16), torch.randint(5, (16,))

    def most_saved(run) -> int:
        sizes = {"alive": 0, "peak": 0}

        class Saved:
            def __init__(self, tensor):
                self.tensor = tensor
                sizes["alive"] += tensor.numel()
                sizes["peak"] = max(sizes.values())

            def __del__(self):
                sizes["alive"] -= self.tensor.numel()

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            run()
        return sizes["peak"]

    single = most_saved(lambda: F.cross_entropy(reference(x), target).backward())
    whole = most_saved(lambda: ensemble.objective(ensemble(x), target).backward())
    stepwise = most_saved(lambda: ensemble.backward(x, target, chunk=1))
    assert stepwise < 1.5 * single < whole / 4
