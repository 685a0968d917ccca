"""Ways to compute the divergence between the spectra of two models, in its normalized form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["autograd_fft", "autograd_rfft", "fft_teacher", "numpy_lists", "rfft_teacher"]


def fft_teacher(teacher: Sequence[Tensor]) -> Tensor:
    """The logarithm of the teacher's normalized spectrum, made once."""
    q = torch.fft.fft(torch.cat([x.reshape(-1) for x in teacher])).abs()
    return (q / q.sum()).log()


def rfft_teacher(teacher: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same for the half spectrum, and how often each of its bins counts."""
    flat = torch.cat([x.reshape(-1) for x in teacher])
    q = torch.fft.rfft(flat).abs()
    counts = torch.full_like(q, 2.0)
    counts[0] = 1.0
    if flat.numel() % 2 == 0:
        counts[-1] = 1.0
    return (q / (counts * q).sum()).log(), counts


@torch.enable_grad()
def autograd_fft(student: Sequence[Tensor], log_q: Tensor) -> list[Tensor]:
    """``torch.fft.fft`` of the concatenation and the formula, differentiated by autograd."""
    p = torch.fft.fft(torch.cat([x.reshape(-1) for x in student])).abs()
    p = p / p.sum()
    loss = (p * (p.log() - log_q)).sum()
    return [loss, *torch.autograd.grad(loss, student)]


@torch.enable_grad()
def autograd_rfft(student: Sequence[Tensor], log_q: Tensor, counts: Tensor) -> list[Tensor]:
    """The same with ``torch.fft.rfft``, by who knows that half of the spectrum mirrors the other."""
    p = torch.fft.rfft(torch.cat([x.reshape(-1) for x in student])).abs()
    p = p / (counts * p).sum()
    loss = (counts * p * (p.log() - log_q)).sum()
    return [loss, *torch.autograd.grad(loss, student)]


def numpy_lists(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> float:
    """The way of the paper's code: NumPy, magnitudes in a Python list, for both models in every step; no gradient.

    The code itself takes a two-dimensional transform of each layer; here it is the one of the whole vector, so that
    the result can be compared.
    """
    spectra = []
    for model in (student, teacher):
        magnitudes: list[float] = []
        flat = np.concatenate([x.detach().numpy().reshape(-1) for x in model])
        magnitudes.extend(np.abs(np.fft.fft(flat)))
        spectra.append(np.array(magnitudes) / np.sum(magnitudes))
    p, q = spectra
    return float(np.sum(p * (np.log(p) - np.log(q))))
