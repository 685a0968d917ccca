"""What methods with a personal model beside the global one share: what becomes of clients that never took part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from pfl_ext.federation import Client, Method, Options, Stage, fine_tune, option

__all__ = ["NewClients"]


@dataclass(frozen=True)
class NewClients(Options):
    """Clients train their personal model beside the upload; those that never took part fine-tune the global one."""

    fine_tune_epochs: int = option(
        0, "passes by which clients that never took part fine-tune the global model after the last round"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("fine_tune_epochs", self.fine_tune_epochs >= 0, "not negative")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Beside the upload, and after the last round where new clients fine-tune."""
        return ("personal", "finish") if self.fine_tune_epochs else ("personal",)

    def personal_of(self, client: Client, state: Tensor) -> Tensor:
        """The client's personal model; the global one, as it is now, for a client that never took part."""
        return client["personal"] if "personal" in client else state  # noqa: SIM401 (not a dictionary)

    def fine_tune_if_new(self, client: Client, state: Tensor) -> None:
        """Fine-tune a global model, where the client has no personal one yet."""
        if "personal" not in client:
            fine_tune(client, cast(Method, self), state, self.fine_tune_epochs)
