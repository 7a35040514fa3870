"""Reading a reference with torch.fx: the order of its layers, and its folded form.

A traced graph answers two questions. *Which layers come first and last?* is asked once, when sites
are chosen (:mod:`~embens.graph.reading`). *Can several members run as one larger batch?* is asked
for every kind of call (:mod:`~embens.graph.folding`). The terms of both:

Trail
    What is known of a value in the data flow: the layers before it, and where its channels are
    (``reading``). A *flow* is the trails of a whole network. ``watching`` finds it from a real
    call; ``composites`` knows modules with several layers inside.
Row-wise
    An operation is row-wise if it treats the samples of a batch independently (``rowwise``,
    ``shapes``; names of operations in ``operations``). Only such operations can be folded. All
    others raise ``Unfoldable``, and the ensemble runs merged.
Domain
    Whose rows a value has: none (a constant), one batch for all members, or a block of rows for
    each member (``domains``).
Prefix and suffix
    The two graphs of the folded form (``folding``). The prefix computes the shared values, once.
    The suffix computes the rest for a chunk of members. *Border* values go from one to the other.
Chunk
    The members whose rows run together, as consecutive blocks of the first axis (``members``).
    What the suffix calls for them is in ``members``, ``convolutions``, ``attention`` and
    ``norms``; other operations are copied (``functions``).
Guard
    A trace turns every Python value that the code reads into a constant. A guard remembers these
    values, and a change of one drops the graph (``guards``, ``snapshots``). Code that a trace would
    misread is refused (``tracing``, ``misreadings``), as are attributes that a copy of the network
    would share with the original (``captures``).
"""
