"""The methods, one file each. A new file with a :class:`Method` in it is all it takes to add one."""

import importlib
import pkgutil

from pfl_ext.federation import Method

from .apfl import APFL
from .cfl import CFL
from .ditto import Ditto
from .fedala import FedALA
from .fedalt import FedAlt, FedSim
from .fedamp import FedAMP
from .fedas import FedAS
from .fedasync import FedAsync
from .fedavg import FedAvg, FedAvgFT, Standalone
from .fedavgm import FedAvgM
from .fedbabu import FedBABU
from .fedbn import FedBN
from .fedbuff import FedBuff
from .fedcac import FedCAC
from .feddf import FedDF
from .feddyn import FedDyn
from .fedem import FedEM
from .fedfomo import FedFomo
from .fedgen import FedGen
from .fedmd import FedMD
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedYogi
from .fedpac import FedPAC
from .fedper import FedPer
from .fedproto import FedProto
from .fedprox import FedProx
from .fedrep import FedRep
from .fedrod import FedRoD, FedRoDHyper
from .fedsam import FedSAM
from .fml import FML
from .gpfl import GPFL
from .ifca import IFCA
from .knn_per import KNNPer
from .lg_fedavg import LGFedAvg
from .moon import MOON
from .mtl import MTL
from .per_fedavg import PerFedAvg
from .perada import PerAda
from .persfl import PersFL
from .pfedhn import PFedHN, PFedHNPC
from .pfedla import PFedLA
from .pfedme import PFedMe
from .plgu_ghn import PLGUGHN
from .plgu_grep import PLGUGRep
from .plgu_lf import PLGULF
from .power_of_choice import PowerOfChoice
from .scaffold import SCAFFOLD
from .scd import SCD

__all__ = [
    "APFL",
    "CFL",
    "FML",
    "GPFL",
    "IFCA",
    "METHODS",
    "MOON",
    "MTL",
    "PLGUGHN",
    "PLGULF",
    "SCAFFOLD",
    "SCD",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAdagrad",
    "FedAdam",
    "FedAlt",
    "FedAsync",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedBuff",
    "FedCAC",
    "FedDF",
    "FedDyn",
    "FedEM",
    "FedFomo",
    "FedGen",
    "FedMD",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedRoDHyper",
    "FedSAM",
    "FedSim",
    "FedYogi",
    "KNNPer",
    "LGFedAvg",
    "PFedHN",
    "PFedHNPC",
    "PFedLA",
    "PFedMe",
    "PLGUGRep",
    "PerAda",
    "PerFedAvg",
    "PersFL",
    "PowerOfChoice",
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
