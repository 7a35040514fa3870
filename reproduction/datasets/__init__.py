"""Data sets as tensors, fetched once, checked, and kept."""

from reproduction.datasets.sets import DataSet, Part, cache_folder, cifar100, digits, fashion_mnist, mnist

__all__ = ["DataSet", "Part", "cache_folder", "cifar100", "digits", "fashion_mnist", "mnist"]
