"""FedAlt and FedSim: a part of the model stays with the client, the rest is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Uploads, WorkingModel, local_sgd, option
from pfl_ext.nn import adapter_parameters

from .fedavg import average

__all__ = ["FedAlt", "FedSim", "PartiallyPersonal", "personal_entries"]

_PARTS = ("input", "block-inputs", "output", "adapter")


def personal_entries(model: WorkingModel, part: str) -> Tensor:
    """Which numbers of a state are personal.

    ``input`` is the first layer and ``output`` the last one. ``adapter`` is what PerAda trains: adapters, normalisation
    and head. ``block-inputs`` are all convolutions called conv1, the stem's and the first of every block: PerAda's
    Table 6 counts 4.73 M numbers for the input layer of a ResNet-18, which are these. Anything else is the name of a
    module.
    """
    if part == "input":
        return model.entries(model.names[0].rpartition(".")[0])
    if part == "output":
        return model.entries(model.last_layer())
    if part == "adapter":
        return model.entries(*{name.rpartition(".")[0] for name in adapter_parameters(model.module)})
    if part == "block-inputs":
        return model.entries(*(n for n, _ in model.module.named_modules() if n.rpartition(".")[2] == "conv1"))
    return model.entries(part)


@dataclass(frozen=True)
class PartiallyPersonal(Method):
    """What FedAlt and FedSim share: everything but the local steps."""

    personal: str = option("output", f"the part that stays with the client: {', '.join(_PARTS)}, or a module's name")

    def _parts(self, model: WorkingModel) -> tuple[Tensor, Tensor]:
        """The entries of the personal part v and of the shared part u; what never changes is in neither."""
        personal = personal_entries(model, self.personal)
        return personal & model.changing, ~personal & model.changing

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """u."""
        return {"shared": model.read(self._parts(model)[1])}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """v_k, from the common initial weights."""
        return {"personal": model.read(self._parts(model)[0])}

    def received(self) -> tuple[str, ...]:
        """u."""
        return ("shared",)

    def _joined(self, client: Client, received: Mapping[str, Tensor]) -> Tensor:
        """(u, v_k) as one state."""
        v, u = self._parts(client.model)
        return client.model.whole((u, received["shared"]), (v, client["personal"]))

    def _kept_and_sent(self, client: Client) -> dict[str, Tensor]:
        v, u = self._parts(client.model)
        client["personal"] = client.model.read(v)
        return {"shared": client.model.read(u)}

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Average the shared parts, weighted by samples."""
        server["shared"] = average(uploads, "shared")

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(u, v_k)."""
        return {"personal": self._joined(client, received)}


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
        """Check the options."""
        super().__post_init__()
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """v_k, then u_k."""
        model = client.model
        model.load(self._joined(client, received))
        v, u = self._parts(model)
        client.report["personal_loss"] = local_sgd(
            client, self, only=model.parameters_in(v), epochs=self.personal_epochs, batches="personal"
        )
        client.report["loss"] = local_sgd(client, self, only=model.parameters_in(u))
        return self._kept_and_sent(client)


@dataclass(frozen=True)
class FedSim(PartiallyPersonal):
    r"""FedSim (Pillutla et al., 2022), Algorithm 3: both parts in every step.

    .. math::
        (u_k, v_k) &\leftarrow (u_k, v_k) - \eta\, \nabla L_k(u_k, v_k) && \text{E epochs from } (u, v_k) \\
        u &\leftarrow \sum_k \tfrac{n_k}{n} u_k
    """

    name = "fedsim"
    private = True

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """v_k and u_k together."""
        client.model.load(self._joined(client, received))
        client.report["loss"] = local_sgd(client, self)
        return self._kept_and_sent(client)
