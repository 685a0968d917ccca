r"""Differential privacy of a client's samples: DP-SGD, and what it costs.

Gradients of single samples come from ``torch.func``: any layer that ``vmap`` can follow works, frozen parameters are
left out, and nothing is wrapped or hooked. Opacus would be a dependency for the same arithmetic; its accountant of
Rényi divergences is the standard one, and :func:`epsilon` gives its numbers. ``docs/privacy.md`` says what of a run is
covered, and what is not.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pfl_ext.data import Inputs
from pfl_ext.data.nests import arguments, mapped, split
from pfl_ext.nn import FrozenBatchNorm2d
from pfl_ext.tasks import outputs

from .model import WorkingModel
from .settings import Privacy

__all__ = [
    "PRIVATE_STEPS",
    "epsilon",
    "private_gradients",
    "refuse_batch_norm",
    "sampling",
    "secure_normal",
    "secure_uniform",
]

PRIVATE_STEPS = "pfl_ext.private_steps"
"""The name under which a client keeps how many steps it has taken on its data, and how many for what it sends."""

_NUMBERS = 1 << 26  # gradients of single samples that are in memory at once
_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))


def sampling(samples: int, batch_size: int) -> tuple[float, int]:
    """The probability with which a sample is in a batch, and the batches of a pass: as in Opacus, one by the other."""
    batches = -(-samples // batch_size)
    return 1 / batches, batches


def refuse_batch_norm(module: nn.Module) -> None:
    """Raise a ValueError for a network in which a sample's output depends on other samples of its batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, FrozenBatchNorm2d):
            raise ValueError(
                f"the network has batch normalisation ({name}): it mixes the samples of a batch, so that no sample has "
                "a gradient of its own to clip, and its running statistics would leave without noise. Use one without, "
                "such as vit, or a resnet with norm=group"
            )


