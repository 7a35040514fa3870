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


ALLOWED = ("members do not differ in",)
"""Warnings that may occur: layers that members cannot modulate."""


def check(reference: nn.Module, inputs: Any, folder: Path) -> None:
    """Check one network; ``inputs`` are a tensor, a tuple or a dict."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        share = _check(reference, inputs, folder)
    texts = [str(w.message) for w in seen if "site-packages" not in w.filename]
    others = [t for t in texts if not any(words in t for words in ALLOWED)]
    assert not others, others[0]
    is_reported = any("members do not differ in" in str(w.message) for w in seen)
    assert is_reported or share > 0.8, f"members differ in {share:.0%} of the weights only"


def _check(reference: nn.Module, inputs: Any, folder: Path) -> float:
    randomise(reference.eval())
    before = copy.deepcopy(reference.state_dict())
    with torch.no_grad():
        expected = run(reference, inputs)
    options = {"members": MEMBERS, "example_input": inputs}
    same = embens.embed(reference, pre=ONE, post=ONE, **options)
    with torch.no_grad():
        outputs = run(same, inputs)
    assert type(outputs) is type(expected), "outputs are of another type"
    for a in range(MEMBERS):
        assert_close(pick(outputs, a), expected, "Constant(1) is not the reference")

    generator = torch.Generator().manual_seed(0)
    law = laws.Normal(1.0, 0.3)
    ensemble = embens.embed(reference, pre=law, post=law, generator=generator, **options)
    share = covered(ensemble, reference)
    outputs = run(ensemble, inputs)
    check_that_all_matter(ensemble, outputs)
    outputs = detached(outputs)
    with torch.no_grad():
        for chunk in (1, 2):
            assert_close(run(ensemble, inputs, chunk=chunk), outputs, f"chunk {chunk} differs")
        print(ensemble.executor)  # shown by pytest -rA
        for a in (0, MEMBERS - 1):
            alone = run(ensemble.member(a), inputs)
            assert_close(alone, pick(outputs, a), f"member({a}) is not its row")
    for shared in (True, False):
        ensemble.save(folder / "ensemble.safetensors", shared=shared)
        loaded = embens.load(folder / "ensemble.safetensors", reference)
        with torch.no_grad():
            assert_close(run(loaded, inputs), outputs, "loaded members are others")
    check_step(ensemble, inputs)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, before[name]), f"the reference's {name} has changed"
    return share


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
    return network(*inputs, **options) if isinstance(inputs, tuple) else network(inputs, **options)


def tensors(values: Any) -> list[Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]


def detached(values: Any) -> list[Tensor]:
    return [v.detach() for v in tensors(values)]


def pick(values: Any, a: int) -> list[Tensor]:
    return [v[a] for v in tensors(values)]


def assert_close(actual: Any, expected: Any, message: str) -> None:
    left, right = tensors(actual), tensors(expected)
    assert len(left) == len(right) > 0, f"{message}: {len(left)} tensors against {len(right)}"
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape, f"{message}: {tuple(a.shape)} against {tuple(b.shape)}"
        error = float((a - b).abs().max() / (b.abs().max() + 1e-9)) if b.numel() else 0.0
        assert error < TOLERANCE, f"{message}: by {error:.1g}"


def covered(ensemble: embens.EmbeddedEnsemble, reference: nn.Module) -> float:
    """Return the share of all weights that are those of layers in which members differ."""
    modulated = set()
    for site in ensemble.spec.sites:
        layer = ensemble.layers[site.layer]
        module = reference.get_submodule(layer.module)
        modulated |= {id(parameter) for parameter in module.parameters()}
    matrices = {id(p): p.numel() for p in reference.parameters() if p.dim() > 1}
    covered_size = sum(size for key, size in matrices.items() if key in modulated)
    return covered_size / sum(matrices.values())


def check_that_all_matter(ensemble: embens.EmbeddedEnsemble, outputs: Any) -> None:
    """Check that every member's numbers of every site have a part in the outputs."""
    generator = torch.Generator().manual_seed(1)
    losses = [(v * torch.randn(v.shape, generator=generator)).sum() for v in tensors(outputs)]
    torch.stack(losses).sum().backward()
    for name, values in ensemble.named_parameters():
        if any(values is p for p in ensemble.individual_parameters()):
            sizes = torch.zeros(1) if values.grad is None else values.grad.abs().amax(1)
            assert sizes.min() > 0, f"{name} does not matter"
    ensemble.zero_grad()


def check_step(ensemble: embens.EmbeddedEnsemble, inputs: Any) -> None:
    """Check that a step in training mode reaches every member's numbers and lowers the loss."""
    ensemble.train()
    members = list(ensemble.individual_parameters())
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=1e-3))
    loss = torch.stack([v.square().mean() for v in tensors(run(ensemble, inputs))]).sum()
    loss.backward()
    optimizer.step()
    reached = [p.grad is not None and bool((p.grad != 0).any()) for p in members]
    assert all(reached), f"{reached.count(False)} of {len(reached)} modulations are not trained"
    assert all(torch.isfinite(p).all() for p in ensemble.parameters()), "a step gives NaN"
