"""FedAlt and FedSim: a part of the model stays with the client, the rest is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Part, Server, Stage, Steps, Uploads, WorkingModel, option
from pfl_ext.nn import adapter_parameters

__all__ = ["FedAlt", "FedSim", "PartiallyPersonal", "personal_part"]

_PARTS = ("input", "block-inputs", "output", "adapter")


def personal_part(model: WorkingModel, part: str) -> Part:
    """The part of a model that is personal.

    ``input`` is the first layer and ``output`` the last one. ``adapter`` is what PerAda trains: adapters, normalisation
    and head. ``block-inputs`` are all convolutions called conv1, the stem's and the first of every block: PerAda's
    Table 6 counts 4.73 M numbers for the input layer of a ResNet-18, which are these. Anything else is the name of a
    module.
    """
    if part == "input":
        return model.part(model.names[0].rpartition(".")[0])
    if part == "output":
        return model.part("")
    if part == "adapter":
        return model.part(*sorted({name.rpartition(".")[0] for name in adapter_parameters(model.module)}))
    if part == "block-inputs":
        return model.part(*(n for n, _ in model.module.named_modules() if n.rpartition(".")[2] == "conv1"))
    return model.part(part)


@dataclass(frozen=True)
class PartiallyPersonal(Method):
    """What FedAlt and FedSim share: everything but the local steps."""

    personal: str = option("output", f"the part that stays with the client: {', '.join(_PARTS)}, or a module's name")

    def set_up(self, server: Server) -> None:
        """The server keeps the shared part u."""
        server["shared"] = (~personal_part(server.model, self.personal)).read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its personal part v_k, which starts from the common initial weights."""
        return {"personal": personal_part(model, self.personal).read()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the shared part u."""
        return {"shared": server["shared"]}

    def load(self, client: Client, received: Mapping[str, Tensor]) -> Part:
        """Make the working model (u, v_k); returns the part v."""
        v = personal_part(client.model, self.personal)
        v.write(client["personal"])
        (~v).write(received["shared"])
        return v

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the shared parts, weighted by samples."""
        server["shared"] = uploads.average("shared")

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The shared part u with the client's personal part v_k."""
        v = personal_part(client.model, self.personal)
        return {"personal": client.model.whole((~v, received["shared"]), (v, client["personal"]))}


@dataclass(frozen=True)
class FedAlt(PartiallyPersonal):
    r"""FedAlt (Pillutla et al., 2022), Algorithm 2: personal steps, then shared steps.

    .. math::
        v_k &\leftarrow v_k - \eta\, \nabla_v L_k(u, v_k) && \text{personal epochs, u fixed} \\
        u_k &\leftarrow u_k - \eta\, \nabla_u L_k(u_k, v_k) && \text{E epochs from } u,\ v_k \text{ fixed} \\
        u &\leftarrow \sum_k \tfrac{n_k}{n} u_k
    """

    name = "fedalt"
    private = True

    personal_epochs: int = option(1, "passes over a client's data for the personal part in a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the personal part v_k first, then the shared part u_k, which is sent."""
        v = self.load(client, received)
        steps = Steps(client, self, params=v.parameters)
        client.report["personal_loss"] = steps.train(epochs=self.personal_epochs, batches="personal")
        client.report["loss"] = Steps(client, self, params=(~v).parameters).train()
        client["personal"] = v.read()
        return {"shared": (~v).read()}


@dataclass(frozen=True)
class FedSim(PartiallyPersonal):
    r"""FedSim (Pillutla et al., 2022), Algorithm 3: both parts in every step.

    .. math::
        (u_k, v_k) &\leftarrow (u_k, v_k) - \eta\, \nabla L_k(u_k, v_k) && \text{E epochs from } (u, v_k) \\
        u &\leftarrow \sum_k \tfrac{n_k}{n} u_k
    """

    name = "fedsim"
    private = True

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the parts v_k and u_k in the same steps, and send u_k."""
        v = self.load(client, received)
        client.report["loss"] = Steps(client, self).train()
        client["personal"] = v.read()
        return {"shared": (~v).read()}
