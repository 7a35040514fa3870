"""Whether the members of an ensemble may run as one larger batch.

Known where the code of the reference was read in full. Where it is not, two members run both ways,
with numbers that make them differ, before the first batch of a kind is trusted to a folded pass;
what does not agree runs member by member from then on, and the reason is said once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from embens.ensemble.layers import Once
from embens.ensemble.run import Run, Unfoldable, Way, batch_size
from embens.reading import RANDOM

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

TRIALS = 16
"""How many numbers of rows are tried out, in each mode, before they are folded."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class FoldingChoice:
    """Chooses the way of every pass of one ensemble."""

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.plan, self.network = ensemble.plan, ensemble.network
        self.known: dict[Any, dict[int, Way]] = {}
        self.said = False
        self.certain = self.plan.folding.shares and not self.plan.folding.unclear
        self.reason = self.plan.folding.impossible
        once = [m for m in self.network.modules() if isinstance(m, Once)]
        prefix = [inner for m in once for inner in m.modules()]
        self.norms = [m for m in prefix if isinstance(m, nn.modules.batchnorm._NormBase)]
        self.draws = [self.network] if self.plan.random else []
        self.draws += [m for m in prefix if isinstance(m, RANDOM)]

    def possible(self) -> bool:
        """Return whether several members can run at once, as far as is known."""
        return not self.reason

    def choose(self, run: Run) -> Way:
        """Return the way for a pass."""
        if self.reason:
            return Way.EACH
        usual = self.certain and run.batch == "same" and not run.kwargs
        if usual and not any(m.training for m in self.draws):
            return Way.SHARED
        candidates = self._candidates(run)
        if not candidates:
            return Way.EACH
        if not self._suspects(run, candidates[0]):
            return candidates[0]
        mode, rows = self._mode(run), batch_size((run.inputs, run.kwargs))
        known = self.known.setdefault(mode, {})
        if Way.EACH in known.values():
            return Way.EACH
        if rows not in known:
            if torch.compiler.is_compiling():
                return Way.EACH
            if len(known) >= TRIALS:
                return next(reversed(known.values()))
            found = self._try(run, candidates)
            if found is None:
                return Way.EACH
            if found is Way.EACH:
                suspects = ", ".join(self._suspects(run, candidates[0])[:4])
                self._say(f"samples don't keep to themselves ({suspects})")
            known[rows] = found
        return known[rows]

    def _candidates(self, run: Run) -> list[Way]:
        drawing = any(m.training for m in self.draws)
        found = []
        if run.batch == "same" and self.plan.folding.shares and not drawing:
            found.append(Way.SHARED)
        updating = any(m.training or m.running_mean is None for m in self.norms)
        if not updating:  # else what members share would see its batch several times
            found.append(Way.REPEATED)
            if any(isinstance(v, Tensor) for v in tree_leaves(run.kwargs)):
                found.append(Way.REPEATED_INPUTS)
        return found

    def _mode(self, run: Run) -> Any:
        """Return what decides, besides the number of rows, which code runs."""
        modes = tuple(m.training for m in self.network.modules())
        names = tuple(sorted(k for k, v in run.kwargs.items() if v is not None))
        return run.batch, names, hash(modes), torch.is_autocast_enabled("cpu")

    def _suspects(self, run: Run, way: Way) -> list[str]:
        """Return what may mix samples in a pass; nothing where it is known that none does."""
        folding = self.plan.folding
        found = [*folding.unclear, *(folding.unclear_before if way is not Way.SHARED else ())]
        if any(isinstance(v, Tensor) for v in tree_leaves(run.kwargs)):
            found.append("tensors passed by keyword")
        return found

    # Trying out

    @torch.no_grad()
    def _try(self, run: Run, candidates: list[Way]) -> Way | None:
        """Return the first way that agrees with member by member; None: nothing can be told."""
        if any(p.is_meta for p in run.ensemble.parameters()):
            return None
        for seed in (0, 1):  # what agrees once may do so by chance
            for noise in (0.1, 0.0):  # the noise may be outside what the code takes
                with _undisturbed(run.ensemble):
                    way = self._compare(run, candidates, seed, noise)
                if self.reason:
                    return None
                if way is not None:
                    break
            if way is None or way is Way.EACH:
                return way
            candidates = [way]
        return way

    def _compare(self, run: Run, candidates: list[Way], seed: int, noise: float) -> Way | None:
        generator = torch.Generator().manual_seed(seed)
        pair = [_differing(stack, generator) for stack in run.numbers]
        inputs = run.inputs
        if run.batch == "own":
            inputs = tree_map(lambda x: x[:2] if isinstance(x, Tensor) else x, inputs)
        inputs = tree_map(lambda x: _noisy(x, noise, generator), inputs)
        try:
            each = self._outputs(run, inputs, pair, Way.EACH)
        except Exception:
            return None
        for way in candidates:
            try:
                together = self._outputs(run, inputs, pair, way)
            except Exception:  # whatever fails is not the way
                continue
            agreed = _agree(each, together)
            if agreed is None or agreed:
                return way if agreed else None
        return Way.EACH

    def _outputs(self, run: Run, inputs: tuple, pair: list[Tensor], way: Way) -> Any:
        current, run.ensemble.current.run = run.ensemble.current.run, None
        numbers, still = [n.clone() for n in pair], _Still()
        trial = Run(run.ensemble, inputs, run.kwargs, batch=run.batch, chunk=2, numbers=numbers)
        try:
            with still, trial:
                if run.batch == "split":
                    return trial.split_each() if way is Way.EACH else trial.split_folded()
                return trial.each(0, 2) if way is Way.EACH else trial.folded(0, 2, way)
        finally:
            run.ensemble.current.run = current
            if still.looked:  # no trial can tell what the code does with other values
                self.reason = "the code looks at values"

    # Refusing

    def refuse(self, error: Exception) -> None:
        """Go member by member from now on, because of an error that it does not have."""
        if isinstance(error, Unfoldable) and not self.plan.folding.unclear:
            return  # this batch has other axes than the code needs; others may not
        text = str(error).strip()
        self.reason = text.splitlines()[0] if text else type(error).__name__
        self._say(self.reason)

    def _say(self, reason: str) -> None:
        if self.said:
            return
        self.said = True
        warnings.warn(
            f"this network can't run several members at once ({reason}); its members run one after "
            "another from now on. Set ensemble.chunk = 1 to choose that yourself.",
            stacklevel=5,
        )


