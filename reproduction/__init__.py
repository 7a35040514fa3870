"""Reproduction of the paper's experiments; not part of the installed package."""
