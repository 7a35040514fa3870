"""MIMO and MixMo against explicit concatenation, sums of blocks and hand-written losses."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import embens
from reproduction.systems.loop import Recipe, train
from reproduction.systems.mimo import MIMO, loss_weights, member_orders


def make_mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def make_flattened_mlp():
    return nn.Sequential(nn.Flatten(), make_mlp())


def make_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2)
    )


def make_ntk_mlp():
    return embens.networks.mlp(inputs=4, width=6, depth=2, outputs=2, bias_std=0.3)


CASES = {
    "mlp": (make_mlp, (4,)),
    "tokens": (make_mlp, (5, 4)),
    "flattened mlp": (make_flattened_mlp, (2, 1, 2)),
    "cnn": (make_cnn, (3, 4, 4)),
    "ntk mlp": (make_ntk_mlp, (4,)),
}
cases = pytest.mark.parametrize("case", CASES)


def build(case, members=3, **options):
    make, shape = CASES[case]
    torch.manual_seed(0)
    reference = make().double()
    network = MIMO(reference, members, generator=torch.Generator().manual_seed(1), **options)
    inputs = torch.randn(members, 7, *shape, dtype=torch.float64)
    return reference, network, inputs


@cases
def test_one_pass_for_equal_inputs_is_the_explicit_concatenation(case):
    _, network, inputs = build(case)
    network.eval()
    repeated = inputs[:1].expand(inputs.shape)
    torch.testing.assert_close(network(inputs[0]), network.forward_members(repeated))


@cases
def test_the_first_layer_sums_the_outputs_of_the_blocks(case):
    reference, network, inputs = build(case)
    network.eval()
    reference.eval()
    outputs = network.forward_members(inputs)

    # A copy of the reference per member: first layer as a sum of plain layers, one head.
    wide_first = network.network.get_submodule(network.first)
    wide_last = network.network.get_submodule(network.last)
    first = reference.get_submodule(network.first)
    last = reference.get_submodule(network.last)
    before = []
    hook = first.register_forward_pre_hook(lambda layer, args: before.append(args[0]))
    for x in inputs:
        reference(x)
    hook.remove()
    total = 0
    for a, block in enumerate(wide_first.weight.detach().chunk(3, dim=1)):
        layer = copy.deepcopy(first)
        layer.weight.data = block
        if a > 0:
            nn.init.zeros_(layer.bias)
        total = total + layer(before[a])
    first.register_forward_hook(lambda layer, args, output: total)
    for a in range(3):
        last.weight.data = wide_last.weight.detach().chunk(3)[a]
        last.bias.data = wide_last.bias.detach().chunk(3)[a]
        torch.testing.assert_close(outputs[a], reference(inputs[a]))


@cases
def test_one_member_is_the_reference(case):
    reference, network, inputs = build(case, members=1)
    reference.eval()
    network.eval()
    assert torch.equal(network(inputs[0])[0], reference(inputs[0]))
    assert torch.equal(network.forward_members(inputs)[0], reference(inputs[0]))


def test_the_trunk_runs_once():
    _, network, inputs = build("cnn")
    shapes = []
    network.network[1].register_forward_pre_hook(lambda layer, args: shapes.append(args[0].shape))
    network(inputs[0])
    network.forward_members(inputs)

    assert shapes == [(7, 5, 4, 4)] * 2
    assert network.network[1].num_batches_tracked == 2


def test_the_reference_and_its_trunk_are_kept():
    reference, network, _ = build("mlp")
    assert reference[0].weight.shape == (6, 4)
    assert torch.equal(network.network[2].weight, reference[2].weight)
    assert torch.equal(network.network[0].bias, reference[0].bias)
    sizes = [tuple(parameter.shape) for parameter in network.parameters()]
    assert sizes == [(6, 12), (6,), (6, 6), (6,), (6, 6), (6,)]
    assert (network.network[0].in_features, network.network[4].out_features) == (12, 6)


def test_blocks_are_drawn_at_the_scale_that_keeps_the_size_of_the_sum():
    reference = nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 2))
    network = MIMO(reference, 4, generator=torch.Generator().manual_seed(0))
    blocks = network.network[0].weight.detach().unflatten(1, (4, 400))
    scale = reference[0].weight.std()

    torch.testing.assert_close(blocks.std((0, 2)), (scale / 2).expand(4), rtol=0.02, atol=0)
    torch.testing.assert_close(blocks.sum(1).std(), scale, rtol=0.02, atol=0)


def test_the_loss_is_the_sum_of_the_members_losses_on_their_samples():
    _, network, inputs = build("mlp")
    target = torch.arange(21).view(3, 7) % 2
    outputs = network.forward_members(inputs)
    expected = sum(F.cross_entropy(outputs[a], target[a]) for a in range(3))
    torch.testing.assert_close(network.loss(inputs, target), expected)
    values = torch.randn(3, 7, 2, dtype=torch.float64)
    squares = sum((outputs[a] - values[a]).square().mean() for a in range(3))
    torch.testing.assert_close(network.loss(inputs, values), squares)


def test_mixmo_mixes_encodings_and_weights_losses_by_the_cube_root_of_the_ratio():
    _, network, inputs = build("mlp", members=2, mixing=2.0)
    target = torch.arange(14).view(2, 7) % 2
    torch.manual_seed(3)
    ratio = (network.draw_shares() / 2).double()
    torch.manual_seed(3)
    loss = network.loss(inputs, target)

    layers = network.network
    first, second = layers[0].weight.chunk(2, dim=1)
    mixed = 2 * (ratio[0] * inputs[0] @ first.T + ratio[1] * inputs[1] @ second.T) + layers[0].bias
    outputs = layers[1:](mixed).chunk(2, dim=1)
    losses = [F.cross_entropy(outputs[a], target[a]) for a in range(2)]
    roots = ratio ** (1 / 3)
    expected = 2 * (roots[0] * losses[0] + roots[1] * losses[1]) / roots.sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(loss_weights(2 * ratio), 2 * roots / roots.sum())


def test_mixing_ratios_have_a_beta_distribution():
    _, network, _ = build("mlp", members=2, mixing=2.0)
    torch.manual_seed(0)
    ratios = torch.stack([network.draw_shares() for _ in range(2000)]) / 2

    torch.testing.assert_close(ratios.sum(1), torch.ones(2000))
    # Beta(2, 2) has mean 1/2 and variance 1/20.
    assert abs(ratios[:, 0].mean() - 0.5) < 4 * (0.05 / 2000) ** 0.5
    assert ratios[:, 0].var() == pytest.approx(0.05, rel=0.12)


@pytest.mark.parametrize("repetition", [0.0, 0.3, 1.0])
def test_orders_are_permutations_that_agree_at_a_fraction_of_positions(repetition):
    orders = member_orders(1000, torch.Generator().manual_seed(0), members=3, repetition=repetition)
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    agreement = (orders[1] == orders[0]).float().mean().item()
    # Shuffled positions agree by chance about once.
    assert repetition <= agreement <= repetition + 0.01
    equal = (orders == orders[0]).all(0).float().mean().item()
    assert equal == pytest.approx(repetition, abs=0.005)


@pytest.mark.parametrize("mixing", [None, 2.0])
def test_training_fits_the_data(mixing):
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = (x[:, 0] > 0).long()
    reference = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    network = MIMO(reference, 2, mixing=mixing)
    recipe = Recipe(epochs=20, lr=0.1, batch_size=20)
    order = partial(member_orders, members=2)
    train(network.loss, recipe.optimizer(network.parameters()), (x, y), recipe, order=order)

    assert embens.metrics.ensemble_accuracy(network(x), y) > 0.9


def test_layers_may_be_named():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 2)
            self.first = nn.Linear(4, 6)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    network = MIMO(Reversed(), 3, first="first", last="last")
    x = torch.randn(5, 4)
    torch.testing.assert_close(network(x), network.forward_members(x.expand(3, 5, 4)))


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="members must be a positive integer, got 0"):
        MIMO(make_mlp(), 0)
    with pytest.raises(ValueError, match=r"mixing must be positive or None, got -1"):
        MIMO(make_mlp(), 2, mixing=-1)
    with pytest.raises(ValueError, match="last layer must be Linear"):
        MIMO(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), 2)
    with pytest.raises(ValueError, match="without groups"):
        MIMO(nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 2)), 2)
    with pytest.raises(ValueError, match=r"shape \(3, batch, …\), got \(2, 5, 4\)"):
        MIMO(make_mlp(), 3).forward_members(torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match=r"fraction from 0 to 1, got 1.5"):
        member_orders(10, torch.Generator(), members=2, repetition=1.5)
