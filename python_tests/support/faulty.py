"""A method with a fault in one client's turn, importable by worker processes."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.algorithms import FedAvg
from pfl_ext.federation import Client, option

__all__ = ["Faulty"]


@dataclass(frozen=True)
class Faulty(FedAvg):
    """FedAvg in which client 2 goes wrong in round 2."""

    name = "faulty"

    how: str = option("raise", "what goes wrong", choices=("raise", "nan", "die"))

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """FedAvg's, or the fault."""
        if client.index == 2 and client.round == 2:
            if self.how == "nan":
                return {"model": received["model"] * math.nan}
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a fault in the method")
        return super().train(client, received)