def private_gradients(
    model: WorkingModel,
    params: Sequence[Tensor],
    inputs: Inputs,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    privacy: Privacy,
    expected: float,
    noise: torch.Generator,
) -> tuple[Tensor, list[Tensor]]:
    r"""The mean loss of a batch, and the noisy gradients that DP-SGD steps by (Abadi et al., 2016, Algorithm 1).

    .. math:: \tilde g = \frac1L \Big(\sum_{i \in B} g_i \min\big(1, C / \|g_i\|_2\big) + N(0, \sigma^2 C^2 I)\Big)

    :math:`g_i` is the gradient of one sample's loss over all of ``params`` together. L is the expected size of a batch,
    not that of this one, which is random and may be 0.

    Args:
        model: at the point where the gradient is asked for, in training mode.
        params: those that are trained.
        inputs, targets: a batch, drawn as :func:`sampling` says, each sample by itself.
        loss: of logits and targets; it is asked for one sample at a time.
        privacy: :math:`\sigma` and C, and whether the noise is drawn securely.
        expected: L.
        noise: the random stream; of no meaning where it is drawn securely.
    """
    names = {id(p): name for name, p in model.module.named_parameters()}
    values = {names[id(p)]: p.detach() for p in params}

    def of_one(values: dict[str, Tensor], x: Any, y: Tensor) -> Tensor:
        given, by_name = arguments(mapped(lambda leaf: leaf[None], x))
        return loss(outputs(functional_call(model.module, values, given, by_name)), y[None])

    each = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different")
    sums = {name: torch.zeros_like(value) for name, value in values.items()}
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    at_once = max(1, _NUMBERS // sum(value.numel() for value in values.values()))
    for x, y in zip(split(inputs, at_once), targets.split(at_once), strict=True):
        if len(y) == 0:
            break
        gradients, losses = each(values, x, y)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        factors = (privacy.dp_clip / norms.clamp(min=privacy.dp_clip)).to(model.dtype)
        for name, g in gradients.items():
            sums[name] += torch.tensordot(factors, g, 1)
        total += losses.sum()
    scale = privacy.dp_noise * privacy.dp_clip
    found = []
    for value in sums.values():
        if privacy.dp_secure:
            random = secure_normal(value.shape, value.dtype).to(value.device)
        else:
            random = torch.randn(value.shape, generator=noise, dtype=value.dtype, device=noise.device).to(value.device)
        found.append((value + scale * random) / expected)
    return total / max(1, len(targets)), found


def secure_uniform(count: int) -> Tensor:
    """Numbers above 0, up to 1, of 53 random bits each from the operating system's secure generator, in float64."""
    if count == 0:
        return torch.empty(0, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64) & ((1 << 53) - 1)
    return (bits + 1).double().mul_(2.0**-53)  # above 0: its logarithm is a number


def secure_normal(shape: torch.Size | Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    r"""Standard normal numbers from the operating system's secure generator, by the formula of Box and Muller.

    .. math:: \sqrt{-2 \ln u_1}\, \cos(2 \pi u_2), \quad \sqrt{-2 \ln u_1}\, \sin(2 \pi u_2)

    for :math:`u_1, u_2` of :func:`secure_uniform`: up to 8.57 standard deviations.
    """
    count = math.prod(shape)
    pairs = -(-count // 2)
    u = secure_uniform(2 * pairs).view(2, pairs)
    length, angle = u[0].log().mul_(-2).sqrt_(), u[1] * (2 * math.pi)
    return torch.cat([length * angle.cos(), length * angle.sin()])[:count].view(shape).to(dtype)


# ---- the accountant --------------------------------------------------------------------------------------------------


def epsilon(rate: float, noise: float, steps: int, delta: float) -> float:
    r"""The :math:`\varepsilon` that this number of DP-SGD steps costs, at this :math:`\delta`.

    The Rényi divergences of the Gaussian mechanism on a batch that holds each sample with probability ``rate``
    (Mironov, Talwar and Zhang, 2019), added over the steps, at the best of Opacus' orders :math:`\alpha`; and (Canonne,
    Kamath and Steinke, 2020; Proposition 12)

    .. math:: \varepsilon = \mathrm{rdp}(\alpha) - \frac{\log \delta + \log \alpha}{\alpha - 1}
              + \log \frac{\alpha - 1}{\alpha}

    Infinite without noise, 0 without steps.
    """
    if steps == 0:
        return 0.0
    if noise == 0:
        return math.inf
    found = [
        steps * one - (math.log(delta) + math.log(order)) / (order - 1) + math.log((order - 1) / order)
        for order, one in zip(_ORDERS, _renyi(rate, noise), strict=True)
    ]
    return max(0.0, min(found))


@functools.cache
def _renyi(rate: float, noise: float) -> tuple[float, ...]:
    """The divergence of one step at each order."""
    if rate == 1:
        return tuple(order / (2 * noise**2) for order in _ORDERS)
    return tuple(_log_moment(rate, noise, order) / (order - 1) for order in _ORDERS)


def _log_moment(q: float, sigma: float, alpha: float) -> float:
    """log A of Mironov et al.: equation (30) for whole orders, section 3.3 for others."""
    if alpha == int(alpha):
        n = int(alpha)
        terms = [
            math.log(math.comb(n, k)) + k * math.log(q) + (n - k) * math.log1p(-q) + (k * k - k) / (2 * sigma**2)
            for k in range(n + 1)
        ]
        return _log_sum([(1.0, term) for term in terms])
    # Two alternating series, of both sides of z0: signs come from the binomial coefficients of a broken order.
    z0 = sigma**2 * math.log(1 / q - 1) + 0.5
    signed: list[tuple[float, float]] = []
    i, log_binomial, sign = 0, 0.0, 1.0
    while True:
        j = alpha - i
        s0 = log_binomial + i * math.log(q) + j * math.log1p(-q) + (i * i - i) / (2 * sigma**2)
        s1 = log_binomial + j * math.log(q) + i * math.log1p(-q) + (j * j - j) / (2 * sigma**2)
        s0 += _log_normal_cdf((z0 - i) / sigma)
        s1 += _log_normal_cdf((j - z0) / sigma)
        signed += [(sign, s0), (sign, s1)]
        if max(s0, s1) < -30 and i > alpha:
            return _log_sum(signed)
        log_binomial += math.log(abs(alpha - i) / (i + 1))
        sign *= math.copysign(1.0, alpha - i)
        i += 1


def _log_sum(terms: list[tuple[float, float]]) -> float:
    """The logarithm of a sum of numbers that are given as a sign and a logarithm."""
    top = max(term for _, term in terms)
    return top + math.log(math.fsum(sign * math.exp(term - top) for sign, term in terms))


def _log_normal_cdf(x: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))
