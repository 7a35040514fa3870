"""The specification of an ensemble in the header of a file, read field by field."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, cast

from embens.fields import FIX, Fields
from embens.files import Refused
from embens.laws import Law, from_dict, registered
from embens.sites import Site
from embens.spec import EnsembleSpec, LowRankSite, PerMember

MAX_MEMBERS = 2**20
"""Members that a file may ask for: fresh masks have no tensors that would prove their number."""
LARGEST_PARAMETER = 1e30  # samples of larger values would overflow in float32
PLAIN_TYPES = {"bool": bool, "int": int, "float": float, "str": str}
"""Types of the parameters of laws that are checked, by name."""


def read_spec(values: Any, place: str) -> EnsembleSpec:
    """Return the specification that :meth:`EnsembleSpec.to_dict` described.

    Args:
        values: Parsed JSON.
        place: Name of the file and of the field, for error messages.

    Raises:
        embens.files.Refused: If a field is missing, unknown, of another type or out of range.

    Example:
        >>> spec = EnsembleSpec("embed", 3)
        >>> read_spec(spec.to_dict(), "x.safetensors: spec") == spec
        True
    """
    spec = Fields(values, place, _names(EnsembleSpec))
    members = spec.whole("members", most=MAX_MEMBERS)
    sampled = spec.whole("sampled", least=0, most=MAX_MEMBERS)
    original_members = spec.wholes("chosen", 0, sampled - 1)
    if original_members and len(original_members) != members:
        raise spec.fail("chosen", f"empty, or a list of {members} members")
    sites = [_read_site(site) for site in spec.each("sites", _names(Site))]
    low_rank = [_read_low_rank(site) for site in spec.each("low_rank", _names(LowRankSite))]
    per_member = [_read_per_member(item) for item in spec.each("per_member", _names(PerMember))]
    check_unique(f"{place}.sites", [site.key for site in sites])
    check_unique(f"{place}.low_rank", [site.layer for site in low_rank])
    check_unique(f"{place}.per_member", [item.module for item in per_member])
    return EnsembleSpec(
        spec.text("family"),
        members,
        tuple(sites),
        tuple(low_rank),
        tuple(per_member),
        frozen=spec.flag("frozen"),
        pretrained=spec.flag("pretrained"),
        separate=spec.flag("separate"),
        individual_head=spec.flag("individual_head"),
        sampled=sampled,
        chosen=tuple(original_members),
    )


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _read_site(site: Fields) -> Site:
    return Site(
        site.text("layer"),
        cast(Any, site.text("kind", ("pre", "post"))),
        read_law(site.get("law"), f"{site.place}.law"),
        site.whole("size"),
        site.whole("repeat"),
        site.flag("trainable"),
        site.flag("fresh"),
        site.flag("hidden"),
    )


def read_law(values: Any, place: str) -> Law:
    """Return a law from its class name and its parameters.

    Args:
        values: Parsed JSON of :meth:`embens.laws.Law.to_dict`.
        place: Name of the file and of the field, for error messages.

    Raises:
        embens.files.Refused: If the law is unknown or its parameters are not valid.
    """
    law = Fields(values, place)
    law_class = registered().get(law.text("law"))
    if law_class is not None:
        _check_parameters(law, law_class)
    try:
        return from_dict(law.values)
    except (TypeError, ValueError) as error:
        advice = "" if law_class is None else f" {FIX}"
        raise Refused(f"{place}: {error}{advice}") from None


def _check_parameters(law: Fields, law_class: type[Law]) -> None:
    """Raise if a parameter is missing or of another type.

    A law of the user may have got a parameter with a default after the file was written.
    """
    if not is_dataclass(law_class):
        return
    is_ours = law_class.__module__.startswith("embens.")
    for field in fields(cast(Any, law_class)):
        type_name = getattr(field.type, "__name__", field.type)
        if field.name not in law.values:
            if is_ours:
                raise Refused(f"{law.place} has no field {field.name!r}. {FIX}")
        elif type_name in PLAIN_TYPES:
            value = law.typed(field.name, PLAIN_TYPES[type_name])
            if isinstance(value, float) and abs(value) > LARGEST_PARAMETER:
                raise law.fail(field.name, f"a number of at most {LARGEST_PARAMETER:g}")


def _read_low_rank(site: Fields) -> LowRankSite:
    return LowRankSite(
        site.text("layer"),
        site.whole("rank"),
        cast(Any, site.text("kind", ("multiplicative", "additive"))),
        site.number("scale", low=0),
    )


def _read_per_member(item: Fields) -> PerMember:
    tensors = item.texts("tensors")
    check_unique(f"{item.place}.tensors", tensors)
    return PerMember(item.text("module"), tuple(tensors), item.flag("drawn"))


def check_unique(place: str, names: Iterable[str]) -> None:
    """Raise if a name occurs twice.

    Args:
        place: Name of the file and of the field, for error messages.
        names: The names.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise Refused(f"{place} has {name!r:.80} twice. {FIX}")
