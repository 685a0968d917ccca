"""Datasets as tensors, ways to share them among clients, augmentation."""

from .augmentation import AUGMENTATIONS
from .dataset import Dataset
from .nests import Inputs
from .partition import Partition
from .partitioners import PARTITIONERS
from .sources import SOURCES, TEST_SOURCES, load, load_test
from .targets import IGNORED

__all__ = [
    "AUGMENTATIONS",
    "IGNORED",
    "PARTITIONERS",
    "SOURCES",
    "TEST_SOURCES",
    "Dataset",
    "Inputs",
    "Partition",
    "load",
    "load_test",
]
