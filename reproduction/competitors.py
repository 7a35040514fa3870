"""The systems that ``compare`` trains with equal compute."""

from dataclasses import dataclass

from reproduction.drawing import BLACK, BLUE, BROWN, GREY, ORANGE, PINK, PURPLE, RED, shades

# Names without commas, so that ``--only`` can list them.
ONE, WIDE, SEPARATE = "one network", "one wider network", "separate networks"
TWO_NETWORKS, FOUR_NETWORKS = "two networks", "four networks"
LOW_RANK, LAST_LAYER, NORMAL = "low rank M=4", "last layer M=8", "normal M=4"
SIGNS = ("signs M=2", "signs M=4", "signs M=8")
SPLIT = ("signs M=2 split", "signs M=4 split", "signs M=8 split")


@dataclass(frozen=True)
class System:
    """Members and cost of a system.

    Attributes:
        members: Number of members; 0: as many as the budget pays for.
        shares_pass: Whether a pass of all members costs about one network.
        split: Whether batches are split among the members.
    """

    members: int = 1
    shares_pass: bool = False
    split: bool = False


SYSTEMS = {
    ONE: System(),
    WIDE: System(),
    SEPARATE: System(0),
    SIGNS[0]: System(2),
    SIGNS[1]: System(4),
    SIGNS[2]: System(8),
    SPLIT[0]: System(2, shares_pass=True, split=True),
    SPLIT[1]: System(4, shares_pass=True, split=True),
    SPLIT[2]: System(8, shares_pass=True, split=True),
    LOW_RANK: System(4),
    LAST_LAYER: System(8, shares_pass=True),
    NORMAL: System(4),
}
TUNED = {
    ONE: ONE,
    WIDE: ONE,
    SEPARATE: ONE,
    SIGNS[0]: SIGNS[1],
    SIGNS[1]: SIGNS[1],
    SIGNS[2]: SIGNS[1],
    SPLIT[0]: SIGNS[1],
    SPLIT[1]: SIGNS[1],
    SPLIT[2]: SIGNS[1],
    LOW_RANK: ONE,
    LAST_LAYER: ONE,
    NORMAL: NORMAL,
}
"""For each system, the system of its family whose learning rate it uses."""


def colours_of_systems() -> dict[str, str]:
    """Return a colour for each system; split batches have the colour of their members."""
    colours = {ONE: BLACK, WIDE: BROWN, SEPARATE: GREY}
    colours.update(shades(SIGNS, "viridis"))
    colours.update(zip(SPLIT, shades(SIGNS, "viridis").values(), strict=True))
    colours.update({TWO_NETWORKS: BLUE, FOUR_NETWORKS: PURPLE})
    colours.update({LOW_RANK: RED, LAST_LAYER: PINK, NORMAL: ORANGE})
    return colours
