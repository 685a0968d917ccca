"""PersFL: each client's optimal teacher, distilled into its personal model (Divi, Farrukh and Celik, 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfl_ext.data.nests import arguments
from pfl_ext.federation import Client, Distillation, Method, Server, Stage, Steps, Uploads, WorkingModel, option
from pfl_ext.ops.distillation import Soft
from pfl_ext.tasks import Classification, outputs

__all__ = ["PersFL"]


@dataclass(frozen=True)
class PersFL(Method):
    r"""PersFL (Divi, Farrukh and Celik, 2021), Algorithm 1: optimal teachers, distilled into personal models.

    Stage 1 is FedAvg; of the global models that it receives, client k keeps the one with the lowest cross-entropy on
    its validation data (equation 2):

    .. math:: O_k = \arg\min_{G_e} \mathrm{CE}(G_e(x_k^{val}), y_k^{val})

    Stage 2: from :math:`O_k`, for each :math:`(T, \lambda)` of a grid, E epochs of SGD on (equation 3)

    .. math:: (1 - \lambda)\, \mathrm{CE}(y, \sigma(A))
              + \lambda T^2\, \mathrm{KL}(\sigma(O_k / T) \,\|\, \sigma(A / T))

    and :math:`A_k` is the one with the highest validation accuracy. PersFL-GD (equation 7) is ``soft="ce"``: it differs
    by the teacher's entropy, which does not depend on A, so it trains the same model. The two columns of Table 6 differ
    nevertheless: they can if the KL was averaged over classes too (``soft_mean="elements"``).

    Readings. The grid follows from the arithmetic of Table 5. With :math:`\lambda = 0` there is no temperature: that
    point is run once, as T = 1, as the table prints it. Among equal validation accuracies the first point wins, and
    the points are in the order of :math:`\lambda`. The initial model is no :math:`G_e`. The teacher's logits are
    computed once for all points and epochs, of the images without augmentation.

    A user that never took part chooses its teacher in the same way among the global models that the server has stored
    (section 6): all of them, up to ``stored_models``. They are stored only where a user may never take part, and sent
    only to such users.
    """

    name = "persfl"
    needs = "logits"
    needs_validation = True

    teacher: str = option(
        "optimal", "O_k is the client's best global model, or the last one (Table 4)", choices=("optimal", "last")
    )
    soft: str = option("kl", "soft term: KL divergence, or cross-entropy (PersFL-GD)", choices=("kl", "ce"))
    soft_mean: str = option(
        "samples",
        "the soft term is a mean over samples, or over samples and classes, as torch's kl_div takes it by default",
        choices=("samples", "elements"),
    )
    temperatures: tuple[float, ...] = option((1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0), "grid of T")
    lambdas: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "grid of lambda")
    grid_tests: bool = option(False, "report every point's accuracy on the user's test data (Figures 3 to 8)")
    distill_epochs: int = option(5, "passes over a client's data for each point of the grid")
    distill_lr: float = option(0.0, "step size of stage 2; 0: lr")
    stored_models: int = option(
        100, "how many global models, the last ones, the server stores for users that never take part"
    )
    grid: str = option(
        "auto",
        "train the grid's points all at once, one by one, or at once where the network has only linear layers and its "
        "steps are no native calls",
        choices=("auto", "batched", "one-by-one"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("temperatures", bool(self.temperatures) and all(t > 0 for t in self.temperatures), "above 0")
        self.check("lambdas", bool(self.lambdas) and all(0 <= x <= 1 for x in self.lambdas), "from 0 to 1")
        self.check("distill_epochs", self.distill_epochs >= 0, "not negative")
        self.check("distill_lr", self.distill_lr >= 0, "not negative")
        self.check("stored_models", self.stored_models >= 1, "at least 1")

    def points(self) -> list[tuple[float, float]]:
        """The grid as (T, lambda), in the order in which ties are decided."""
        rest = [(t, x) for x in sorted(self.lambdas) if x > 0 for t in sorted(self.temperatures)]
        return ([(1.0, 0.0)] if 0 in self.lambdas else []) + rest

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Clients distil their teachers (stage 2) after the last round."""
        return ("finish",)

    def set_up(self, server: Server) -> None:
        """The global model; who has taken part, and the stored models of earlier rounds for those who have not."""
        super().set_up(server)
        stored = self.stored_models if server.partial and self.teacher == "optimal" else 0
        server["stored"] = server["model"].repeat(stored, 1)
        server["took_part"] = torch.zeros(server.clients, dtype=torch.int64)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """O_k with its validation loss and its round, and A_k."""
        state = model.state()
        return {
            "teacher": state,
            "teacher_loss": torch.tensor([math.inf], dtype=torch.float64),
            "teacher_round": torch.zeros(1, dtype=torch.int64),
            "personal": state,
        }

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """The global model; after the last round the stored ones too, to users that never took part."""
        new = stage == "finish" and len(server["stored"]) > 0 and not bool(server["took_part"][client])
        return {name: server[name] for name in (("model", "stored") if new else ("model",))}

    # ---- stage 1 -----------------------------------------------------------------------------------------------------

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Validate the received G_e, keep it if it is the best so far (lines 5 to 9), and train as FedAvg does."""
        if client.round > 1:  # before, it is the initial model
            self._consider(client, received["model"], client.round - 1)
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average; and store the average where somebody may need it."""
        server["model"] = uploads.average()
        server["took_part"] = server["took_part"].index_fill(0, torch.tensor(uploads.clients), 1)
        if len(server["stored"]):
            row = torch.tensor([(server.round - 1) % len(server["stored"])], device=server["stored"].device)
            server["stored"] = server["stored"].index_copy(0, row, server["model"][None])

    @staticmethod
    def _consider(client: Client, state: Tensor, round: int) -> None:
        """Keep a global model as teacher if it is the best so far."""
        client.model.load(state)
        loss = client.loss(client.validation)
        if loss < float(client["teacher_loss"]):
            client["teacher"] = state
            client["teacher_loss"] = torch.tensor([loss], dtype=torch.float64)
            client["teacher_round"] = torch.tensor([round])

    # ---- stage 2 -----------------------------------------------------------------------------------------------------

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """The last G_e is a candidate too, for new users all stored ones; then the grid."""
        stored = received.get("stored", received["model"][:0, None])
        for round in range(max(1, client.round - len(stored) + 1), client.round):
            self._consider(client, stored[(round - 1) % len(stored)], round)
        self._consider(client, received["model"], client.round)
        if self.teacher == "last":
            client["teacher"], client["teacher_round"] = received["model"], torch.tensor([client.round])
        client.model.load(client["teacher"])
        soft_labels, _ = client.outputs(client.train)
        # Native steps are faster than a batch of models; and of more than matrix products a batch gains nothing: with a
        # kernel each, convolutions are slow on a CPU.
        batched = self.grid == "batched"
        if self.grid == "auto":
            batched = _only_linear(client.model.module) and not Steps(client, self).native
        batched = batched and client.task == Classification()
        students = self._grid_at_once(client, soft_labels) if batched else self._one_by_one(client, soft_labels)
        best, metric = math.nan, client.task.metric
        for (temperature, lam), student in zip(self.points(), students, strict=True):
            client.model.load(student)
            found = client.metrics(client.validation)[metric]
            if self.grid_tests:  # seen by nobody who chooses
                place = f"test_{metric}, T = {temperature:g}, lambda = {lam:g}"
                client.report[place] = client.metrics(client.test)[metric]
            if client.task.is_better(found, best):
                best = found
                client["personal"] = student
                client.report |= {"temperature": temperature, "lambda": lam, f"distilled_validation_{metric}": found}
        client.report["teacher_round"] = float(client["teacher_round"])

    def _one_by_one(self, client: Client, teacher_logits: Tensor) -> list[Tensor]:
        students = []
        for temperature, lam in self.points():
            soft = lam * self._share(teacher_logits)
            loss = Distillation(client.task, teacher_logits, 1 - lam, soft, temperature, cast(Soft, self.soft))
            client.model.load(client["teacher"])
            steps = Steps(client, self, lr=self.distill_lr or None)
            steps.train(loss, epochs=self.distill_epochs, batches="distillation")
            students.append(client.model.state())
        return students

    def _share(self, logits: Tensor) -> float:
        """What a mean over classes too leaves of the soft term."""
        return 1 / logits.shape[-1] if self.soft_mean == "elements" else 1.0

    def _grid_at_once(self, client: Client, teacher_logits: Tensor) -> list[Tensor]:
        r"""The same with all points in one batch of models; the gradient in the logits is written out:

        .. math:: \frac{1}{B} \big((1 - \lambda) (\sigma(a) - y) + \lambda T\, (\sigma(a / T) - \sigma(o / T))\big)
        """
        model, points = client.model, self.points()
        client.model.load(client["teacher"])
        names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        stacked = {
            name: p.detach().expand(len(points), *p.shape).clone().requires_grad_()
            for name, p in zip(names, model.trained, strict=True)
        }
        students = list(stacked.values())
        expected = client.steps_of(self.batch_size, epochs=self.distill_epochs)
        sgd = Steps(client, self, params=students, lr=self.distill_lr or None, expected=expected)
        temperature = teacher_logits.new_tensor([t for t, _ in points]).view(-1, 1, 1)
        lam = teacher_logits.new_tensor([x for _, x in points]).view(-1, 1, 1)
        forward = vmap(lambda some, x: outputs(functional_call(model.module, some, *arguments(x))), in_dims=(0, None))
        model.module.train()
        for batch in client.batches(self.batch_size, epochs=self.distill_epochs, name="distillation"):
            logits = forward(stacked, batch.inputs)
            with torch.no_grad():
                soft = torch.softmax(teacher_logits[batch.rows] / temperature, -1)
                hard = nn.functional.one_hot(batch.targets, logits.shape[-1])
                seed = (1 - lam) * (torch.softmax(logits, -1) - hard)
                seed += lam * self._share(logits) * temperature * (torch.softmax(logits / temperature, -1) - soft)
                seed /= len(batch.rows)
            sgd.step(list(torch.autograd.grad(logits, students, seed)))
        found = []
        for g in range(len(points)):
            for p, student in zip(model.trained, students, strict=True):
                p.data.copy_(student.detach()[g])
            found.append(model.state())
        return found

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's teacher so far, the global model where there is none yet, and A_k once it is there."""
        teacher = client["teacher"] if "teacher" in client else received["model"]
        return {"teacher": teacher} | ({"personal": client["personal"]} if "personal" in client else {})


def _only_linear(module: nn.Module) -> bool:
    """Whether a batch of such networks is a batch of matrix products, and their forward needs no random numbers."""
    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    return all(isinstance(m, (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity, nn.Tanh)) for m in leaves)
