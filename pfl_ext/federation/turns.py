"""A client's turns, wherever they run: train, personalise, be evaluated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.metrics import classification_metrics, mean_metrics, prediction_distance
from pfl_ext.ops import all_finite

from .client import Client
from .mapped import MappedTensor, opened
from .method import Method
from .model import WorkingModel
from .privacy import PRIVATE_STEPS, Privacy
from .store import ClientStore
from .streams import seed_of

__all__ = ["Buffers", "Diverged", "Plan", "Turned", "Turns", "seed_layers", "threads_of_a_turn"]

_LOCAL_BUFFERS = "pfl_ext.local_buffers"


class Diverged(RuntimeError):
    """A client's training, or the server's, gave infinity or NaN."""

    def __init__(self, client: int | None, round: int, what: str) -> None:
        """``what`` is not finite after this client's turn in this round, or after the server's where that is None."""
        super().__init__(client, round, what)
        self.client, self.round, self.what = client, round, what

    def __str__(self) -> str:
        """Who, when, what, and what to do."""
        who = "the server" if self.client is None else f"client {self.client}"
        drop = "" if self.client is None else ", or run with diverged=drop to leave such clients out of the round"
        return f"{who} diverged in round {self.round}: its {self.what} is not finite. Lower the step size{drop}"


@contextlib.contextmanager
def threads_of_a_turn(threads: int) -> Iterator[None]:
    """That many threads inside, and torch's random state left as it was."""
    before, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(random_state)


def seed_layers(seed: int, device: torch.device) -> None:
    """Begin the stream of torch's own generator, from which dropout and the like draw."""
    # Not torch.manual_seed, which took 147 us with a CUDA build of torch on a machine without a GPU; this 1.5 us.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@dataclass(frozen=True)
class Buffers:
    """What becomes of the buffers of modules, such as the running statistics of batch normalisation, by module type.

    Buffers of all other modules are averaged like parameters.
    """

    local: tuple[type[nn.Module], ...] = ()
    """Modules whose buffers stay with each client."""
    server: tuple[type[nn.Module], ...] = ()
    """Modules whose buffers stay as the server has them."""


@dataclass(frozen=True)
class Plan:
    """Everything turns need, wherever they run."""

    method: Method
    module: nn.Module
    """The network; it becomes the working model."""
    dataset: Dataset
    partition: Partition
    store: ClientStore
    """The clients' vectors."""
    server: Mapping[str, Tensor]
    """The server's vectors, as this process sees them."""
    seed: int
    buffers: Buffers
    augmentation: str
    """The name of one of :data:`pfl_ext.data.AUGMENTATIONS`."""
    protocol: str = "wait-free"
    """One of :data:`pfl_ext.federation.clock.PROTOCOLS`."""
    personal_cap: int = 0
    """Most personal steps of a turn; 0: no limit."""
    privacy: Privacy | None = None
    drop_last: bool = False
    extra_tests: Mapping[str, Sequence[Dataset]] = field(default_factory=dict)
    """Test sets beside the global one, each in parts over which results are averaged."""


Vectors = Mapping[str, Tensor | MappedTensor]


class Turned(NamedTuple):
    """What a turn leaves."""

    sent: Vectors
    """What the client sent."""
    kept: Vectors
    """What it is to keep, where that was not kept at once."""
    report: dict[str, float]
    trained: dict[str, int]
    """How many samples it trained on, before the upload and beside it."""


