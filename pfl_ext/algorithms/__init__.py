"""The methods, one file each."""

from pfl_ext.federation import Method

from .ditto import Ditto
from .fedavg import FedAvg, FedAvgFT, Standalone
from .fedprox import FedProx
from .persfl import PersFL

__all__ = ["METHODS", "Ditto", "FedAvg", "FedAvgFT", "FedProx", "PersFL", "Standalone"]

METHODS: dict[str, type[Method]] = {
    "standalone": Standalone,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "ditto": Ditto,
    "persfl": PersFL,
}
"""A method's name on the command line, and its class."""
