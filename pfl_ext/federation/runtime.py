"""What happens where a client is: a request comes in, a reply goes out. The same object in every engine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pfl_ext.data import Dataset, Inputs
from pfl_ext.data.placement import placed
from pfl_ext.metrics import mean_metrics, prediction_distance
from pfl_ext.ops import all_finite

from .client import Client, Rows, current_outputs
from .mapped import opened
from .messages import Diverged, Reply, Request, Stage, Work
from .method import Models, Predictor
from .model import WorkingModel
from .plan import LOCAL_BUFFERS, Plan
from .store import ClientStore
from .streams import seed_of
from .uplink import Deliver, InThread, ToHost, Uplink

__all__ = ["ClientRuntime", "Deliver", "seed_layers", "state_of", "threads"]

Vectors = Mapping[str, Tensor]


class threads:
    """A context with that many threads of torch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        """Set the number, where it is another one."""
        self._before = torch.get_num_threads()
        if self._before != self._count:
            torch.set_num_threads(self._count)

    def __exit__(self, *error: object) -> None:
        if self._before != self._count:
            torch.set_num_threads(self._before)


def seed_layers(seed: int, device: torch.device) -> None:
    """Begin the stream of torch's own generator, from which dropout and the like draw."""
    # Not torch.manual_seed, which took 147 us with a CUDA build of torch on a machine without a GPU; this 1.5 us.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def state_of(name: str, model: Tensor | Predictor) -> Tensor:
    """A model of a client as a state of the network.

    Raises:
        ValueError: it is no such state.
    """
    if isinstance(model, Tensor):
        return model
    raise ValueError(
        f"the {name} model of this method is not one network's weights but a prediction made of several, or of samples "
        "that the client keeps; accepted are models that are a state of the network"
    )