class Turns:
    """The turns of a plan, in the process that makes this.

    Attributes:
        deliver: brings what a client sends on its way: to the server's side, in a file or in memory that processes
            share. It runs in a thread beside the client's personal training, unless the protocol is to wait.
    """

    def __init__(self, plan: Plan) -> None:
        """See the class."""
        self.method, self.dataset, self.partition, self.store = plan.method, plan.dataset, plan.partition, plan.store
        self.server, self.seed, self.augmentation = plan.server, plan.seed, plan.augmentation
        self.protocol, self.personal_cap = plan.protocol, plan.personal_cap
        self.privacy, self.drop_last, self.extra_tests = plan.privacy, plan.drop_last, plan.extra_tests
        self.deliver: Callable[[int, int, Mapping[str, Tensor]], Vectors] = lambda client, round, vectors: vectors
        self.model = WorkingModel(plan.module, plan.buffers.local, plan.buffers.server)
        stays = self.model.local | self.model.server
        self._has_local, self._stays = bool(self.model.local.any()), stays if bool(stays.any()) else None

    @staticmethod
    def kept(method: Method, model: WorkingModel, privacy: Privacy | None = None) -> dict[str, Tensor]:
        """What the store keeps for each client: the method's vectors, local buffers and private steps if there are."""
        kept = method.client_state(model)
        if privacy is not None:
            kept[PRIVATE_STEPS] = torch.zeros(1, dtype=torch.float64)
        if model.local.any():
            kept[_LOCAL_BUFFERS] = model.state()[model.local]
        return kept

    def _begin(self, client: int, round: int, names: tuple[str, ...] | None = None) -> tuple[Client, dict[str, Tensor]]:
        seed_layers(seed_of(self.seed, "layers", round, client), self.model.device)
        data = (self.dataset, self.partition, self.store, self.seed, self.augmentation, self.privacy, self.drop_last)
        turn = Client(client, round, self.model, *data)
        received = self.method.sends(self.server, client, self.method.received() if names is None else names)
        if self._has_local and _LOCAL_BUFFERS in turn:
            for name, vector in received.items():
                if vector.numel() == self.model.size:
                    received[name] = vector.clone()
                    received[name][self.model.local] = turn[_LOCAL_BUFFERS]
        return turn, received

    def _check_kept(self, turn: Client) -> None:
        for name, vector in turn._set.items():
            if not all_finite(vector):
                raise Diverged(turn.index, turn.round, name)

    def _keep(self, turn: Client) -> None:
        self._check_kept(turn)
        turn.commit()

    def train(self, client: int, round: int, measure: bool = False, hold: bool = False) -> Turned:
        """A selected client's turn, without its personal part if that is to last until the new model arrives.

        With ``measure`` it also reports how the received model does on the client's test data, and how the working
        model does after the generic part. With ``hold`` the client keeps nothing yet: that is in what is returned.
        """
        turn, received = self._begin(client, round)
        before = self._measure(turn, "before", received["model"]) if measure and "model" in received else {}
        sent = self.method.client_round(turn, received)
        if measure:
            turn.report |= before | self._measure(turn, "after", None)
        for name, vector in sent.items():
            if not all_finite(vector):
                raise Diverged(client, round, f"upload {name!r}")
            if self._stays is not None and vector.numel() == self.model.size:
                # What is not one of the server's vectors is a change of one: none, here.
                vector[self._stays] = self.server[name][self._stays] if name in self.server else 0.0
        if math.isinf(turn.report.get("loss", 0.0)):
            raise Diverged(client, round, "loss")
        if self._has_local:
            turn[_LOCAL_BUFFERS] = self.model.state()[self.model.local]
        if not self.method.has_personal_round or self.protocol == "until-arrival":
            delivered = self.deliver(client, round, sent)
        elif self.protocol == "compute-and-wait":
            self._train_personal(turn, received, sent)
            delivered = self.deliver(client, round, sent)
        else:
            with ThreadPoolExecutor(1, "upload") as uplink:
                arriving = uplink.submit(self.deliver, client, round, sent)
                self._train_personal(turn, received, sent)
            delivered = arriving.result()
        self._check_kept(turn)
        kept: Vectors = {}
        if hold:
            kept = self.deliver(client, round, {f"kept-{name}": vector for name, vector in turn._set.items()})
        else:
            turn.commit()
        return Turned(delivered, kept, turn.report, turn.trained)

    def _train_personal(
        self, turn: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor], samples: int | None = None
    ) -> None:
        seed_layers(seed_of(self.seed, "layers/personal", turn.round, turn.index), self.model.device)
        turn.begin_personal(self.personal_cap or None, samples)
        self.method.personal_round(turn, received, sent)

    def train_until_arrival(self, client: int, round: int, sent: Vectors, samples: int) -> Turned:
        """The personal part of a turn, as long as ``samples`` of training take."""
        turn, received = self._begin(client, round)
        self._train_personal(turn, received, {name: opened(vector) for name, vector in sent.items()}, samples)
        self._keep(turn)
        return Turned({}, {}, turn.report, turn.trained)

    def unselected(self, client: int, round: int) -> Turned:
        """What a client that was not selected does for its own model."""
        names = self.method.received_unselected()
        assert names is not None
        turn, received = self._begin(client, round, names)
        seed_layers(seed_of(self.seed, "layers/personal", round, client), self.model.device)
        turn.begin_personal(self.personal_cap or None)
        self.method.unselected_round(turn, received)
        self._keep(turn)
        return Turned({}, {}, turn.report, turn.trained)

    def _measure(self, turn: Client, when: str, state: Tensor | None) -> dict[str, float]:
        if len(turn.test) == 0 or (state is not None and state.numel() != self.model.size):
            return {}
        if state is not None:
            self.model.load(state)
        metrics = classification_metrics(*turn.logits(turn.test))
        return {f"{when}_training/{metric}": value for metric, value in metrics.items()}

    def personalize(self, client: int, round: int) -> dict[str, float]:
        """What a client does on its own after the last round; returns what it reports."""
        turn, received = self._begin(client, round, self.method.received_last())
        self.method.personalize(turn, received)
        if self._has_local:
            turn[_LOCAL_BUFFERS] = self.model.state()[self.model.local]
        self._keep(turn)
        return turn.report

    def models(self, client: int, round: int) -> tuple[Client, dict[str, Tensor]]:
        """A client and its models as an evaluation after this round sees them, by name."""
        turn, received = self._begin(client, round, self.method.received_last())
        return turn, self.method.evaluated(turn, received)

    def evaluate(
        self,
        client: int,
        round: int,
        splits: tuple[str, ...],
        global_test: tuple[str, ...],
        distance: bool = False,
        extra_tests: tuple[str, ...] = (),
    ) -> dict[str, float]:
        """Metrics of the client's models, as ``"personal/test/accuracy"``; never changes what is kept.

        Models that ``global_test`` names are evaluated on the global test set and on those ``extra_tests`` too.
        With ``distance`` also how far the personal model's predictions are from the global one's, where there are both.
        """
        turn, models = self.models(client, round)
        found: dict[str, float] = {}
        outputs: dict[tuple[str, str], list[Tensor]] = {}
        for name, state in models.items():
            self.model.load(state)
            sets = {split: [(self.dataset, getattr(turn, split))] for split in splits}
            if name in global_test:
                sets["global_test"] = [(self.dataset, self.partition.global_test)]
                for extra in extra_tests:
                    sets[extra] = [(part, torch.arange(len(part))) for part in self.extra_tests[extra]]
            for split, parts in sets.items():
                results = [turn.logits(rows, data) for data, rows in parts if len(rows)]
                if distance:
                    outputs[name, split] = [logits for logits, _ in results]
                metrics = mean_metrics([classification_metrics(*result) for result in results])
                found |= {f"{name}/{split}/{metric}": value for metric, value in metrics.items()}
        for (name, split), own in outputs.items():
            if name == "personal" and ("global", split) in outputs:
                pairs = zip(own, outputs["global", split], strict=True)
                apart = [{"distance": prediction_distance(p, g, self.dataset.multilabel)} for p, g in pairs]
                found |= {f"personal/{split}/{metric}": value for metric, value in mean_metrics(apart).items()}
        return found

    def global_logits(self, rows: Tensor, extra: str | None = None, number: int = 0) -> tuple[Tensor, Tensor]:
        """Logits and targets of part of the global test set by the model that the method calls global.

        With ``extra`` the rows are of that extra test set, of its part ``number``.
        """
        turn, models = self.models(0, 0)
        turn.model.load(models["global"])
        return turn.logits(rows, None if extra is None else self.extra_tests[extra][number])
