"""Whether the members of an ensemble may run as one larger batch.

Known where the code of the reference was read in full and does nothing but row-by-row operations on
one input. Otherwise the members run both ways on copies of the ensemble, with other parameters and
noise on the inputs, before a batch of new shapes is trusted to a folded pass. Where outputs or
buffers disagree, members run one after another from then on, and the reason is said once.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from embens.ensemble.layers import Modulation, Once
from embens.ensemble.run import Run, Way
from embens.reading.attention import Unfoldable
from embens.reading.flow import RANDOM
from embens.reading.samples import is_in_place, is_row_by_row
from embens.reading.state import find_state

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

TRIALS = 16  # after so many shapes of one mode, those between the extremes are trusted
MODES = 64  # with more kinds of arguments than this, members run one after another
LOOKING = frozenset(
    "__bool__ __int__ __float__ __index__ item tolist numpy nonzero unique unique_consecutive "
    "masked_select argwhere equal allclose is_nonzero".split()
)
"""Operations that look at the values of tensors, so that the code may branch on them."""
_ASKING = frozenset("eq ne lt le gt ge isfinite isnan isinf bool int long invert".split())
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class FoldingChoice:
    """Chooses the way of every pass of one ensemble.

    ``reason`` is why several members can't run at once; empty where they can, as far as is known.
    """

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.plan, self.network = ensemble.plan, ensemble.network
        self.known: dict[Any, dict[tuple[int, ...], Way]] = {}
        self.said = self.disagreed = False
        self.certain = self.plan.folding.shares and not self.plan.folding.unclear
        self.reason = self.plan.folding.impossible
        once = [m for m in self.network.modules() if isinstance(m, Once)]
        prefix = [inner for m in once for inner in m.modules()]
        self.norms = [m for m in prefix if isinstance(m, nn.modules.batchnorm._NormBase)]
        self.asks = False  # whether the code asks if all, or any, numbers of an input are so
        self.stateful = any(s.buffers | s.kept for s in map(find_state, once))
        self.draws = [self.network] if self.plan.random else []
        if self.plan.heads is None:  # else what is drawn is drawn once
            self.draws += [m for m in prefix if isinstance(m, RANDOM)]

    def choose(self, run: Run) -> Way:
        """Return the way for a pass."""
        if self.reason:
            return Way.EACH
        usual = self.certain and run.batch == "same" and not run.kwargs and len(run.inputs) == 1
        if usual and not any(m.training for m in self.draws):
            return Way.SHARED
        candidates = self._candidates(run)
        if not candidates or not self._suspects(run, candidates[0]):
            return candidates[0] if candidates else Way.EACH
        if torch.compiler.is_compiling():  # what was tried before counts, nothing is tried
            ways = {way for known in self.known.values() for way in known.values()}
            return ways.pop() if len(ways) == 1 else Way.EACH
        mode, shape = self._kind(run)
        known = self.known.setdefault(mode, {})
        if Way.EACH in known.values() or len(self.known) > MODES:
            return Way.EACH
        if shape not in known:
            if len(known) >= TRIALS and _between(shape, list(known)):
                return next(reversed(known.values()))
            found = self._try(run, candidates)
            if found is None:
                return Way.EACH
            if found is Way.EACH and self.disagreed:
                suspects = ", ".join(self._suspects(run, candidates[0])[:4])
                self._say(f"samples don't keep to themselves ({suspects})")
            known[shape] = found
        return known[shape]

    def _candidates(self, run: Run) -> list[Way]:
        if self.plan.heads is not None:
            return [Way.SHARED]
        drawing = any(m.training for m in self.draws)
        found = []
        if run.batch == "same" and self.plan.folding.shares and not drawing:
            found.append(Way.SHARED)
        updating = self.stateful or any(m.training or m.running_mean is None for m in self.norms)
        if not updating:  # else what members share would see its batch several times
            found.append(Way.REPEATED)
            if any(isinstance(v, Tensor) for v in tree_leaves(run.kwargs)):
                found.append(Way.REPEATED_INPUTS)
        return found

    def _suspects(self, run: Run, way: Way) -> list[str]:
        """Return what may mix samples in a pass; nothing where it is known that none does."""
        folding = self.plan.folding
        found = [*folding.unclear, *(folding.unclear_before if way is not Way.SHARED else ())]
        if run.kwargs:
            found.append("arguments passed by keyword")
        if len(run.inputs) != 1 or not isinstance(run.inputs[0], Tensor):
            found.append("several inputs")
        return found

    def _kind(self, run: Run) -> tuple[Any, tuple[int, ...]]:
        """Return what decides which code runs, and the shapes of all tensors."""
        leaves = tree_leaves((run.inputs, sorted(run.kwargs.items())))
        shapes = tuple(n for v in leaves if isinstance(v, Tensor) for n in v.shape)
        plain = (bool, int, float, str, type(None))
        values = tuple(
            v.dim() if isinstance(v, Tensor) else v if isinstance(v, plain) else type(v).__name__
            for v in leaves
        )
        modes = [m.training for m in self.network.modules()]
        if self.asks:  # which may be answered by other code
            inputs = (v for v in leaves if isinstance(v, Tensor) and not v.is_floating_point())
            modes += [bool(f) for v in inputs for f in (v.all(), v.any())]
        modes = hash(tuple(modes))
        return (run.batch, run.chunk, values, modes, torch.is_autocast_enabled("cpu")), shapes

    # Trying out

    @torch.no_grad()
    def _try(self, run: Run, candidates: list[Way]) -> Way | None:
        """Return the first way that agrees with member by member; None: nothing can be told."""
        if any(p.is_meta for p in run.ensemble.parameters()):
            return None
        for seed in (0, 1):  # what agrees once may do so by chance
            way = self._compare(run, candidates, seed, noise=0.1)
            if way is None and not self.reason:  # the noise may be outside what the code takes
                way = self._compare(run, candidates, seed, noise=0.0)
            if self.reason or way is None or way is Way.EACH:
                return None if self.reason else way
            candidates = [way]
        return candidates[0]

    def _compare(self, run: Run, candidates: list[Way], seed: int, noise: float) -> Way | None:
        try:
            each = self._outcome(run, Way.EACH, seed, noise)
        except Exception:
            return None
        for way in candidates:
            try:
                together = self._outcome(run, way, seed, noise)
            except Unfoldable:  # plain from the shapes, nothing to be warned of
                return Way.EACH
            except Exception:  # whatever fails is not the way
                self.disagreed = True
                continue
            agreed = _agree(each, together)
            if agreed is None or agreed:
                return way if agreed else None
            self.disagreed = True
        return Way.EACH

    def _outcome(self, run: Run, way: Way, seed: int, noise: float) -> tuple[Any, list[Tensor]]:
        """Return the outputs and the buffers of a copy that runs in some way."""
        generator = torch.Generator().manual_seed(seed)
        ensemble = copy.deepcopy(run.ensemble, _matrices(run.ensemble))
        _perturb(ensemble, generator)
        inputs = tree_map(lambda x: _noisy(x, noise, generator), run.inputs)
        trial = Run(ensemble, inputs, run.kwargs, batch=run.batch, chunk=run.chunk)
        still = _Still(0.37 + 0.36 * seed, (inputs, run.kwargs))
        count = min(run.chunk, run.members)
        each = way is Way.EACH
        devices = {p.device for p in ensemble.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)), still, trial:
            torch.manual_seed(seed)  # the same fresh masks each time
            outputs = trial.each(0, count) if each else trial.folded(0, count, way)
        self.asks = self.asks or still.asked
        if still.looked and each:  # no trial can tell what the code does with other values
            self.reason = f"the code looks at values ({', '.join(sorted(still.looked))})"
        return outputs, list(ensemble.buffers())

    # Refusing

    def refuse(self, error: Exception) -> None:
        """Go member by member from now on, because of an error that it does not have."""
        if isinstance(error, Unfoldable) and not self.plan.folding.unclear:
            return  # this batch has other axes than the code needs; others may not
        text = str(error).strip()
        self.reason = text.splitlines()[0] if text else type(error).__name__
        self._say(self.reason)

    def _say(self, reason: str) -> None:
        if not self.said:
            self.said = True
            warnings.warn(
                f"this network can't run several members at once ({reason}); its members run one "
                "after another from now on. Set ensemble.chunk = 1 to choose that yourself.",
                stacklevel=5,
            )


def _between(shape: tuple[int, ...], tried: list[tuple[int, ...]]) -> bool:
    columns = zip(shape, *tried, strict=True)
    return all(min(others) <= size <= max(others) for size, *others in columns)


def _matrices(ensemble: EmbeddedEnsemble) -> dict[int, Any]:
    """Return a memo for a copy that shares the large tensors, which a trial needs no others of."""
    mine = {id(p) for p in ensemble.individual_parameters()}
    owners = (m for m in ensemble.modules() if getattr(m, "max_norm", None) is None)
    every = (p for m in owners for p in m._parameters.values() if p is not None and p.dim() > 1)
    return {id(p): p for p in every if id(p) not in mine and 1e-3 < _size(p) < math.inf}


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt()) if tensor.is_floating_point() else 0.0


def _perturb(ensemble: EmbeddedEnsemble, generator: torch.Generator) -> None:
    """Change small numbers, so that members differ and nothing is zero that may not stay so."""
    masks = [m.values for m in ensemble.modules() if isinstance(m, Modulation)]
    kept = _matrices(ensemble)
    for tensor in {id(t): t for t in (*ensemble.parameters(), *masks)}.values():
        if tensor.is_floating_point() and tensor.numel() and id(tensor) not in kept:
            uniform = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            normal = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            changed = tensor * (1 + 0.5 * uniform).to(tensor)
            changed += 0.1 * (_size(tensor) or 0.1) * normal.to(tensor)
            tensor.data.copy_(changed)


def _noisy(value: Any, noise: float, generator: torch.Generator) -> Any:
    """Return inputs that are all different; whole numbers stay as they are."""
    if not noise or not isinstance(value, Tensor) or not value.is_floating_point():
        return value.clone() if isinstance(value, Tensor) else value
    normal = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    size = value.abs().amax() if value.numel() else 0
    return value + noise * (size + (size == 0)) * normal


def _agree(each: tuple[Any, list], together: tuple[Any, list]) -> bool | None:
    """Return whether outputs ``(member, …)`` and buffers agree; None: members are all alike."""
    left, right = ([v for v in tree_leaves(o) if isinstance(v, Tensor)] for o in (each, together))
    if [(a.shape, a.dtype) for a in left] != [(b.shape, b.dtype) for b in right]:
        return False
    for a, b in zip(left, right, strict=True):
        if not a.is_floating_point() or not a.numel():
            if not torch.equal(a, b):
                return False
        elif not math.isfinite(size := float(a.abs().amax())):
            return None
        elif float((a - b).abs().amax()) > _TOLERANCE[a.dtype] * size:
            return False
    outputs = (v for v in tree_leaves(each[0]) if isinstance(v, Tensor) and v.dim())
    told = any(len(a) > 1 and not torch.equal(a[0], a[-1]) for a in outputs)
    return True if told else None


class _Still(TorchFunctionMode):
    """Takes the chance out of random functions, so that two passes can be compared.

    The code may have ``looked`` at the values of a tensor, to branch on them perhaps, or only have
    ``asked`` if all, or any, numbers of an input are so, the same in a batch that repeats its rows.
    """

    _IDENTITIES = frozenset(
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ "
        "feature_dropout alpha_dropout_ feature_dropout_ native_dropout rrelu".split()
    )
    _DRAWS = frozenset(
        "rand randn rand_like randn_like normal uniform_ normal_ exponential_".split()
    )

    def __init__(self, value: float, inputs: Any) -> None:
        super().__init__()
        self.value, self.asked = value, False
        self.looked: set[str] = set()
        given = [v for v in tree_leaves(inputs) if isinstance(v, Tensor)]
        # What is made of inputs alone. Of sums: how many numbers; of answers: True.
        self.made: dict[int, tuple[Tensor, Any]] = {id(v): (v, None) for v in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in LOOKING and not _asked_by_torch():
            answer = self.made.get(id(args[0]), (None, None))[1] is True
            self.asked = self.asked or answer
            self.looked |= set() if answer else {name}
        if name in self._IDENTITIES:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
        result = func(*args, **kwargs)
        self._follow(name, args, kwargs, result)
        if name in ("bernoulli", "bernoulli_"):
            return result.fill_(1.0)
        return result.fill_(self.value) if name in self._DRAWS else result

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what is made row by row of inputs alone, and questions about all rows."""
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        known = [self.made[id(v)][1] for v in given if id(v) in self.made]
        if len(known) < len(given) or not given:
            place = args[0].untyped_storage().data_ptr() if is_in_place(name) else None
            for value in [v for v, _ in self.made.values() if place is not None]:
                if value.untyped_storage().data_ptr() == place:
                    del self.made[id(value)]
            return
        name = name.strip("_")
        whole = name == "eq" and isinstance(args[1], int) and args[1] == known[0]  # of a sum
        answer = whole or name in ("all", "any") or all(k is True for k in known)
        kept = {"getitem": slice(None), "view": len(given[0]) if given[0].dim() else None}
        axes = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:]
        part = bool(axes) and axes[0] == kept.get(name)
        if answer or name == "sum":
            note = answer or given[0].numel()
        elif name in _ASKING or is_row_by_row(name, args[1:]) or part:
            note = None
        else:
            return
        if isinstance(result, Tensor) and (note is None or result.dim() == 0):
            self.made[id(result)] = (result, note)


def _asked_by_torch() -> bool:
    """Return whether a module of torch, not the user's code, calls the function that is watched."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        if frame.f_globals["__name__"].startswith("torch.nn.modules."):
            return True
        frame = frame.f_back
    return False
