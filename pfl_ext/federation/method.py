"""What a method is: one file that says what a client trains and sends, what the server does, what is evaluated."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from pfl_ext.data import Inputs
from pfl_ext.options import Options, option

from .client import Client
from .messages import Stage
from .model import WorkingModel
from .optimizers import OPTIMIZERS, OptimizerFactory
from .server import Server
from .uploads import Uploads

__all__ = ["Method", "Models", "Predictor"]

Predictor: TypeAlias = Callable[[WorkingModel, Inputs], Tensor]
"""A model that is not one state of the network: a mixture, neighbours, prototypes. Given the working model, in
evaluation mode and with any state in it, and a batch's inputs, it returns outputs in the form of the task's."""

Models: TypeAlias = dict[str, Tensor | Predictor]
"""Models by name, each a state of the network or a predictor."""


@dataclass(frozen=True)
class Method(Options, abc.ABC):
    """The base of every method: the options all share, values that say what it is, and nine hooks.

    A method has no state of its own: what the server keeps is in ``server``, what a client keeps in ``client``, so that
    a run can be saved at any round and clients can be trained in any process. ``docs/methods.md`` shows a whole one.
    """

    name: ClassVar[str]
    """What the method is called on the command line."""

    private: ClassVar[bool] = False
    """Whether clients touch their samples in :meth:`Steps.train` alone, on the labels' loss, so that a run of it can be
    made differentially private."""

    needs: ClassVar[Literal["nothing", "logits", "classes"]] = "nothing"
    """What the task must have: logits of classes, to distil them; one class for each sample, to count by it."""

    several_networks: ClassVar[bool] = False
    """Whether clients may have networks of different shapes: it sends no vector of one's state to another."""

    public: ClassVar[bool] = False
    """Whether clients see the server's unlabelled data."""

    needs_validation: ClassVar[bool] = False
    """Whether every client must have validation data."""

    refuses: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Options of all methods that this one's equations leave no room for, each with the reason."""

    lr: float = option(0.01, "step size of the local steps")
    momentum: float = option(0.0, "momentum of the local SGD; it starts anew in each round")
    weight_decay: float = option(0.0, "weight decay of the local steps")
    optimizer: str | OptimizerFactory = option(  # noqa: RUF009 - a field, as all others
        "sgd", "local optimiser: sgd, adam, adamw, or a factory, FILE.py:NAME; its state starts anew in each round"
    )
    clip: float = option(0.0, "largest norm of a local step's gradient, which is shortened to it; 0: any")
    lr_rounds: str = option(
        "constant", "step size over the rounds: cosine ends at 0, step drops", choices=("constant", "cosine", "step")
    )
    lr_steps: str = option(
        "constant", "step size over the steps of a turn, in the same ways", choices=("constant", "cosine", "step")
    )
    lr_warmup_rounds: int = option(0, "rounds in which the step size grows to lr, linearly")
    lr_warmup_steps: int = option(0, "steps of a turn in which the step size grows, linearly")
    lr_drop: float = option(0.1, "what a step size is multiplied with where it drops")
    lr_drop_every: int = option(10, "rounds, or steps of a turn, after which it drops")
    weighting: str = option(
        "paper",
        "weights of clients in averages: as the paper has them, n_k, or all alike",
        choices=("paper", "samples", "equal"),
    )
    batch_size: int = option(10, "samples a local step takes")
    local_epochs: int = option(1, "passes over a client's data in a round")
    local_steps: int = option(0, "steps in a round instead of passes; 0: passes")

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse values that no guard would see, such as ``needs = "class"``."""
        super().__init_subclass__(**more)
        guards = ("private", "several_networks", "public", "needs_validation")
        accepted: dict[str, tuple[Any, ...]] = dict.fromkeys(guards, (True, False))
        for name, values in (accepted | {"needs": ("nothing", "logits", "classes")}).items():
            if (value := getattr(cls, name)) not in values:
                raise TypeError(f"{name} of {cls.__name__} is {value!r}; accepted: {', '.join(map(repr, values))}")

    def __post_init__(self) -> None:
        """Refuse what cannot work before a run begins."""
        super().__post_init__()
        self.check("lr", self.lr > 0, "above 0")
        self.check("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self._check_optimizer()
        self.check("clip", self.clip >= 0, "not negative")
        for name in ("lr_warmup_rounds", "lr_warmup_steps"):
            self.check(name, getattr(self, name) >= 0, "not negative")
        self.check("lr_drop", 0 < self.lr_drop <= 1, "above 0, up to 1")
        self.check("lr_drop_every", self.lr_drop_every >= 1, "at least 1")
        for name, reason in self.refuses:
            only = self._default(name)
            self.check(name, getattr(self, name) == only, f"of {only!r} in {self.name}: {reason}")
        self.check("weight_decay", self.weight_decay >= 0, "not negative")
        self.check("batch_size", self.batch_size >= 1, "at least 1")
        self.check("local_epochs", self.local_epochs >= 0, "not negative")
        self.check("local_steps", self.local_steps >= 0, "not negative")

    def _check_optimizer(self) -> None:
        known = callable(self.optimizer) or self.optimizer in OPTIMIZERS
        names = ", ".join(OPTIMIZERS)
        self.check("optimizer", known, f"of {names}, path/to/file.py:NAME, or in Python a factory")
        if self.optimizer != "sgd":  # a paper's momentum that nobody asked for is nobody's mistake
            unasked = (0.0, self._default("momentum"))
            self.check("momentum", self.momentum in unasked, "of 0: it is SGD's, and the optimizer is another")

    def __getstate__(self) -> dict[str, Any]:
        """With the optimiser of a user's file, which its name does not bring to another process."""
        name = self.optimizer
        return {**self.__dict__, "_own_optimizer": OPTIMIZERS[name] if isinstance(name, str) else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a user's own optimiser known in this process too."""
        own = state.pop("_own_optimizer")
        if own is not None:
            OPTIMIZERS.setdefault(state["optimizer"], own)
        self.__dict__.update(state)

    def _default(self, name: str) -> Any:
        return next(field.default for field in dataclasses.fields(self) if field.name == name)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """When :meth:`personalize` is called.

        ``"personal"``: of a selected client, while its upload is on the way; that is all the wait-free protocol takes
        (:mod:`pfl_ext.federation.clock`). ``"rest"``: of clients that were not selected. ``"finish"``: of all clients,
        after the last round.
        """
        return ()

    @property
    def buffer(self) -> int | None:
        """How many uploads the server takes for an update of its vectors; None: those of all selected clients.

        With a number the run is asynchronous: clients begin and end their turns by the clock, each with the vectors
        that the server had when the turn began, and a round is one update.
        """
        return None

    # ---- the server and the clients before the first round -----------------------------------------------------------

    def set_up(self, server: Server) -> None:
        """Set the server's vectors; refuse what it cannot work with."""
        server["model"] = server.model.state()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The vectors a client keeps, as they are before its first turn."""
        return {}

    # ---- a round -----------------------------------------------------------------------------------------------------

    def select(self, server: Server, count: int) -> list[int] | None:
        """Which ``count`` of the first ``server.members`` clients take part in this round.

        None, as most methods have it: any, the same for all methods with a seed. ``server.round`` is the round, and
        ``server.stream`` has the random numbers for a choice. Not asked where the rounds are asynchronous.
        """
        return None

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """What the server sends to one client for a stage; its size is what is counted as sent.

        It may be asked where the client's turn runs, so it sees the server's vectors and nothing else.
        """
        return {"model": server["model"]}

    @abc.abstractmethod
    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A selected client's turn; returns what it sends."""

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """What a client does for its own model, in the :attr:`stages` that the method names (``client.stage``).

        ``sent`` is what the client has sent in this turn and not to be changed: it is on its way. Empty in all stages
        but ``"personal"``.
        """

    @abc.abstractmethod
    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Change the server's vectors by what the clients sent."""

    # ---- what is evaluated -------------------------------------------------------------------------------------------

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | Predictor]:
        """The client's own models by name, such as ``"personal"``: each a state of the network, or a predictor."""
        return {}

    def global_model(self, server: Mapping[str, Tensor], model: WorkingModel) -> Tensor | None:
        """The global model as a state of this network; None where there is none."""
        return server.get("model")
