"""One statement of the paper for each of its figures, and what we see there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """One row of the table in ``index.md``.

    Attributes:
        name: Name of the experiment.
        statement: What the paper says.
        claim: Statement of the claim whose value is shown.
        quantity: The measured quantity, in a few words.
        comment: What we see, in one or two sentences. ``{name}`` is a number from ``values`` or
            ``points``.
        verdicts: Verdicts of other statements on which the comment relies. The page is not written
            if they change.
        values: Statements whose values are shown in the comment, by name.
        points: The same for accuracies and fractions, which are multiplied by 100.
    """

    name: str
    statement: str
    claim: str
    quantity: str
    comment: str
    verdicts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)


FIGURES = [
    Figure(
        "transition",
        "Members change from independent to collective near p = 0.6.",
        "the curves separate into two groups near p=0.6",
        "p halfway between the regimes",
        "The middle of the change is at a larger p. Below it, 4 of 1, 4 and 16 members are best "
        "(paper: 7). Above it, 16 members train badly with γ=M and diverge at p=0.95, so that "
        "accuracy does not grow with M there.",
        verdicts={
            "below, ensemble accuracy rises with M and falls again": "holds",
            "below, the best number of members is near 7": "holds",
            "above, ensemble accuracy grows with M": "does not hold",
        },
    ),
    Figure(
        "widths",
        "Wider networks have room for more members (best M = 7 at width 1).",
        "the best number of members grows with the width",
        "exponent of the best M in the width",
        "Eight members are best at the two smaller widths, and 16, the most that were run, at the "
        "largest.",
    ),
    Figure(
        "trajectories",
        "With γ = M, members learn equally fast for every M (exponent 0).",
        "with γ=M members learn equally fast for every M (exponent 0, to 0.2)",
        "exponent in M of the time to learn half",
        "With γ=1 the exponent is {slow:.2f}, hardly larger and undecided as well (the paper: "
        "slower). M is 1, 4 and 16.",
        verdicts={
            "with γ=1 members learn more slowly with more members (exponent above 0.2)": "undecided"
        },
        values={
            "slow": "with γ=1 members learn more slowly with more members (exponent above 0.2)"
        },
    ),
    Figure(
        "lld-rates",
        "Last-layer dropout is best near ten members.",
        "the best number of members is near 10",
        "best M at the best rate",
        "The last hidden layer has 16 units here, 512 in the paper: room for one or two members.",
    ),
    Figure(
        "gradients",
        "The cosine between members' gradients falls as 1/width (exponent −1).",
        "|cos| ∝ 1/width, as in the paper",
        "exponent in the width, centred",
        "Inner layers fall as 1/width, the first and the last as 1/√width. So the total must "
        "approach 1/√width (an [erratum](#errata)).",
        verdicts={
            "|cos| ∝ 1/width in inner layers (theory)": "holds",
            "|cos| ∝ width^−1/2 in the first layer (theory)": "holds",
            "|cos| ∝ width^−1/2 in the last layer (theory)": "holds",
        },
    ),
    Figure(
        "ablation",
        "Modulations after the activation alone are as good as both.",
        "post only: as accurate as the baseline (to 1 %)",
        "accuracy minus that of both (M ≥ 4)",
        "They tend to be better than both. So are modulations before the activation alone "
        "({pre:+.1f} points), which are worse in the paper.",
        verdicts={"pre only: less accurate": "does not hold"},
        points={"pre": "pre only: less accurate"},
    ),
    Figure(
        "ntk-at-init",
        "The tangent kernel between members falls as 1/width (exponent −1).",
        "the ratio falls as 1/width when centred (normalised by the limit)",
        "exponent of its square in the width",
        "The effect of m other members grows as m^{centred:.1f} if centred and as m^{shifted:.1f} "
        "if shifted (paper: 1 and 2).",
        verdicts={
            "nll grows as m when centred": "holds",
            "nll grows as m² when shifted": "holds",
        },
        values={
            "centred": "nll grows as m when centred",
            "shifted": "nll grows as m² when shifted",
        },
    ),
    Figure(
        "mc-dropout",
        "With fixed centred masks, the best M grows with the width.",
        "with fixed centred masks the best M grows with width",
        "exponent of the best M in the width",
        "Four members are best on average at both widths. Fresh centred masks hardly learn, as in "
        "the paper.",
        verdicts={
            "with fresh centred masks the network hardly learns (half the accuracy)": "holds",
        },
    ),
    Figure(
        "lld",
        "Last-layer members become more correlated as p grows.",
        "correlation grows with p",
        "slope of the correlation in p",
        "At p=0, five of 1, 2, 5, 10 and 20 members are best at every width on average; ten come "
        "closer in wider networks.",
        verdicts={
            "at p=0 ensemble accuracy rises with M and falls again": "holds",
            "at p=0 the best M grows with width": "undecided",
        },
    ),
    Figure(
        "cost",
        "Last-layer dropout with 50 members costs about 10 % more time.",
        "a training step costs at most 1.1 × that of one network at M=50",
        "time of a training step ÷ one network's",
        "Inference takes {inference:.2f} × the time of one network. The time of a BatchEnsemble is "
        "proportional to M.",
        verdicts={
            "inference costs at most 1.1 × that of one network at M=50": "holds",
            "the time of a BatchEnsemble's step grows in proportion to M": "holds",
        },
        values={"inference": "inference costs at most 1.1 × that of one network at M=50"},
    ),
    Figure(
        "theorems",
        "Kernels between members vanish if and only if the last modulations are centred.",
        "the tangent kernel between members vanishes if only u of the last layer is centred",
        "kernel between ÷ within members, last u centred",
        "It is {shifted:.2f} if that u is not centred. A shared output bias makes it {bias:.2f} "
        "although u is centred (an [erratum](#errata)).",
        verdicts={
            "the tangent kernel between members does not vanish if u of the last layer is not "
            "centred": "holds",
            "the tangent kernel between members does not vanish with a shared output bias "
            "(an erratum)": "holds",
        },
        values={
            "shifted": "the tangent kernel between members does not vanish if u of the last layer "
            "is not centred",
            "bias": "the tangent kernel between members does not vanish with a shared output bias "
            "(an erratum)",
        },
    ),
    Figure(
        "parametrization",
        "Standard and NTK parametrization reach a similar accuracy.",
        "both reach a similar ensemble accuracy (to 1.5 %)",
        "accuracy, NTK minus standard",
        "After 30 epochs the NTK parametrization is far behind at its best learning rate. It "
        "trains more slowly, as in the paper, which trains longer.",
        verdicts={"the standard parametrization converges faster": "holds"},
    ),
]
