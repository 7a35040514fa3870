"""The law of weights: variances and gains of each parametrization."""

import pytest
import torch
from torch import nn

from embens.networks import Conv2d, Linear
from embens.theory.weight_law import weight_law


def test_in_the_ntk_parametrization_gains_are_variances():
    law = weight_law(Linear(4, 2, weight_std=2.0, bias_std=0.5), finite=False)
    assert law == (4.0, 0.25, 4.0, 0.25)


@pytest.mark.parametrize(("finite", "gain"), [(True, 0.25), (False, 0.0)])
def test_in_the_standard_one_the_gain_of_a_bias_is_one_over_the_fan_in(finite, gain):
    layer = Linear(4, 2, weight_std=2.0, bias_std=0.5, parametrization="standard")
    assert weight_law(layer, finite=finite) == (4.0, 0.25, 1.0, gain)


def test_xavier_has_the_ratio_of_fan_in_and_fan_out():
    layer = Conv2d(2, 6, 3, parametrization="xavier")
    assert weight_law(layer, finite=False).weight_variance == pytest.approx(2 * 18 / (18 + 54))


def test_torch_layers_are_uniform():
    torch.manual_seed(0)
    layer = nn.Linear(9, 30)
    assert weight_law(layer, finite=True) == pytest.approx((1 / 3, 1 / 27, 1.0, 1 / 9))
    assert weight_law(layer, finite=False).bias_variance == 0


def test_frozen_parameters_have_no_gain():
    layer = Linear(4, 2, bias_std=0.5)
    layer.weight.requires_grad_(False)
    assert weight_law(layer, finite=False) == (1.0, 0.25, 0.0, 0.25)
    layer.bias.requires_grad_(False)
    assert weight_law(layer, finite=False).bias_gain == 0


def test_other_weights_are_refused_by_name():
    layer = nn.Linear(9, 30)
    nn.init.normal_(layer.weight)
    with pytest.raises(ValueError, match=r"weights of 'head' \(Linear\) is not known"):
        weight_law(layer, finite=True, path="head")


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_refused(norm):
    layer = norm(nn.Linear(9, 30))
    with pytest.raises(TypeError, match=r"weight of 'up' \(.*Linear\) is computed from other"):
        weight_law(layer, finite=True, path="up")
