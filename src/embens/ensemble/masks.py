"""Fresh masks: modulations that are drawn at each pass.

They come from torch's global generator, or from a generator whose state is a buffer of the
ensemble, so that copies and loaded ensembles continue with the same masks.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.sites import Site

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def draw_masks(ensemble: "EmbeddedEnsemble", sites: Iterable[Site]) -> dict[str, Tensor]:
    """Draw the values of fresh sites for one pass, and advance the state of the generator.

    Args:
        ensemble: The ensemble.
        sites: Its fresh sites.

    Returns:
        Values of each site, ``(member, size)``, by its key.
    """
    generator = None
    if ensemble.generator_state is not None:
        generator = torch.Generator()
        generator.set_state(ensemble.generator_state.cpu())
    values = {}
    for site in sites:
        module = ensemble.reference.get_submodule(ensemble.layers[site.layer].module)
        example = next(module.parameters())
        shape = (ensemble.members, site.size)
        values[site.key] = site.law.sample(
            shape, generator, dtype=example.dtype, device=example.device
        )
    if ensemble.generator_state is not None and generator is not None:
        ensemble.generator_state.copy_(generator.get_state())
    return values


def seed_masks(ensemble: "EmbeddedEnsemble", generator: torch.Generator) -> None:
    """Draw the masks of later passes from a seed, not from torch's global generator.

    Args:
        ensemble: The ensemble.
        generator: Draws the seed.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    ensemble.generator_state = torch.Generator().manual_seed(seed).get_state()
