"""Diagnosis before training: will members differ, how many have room, what is wrong."""
