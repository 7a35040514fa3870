"""From a module to its limit: what travels through the network, and the rules of its parts."""

from embens.theory.limit.limit import Limit
from embens.theory.limit.rules import propagate
from embens.theory.limit.state import State

__all__ = ["Limit", "State", "propagate"]
