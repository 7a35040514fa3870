"""Data sets as tensors, downloaded once and verified by checksum."""

from reproduction.datasets.sets import DataSet, Part, cache_folder, cifar100, digits

__all__ = ["DataSet", "Part", "cache_folder", "cifar100", "digits"]
