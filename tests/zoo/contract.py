"""The contract of an ensemble, checked on one network in float32."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import embens
from embens import laws

MEMBERS = 3
TOLERANCE = 2e-4
ONE = laws.Constant(1.0)


ALLOWED = ("members do not differ in", "with a transform or a compiled function")
"""Warnings that may occur: layers that members cannot modulate, and scripted functions."""


def check(reference: nn.Module, inputs: Any, folder: Path) -> None:
    """Check one network; ``inputs`` are a tensor, a tuple or a dict."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share = _check(reference, inputs, folder)
    messages = [str(warning.message) for warning in caught]
    is_reported = any("members do not differ in" in message for message in messages)
    assert is_reported or share > 0.8, f"members differ in {share:.0%} of the weights only"
    for warning in caught:
        is_of_library = "site-packages" in warning.filename
        assert is_of_library or any(words in str(warning.message) for words in ALLOWED), warning


def _check(reference: nn.Module, inputs: Any, folder: Path) -> float:
    randomise(reference.eval())
    state_before = copy.deepcopy(reference.state_dict())

    check_constant_modulations(reference, inputs)
    generator = torch.Generator().manual_seed(0)
    law = laws.Normal(1.0, 0.3)
    ensemble = embens.embed(
        reference, MEMBERS, pre=law, post=law, generator=generator, example_input=inputs
    )
    share = modulated_share(ensemble, reference)
    outputs = run(ensemble, inputs)
    check_that_all_matter(ensemble, outputs)
    outputs = [output.detach() for output in tensors(outputs)]
    check_members(ensemble, inputs, outputs)
    check_files(ensemble, reference, inputs, outputs, folder)
    check_step(ensemble, inputs)

    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, state_before[name]), f"the reference's {name} has changed"
    return share


@torch.no_grad()
def check_constant_modulations(reference: nn.Module, inputs: Any) -> None:
    """Check that members with modulations of 1 are the reference."""
    expected = run(reference, inputs)
    ensemble = embens.embed(reference, MEMBERS, pre=ONE, post=ONE, example_input=inputs)
    outputs = run(ensemble, inputs)
    assert type(outputs) is type(expected), "outputs are of another type"
    for a in range(MEMBERS):
        assert_close(pick(outputs, a), expected, "Constant(1) is not the reference")


@torch.no_grad()
def check_members(ensemble: embens.EmbeddedEnsemble, inputs: Any, outputs: list[Tensor]) -> None:
    """Check that chunks and single members give the outputs of the ensemble."""
    for chunk in (1, 2):
        assert_close(run(ensemble, inputs, chunk=chunk), outputs, f"chunk {chunk} differs")
    print(ensemble.executor)  # shown by pytest -rA
    for a in (0, MEMBERS - 1):
        member_outputs = run(ensemble.member(a), inputs)
        assert_close(member_outputs, pick(outputs, a), f"member({a}) is not its row")


@torch.no_grad()
def check_files(
    ensemble: embens.EmbeddedEnsemble,
    reference: nn.Module,
    inputs: Any,
    outputs: list[Tensor],
    folder: Path,
) -> None:
    """Check that a saved and loaded ensemble has the same outputs."""
    for shared in (True, False):
        ensemble.save(folder / "ensemble.safetensors", shared=shared)
        loaded = embens.load(folder / "ensemble.safetensors", reference)
        assert_close(run(loaded, inputs), outputs, "outputs of the loaded ensemble differ")


def randomise(network: nn.Module) -> None:
    """Give every tensor some size, so that no branch is switched off as it is at the start."""
    generator = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        size = 0.2 if parameter.dim() < 2 else 0.02
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += size * noise.to(parameter)


def run(network: nn.Module, inputs: Any, **options: Any) -> Any:
    if isinstance(inputs, Mapping):
        return network(**inputs, **options)
    if isinstance(inputs, tuple):
        return network(*inputs, **options)
    return network(inputs, **options)


def tensors(values: Any) -> list[Tensor]:
    """Return the floating tensors of a nested output."""
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def pick(values: Any, a: int) -> list[Tensor]:
    """Return the outputs of one member."""
    return [tensor[a] for tensor in tensors(values)]


def assert_close(actual: Any, expected: Any, message: str) -> None:
    """Compare nested outputs relative to the largest value of each tensor."""
    left, right = tensors(actual), tensors(expected)
    assert len(left) == len(right) > 0, f"{message}: {len(left)} tensors against {len(right)}"
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape, f"{message}: {tuple(a.shape)} against {tuple(b.shape)}"
        if b.numel() > 0:
            error = float((a - b).abs().max() / (b.abs().max() + 1e-9))
            assert error < TOLERANCE, f"{message}: by {error:.1g}"


def modulated_share(ensemble: embens.EmbeddedEnsemble, reference: nn.Module) -> float:
    """Return the share of all weights that are those of layers in which members differ."""
    modulated = set()
    for site in ensemble.spec.sites:
        layer = ensemble.layers[site.layer]
        module = reference.get_submodule(layer.module)
        modulated.update(id(parameter) for parameter in module.parameters())
    total_size = modulated_size = 0
    for parameter in reference.parameters():
        if parameter.dim() > 1:
            total_size += parameter.numel()
            if id(parameter) in modulated:
                modulated_size += parameter.numel()
    return modulated_size / total_size


def check_that_all_matter(ensemble: embens.EmbeddedEnsemble, outputs: Any) -> None:
    """Check that the outputs depend on the values of every member at every site."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for output in tensors(outputs):
        losses.append((output * torch.randn(output.shape, generator=generator)).sum())
    torch.stack(losses).sum().backward()
    individual = {id(parameter) for parameter in ensemble.individual_parameters()}
    for name, parameter in ensemble.named_parameters():
        if id(parameter) in individual:
            assert parameter.grad is not None, f"{name} does not matter"
            assert parameter.grad.abs().amax(1).min() > 0, f"{name} does not matter"
    ensemble.zero_grad()


def check_step(ensemble: embens.EmbeddedEnsemble, inputs: Any) -> None:
    """Check that a step in training mode has finite gradients at all members' parameters."""
    ensemble.train()
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=1e-3))
    losses = [output.square().mean() for output in tensors(run(ensemble, inputs))]
    torch.stack(losses).sum().backward()
    optimizer.step()
    for parameter in ensemble.individual_parameters():
        assert parameter.grad is not None, "a modulation is not trained"
        assert parameter.grad.any(), "a modulation is not trained"
    for parameter in ensemble.parameters():
        assert parameter.isfinite().all(), "a step gives NaN"
