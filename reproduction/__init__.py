"""Reproduction of the paper, outside the wheel.

Each figure of the paper is one experiment, a module in :mod:`reproduction.figures`. An experiment
sweeps cells, measures each cell, tests the paper's claims on the resulting table, and draws it.

* :mod:`reproduction.grid`: settings, cells, engines that run them, and results on disk.
* :mod:`reproduction.training`: how an ensemble of a cell is trained and scored.
* :mod:`reproduction.baselines`: one network and separate networks at their best learning rate.
* :mod:`reproduction.claims`: claims as statistics with confidence intervals and verdicts.
* :mod:`reproduction.drawing`: figures as data, which :mod:`reproduction.canvas` draws.
* :mod:`reproduction.datasets`: data sets and downloads.
* :mod:`reproduction.report`: HTML pages of results.
* :mod:`reproduction.systems`: other ensemble methods that embedded ensembles are compared with.

``python -m reproduction NAME --preset quick`` runs an experiment.
"""
