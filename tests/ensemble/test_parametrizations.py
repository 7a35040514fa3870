"""Layers that compute their weight."""

import torch
from torch import nn

import embens
from embens.ensemble.parametrizations import copy_with_plain_classes


class Tied(nn.Module):
    """Keeps a parametrized layer in a list, besides its registration."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.layers = [self.layer]

    def forward(self, x):
        return self.layers[0](x)


def test_copies_of_parametrized_layers_have_the_original_class_everywhere():
    reference = Tied()
    before = type(reference.layer)
    copied = copy_with_plain_classes(reference)
    assert type(copied.layer) is nn.Linear
    assert copied.layers[0] is copied.layer
    assert type(reference.layer) is before
    assert copied.layer is not reference.layer
    assert type(copy_with_plain_classes(reference.layer)) is nn.Linear
    ensemble = embens.batch_ensemble(nn.Sequential(reference, nn.ReLU(), nn.Linear(3, 2)), 2)
    x = torch.randn(4, 3)
    assert type(ensemble.member(1)[0].layers[0]) is nn.Linear
    torch.testing.assert_close(ensemble.member(1)(x), ensemble(x)[1])


class Spectral(nn.Module):
    """Two layers with spectral norm, far from converged, so that every power iteration shows."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        for layer in (self.a, self.b):
            nn.utils.parametrizations.spectral_norm(layer)
            direction = torch.randn(layer.out_features)
            layer.parametrizations.weight[0]._u.copy_(nn.functional.normalize(direction, dim=0))

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_extracted_members_have_the_weights_of_the_latest_pass_and_change_nothing():
    reference, x = Spectral().train(), torch.randn(6, 3)
    ensemble = embens.batch_ensemble(reference, 4)
    for chunk in (1, 2, 4):
        outputs = ensemble(x, chunk=chunk)
        reference(x)  # one power iteration, as in a pass of the ensemble
        before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
        members = torch.stack([ensemble.member(a)(x) for a in range(4)])

        torch.testing.assert_close(members, outputs)
        for name, tensor in ensemble.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(ensemble.reference.get_buffer(name), buffer)