def _differing(stack: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers of two members that differ even if all members are equal."""
    two = stack.detach()[[0, -1]]
    if not two.is_floating_point():
        return two.clone()
    noise = torch.rand(two.shape, generator=generator, dtype=torch.float64).to(two)
    return two * (1 + 0.5 * noise)


def _noisy(value: Any, noise: float, generator: torch.Generator) -> Any:
    """Return inputs that are all different; whole numbers stay as they are."""
    if not noise or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if not value.numel():
        return value
    normal = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    size = value.abs().amax()
    return value + noise * (size + (size == 0)) * normal


def _agree(each: Any, together: Any) -> bool | None:
    """Return whether outputs ``(member, …)`` agree; None where the members can't be told apart."""
    left = [v for v in tree_leaves(each) if isinstance(v, Tensor)]
    right = [v for v in tree_leaves(together) if isinstance(v, Tensor)]
    if len(left) != len(right) or any(a.shape != b.shape for a, b in zip(left, right, strict=True)):
        return False
    told = False
    for a, b in zip(left, right, strict=True):
        if a.is_floating_point() and a.numel():
            size = a.abs().amax()
            if not torch.isfinite(size):
                return None
            if float((a - b).abs().amax()) > _TOLERANCE[a.dtype] * float(size):
                return False
            told = told or (len(a) > 1 and not torch.equal(a[0], a[1]))
        elif not torch.equal(a, b):
            return False
    return True if told else None


@contextmanager
def _undisturbed(ensemble: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics) and the global random state back at the end."""
    buffers = [(b, b.detach().clone()) for b in ensemble.buffers()]
    devices = {b.device for b in ensemble.parameters()}
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        try:
            yield
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


class _Still(TorchFunctionMode):
    """Takes the chance out of random functions, so that two passes can be compared.

    Attributes:
        looked: whether the code has looked at the values of a tensor, to branch on them perhaps.
    """

    _IDENTITIES = frozenset(
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ "
        "feature_dropout alpha_dropout_ feature_dropout_ native_dropout rrelu".split()
    )
    _DRAWS = frozenset("rand randn rand_like randn_like bernoulli normal".split())
    _FILLS = frozenset("bernoulli_ uniform_ normal_ exponential_ random_".split())
    _LOOKS = frozenset(
        "__bool__ __int__ __float__ __index__ item tolist numpy nonzero unique unique_consecutive "
        "masked_select argwhere equal allclose is_nonzero".split()
    )

    def __init__(self) -> None:
        super().__init__()
        self.looked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        self.looked = self.looked or (name in self._LOOKS and not _asked_by_torch())
        if name in self._IDENTITIES:
            return args[0] if args else kwargs["input"]
        if name in self._FILLS:
            return args[0].fill_(1.0)
        if name == "multi_head_attention_forward":
            args = (*args[:10], 0.0, *args[11:])  # its probability of dropout
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
        result = func(*args, **kwargs)
        return result.fill_(1.0) if name in self._DRAWS else result


def _asked_by_torch() -> bool:
    """Return whether a module of torch, not the user's code, calls the function that is watched."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        if frame.f_globals["__name__"].startswith("torch.nn.modules."):
            return True
        frame = frame.f_back
    return False