class ClientRuntime:
    """Carries out the requests of clients, one at a time.

    Args:
        plan: what clients do, and the data of those that it may be asked for. It owns the plan's module from now on.
        store: the vectors that these clients keep.
        deliver: brings uploads on their way; it runs in a thread beside the personal training, unless the protocol is
            to wait.

    Attributes:
        server: the server's vectors, as the engine has published them.
        models_of: the working model of each network; ``model`` is the first, which most runs have alone.
    """

    def __init__(
        self, plan: Plan, store: ClientStore, deliver: Deliver = lambda request, kind, vectors: vectors
    ) -> None:
        self.plan, self.store, self.deliver = plan, store, deliver
        self.method, self.task, self.settings = plan.method, plan.task, plan.settings
        self.models_of = plan.working_models()
        self.model, self._networks = self.models_of[0], plan.networks
        self.server: Vectors = {}
        self._placed: dict[int, Rows] = {}
        self._evaluated: dict[int, int] = {}  # the round in which a network was last loaded for an evaluation
        self._personal = "personal" in self.method.stages
        self._uplink: Uplink = ToHost(self.model.device) if self.settings.uploads == "host" else InThread()
        stays = self.model.stays
        self._has_local, self._stays = bool(self.model.local.any()), stays if bool(stays.any()) else None
        self._stages: dict[Stage, Callable[[Request, Client, Vectors], Reply]] = {
            "train": self._train,
            "personal": self._personalize,
            "rest": self._personalize,
            "finish": self._personalize,
            "evaluate": self._evaluate,
        }

    def __call__(self, request: Request) -> Reply:
        """Carry out a request. A divergence is a reply; any other error is raised as it is."""
        if request.stage == "test":
            return self._test(request)
        if request.stage == "keep":
            for name, vector in request.sent.items():
                self.store.write(request.client, name, opened(vector))
            return Reply(request.client)
        client, received = self.begin(request)
        # Once for all evaluations in a row: walking over the modules takes as long as a small forward pass.
        if client.model.module.training == (request.stage == "evaluate"):
            client.model.module.train(request.stage != "evaluate")
        try:
            reply = self._stages[request.stage](request, client, received)
        except Diverged as error:
            reply = Reply(request.client, error=error)
        reply.received = {name: vector.numel() for name, vector in received.items()}
        up, down = (sum(vector.nbytes for vector in vectors.values()) for vectors in (reply.sent, received))
        reply.work = Work(request.client, client.trained, client.trained_personally, up, down)
        reply.trained_parameters = client.trained_parameters
        return reply

    # ---- training ----------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> tuple[Client, dict[str, Tensor]]:
        """A client at the beginning of its turn, and what it receives."""
        settings, k = self.settings, request.client
        seed_layers(seed_of(settings.seed, "layers", request.round, k), self.model.device)
        plan, model = self.plan, self.models_of[self._networks[k]]
        client = Client(
            k, request.round, request.stage, self.task, model, plan.dataset, self._rows(k), self.store, settings,
            plan.public,
        )  # fmt: skip
        if request.received is None:
            received = self.method.sends(self.server, k, request.stage)
        else:
            received = {name: opened(vector) for name, vector in request.received.items()}
        if self._has_local:
            received = {name: self._with_own_buffers(client, vector) for name, vector in received.items()}
        return client, received

    def _rows(self, client: int) -> Rows:
        """A client's samples, their numbers where the data is: brought there once."""
        if client not in self._placed:
            device = self.plan.dataset.device
            self._placed[client] = Rows(*(placed(part, device) for part in self.plan.rows[client]))
        return self._placed[client]

    def _with_own_buffers(self, client: Client, state: Tensor) -> Tensor:
        """A state with the buffers that are the client's own, once it has some."""
        if not self._has_local or state.numel() != self.model.size or LOCAL_BUFFERS not in client:
            return state
        state = state.clone()
        state[self.model.local] = client[LOCAL_BUFFERS]
        return state

    def _keep_own_buffers(self, client: Client) -> None:
        if self._has_local:
            client[LOCAL_BUFFERS] = client.model.state()[client.model.local]

    def _train(self, request: Request, client: Client, received: Vectors) -> Reply:
        """A selected client's turn, without its personal part where that is a request of its own."""
        measured = self.settings.evaluate_local
        before = self._measure(client, "before", received["model"]) if measured and "model" in received else {}
        sent = self.method.train(client, received)
        if measured:
            client.report |= before | self._measure(client, "after", None)
        for name, vector in sent.items():
            if not all_finite(vector):
                raise Diverged(client.index, client.round, f"upload {name!r}")
            if self._stays is not None and vector.numel() == self.model.size:
                # What is not one of the server's vectors is a change of one: none, here.
                vector[self._stays] = self.server[name][self._stays] if name in self.server else 0.0
        if math.isinf(client.report.get("loss", 0.0)):
            raise Diverged(client.index, client.round, "loss")
        self._keep_own_buffers(client)
        protocol = self.settings.protocol
        if not self._personal or protocol == "until-arrival":
            delivered = self._uplink.begin(self.deliver, request, sent, wait=True)()
        elif protocol == "compute-and-wait":
            self._train_personally(client, received, sent)
            delivered = self._uplink.begin(self.deliver, request, sent, wait=True)()
        else:
            arrived = self._uplink.begin(self.deliver, request, sent)
            try:
                self._train_personally(client, received, sent)
            finally:
                delivered = arrived()
        reply = Reply(client.index, delivered, report=client.report)
        if self.method.buffer is None:
            self._commit(client)
        else:  # kept when the turn is over by the clock
            self._check(client)
            reply.kept = self.deliver(request, "kept", client.changes)
        return reply

    def _train_personally(self, client: Client, received: Vectors, sent: Vectors, budget: int | None = None) -> None:
        seed_layers(seed_of(self.settings.seed, "layers/personal", client.round, client.index), self.model.device)
        client.begin_personal(budget)
        self.method.personalize(client, received, sent)

    def _personalize(self, request: Request, client: Client, received: Vectors) -> Reply:
        """What a client does for its own model by itself."""
        if request.stage == "finish":
            self.method.personalize(client, received, {})
            self._keep_own_buffers(client)
        else:
            sent = {name: placed(opened(vector), self.model.device) for name, vector in request.sent.items()}
            self._train_personally(client, received, sent, request.budget)
        self._commit(client)
        return Reply(client.index, report=client.report)

    def _check(self, client: Client) -> None:
        for name, vector in client.changes.items():
            if not all_finite(vector):
                raise Diverged(client.index, client.round, name)

    def _commit(self, client: Client) -> None:
        """The turn is over, without an error: what was set is kept."""
        self._check(client)
        for name, vector in client.changes.items():
            self.store.write(client.index, name, vector)

    def _measure(self, client: Client, when: str, state: Tensor | None) -> dict[str, float]:
        """How the received model, or the working model as it is, does on the client's test data."""
        if len(client.test) == 0 or (state is not None and state.numel() != client.model.size):
            return {}
        if state is not None:
            client.model.load(state)
        metrics = self.task.measured(*self._outputs(client.model, self.plan.dataset, client.test))
        return {f"{when}_training/{metric}": value for metric, value in metrics.items()}

    # ---- evaluating --------------------------------------------------------------------------------------------------

    def models(self, client: Client, received: Vectors) -> Models:
        """A client's models by name, the global one first."""
        shared = self.method.global_model(self.server, client.model)
        found: Models = {} if shared is None else {"global": self._with_own_buffers(client, shared)}
        return found | dict(self.method.models(client, received))

    def _predictor(self, working: WorkingModel, model: Tensor | Predictor, round: int) -> Callable[[Inputs], Tensor]:
        """What makes outputs of inputs: the working model with this state, or what the method has in its place."""
        if isinstance(model, Tensor):
            # Most clients are evaluated with the same global model, in a round: in workers another process writes the
            # next one over it, in memory that they share, and no version of a tensor tells.
            if round != self._evaluated.get(working.network) or not working.loaded(model):
                working.load(model)
                self._evaluated[working.network] = round
            return working
        return functools.partial(model, working)

    def _evaluate(self, request: Request, client: Client, received: Vectors) -> Reply:
        """Metrics of the client's models; nothing that is kept changes."""
        s = self.settings
        splits = ("test", "validation") + (("train",) if s.evaluate_train else ())
        reply = Reply(client.index)
        outputs: dict[tuple[str, str], list[Tensor]] = {}
        for name, model in self.models(client, received).items():
            predict = self._predictor(client.model, model, request.round)
            sets = {split: [(self.plan.dataset, getattr(client, split))] for split in splits}
            if s.personal_global_test and (name == "personal" or (name == "global" and s.prediction_distance)):
                # Extra test sets once: CIFAR-10-C has 950,000 images, for every client's model.
                last = request.round == s.rounds
                sets |= {test: list(p) for test, p in self.plan.tests.items() if last or test == "global_test"}
            for split, parts in sets.items():
                results = [self._outputs(client.model, data, rows, predict) for data, rows in parts if len(rows)]
                if any(bool(found.isnan().any()) for found, _ in results):
                    # NaN is no accuracy of 0: the model is named, or left out.
                    reply.error = reply.error or Diverged(
                        client.index, client.round, f"{name} model's output on {split}"
                    )
                    continue
                if s.prediction_distance:
                    outputs[name, split] = [found for found, _ in results]
                metrics = mean_metrics([self.task.measured(*result) for result in results])
                if metrics:
                    reply.metrics[name, split] = metrics
        for (name, split), own in outputs.items():
            if name == "personal" and own and ("global", split) in outputs:
                pairs = zip(own, outputs["global", split], strict=True)
                apart = [
                    {"distance": prediction_distance(*(self.task.probabilities(x.double()) for x in pair))}
                    for pair in pairs
                ]
                reply.metrics[name, split] |= mean_metrics(apart)
        return reply

    def _outputs(
        self,
        model: WorkingModel,
        dataset: Dataset,
        rows: Tensor,
        predict: Callable[[Inputs], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the task's metrics need of these samples, by the working model or by what predicts in its place."""
        return current_outputs(model, dataset, rows, self.task.reduce, predict)

    def _test(self, request: Request) -> Reply:
        """What the global model makes of samples that belong to no client."""
        assert request.rows is not None
        dataset, rows = self.plan.tests[request.rows.test][request.rows.part]
        model = self.models_of[request.rows.network]
        state = self.method.global_model(self.server, model)
        assert state is not None
        model.load(state)
        part = rows[request.rows.begin : request.rows.end]
        return Reply(request.client, outputs=self._outputs(model, dataset, part))
