"""Errors for tools that cannot use an ensemble; each names what to use instead."""

from typing import Any

from torch import nn


class _StockTrainer:
    """Descriptor that raises when the ``Trainer`` of transformers reads ``accepts_loss_kwargs``.

    That trainer would take the member axis for the batch axis. ``EnsembleTrainer`` sets the
    attribute on its ensemble, so that the descriptor is not reached.
    """

    def __get__(self, ensemble: "GuardedModule | None", owner: type) -> Any:
        if ensemble is None:
            return self
        raise TypeError(
            "transformers.Trainer cannot train an ensemble. Use "
            "embens.training.huggingface.EnsembleTrainer, which has the same arguments, or "
            "embens.fit."
        )


class GuardedModule(nn.Module):
    """Base class of ensembles: raises TypeError in tools that need a plain network."""

    accepts_loss_kwargs = _StockTrainer()

    def __dir__(self) -> list[str]:
        # Tools such as inspect.getmembers read each attribute they find here.
        return [name for name in super().__dir__() if name != "accepts_loss_kwargs"]

    def __prepare_scriptable__(self) -> Any:
        """Refuse ``torch.jit.script``, which calls this method first."""
        raise TypeError(
            "torch.jit.script cannot compile an ensemble. Use torch.export.export(ensemble, (x,)) "
            "or ensemble.to_onnx(path, x), or script one member: ensemble.member(0)."
        )
