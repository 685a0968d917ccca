"""The methods, one file each. A new file with a :class:`Method` in it is all it takes to add one."""

import importlib
import pkgutil

from pfl_ext.federation import Method

from .ditto import Ditto
from .fedavg import FedAvg, FedAvgFT, Standalone
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsam import FedSAM
from .persfl import PersFL
from .pfedhn import PFedHN
from .plgu_ghn import PLGUGHN
from .plgu_grep import PLGUGRep
from .plgu_lf import PLGULF
from .scd import SCD

__all__ = [
    "METHODS",
    "PLGUGHN",
    "PLGULF",
    "SCD",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedProx",
    "FedRep",
    "FedSAM",
    "PFedHN",
    "PLGUGRep",
    "PersFL",
    "Standalone",
]


def _found() -> dict[str, type[Method]]:
    """The methods of all files of this folder by their names."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Method) and "name" in vars(value):
                found[value.name] = value
    return dict(sorted(found.items()))


METHODS = _found()
"""A method's name on the command line, and its class."""
