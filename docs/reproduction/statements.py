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
        comment: What we see, in a few sentences. ``{name}`` is a number from ``values`` or
            ``points``.
        verdicts: Verdicts of other statements on which the comment relies. The page is not written
            if they change.
        values: Statements whose values are shown in the comment, by name.
        points: The same for accuracies and fractions, which are multiplied by 100.
    """

    name: str
    statement: str
    claim: str
    comment: str
    verdicts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)


FIGURES = [
    Figure(
        "transition",
        "Members change from independent to collective near p = 0.6.",
        "the curves separate into two groups near p=0.6",
        "The correlation of members grows mainly around one p, which is larger than in the paper: "
        "{near:.0f} % of the growth lie within 0.1 of it. Above it members fit the training data "
        "better. The inverted U in M is not tested, because M ends at 4.",
        verdicts={
            "most of the change happens near the transition": "holds",
            "below the transition the correlation hardly depends on p": "holds",
            "the gap between members' train and test accuracy is smaller below": "holds",
            "below, ensemble accuracy rises with M and falls again": "undecided",
        },
        points={"near": "most of the change happens near the transition"},
    ),
    Figure(
        "widths",
        "Wider networks have room for more members.",
        "the best number of members grows with the width",
        "Averaged over seeds, 8 members are best at the two smaller widths, 16 (the most that were "
        "run) at the largest.",
    ),
    Figure(
        "trajectories",
        "With γ = M, members learn equally fast for every M.",
        "with γ=M members learn equally fast for every M (exponent 0, to 0.2)",
        "With M=1 and 4 the learning curves coincide at γ=M for both widths, but two seeds do not "
        "decide the exponent. At γ=1 four members are slower at the start and at the end. On "
        "digits (`quick`) the statement holds.",
    ),
    Figure(
        "lld-rates",
        "Last-layer dropout is best near ten members.",
        "the best number of members is near 10",
        "The last hidden layer has 16 units here, 512 in the paper: room for one or two members.",
    ),
    Figure(
        "gradients",
        "The cosine between members' gradients falls as 1/width.",
        "|cos| ∝ 1/width, as in the paper",
        "Inner layers fall as 1/width, the first and the last as 1/√width. The total lies between "
        "them and must approach 1/√width (an erratum).",
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
        "With M=4 they are better, so modulations at both places cost accuracy here. Modulations "
        "before the activation alone are better as well ({pre:+.1f} points; in the paper they are "
        "less accurate). "
        "Input and output modulations change the accuracy by {ends:.1f} points, not by −2 or more.",
        verdicts={
            "pre only: less accurate": "does not hold",
            "input and output: much worse (by 2 %)": "does not hold",
        },
        points={
            "pre": "pre only: less accurate",
            "ends": "input and output: much worse (by 2 %)",
        },
    ),
    Figure(
        "ntk-at-init",
        "The tangent kernel between members falls as 1/width.",
        "the ratio falls as 1/width when centred (normalised by the limit)",
        "The kernel at the smallest width has heavy tails, which leave the exponent open. For the "
        "ratio to the measured kernel it is {measured:.1f}, undecided as well. The effect of m "
        "other members grows as m^{centred:.1f} if centred and as m^{shifted:.1f} if shifted "
        "(paper: 1 and 2).",
        verdicts={
            "the ratio falls as 1/width when centred (normalised by the measured kernel)": (
                "undecided"
            ),
            "nll grows as m when centred": "holds",
            "nll grows as m² when shifted": "holds",
        },
        values={
            "measured": (
                "the ratio falls as 1/width when centred (normalised by the measured kernel)"
            ),
            "centred": "nll grows as m when centred",
            "shifted": "nll grows as m² when shifted",
        },
    ),
    Figure(
        "mc-dropout",
        "Fixed centred masks train independent members, with a best M that grows with the width.",
        "with fixed centred masks the best M grows with width",
        "Four members are best on average at both widths. The best M of single seeds varies, so "
        "the exponent is open. Members with fixed masks are much less correlated than with fresh "
        "shifted masks. Fresh centred masks hardly learn, as in the paper.",
        verdicts={
            "with fixed centred masks the best M grows with width": "undecided",
            "fixed centred masks are much less correlated (independent; by 0.1)": "holds",
            "with fresh centred masks the network hardly learns (half the accuracy)": "holds",
        },
    ),
    Figure(
        "lld",
        "Last-layer members become more correlated as p grows.",
        "correlation grows with p",
        "The other statements are undecided. On digits (`quick`) the best M grows with the width.",
    ),
    Figure(
        "cost",
        "Last-layer dropout with 50 members costs about 10 % more time.",
        "a training step costs at most 1.1 × that of one network at M=50",
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
        "The value is for ensembles in which only u of the last layer is centred. It is "
        "{shifted:.2f} if that u is not centred. With a shared output bias it is {bias:.2f} "
        "although u is centred, so the statement needs a network without this bias (an erratum).",
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
        "The difference is small, but the interval exceeds the tolerance of 1.5 points.",
    ),
]
