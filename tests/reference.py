"""Members written by hand, which the tests compare ensembles with."""

import copy
import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from embens import EmbeddedEnsemble


@dataclass
class Modulation:
    """Values of a site, ``(member, size)``, and the number of features per value."""

    values: Tensor
    repeat: int


def modulations(ensemble: EmbeddedEnsemble) -> dict[tuple[str, str], Modulation]:
    """Return every modulation by (layer, kind)."""
    by_site = {}
    for site in ensemble.spec.sites:
        values = ensemble.site_values(site)
        by_site[site.layer, site.kind] = Modulation(values, site.repeat)
    return by_site


def member_by_hand(reference: nn.Module, ensemble: EmbeddedEnsemble, a: int) -> nn.Module:
    """Return the reference with hooks that multiply inputs of layers by u and outputs by v.

    The weights of attention are scaled by rows and columns instead, and recurrent layers run step
    by step.
    """
    network = copy.deepcopy(reference)
    modules = dict(network.named_modules())
    recurrent = {name for name, module in modules.items() if isinstance(module, nn.RNNBase)}
    scales: dict[str, dict[tuple[str, str], Tensor]] = {name: {} for name in recurrent}
    for site in ensemble.spec.sites:
        values = ensemble.site_values(site).detach()[a].repeat_interleave(site.repeat)
        core = site.layer if site.layer in recurrent else site.layer.rpartition(".")[0]
        if core in recurrent:
            level = site.layer.removeprefix(core).lstrip(".") or "l0"
            scales[core][level, site.kind] = values
            continue
        owner, _, projection = site.layer.rpartition(".")
        if isinstance(modules.get(owner), nn.MultiheadAttention):
            _scale_projection(modules[owner], projection, site.kind, values)
            continue
        layer = modules[site.layer]
        if isinstance(layer, _ConvNd):
            values = values.reshape(-1, *(1,) * len(layer.kernel_size))
        if site.kind == "post":
            layer.register_forward_pre_hook(
                lambda m, args, values=values: (args[0] * values, *args[1:])
            )
        else:
            layer.register_forward_hook(lambda m, args, output, values=values: output * values)
    for name in recurrent:
        modules[name].forward = functools.partial(run_by_hand, modules[name], scales[name])
    return network


def run_by_hand(
    core: nn.RNNBase, scales: dict[tuple[str, str], Tensor], x: Tensor
) -> tuple[Tensor, object]:
    """Return what an LSTM or GRU returns, with its inputs and gates multiplied by scales.

    Args:
        core: with ``batch_first``.
        scales: u and v by ("l0", "post"), ("l0_reverse", "pre") and so on.
        x: ``(batch, time, feature)``.
    """
    hidden, cells = [], []
    suffixes = ["", "_reverse"] if core.bidirectional else [""]
    for level in range(core.num_layers):
        outputs = []
        for suffix in suffixes:
            key = f"l{level}{suffix}"
            if suffix == "_reverse":
                states, cell = _run_direction(core, key, scales, x.flip(1))
                outputs.append(states.flip(1))
            else:
                states, cell = _run_direction(core, key, scales, x)
                outputs.append(states)
            hidden.append(states[:, -1])
            cells.append(cell)
        x = torch.cat(outputs, -1)
    if isinstance(core, nn.LSTM):
        return x, (torch.stack(hidden), torch.stack(cells))
    return x, torch.stack(hidden)


def _run_direction(
    core: nn.RNNBase, key: str, scales: dict[tuple[str, str], Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states ``(batch, time, feature)`` of a level and direction, and its last cell."""
    u, v = scales.get((key, "post"), 1.0), scales.get((key, "pre"), 1.0)
    weight_ih, bias_ih = getattr(core, f"weight_ih_{key}"), getattr(core, f"bias_ih_{key}")
    weight_hh, bias_hh = getattr(core, f"weight_hh_{key}"), getattr(core, f"bias_hh_{key}")
    h = c = x.new_zeros(len(x), core.hidden_size)
    states = []
    for time in range(x.shape[1]):
        from_input = v * F.linear(u * x[:, time], weight_ih, bias_ih)
        from_state = v * F.linear(h, weight_hh, bias_hh)
        if isinstance(core, nn.LSTM):
            i, f, g, o = (from_input + from_state).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            reset, update, new = from_input.chunk(3, -1)
            reset_of_state, update_of_state, new_of_state = from_state.chunk(3, -1)
            reset = (reset + reset_of_state).sigmoid()
            update = (update + update_of_state).sigmoid()
            new = (new + reset * new_of_state).tanh()
            h = new + update * (h - new)
        states.append(h)
    return torch.stack(states, 1), c


def _scale_projection(
    attention: nn.MultiheadAttention, projection: str, kind: str, values: Tensor
) -> None:
    with torch.no_grad():
        if projection == "out_proj":
            weight, bias = attention.out_proj.weight, attention.out_proj.bias
        else:
            index = ("q_proj", "k_proj", "v_proj").index(projection)
            rows = slice(index * attention.embed_dim, (index + 1) * attention.embed_dim)
            if attention.in_proj_weight is None:
                weight = getattr(attention, f"{projection}_weight")
            else:
                weight = attention.in_proj_weight[rows]
            bias = attention.in_proj_bias[rows]
        if kind == "post":
            weight.mul_(values)
        else:
            weight.mul_(values[:, None])
            bias.mul_(values)


def randomise_statistics(module: nn.Module, generator: torch.Generator) -> None:
    """Fill running statistics with random values."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
