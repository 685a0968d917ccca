r"""The weight spectrum and the spectral divergence of spectral co-distillation.

With :math:`s(w) = |\mathrm{DFT}(w)|`, the magnitudes of the :math:`d` Fourier coefficients of flattened weights,
:math:`p = s(w)`, :math:`q` the teacher's spectrum, and sums over the first :math:`K = \lceil \tau d \rceil` entries:

* ``form="normalized"``:   :math:`\sum \hat p \log (\hat p / \hat q)`, with :math:`\hat p = p / \sum p`
  and :math:`\hat q = q / \sum q`
* ``form="paper"``:        :math:`\sum p \log (p / q)`, as printed
* ``form="generalized"``:  :math:`\sum p \log (p / q) - p + q`
* ``form="mean"``:         :math:`\sum \bar p \log (\bar p / \bar q)`, with :math:`\bar p = K p / \sum p` and
  :math:`\bar q` likewise: spectra divided by their means, K times the normalised form and its gradient

Readings of the paper. Its D is called equivalent to the KL divergence, which holds for vectors that sum to one; taken
literally it is smallest at :math:`p = q / e` and shrinks the weights. Hence ``"normalized"`` is the default. Its
gradient is about :math:`1 / |w|` whatever the size of the model, which the paper's weights make next to nothing;
``"mean"`` is the same divergence at a scale that does not shrink with the number of entries.
Truncation is in frequency: entries :math:`0 \dots K - 1` of the length-d spectrum.

Zeros: :math:`0 \log 0 = 0` and a coefficient of magnitude zero has gradient zero. A teacher's magnitude is taken as at
least the smallest normal number of its type, so that a divergence is always finite; magnitudes of ``p`` below it count
as zero. NaN and infinity in the weights make the divergence NaN or infinite, never an error.

Real weights have a symmetric spectrum: all work is on the half of ``d // 2 + 1`` bins, each counted once or twice.
One real transform, a pass for the sums, a pass that turns the spectrum in place into the gradient's, one inverse.

Half precision is computed in float32, and losses and spectra come back in float32: the sum of a model's weights leaves
the range of float16 easily. Gradients have the type of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ._arguments import FLOATS, accumulate_type, check_dense, describe, one_of
from ._declare import declare

__all__ = ["SpectralTeacher", "spectral_divergence", "spectrum"]

Form: TypeAlias = Literal["normalized", "paper", "generalized", "mean"]
Scope: TypeAlias = Literal["model", "tensor"]
Length: TypeAlias = Literal["exact", "fast"]
Weights: TypeAlias = Tensor | Iterable[Tensor]

_FORMS = ("normalized", "paper", "generalized", "mean")
_SCOPES = ("model", "tensor")
_LENGTHS = ("exact", "fast")


def _complex_type(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def _real_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else torch.float32


_COMPOSED = {"cuda": "made of cuFFT's transforms and the other spectral ops"}


# ---- the real transform and its adjoint ------------------------------------------------------------------------------
#
# Plain torch's, in exact length and without a factor in either direction. The CPU kernels have transforms of their own
# (csrc/cpu/real_dft.h): lengths with large prime factors at the price of others, and the same bits for any number of
# threads, which torch's FFTs do not give.


@lru_cache(maxsize=256)
def _smooth_length(least: int) -> int:
    """The smallest length from ``least`` on without a prime factor above 5."""
    best = 1 << max(0, least - 1).bit_length()
    fives = 1
    while fives < best:
        odd = fives
        while odd < best:
            best = min(best, odd << max(0, -(-least // odd) - 1).bit_length())
            odd *= 3
        fives *= 5
    return best


def _real_dft_reference(x: Tensor, length: int) -> Tensor:
    if x.dim() != 2 or x.dtype not in FLOATS or not 0 < x.shape[1] <= length:
        raise ValueError(
            f"x is {describe(x)} for a transform of length {length}; a matrix of floating type is accepted"
        )
    return torch.fft.rfft(x.to(accumulate_type(x.dtype)), n=length)


def _real_dft_fake(x: Tensor, length: int) -> Tensor:
    return x.new_empty((x.shape[0], length // 2 + 1), dtype=_complex_type(x.dtype))


def _real_dft_setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.length = inputs
    ctx.size, ctx.dtype = x.shape[1], x.dtype


def _real_dft_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # The inverse counts every bin twice, except the first and, for even lengths, the last.
    once = torch.full((ctx.length // 2 + 1,), 0.5, dtype=_real_type(grad.dtype), device=grad.device)
    once[0] = 1
    once[ctx.length // 2] = 1 if ctx.length % 2 == 0 else 0.5 if ctx.length > 1 else 1
    return _real_idft(grad * once, ctx.length, ctx.size).to(ctx.dtype), None


def _real_idft_reference(half_spectrum: Tensor, length: int, size: int) -> Tensor:
    if half_spectrum.dim() != 2:
        raise ValueError(f"the half spectrum is {describe(half_spectrum)}; a complex matrix is accepted")
    return torch.fft.irfft(half_spectrum, n=length, norm="forward")[:, :size].contiguous()


def _real_idft_fake(half_spectrum: Tensor, length: int, size: int) -> Tensor:
    return half_spectrum.new_empty((half_spectrum.shape[0], size), dtype=_real_type(half_spectrum.dtype))


_real_dft = declare(
    "real_dft(Tensor x, int length) -> Tensor",
    reference=_real_dft_reference,
    fake=_real_dft_fake,
    setup_context=_real_dft_setup,
    backward=_real_dft_backward,
    plain_on=_COMPOSED,
)
_real_idft = declare(
    "real_idft(Tensor half_spectrum, int length, int size) -> Tensor",
    reference=_real_idft_reference,
    fake=_real_idft_fake,
    plain_on=_COMPOSED,
)


# ---- the passes over the half spectrum ------------------------------------------------------------------------------


def _bins(length: int, count: int) -> int:
    """How many bins of the half spectrum the first ``count`` entries of the whole one touch."""
    return min(count, length // 2 + 1)


def _bin_weights(length: int, count: int, like: Tensor) -> Tensor:
    """How often each of the first bins occurs among the first ``count`` entries: entry k > d/2 is bin d - k."""
    k = torch.arange(_bins(length, count), device=like.device)
    mirrored = (k > length - count) & (k > 0) & (2 * k != length)
    return (1 + mirrored.to(torch.int64)).to(torch.float64)


def _magnitude(half_spectrum: Tensor) -> Tensor:
    tiny = torch.finfo(half_spectrum.dtype).smallest_normal
    # Not abs(): where a part is infinite and the other NaN, that is infinite.
    magnitude = torch.hypot(half_spectrum.real, half_spectrum.imag)
    return torch.where(magnitude < tiny, torch.zeros_like(magnitude), magnitude)


def _check_spectrum(half_spectrum: Tensor, length: int, count: int) -> None:
    if half_spectrum.dtype not in (torch.complex64, torch.complex128) or half_spectrum.dim() != 2:
        raise ValueError(f"the half spectrum is {describe(half_spectrum)}; a complex matrix is accepted")
    if length < 1 or half_spectrum.shape[1] != length // 2 + 1 or not half_spectrum.is_contiguous():
        raise ValueError(
            f"the half spectrum is {describe(half_spectrum)}; contiguous rows of {length // 2 + 1} bins are expected "
            f"for length {length}"
        )
    if not 1 <= count <= length:
        raise ValueError(f"count={count} entries of a spectrum of length {length}; 1 to {length} are accepted")


def _check_teacher(half_spectrum: Tensor, log_q: Tensor, total: Tensor, length: int, count: int) -> None:
    rows, real = half_spectrum.shape[0], _real_type(half_spectrum.dtype)
    fits = log_q.dim() == 2 and log_q.shape[1] == _bins(length, count) and log_q.shape[0] in (1, rows)
    if not fits or log_q.dtype != real or log_q.device != half_spectrum.device or not log_q.is_contiguous():
        raise ValueError(
            f"log_q is {describe(log_q)} for the half spectrum {describe(half_spectrum)}; contiguous "
            f"{str(real).removeprefix('torch.')} [1 or {rows}, {_bins(length, count)}] on the same device is expected"
        )
    if total.dtype != torch.float64 or total.shape != log_q.shape[:1] or total.device != log_q.device:
        raise ValueError(f"total is {describe(total)}; float64 [{log_q.shape[0]}] on {log_q.device} is expected")


def _teacher_reference(half_spectrum: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    _check_spectrum(half_spectrum, length, count)
    magnitude = _magnitude(half_spectrum[:, : _bins(length, count)])
    floored = torch.where(
        magnitude == 0, torch.full_like(magnitude, torch.finfo(magnitude.dtype).smallest_normal), magnitude
    )
    total = (floored.double() * _bin_weights(length, count, magnitude)).sum(1)
    return floored.log(), total


def _teacher_fake(half_spectrum: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    rows = half_spectrum.shape[0]
    log_q = half_spectrum.new_empty((rows, _bins(length, count)), dtype=_real_type(half_spectrum.dtype))
    return log_q, half_spectrum.new_empty((rows,), dtype=torch.float64)


_teacher = declare(
    "spectral_teacher(Tensor half_spectrum, int length, int count) -> (Tensor, Tensor)",
    reference=_teacher_reference,
    fake=_teacher_fake,
)


def _half_divergence_reference(
    half_spectrum: Tensor, log_q: Tensor, total: Tensor, length: int, count: int, form: int, need_grad: bool
) -> Tensor:
    _half_divergence_fake(half_spectrum, log_q, total, length, count, form, need_grad)
    bins = _bins(length, count)
    weights = _bin_weights(length, count, log_q)
    used = half_spectrum[:, :bins]
    p = _magnitude(used)
    zero = p == 0
    log_ratio = torch.where(zero, torch.zeros_like(p), p.log() - log_q)
    z = (p.double() * weights).sum(1)
    a = ((p * log_ratio).double() * weights).sum(1)
    one = torch.ones_like(z)
    if _FORMS[form] in ("normalized", "mean"):
        factor = float(count) if _FORMS[form] == "mean" else 1.0
        empty = z == 0
        safe = torch.where(empty, one, z)
        loss = torch.where(empty, torch.zeros_like(z), factor * (a / safe - safe.log() + total.log()))
        alpha = torch.where(empty, torch.zeros_like(z), factor / safe)
        beta = -a / safe
    elif _FORMS[form] == "paper":
        loss, alpha, beta = a, one, one
    else:
        loss, alpha, beta = a - z + total, one, torch.zeros_like(z)
    if need_grad:
        # The inverse transform counts every bin twice, except the first and, for even lengths, the last.
        k = torch.arange(bins, device=p.device)
        share = weights / torch.where((k == 0) | (2 * k == length), 1.0, 2.0)
        slope = alpha.to(p.dtype)[:, None] * (log_ratio + beta.to(p.dtype)[:, None]) * share.to(p.dtype)
        unit = used / torch.where(zero, torch.ones_like(p), p)
        used.copy_(torch.where(zero, torch.zeros_like(used), unit * slope))
        half_spectrum[:, bins:] = 0
    return loss.to(p.dtype)


def _half_divergence_fake(
    half_spectrum: Tensor, log_q: Tensor, total: Tensor, length: int, count: int, form: int, need_grad: bool
) -> Tensor:
    _check_spectrum(half_spectrum, length, count)
    _check_teacher(half_spectrum, log_q, total, length, count)
    if not 0 <= form < len(_FORMS):
        raise ValueError(f"form={form}; 0 to {len(_FORMS) - 1} are accepted")
    return log_q.new_empty((half_spectrum.shape[0],))


# The divergence of each row; with need_grad the half spectrum is replaced by that of the gradient, for real_idft.
_half_divergence = declare(
    "half_spectrum_divergence_(Tensor(a!) half_spectrum, Tensor log_q, Tensor total, int length, int count, int form, "
    "bool need_grad) -> Tensor",
    reference=_half_divergence_reference,
    fake=_half_divergence_fake,
)


# ---- the divergence, and its gradient in forward ---------------------------------------------------------------------


# p: tensors that are read as [clients, ...] and joined to rows of weights; one matrix, or the parameters of one model.


def _divergence_by(
    dft: Callable[..., Tensor], diverge: Callable[..., Tensor], idft: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The whole divergence, made of its three steps."""

    def divergence(
        p: list[Tensor], clients: int, log_q: Tensor, total: Tensor, length: int, count: int, form: int, need_grad: bool
    ) -> tuple[Tensor, Tensor]:
        rows = torch.cat([x.reshape(clients, -1) for x in p], 1)
        half_spectrum = dft(rows, length)
        loss = diverge(half_spectrum, log_q, total, length, count, form, need_grad)
        if not need_grad:
            return loss, rows.new_empty((0,))
        return loss, idft(half_spectrum, length, rows.shape[1]).to(rows.dtype)

    return divergence


