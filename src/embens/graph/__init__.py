"""Reading a reference with torch.fx: the order of its layers, and its folded form.

:mod:`~embens.graph.reading` finds which parameter layers come before which, so that sites can be
chosen. :mod:`~embens.graph.folding` rewrites a traced network so that several members run as one
larger batch.
"""
