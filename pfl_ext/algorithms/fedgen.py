"""FedGen: a generator at the server tells the clients what the others know, without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pfl_ext.data.placement import placed
from pfl_ext.federation import (
    Batch,
    Client,
    Method,
    Server,
    SideModule,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    option,
)

from .prototypes import head_sizes

__all__ = ["FedGen"]


@dataclass(frozen=True)
class FedGen(Method):
    r"""FedGen (Zhu et al., 2021), Algorithm 1: distillation without data, through a generator of features.

    A model is a predictor (head) :math:`\theta^p` on features z. A selected client takes E epochs of SGD from
    :math:`\theta` on

    .. math:: L_k(\theta_k) + \lambda\, \mathbb{E}_{\hat y \sim \hat p,\, z \sim G(\cdot | \hat y)}\,
        \mathrm{CE}(\hat y, h(z; \theta^p_k))

    and sends :math:`\theta_k` and how often it saw each label. The server takes
    :math:`\theta \leftarrow \frac{1}{|S|} \sum_{k \in S} \theta_k` and :math:`\hat p(y)` from the sum of the counts,
    and trains the generator by Adam on

    .. math:: \mathbb{E}_{y \sim \hat p,\, z \sim G(\cdot | y)}\,
        \mathrm{CE}\big(y, \tfrac{1}{|S|} \textstyle\sum_{k \in S} h(z; \theta^p_k)\big)
        + \gamma \exp\Big(-\mathrm{mean}_{i, j}\,
        \tfrac1e \|\epsilon_i - \epsilon_j\|_2^2\; \tfrac1d \|z_i - z_j\|_1\Big),

    in which :math:`\epsilon`, e numbers, is the noise that :math:`z = G(\epsilon, y)`, d numbers, is made of.

    Readings. The generator is a perceptron of one hidden layer with ReLU on noise and label, without the authors' batch
    normalisation, so that a feature depends on its own noise alone. Its second term, which keeps the features of a
    label from becoming one, is in the authors' code, as here with means over the numbers of noise and of features:
    with norms in their place the exponent is about -20 at real sizes, and the term has no gradient to speak of. Adam
    starts anew in each round. In the first round the generator has learnt nothing and clients train without it, as
    theirs do. Their code also matches outputs on real labels and lets :math:`\lambda` decay: not here.
    """

    name = "fedgen"
    needs = "classes"

    head: str = option("", "module that is the predictor; empty: the last layer")
    lam: float = option(1.0, "lambda, weight of the generated samples; 0 is FedAvg")
    generated: int = option(32, "generated samples in a step, at the clients and at the server")
    noise: int = option(32, "noise numbers the generator takes")
    hidden: int = option(256, "width of the generator")
    generator_steps: int = option(50, "steps of the generator in a round")
    generator_lr: float = option(3e-4, "step size of the generator's Adam")
    diversity: float = option(1.0, "gamma, weight of the term that keeps features of a label apart")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")
        self.check("diversity", self.diversity >= 0, "not negative")
        self.check("generator_lr", self.generator_lr > 0, "above 0")
        self.check("generator_steps", self.generator_steps >= 0, "not negative")
        for name in ("generated", "noise", "hidden"):
            self.check(name, getattr(self, name) >= 1, "at least 1")

    # ---- predictor and generator ----------------------------------------------------------------------------------

    def _head(self, model: WorkingModel) -> nn.Module:
        return model.module.get_submodule(self.head or model.last_layer())

    def _generator(self, model: WorkingModel) -> SideModule:
        """G, from noise and a label to features."""
        features, classes = head_sizes(model, self.head, "FedGen")
        into = self.noise + classes
        return SideModule(
            lambda: nn.Sequential(nn.Linear(into, self.hidden), nn.ReLU(), nn.Linear(self.hidden, features))
        )

    def _draw(self, p: Tensor, stream: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
        """Labels of the distribution p, and what the generator takes for them: noise, and the label as one-hot."""
        labels = torch.multinomial(p, self.generated, replacement=True, generator=stream)
        noise = torch.randn(self.generated, self.noise, generator=stream, dtype=p.dtype)
        given = torch.cat([noise, F.one_hot(labels, len(p)).to(p.dtype)], 1)
        return placed(labels, device), placed(given, device)

    # ---- the algorithm -----------------------------------------------------------------------------------------------

    def set_up(self, server: Server) -> None:
        """theta, the sum of the clients' label counts, and the generator's first weights."""
        super().set_up(server)
        server["counts"] = server["model"].new_zeros(head_sizes(server.model, self.head, "FedGen")[1])
        server["generator"] = self._generator(server.model).drawn(server.stream("generator"), server.model)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send all that the server has; for an evaluation the model theta alone."""
        names = ("model", "generator", "counts") if stage == "train" else ("model",)
        return {name: server[name] for name in names}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model on the client's data and on what the generator makes."""
        model, counts = client.model, received["counts"]
        seen = torch.zeros_like(counts)
        model.load(received["model"])
        head, generator, stream = self._head(model), self._generator(model), client.stream("generator")
        p = _distribution(counts) if self.lam != 0 else None

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            # Not bincount, which asks a GPU for the largest label.
            seen.index_add_(0, batch.targets, seen.new_ones(len(batch.targets)))
            objective = client.task.loss(logits, batch.targets)
            if p is None:
                return objective
            labels, given = self._draw(p, stream, model.device)
            with torch.no_grad():
                z = generator(received["generator"], given)
            return objective + self.lam * F.cross_entropy(head(z), labels)

        client.report["loss"] = Steps(client, self).train(loss)
        return {"model": model.state(), "counts": seen}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """The clients' mean; then the generator, from what their predictors say."""
        server["model"] = uploads.average(equally=True)
        server["counts"] = uploads.sum("counts", [1.0] * len(uploads))
        p = _distribution(server["counts"]) if self.lam != 0 else None
        if p is None:
            return
        head, heads = self._head(server.model), []
        for _, state in uploads.one_by_one("model"):
            server.model.load(state)
            heads.append({name: tensor.detach().clone() for name, tensor in head.state_dict().items()})
        generator, numbers = self._generator(server.model), server["generator"].clone().requires_grad_()
        adam = torch.optim.Adam([numbers], lr=self.generator_lr)
        stream = server.stream("generator")
        head.eval()
        for _ in range(self.generator_steps):
            labels, given = self._draw(p, stream, server.model.device)
            z = generator(numbers, given)
            logits = torch.stack([functional_call(head, some, (z,)) for some in heads]).mean(0)
            understood = F.cross_entropy(logits, labels)
            apart = diversity(given[:, : self.noise], z)
            adam.zero_grad()
            (understood + self.diversity * apart).backward()
            adam.step()
        if self.generator_steps:
            server.report["generator_loss"] = float(understood.detach())
        server["generator"] = numbers.detach()


def _distribution(counts: Tensor) -> Tensor | None:
    """The shares of the labels, on the CPU, where labels are drawn; None without any."""
    counts = counts.cpu()
    return counts / counts.sum() if bool(counts.any()) else None


def diversity(noise: Tensor, features: Tensor) -> Tensor:
    """The term that keeps features apart whose noise is: 1 where all features are one, towards 0 the further apart."""
    between_noise = (noise[:, None] - noise).square().mean(-1)
    between_features = (features[:, None] - features).abs().mean(-1)
    return torch.exp(-(between_noise * between_features).mean())