def _divergence_fake(
    p: list[Tensor], clients: int, log_q: Tensor, total: Tensor, length: int, count: int, form: int, need_grad: bool
) -> tuple[Tensor, Tensor]:
    loss = p[0].new_empty((clients,), dtype=accumulate_type(p[0].dtype))
    size = sum(x.numel() for x in p) // clients
    return loss, p[0].new_empty((clients, size) if need_grad else (0,))


# Without a registered gradient: that takes lists apart as Python trees, 0.15 ms of the 1.1 ms that LeNet took with it.
_divergence = declare(
    "spectral_divergence(Tensor[] p, int clients, Tensor log_q, Tensor total, int length, int count, int form, "
    "bool need_grad) -> (Tensor, Tensor)",
    reference=_divergence_by(_real_dft_reference, _half_divergence_reference, _real_idft_reference),
    composed=_divergence_by(_real_dft, _half_divergence, _real_idft),
    fake=_divergence_fake,
    plain_on=_COMPOSED,
)


class _Divergence(torch.autograd.Function):
    """The op with its gradient."""

    @staticmethod
    def forward(ctx: Any, clients: int, teacher: Any, form: int, *p: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = _divergence(list(p), clients, *teacher, form, True)
        ctx.shapes, ctx.clients = [x.shape for x in p], clients
        # Or autograd would make a gradient of zeros for the second output, as long as the weights.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad)
        return loss, grad

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        if grad_loss is None:
            return None, None, None, *[None] * len(ctx.shapes)
        (grad,) = ctx.saved_tensors
        sizes = [shape.numel() // ctx.clients for shape in ctx.shapes]
        parts = _scale_gradient(grad, grad_loss).split(sizes, 1)
        return None, None, None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def _scale_gradient_reference(grad: Tensor, scale: Tensor) -> Tensor:
    if grad.dim() != 2 or scale.shape != grad.shape[:1]:
        raise ValueError(
            f"scale is {describe(scale)} for the gradient {describe(grad)}; one number per row of a matrix is accepted"
        )
    return (grad * scale[:, None]).to(grad.dtype).contiguous()


def _scale_gradient_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _scale_gradient_backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("spectral_divergence computes its gradient in forward and cannot be differentiated twice")


_scale_gradient = declare(
    "spectral_scale_gradient(Tensor grad, Tensor scale) -> Tensor",
    reference=_scale_gradient_reference,
    fake=lambda grad, scale: grad.new_empty(grad.shape),
    setup_context=_scale_gradient_setup,
    backward=_scale_gradient_backward,
    plain_on={"cuda": "one product, which torch has"},
)


# ---- what users call -----------------------------------------------------------------------------------------------


def _check_tau(tau: float) -> None:
    if not 0 < tau <= 1:
        raise ValueError(f"tau={tau} is not accepted; the part of the spectrum that is compared is in (0, 1]")


def _entries(tau: float, length: int) -> int:
    """ceil(tau * length), where a product that is an integer but for rounding (0.07 * 100) is that integer."""
    return min(length, max(1, math.ceil(tau * length * (1 - 2.0**-50))))


def _tensors(x: Any, what: str) -> list[Tensor]:
    if isinstance(x, Tensor):
        if x.dim() not in (1, 2):
            raise ValueError(
                f"{what} is {describe(x)}; a vector of weights, a matrix with a row for each client "
                "or a list of parameters is accepted"
            )
        tensors = [x]
    elif isinstance(x, Iterable) and not isinstance(x, (str, dict)):
        tensors = list(x)
        if not tensors:
            raise ValueError(f"{what} is an empty list; at least one parameter is needed")
    else:
        raise TypeError(f"{what} is a {type(x).__name__}; a tensor or a list of parameters is accepted")
    for t, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: entry {t} is a {type(tensor).__name__}, not a tensor")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{what}: tensor {t} is {describe(tensor)}; floating types are accepted")
        check_dense(f"{what}: tensor {t}", tensor)
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            raise ValueError(f"{what}: tensor {t} is {describe(tensor)}, tensor 0 is {describe(tensors[0])}")
    if sum(tensor.numel() for tensor in tensors) == 0:
        raise ValueError(f"{what} holds no weights: {', '.join(map(describe, tensors[:3]))}")
    return tensors


def _groups(x: Any, what: str, scope: str) -> tuple[list[list[Tensor]], int, bool]:
    """The tensors that are transformed together, the number of clients, and whether there is a dimension of them."""
    tensors = _tensors(x, what)
    if isinstance(x, Tensor):
        return [tensors], x.shape[0] if x.dim() == 2 else 1, x.dim() == 2
    if scope == "tensor":
        return [[tensor] for tensor in tensors if tensor.numel() != 0], 1, False
    return [tensors], 1, False


def _rows(tensors: list[Tensor], clients: int) -> Tensor:
    """The tensors side by side as one matrix [clients, d]."""
    rows = [tensor.reshape(clients, -1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def _size(tensors: list[Tensor], clients: int) -> int:
    return sum(tensor.numel() for tensor in tensors) // clients


def _transform_length(size: int, length: str) -> int:
    return size if length == "exact" else _smooth_length(size)


def spectrum(x: Weights, *, full: bool = False, length: Length = "exact") -> Tensor:
    r"""Magnitudes of the discrete Fourier transform, :math:`s_k = |\sum_j x_j e^{-2 \pi i j k / d}|`.

    Args:
        x: a vector ``[d]``, a matrix ``[clients, d]`` transformed row by row, or a list of parameters, of which the
            concatenation is transformed.
        full: all ``d`` entries instead of the first ``d // 2 + 1``, which the others mirror: ``s[d - k] == s[k]``.
        length: ``"exact"``, or ``"fast"`` to append zeros up to a length that FFTs like. That samples the same
            continuous spectrum at other frequencies: the result has another length and other values.

    Returns:
        ``[bins]`` or ``[clients, bins]``, in float32 for half precision. Differentiable; the gradient of a magnitude of
        zero is zero.

    Raises:
        ValueError: for shapes and types that are not accepted. TypeError: for what is no tensor.
    """
    one_of("length", length, _LENGTHS)
    (tensors,), clients, batched = _groups(x, "x", "model")
    points = _transform_length(_size(tensors, clients), length)
    magnitudes = _real_dft(_rows(tensors, clients), points).abs()
    if full:
        magnitudes = torch.cat([magnitudes, magnitudes[:, 1 : (points + 1) // 2].flip(1)], 1)
    return magnitudes if batched else magnitudes[0]


class SpectralTeacher:
    """The fixed side q of :func:`spectral_divergence`: its spectrum's logarithm and sum, computed once.

    Args:
        q: weights as for :func:`spectral_divergence`: a vector, a matrix with a row for each client, or a list of
            parameters. Nothing of them is kept, and they get no gradient.
        tau: the part of the spectrum that is compared; bins beyond it are not stored.
        scope: ``"model"`` for one transform of all weights, ``"tensor"`` for one of each tensor of a list.
        length: as for :func:`spectral_divergence`.
    """

    def __init__(self, q: Weights, *, tau: float = 1.0, scope: Scope = "model", length: Length = "exact") -> None:
        """Transform ``q`` and keep what the kernel needs."""
        _check_tau(tau)
        one_of("scope", scope, _SCOPES)
        one_of("length", length, _LENGTHS)
        self.tau, self.scope, self.length = tau, scope, length
        with torch.no_grad():
            groups, clients, _ = _groups(q, "q", scope)
            self._sizes = [_size(tensors, clients) for tensors in groups]
            self._dtype, self._device = groups[0][0].dtype, groups[0][0].device
            self._parts: list[tuple[Tensor, Tensor, int, int]] = []
            for tensors, size in zip(groups, self._sizes, strict=True):
                points = _transform_length(size, length)
                count = _entries(tau, points)
                half_spectrum = _real_dft(_rows(tensors, clients), points)
                self._parts.append((*_teacher(half_spectrum, points, count), points, count))

    @property
    def clients(self) -> int:
        """How many rows it has; one serves any number of students."""
        return self._parts[0][0].shape[0]

    def __repr__(self) -> str:
        return (
            f"SpectralTeacher(sizes={self._sizes}, clients={self.clients}, tau={self.tau}, scope={self.scope!r}, "
            f"length={self.length!r})"
        )


def spectral_divergence(
    p: Weights,
    q: Weights | SpectralTeacher,
    *,
    tau: float | None = None,
    form: Form = "normalized",
    scope: Scope | None = None,
    length: Length | None = None,
) -> Tensor:
    r"""Divergence D(p || q) between the spectra of two models, with its exact gradient in ``p``.

    See the module's text for the equations of the four forms and for the readings of the paper.

    Args:
        p: a vector ``[d]``, a matrix ``[clients, d]``, or a list of parameters (one model).
        q: the teacher: weights of the same form (a vector or one row serves all clients of ``p``), or a
            :class:`SpectralTeacher`, which saves its transform in every step after the first. It gets no gradient.
        tau: compare the first ``ceil(tau * d)`` entries of the spectrum of length d, in (0, 1]. Default 1, or the
            teacher's.
        form: ``"normalized"``, ``"paper"``, ``"generalized"`` or ``"mean"``.
        scope: ``"model"`` (default, or the teacher's): one transform of all parameters in a row, as in the paper.
            ``"tensor"``: one for each tensor of a list; their divergences are added.
        length: ``"exact"`` (default, or the teacher's), or ``"fast"``: zeros are appended up to a length that FFTs
            like, which compares the same continuous spectra at other frequencies.

    Returns:
        A scalar, or one value for each client of a matrix; float32 for half precision. The same bits for any number
        of threads and in every run. Differentiating twice raises.

    Raises:
        ValueError: for shapes, types, devices or options that are not accepted. TypeError: for what is no tensor.
    """
    one_of("form", form, _FORMS)
    if isinstance(q, SpectralTeacher):
        teacher = q
        for name, given in (("tau", tau), ("scope", scope), ("length", length)):
            if given is not None and given != getattr(teacher, name):
                raise ValueError(f"{name}={given!r}, but the teacher was made with {name}={getattr(teacher, name)!r}")
    else:
        teacher = SpectralTeacher(q, tau=1.0 if tau is None else tau, scope=scope or "model", length=length or "exact")
    groups, clients, batched = _groups(p, "p", teacher.scope)
    sizes = [_size(tensors, clients) for tensors in groups]
    first = groups[0][0]
    if sizes != teacher._sizes:
        raise ValueError(f"p has weights of sizes {sizes}, q of {teacher._sizes}")
    if (first.dtype, first.device) != (teacher._dtype, teacher._device):
        raise ValueError(f"p is {describe(first)}, q is {teacher._dtype} on {teacher._device}")
    if teacher.clients not in (1, clients):
        raise ValueError(f"p has {clients} clients, q has {teacher.clients}; 1 or {clients} are accepted")
    need_grad = torch.is_grad_enabled() and any(x.requires_grad for tensors in groups for x in tensors)
    code = _FORMS.index(form)
    losses = [
        (
            _Divergence.apply(clients, part, code, *tensors)
            if need_grad
            else _divergence(tensors, clients, *part, code, False)
        )[0]
        for tensors, part in zip(groups, teacher._parts, strict=True)
    ]
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
    return loss if batched else loss.view(())
