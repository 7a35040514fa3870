"""Stands in for ensemble.run until it is there."""

from contextlib import contextmanager

from embens.ensemble import run as execution
from embens.ensemble.layers import Own
from embens.ensemble.plain import walk


class _Run:
    def __init__(self, ensemble, inputs):
        self.ensemble, self.inputs = ensemble, inputs
        self.numbers, self.names = [], []
        names = {id(m): n for n, m in walk(ensemble.network)}
        for m in ensemble._individuals:
            self.numbers += m.stacks()
            n = names[id(m)]
            self.names += [f"{n}.{k}".lstrip(".") for k in m.names] if isinstance(m, Own) else [n]

    def member(self, a, numbers=None):
        numbers = [s[a] for s in self.numbers] if numbers is None else numbers
        return self.ensemble._run_member(numbers, self.inputs, {})


@contextmanager
def open_run(ensemble, inputs):
    run = _Run(ensemble, inputs)
    with execution.Pass(ensemble._cursor, ensemble._new_store("same", 1)):
        yield run
