"""Datasets as tensors, ways to share them among clients, augmentation."""

from .augmentation import AUGMENTATIONS
from .dataset import Dataset
from .partition import Partition
from .partitioners import PARTITIONERS
from .sources import SOURCES, load

__all__ = ["AUGMENTATIONS", "PARTITIONERS", "SOURCES", "Dataset", "Partition", "load"]
