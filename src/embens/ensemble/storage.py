"""Save and load ensembles: one safetensors file with a JSON header, no pickle.

The file holds every tensor of the ensemble (the reference's weights, modulations, masks, running
statistics) and, as JSON in its metadata, the plan: members, sites, laws. Nothing in it is ever
executed; loading needs the reference's architecture from the user.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from embens.ensemble.module import EmbeddedEnsemble
from embens.ensemble.plan import Plan, Site, check_plan
from embens.ensemble.surgery import operate
from embens.files import write_atomically
from embens.laws import Law, from_dict

FORMAT = "embens ensemble"
VERSION = 1


def plan_to_json(plan: Plan) -> str:
    """Return a plan as JSON."""
    data = dataclasses.asdict(plan)
    data["sites"] = [{**dataclasses.asdict(site), "law": site.law.to_dict()} for site in plan.sites]
    return json.dumps({"format": FORMAT, "version": VERSION, "plan": data})


def plan_from_json(text: str, laws: Iterable[type[Law]] = ()) -> Plan:
    """Return the plan that :func:`plan_to_json` wrote."""
    content = json.loads(text)
    if content.get("format") != FORMAT:
        raise ValueError("not an ensemble's header")
    if content.get("version") != VERSION:
        raise ValueError(
            f"the file has format version {content.get('version')}, this embens reads {VERSION}; "
            "use a newer embens"
        )
    data = content["plan"]
    sites = tuple(Site(**{**s, "law": from_dict(s["law"], laws)}) for s in data["sites"])
    return Plan(
        **{
            **data,
            "sites": sites,
            "own": tuple((name, tuple(names)) for name, names in data["own"]),
            "shared": tuple(tuple(entry) for entry in data["shared"]),
            "widths": tuple(data["widths"]),
            "overwriting": tuple(data["overwriting"]),
        }
    )


def save(ensemble: EmbeddedEnsemble, path: str | os.PathLike[str]) -> None:
    """Write an ensemble to one file."""
    from safetensors.torch import save_file

    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist")
    tensors = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in ensemble.state_dict().items()
    }
    metadata = {"embens": plan_to_json(ensemble.plan)}
    write_atomically(path, lambda name: save_file(tensors, name, metadata))


def load(
    path: str | os.PathLike[str],
    reference: nn.Module,
    *,
    laws: Iterable[type[Law]] = (),
) -> EmbeddedEnsemble:
    """Read an ensemble that :meth:`EmbeddedEnsemble.save` wrote.

    Args:
        path: the file.
        reference: a network of the same architecture; its weights are not used, and it is not
            changed.
        laws: classes of laws that are defined nowhere yet, or that share a name with others.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get("embens")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a whole safetensors file (truncated, or another format): {error}"
        ) from None
    if header is None:
        raise ValueError(
            f"{path.name} was not written by ensemble.save: it has tensors but no embens header"
        )
    try:
        plan = plan_from_json(header, laws)
    except (TypeError, KeyError, AttributeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} has a damaged embens header: {error!r}") from None
    try:
        check_plan(plan, reference)
    except TypeError as error:
        raise ValueError(f"{path.name} has a damaged embens header: {error}") from None
    stacks = [t for name, t in tensors.items() if name.endswith(".values") and t.numel()]
    if any(len(t) != plan.members for t in stacks):
        raise ValueError(f"{path.name}: header and tensors disagree on the number of members")
    ensemble = operate(reference, plan)
    _check_tensors(path.name, tensors, ensemble.state_dict())
    ensemble.load_state_dict(tensors)
    return ensemble


def _check_tensors(
    name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    for missing in expected.keys() - found.keys():
        raise ValueError(f"{name} has no tensor {missing!r}, which the reference needs")
    for extra in found.keys() - expected.keys():
        raise ValueError(f"{name} has a tensor {extra!r}, which the reference has no place for")
    for key, tensor in expected.items():
        if found[key].shape != tensor.shape:
            raise ValueError(
                f"{name}: {key!r} has shape {tuple(found[key].shape)}, the reference needs "
                f"{tuple(tensor.shape)}; pass a reference of the architecture that was saved"
            )
