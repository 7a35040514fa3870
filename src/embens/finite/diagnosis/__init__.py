"""Diagnosis before training: will members differ, what are they worth, what is wrong."""
