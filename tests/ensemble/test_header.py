"""Specifications survive JSON; every wrong field is an error with its name and value."""

import json
from dataclasses import dataclass

import pytest
from cases import ARCHITECTURES, FAMILIES

from embens import laws
from embens.ensemble.header import MAX_MEMBERS, check_unique, read_law, read_spec
from embens.fields import FIX
from embens.files import Refused
from embens.sites import Site
from embens.spec import EnsembleSpec, LowRankSite, PerMember

SPEC = EnsembleSpec(
    "embed",
    3,
    (Site("0", "pre", laws.Shifted(0.5), 4), Site("2", "post", laws.Normal(), 2, 2, False)),
    (LowRankSite("2", 1, "additive", 0.5),),
    (PerMember("4", ("weight", "bias"), drawn=True),),
    frozen=True,
)
PLACE = "x.safetensors: spec"


def parsed(spec: EnsembleSpec):
    return json.loads(json.dumps(spec.to_dict()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ARCHITECTURES[:4], ids=str)
def test_a_spec_survives_json(case, family):
    spec = FAMILIES[family](case.build(), members=3).spec
    assert read_spec(parsed(spec), PLACE) == spec
    subset = spec.subset([2, 0])
    assert read_spec(parsed(subset), PLACE) == subset


def test_the_spec_of_all_fields_survives_json():
    assert read_spec(parsed(SPEC), PLACE) == SPEC


def leaves(values, path=()):
    """Yield the paths of all plain values of parsed JSON."""
    items = {}
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    else:
        yield path
    for key, value in dict(items).items():
        yield from leaves(value, (*path, key))


def place_of(path):
    text = PLACE
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text


def edited(path, value):
    values = parsed(SPEC.subset([0, 2]))
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return values


WRONG = [None, float("nan"), 10**30, -1, 1.5, [[[]]], {"a": 1}, "nowhere" * 50]


@pytest.mark.parametrize("path", list(leaves(parsed(SPEC.subset([0, 2])))), ids=place_of)
def test_each_plain_field_refuses_values_of_another_type(path):
    refused = 0
    for value in (*WRONG, True, 0):
        try:
            read_spec(edited(path, value), PLACE)
        except Refused as error:
            refused += 1
            message = str(error)
            # An element of a list is named by its list, a parameter of a law by the law.
            assert any(place_of(path[:end]) in message for end in (len(path), len(path) - 1))
            assert FIX in message or "import its module first" in message

    assert refused >= 5


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("members",), True, "members must be an integer from 1 to"),
        (("members",), MAX_MEMBERS + 1, "members must be an integer from 1 to"),
        (("frozen",), 1, "frozen must be true or false, got 1"),
        (("chosen",), [0], "chosen must be empty, or a list of 2 members"),
        (("chosen",), [0, 3], "chosen must be a list of integers from 0 to 2"),
        (("sampled",), 0, "chosen must be a list of integers from 0 to -1"),
        (("sites", 0, "kind"), "side", "kind must be one of 'pre', 'post', got 'side'"),
        (("sites", 0, "size"), 0, "size must be an integer of at least 1, got 0"),
        (("sites", 0, "law"), {"law": "Normal", "mean": 0.0, "std": -1.0}, "std must be"),
        (("sites", 0, "law"), {"law": "Rademacher", "x": 1}, "unexpected keyword argument 'x'"),
        (("sites", 0, "law"), {"law": "os.system"}, "unknown law 'os.system'"),
        (("sites", 0, "law"), {"law": "Normal", "std": 1.0}, "law has no field 'mean'"),
        (
            ("sites", 0, "law"),
            {"law": "TypedSteps", "spread": "x"},
            "law.spread must be a value of",
        ),
        (
            ("sites", 0, "law"),
            {"law": "Constant", "value": 1e300},
            "value must be a number of at m",
        ),
        (("sites", 0, "law"), {}, "law.law must be a text"),
        (("low_rank", 0, "kind"), "other", "must be one of 'multiplicative', 'additive'"),
        (("low_rank", 0, "rank"), 0, "rank must be an integer of at least 1"),
        (("low_rank", 0, "scale"), float("inf"), "scale must be a finite number"),
        (("per_member", 0, "tensors"), ["weight", "weight"], "tensors has 'weight' twice"),
        (("surprise",), 1, "has an unknown field 'surprise'"),
    ],
)
def test_values_out_of_range_are_refused(path, value, message):
    with pytest.raises(Refused, match=message):
        read_spec(edited(path, value), PLACE)


@pytest.mark.parametrize("name", SPEC.to_dict())
def test_missing_fields_and_repeated_sites_are_refused(name):
    values = parsed(SPEC)
    repeated = {**values, name: values[name] * 2} if isinstance(values[name], list) else None
    if repeated is not None and values[name]:
        with pytest.raises(Refused, match=f"{name} has .* twice"):
            read_spec(repeated, PLACE)
    del values[name]
    with pytest.raises(Refused, match=f"has no field '{name}'"):
        read_spec(values, PLACE)


@dataclass(frozen=True)
class TypedSteps(laws.Discrete):
    """A law of a user, who checks nothing."""

    spread: float = 0.5
    count: int = 2
    names: tuple[str, ...] = ()

    @property
    def atoms(self):
        return [(1 - self.spread, 0.5), (1 + self.spread, 0.5)]


def test_laws_of_users_have_typed_parameters_and_may_get_new_ones():
    assert read_law({"law": "TypedSteps", "spread": 1}, "x") == TypedSteps(1)
    with pytest.raises(Refused, match=r"x\.count must be a value of type int, got True"):
        read_law({"law": "TypedSteps", "count": True}, "x")


def test_laws_and_names_are_checked_alone():
    assert read_law(laws.Signs(0.5).to_dict(), "x") == laws.Signs(0.5)
    with pytest.raises(Refused, match="x must be a dictionary, got 7"):
        read_law(7, "x")
    check_unique("x", ["a", "b"])
