r"""The weight spectrum and the spectral divergence of spectral co-distillation.

With :math:`s(w) = |\mathrm{DFT}(w)|`, the magnitudes of the :math:`d` Fourier coefficients of flattened weights,
:math:`p = s(w)`, :math:`q` the teacher's spectrum, and sums over the first :math:`K = \lceil \tau d \rceil` entries:

* ``form="normalized"``:   :math:`\sum \hat p \log (\hat p / \hat q)`, with :math:`\hat p = p / \sum p`
  and :math:`\hat q = q / \sum q`
* ``form="paper"``:        :math:`\sum p \log (p / q)`, as printed
* ``form="generalized"``:  :math:`\sum p \log (p / q) - p + q`

Readings of the paper. Its D is called equivalent to the KL divergence, which holds for vectors that sum to one; taken
literally it is smallest at :math:`p = q / e` and shrinks the weights. Hence ``"normalized"`` is the default.
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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ._arguments import FLOATS, accumulate_type, describe, one_of
from ._declare import declare

__all__ = ["SpectralTeacher", "spectral_divergence", "spectrum"]

Form: TypeAlias = Literal["normalized", "paper", "generalized"]
Scope: TypeAlias = Literal["model", "tensor"]
Length: TypeAlias = Literal["exact", "fast"]
Weights: TypeAlias = Tensor | Iterable[Tensor]

_FORMS = ("normalized", "paper", "generalized")
_SCOPES = ("model", "tensor")
_LENGTHS = ("exact", "fast")


def _complex_type(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def _real_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else torch.float32


_CPU_ONLY = {"cuda": "only the CPU needs it; cuFFT takes every length and thread count by itself"}
_COMPOSED = dict.fromkeys(("cpu", "cuda"), "made of torch's FFTs and the other spectral ops")


# ---- lengths -------------------------------------------------------------------------------------------------------


def _largest_prime_factor(n: int) -> int:
    largest, p = 1, 2
    while p * p <= n:
        while n % p == 0:
            largest, n = p, n // p
        p += 1 if p == 2 else 2
    return max(largest, n)


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


# The FFT library's own way with large primes takes 2 to 13 times as long as a smooth length from this factor on (one
# million points: 2.6 times at 8209, 4 at 32771, 13 at 524309, on a loaded
# machine); the chirps need four times a smooth length's operations, an estimate that is yet to be timed.
_AWKWARD_PRIME = 8192


@lru_cache(maxsize=256)
def _rows(length: int) -> int:
    """How many interleaved rows an awkward length is cut into: an even divisor, or 1 if the length is odd."""
    return next((r for r in (8, 6, 4, 2) if length % r == 0), 1)


@lru_cache(maxsize=256)
def _is_awkward(length: int) -> bool:
    return length > _AWKWARD_PRIME and _largest_prime_factor(length) > _AWKWARD_PRIME


# ---- FFTs of rows ----------------------------------------------------------------------------------------------------
#
# torch's, without a factor in either direction. The CPU kernels make them independent of the number of threads: MKL
# gives other bits for another number where it has more threads than rows. A long one is done in two steps of short
# FFTs, cut over the threads.


def _fft_rows_reference(x: Tensor, twiddle: Tensor, inverse: bool) -> Tensor:
    return torch.fft.ifft(x, norm="forward") if inverse else torch.fft.fft(x)


_fft_rows = declare(
    "fft_rows(Tensor x, Tensor twiddle, bool inverse) -> Tensor",
    reference=_fft_rows_reference,
    fake=lambda x, twiddle, inverse: torch.empty_like(x),
    plain_on=_CPU_ONLY,
)
_rfft_rows = declare(
    "rfft_rows(Tensor x) -> Tensor",
    reference=lambda x: torch.fft.rfft(x),
    fake=lambda x: x.new_empty((x.shape[0], x.shape[1] // 2 + 1), dtype=_complex_type(x.dtype)),
    plain_on=_CPU_ONLY,
)
_irfft_rows = declare(
    "irfft_rows(Tensor half_spectrum, int length) -> Tensor",
    reference=lambda half_spectrum, length: torch.fft.irfft(half_spectrum, n=length, norm="forward"),
    fake=lambda half_spectrum, length: half_spectrum.new_empty(
        (half_spectrum.shape[0], length), dtype=_real_type(half_spectrum.dtype)
    ),
    plain_on=_CPU_ONLY,
)

# Complex numbers from which two steps are faster than one: 3 times at 32,768, 6 times at 31,003 = 7 * 43 * 103, on one
# thread of an AMD EPYC.
_LONG = 1 << 13


@lru_cache(maxsize=256)
def _steps(length: int) -> tuple[int, int] | None:
    """Two factors of a long length, each smooth and short enough for the cache; None if there are none."""
    if length < _LONG:
        return None
    for a in range(math.isqrt(length), 15, -1):
        if length % a == 0 and length // a <= 8192 and max(map(_largest_prime_factor, (a, length // a))) <= 128:
            return a, length // a
    return None


def _units(numerator: Tensor, denominator: int) -> Tensor:
    """exp(-i pi numerator / denominator) of integers, in complex128."""
    angle = numerator.double() * (-math.pi / denominator)
    return torch.complex(torch.cos(angle), torch.sin(angle))


@lru_cache(maxsize=4)
def _step_twiddles(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(-2 pi i j k / (a b)), [b, a] for the two steps of a long length; empty for one step."""
    steps = _steps(length) if device.type == "cpu" else None
    if steps is None:
        return torch.empty(0, dtype=dtype, device=device)
    a, b = steps
    return _units(2 * torch.arange(b, device=device)[:, None] * torch.arange(a, device=device), length).to(dtype)


def _complex_dft(x: Tensor, inverse: bool) -> Tensor:
    """The DFTs of the rows of ``x``, or their inverses without 1/n."""
    return _fft_rows(x.contiguous(), _step_twiddles(x.shape[1], x.dtype, x.device), inverse)


# ---- chirps: the DFT of an awkward length through FFTs of a smooth one ----------------------------------------------


def _row_phases(n: int, rows: int, device: torch.device) -> Tensor:
    """exp(-2 pi i k / d) for the first bins of ``rows`` interleaved rows of length n, [n // 2 + 1]."""
    return _units(2 * torch.arange(n // 2 + 1, device=device), n * rows)


@dataclass(frozen=True)
class _Chirps:
    r"""What the DFT of length n needs, once for all transforms of that length.

    With :math:`jk = (j^2 + k^2 - (k - j)^2) / 2` a DFT is a convolution with a chirp, :math:`e^{i \pi m^2 / n}`, and
    two multiplications by its conjugate. A linear convolution with n inputs and outputs is the mean of a cyclic and a
    negacyclic one of any length from n on: no padding to 2n, and the second is a cyclic one of what is modulated by
    half a frequency. Phases are reduced in integers, so that they are exact before they are rounded to the type.
    """

    chirp: Tensor  # [n], exp(-i pi k^2 / n)
    shift: Tensor  # [n], exp(-i pi k / m)
    kernel: Tensor  # [2, m], transforms of the conjugate chirp, cyclic and negacyclic, with all normalisation in it
    twiddle: Tensor  # [n // 2 + 1], exp(-2 pi i k / d) for the rows

    @staticmethod
    @lru_cache(maxsize=4)
    def of(n: int, rows: int, dtype: torch.dtype, device: torch.device) -> _Chirps:
        m = _smooth_length(n)
        k = torch.arange(n, dtype=torch.int64, device=device)
        chirp = _units(k * k % (2 * n), n)
        tail = chirp[1:].conj().flip(0)  # at the negative places -n + 1 ... -1, which are m - n + 1 ... m - 1
        kernel = torch.zeros(2, m, dtype=torch.complex128, device=device)
        kernel[:, :n] = chirp.conj()
        # Both wrap around: the negacyclic one with a change of sign.
        kernel[0, m - n + 1 :] += tail
        kernel[1, m - n + 1 :] -= tail
        kernel[1] *= _units(torch.arange(m, dtype=torch.int64, device=device), m)
        kernel = torch.fft.fft(kernel) / (2 * m)
        twiddle = _row_phases(n, rows, device)
        return _Chirps(chirp.to(dtype), _units(k, m).to(dtype), kernel.to(dtype), twiddle.to(dtype))


def _chirp_load_reference(rows: Tensor, row: int, chirp: Tensor, shift: Tensor, padded: int, conjugate: bool) -> Tensor:
    values = rows[:, row].conj() if conjugate else rows[:, row]
    out = chirp.new_zeros((2, padded))
    torch.mul(values, chirp, out=out[0, : chirp.numel()])
    torch.mul(out[0, : chirp.numel()], shift, out=out[1, : chirp.numel()])
    return out


def _chirp_load_fake(rows: Tensor, row: int, chirp: Tensor, shift: Tensor, padded: int, conjugate: bool) -> Tensor:
    return chirp.new_empty((2, padded))


# rows: complex [n, R], of which column `row` is taken; in memory either R complex numbers apart or contiguous.
_chirp_load = declare(
    "chirp_load(Tensor rows, int row, Tensor chirp, Tensor shift, int padded, bool conjugate) -> Tensor",
    reference=_chirp_load_reference,
    fake=_chirp_load_fake,
    plain_on=_CPU_ONLY,
)


def _chirp_store_reference(
    out: Tensor, row: int, convolved: Tensor, chirp: Tensor, shift: Tensor, conjugate: bool
) -> None:
    n = chirp.numel()
    values = (convolved[0, :n] + convolved[1, :n] * shift.conj()) * chirp
    out[:, row] = values.conj() if conjugate else values


def _chirp_store_fake(out: Tensor, row: int, convolved: Tensor, chirp: Tensor, shift: Tensor, conjugate: bool) -> None:
    pass


_chirp_store = declare(
    "chirp_store_(Tensor(a!) out, int row, Tensor convolved, Tensor chirp, Tensor shift, bool conjugate) -> ()",
    reference=_chirp_store_reference,
    fake=_chirp_store_fake,
    plain_on=_CPU_ONLY,
)


def _chirp_multiply_reference(x: Tensor, kernel: Tensor) -> None:
    x.mul_(kernel)


# Not torch's product: with it the bits depended on the number of threads.
_chirp_multiply = declare(
    "chirp_multiply_(Tensor(a!) x, Tensor kernel) -> ()",
    reference=_chirp_multiply_reference,
    fake=lambda x, kernel: None,
    plain_on=_CPU_ONLY,
)


def _row_transform(count: int, sign: float, like: Tensor) -> Tensor:
    """The DFT matrix of the rows, [count, count]."""
    k = torch.arange(count, dtype=torch.float64, device=like.device)
    angle = (k[:, None] * k % count) * (sign * 2 * math.pi / count)
    return torch.complex(torch.cos(angle), torch.sin(angle)).to(like.dtype)


def _row_twiddles(twiddle: Tensor, count: int) -> Tensor:
    """Powers 0 ... count - 1 of the twiddles, [count, bins]."""
    return torch.stack([twiddle**b for b in range(count)])


def _join_rows_reference(rows: Tensor, twiddle: Tensor) -> Tensor:
    n, pairs = rows.shape
    half, q = n // 2 + 1, pairs
    ahead = rows[:half].T
    behind = rows[(n - torch.arange(half, device=rows.device)) % n].T.conj()
    spectra = torch.stack([(ahead + behind) / 2, (ahead - behind) * -0.5j], 1).reshape(2 * pairs, half)
    joined = _row_transform(2 * pairs, -1.0, rows) @ (spectra * _row_twiddles(twiddle, 2 * pairs))
    out = rows.new_empty(n * q + 1)
    for m in range(q):
        out[n * (q - m) - half + 1 : n * (q - m) + 1] = joined[q + m].conj().flip(0)
        out[n * m : n * m + half] = joined[m]
    torch.view_as_real(out)[:: n * q, 1] = 0
    return out


def _join_rows_fake(rows: Tensor, twiddle: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0] * rows.shape[1] + 1)


# rows: complex [n, R], the DFTs of R pairs of real rows, 2i and 2i + 1 as real and imaginary part; stored row by row.
_join_rows = declare(
    "join_rows(Tensor rows, Tensor twiddle) -> Tensor",
    reference=_join_rows_reference,
    fake=_join_rows_fake,
    plain_on=_CPU_ONLY,
)


def _split_rows_reference(half_spectrum: Tensor, twiddle: Tensor, n: int) -> Tensor:
    q = (half_spectrum.numel() - 1) // n
    half = n // 2 + 1
    given = half_spectrum.clone()
    torch.view_as_real(given)[:: n * q, 1] = 0
    parts = [given[n * m : n * m + half] for m in range(q)]
    parts += [given[n * (q - m) - half + 1 : n * (q - m) + 1].flip(0).conj() for m in range(q)]
    spectra = (_row_transform(2 * q, 1.0, given) @ torch.stack(parts)) * _row_twiddles(twiddle.conj(), 2 * q)
    out = given.new_empty((q, n))
    places = (n - torch.arange(half, device=given.device)) % n
    out[:, places] = spectra[0::2].conj() + 1j * spectra[1::2].conj()
    out[:, :half] = spectra[0::2] + 1j * spectra[1::2]
    return out.T


def _split_rows_fake(half_spectrum: Tensor, twiddle: Tensor, n: int) -> Tensor:
    return half_spectrum.new_empty(((half_spectrum.numel() - 1) // n, n)).T


_split_rows = declare(
    "split_rows(Tensor half_spectrum, Tensor twiddle, int n) -> Tensor",
    reference=_split_rows_reference,
    fake=_split_rows_fake,
    plain_on=_CPU_ONLY,
)


def _convolve(out: Tensor, row: int, rows: Tensor, chirps: _Chirps, invert: bool) -> None:
    """The DFT of column ``row`` of ``rows``, or its inverse without 1/n, into that column of ``out``."""
    work = _chirp_load(rows, row, chirps.chirp, chirps.shift, chirps.kernel.shape[1], invert)
    work = _complex_dft(work, inverse=False)
    _chirp_multiply(work, chirps.kernel)
    work = _complex_dft(work, inverse=True)
    _chirp_store(out, row, work, chirps.chirp, chirps.shift, invert)


def _awkward_dft(x: Tensor) -> Tensor:
    """The half spectrum of the rows of ``x`` [C, d]."""
    d = x.shape[1]
    rows = _rows(d)
    dtype = _complex_type(x.dtype)
    chirps = _Chirps.of(d // rows, rows, dtype, x.device)
    if rows == 1:
        return _awkward_odd_dft(x, chirps)
    out = x.new_empty((x.shape[0], d // 2 + 1), dtype=dtype)
    for client, spectrum in zip(x, out, strict=True):
        interleaved = torch.view_as_complex(client.view(d // rows, rows // 2, 2))
        transformed = x.new_empty((rows // 2, d // rows), dtype=dtype).T
        for row in range(rows // 2):
            _convolve(transformed, row, interleaved, chirps, invert=False)
        if x.shape[0] == 1:
            return _join_rows(transformed, chirps.twiddle)[None]
        spectrum.copy_(_join_rows(transformed, chirps.twiddle))
    return out


def _awkward_idft(half_spectrum: Tensor, d: int) -> Tensor:
    rows = _rows(d)
    chirps = _Chirps.of(d // rows, rows, half_spectrum.dtype, half_spectrum.device)
    if rows == 1:
        return _awkward_odd_idft(half_spectrum, d, chirps)
    out = torch.empty((half_spectrum.shape[0], d), dtype=_real_type(half_spectrum.dtype), device=half_spectrum.device)
    for bins, client in zip(half_spectrum, out, strict=True):
        split = _split_rows(bins, chirps.twiddle, d // rows)
        interleaved = torch.view_as_complex(client.view(d // rows, rows // 2, 2))
        for row in range(rows // 2):
            _convolve(interleaved, row, split, chirps, invert=True)
    return out


def _awkward_odd_dft(x: Tensor, chirps: _Chirps) -> Tensor:
    """Of an odd length, two clients are the real and the imaginary part of one transform."""
    d = x.shape[1]
    out = x.new_empty((x.shape[0], d // 2 + 1), dtype=chirps.chirp.dtype)
    for first in range(0, x.shape[0], 2):
        pair = x[first : first + 2]
        packed = torch.complex(pair[0], pair[1] if len(pair) == 2 else torch.zeros_like(pair[0]))[:, None]
        _convolve(packed, 0, packed, chirps, invert=False)
        ahead, behind = packed[: d // 2 + 1, 0], packed[:, 0].roll(-1).flip(0)[: d // 2 + 1].conj()
        out[first] = (ahead + behind) / 2
        if len(pair) == 2:
            out[first + 1] = (ahead - behind) * -0.5j
    return out


def _awkward_odd_idft(half_spectrum: Tensor, d: int, chirps: _Chirps) -> Tensor:
    out = torch.empty((half_spectrum.shape[0], d), dtype=_real_type(half_spectrum.dtype), device=half_spectrum.device)
    for first in range(0, half_spectrum.shape[0], 2):
        pair = half_spectrum[first : first + 2].clone()
        torch.view_as_real(pair)[:, 0, 1] = 0
        packed = half_spectrum.new_empty((d, 1))
        other = pair[1] if len(pair) == 2 else torch.zeros_like(pair[0])
        packed[: d // 2 + 1, 0] = pair[0] + 1j * other
        packed[d // 2 + 1 :, 0] = (pair[0].conj() + 1j * other.conj())[1:].flip(0)
        _convolve(packed, 0, packed, chirps, invert=True)
        out[first] = packed[:, 0].real
        if len(pair) == 2:
            out[first + 1] = packed[:, 0].imag
    return out


# ---- a long even length: half as many complex numbers ----------------------------------------------------------------


@lru_cache(maxsize=4)
def _pair_twiddles(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _row_phases(n, 2, device).to(dtype)


def _long_dft(x: Tensor) -> Tensor:
    n = x.shape[1] // 2
    transformed = _complex_dft(torch.view_as_complex(x.view(-1, n, 2)), inverse=False)
    twiddle = _pair_twiddles(n, transformed.dtype, x.device)
    halves = [_join_rows(row[:, None], twiddle) for row in transformed]
    return halves[0][None] if len(halves) == 1 else torch.stack(halves)


def _long_idft(half_spectrum: Tensor, d: int) -> Tensor:
    twiddle = _pair_twiddles(d // 2, half_spectrum.dtype, half_spectrum.device)
    rows = [_split_rows(bins, twiddle, d // 2)[:, 0] for bins in half_spectrum]
    packed = rows[0][None] if len(rows) == 1 else torch.stack(rows)
    return torch.view_as_real(_complex_dft(packed, inverse=True)).view(-1, d)


# ---- the real transform and its adjoint ----------------------------------------------------------------------------


def _use_chirps(x: Tensor, length: int) -> bool:
    # cuFFT does chirps by itself.
    return x.device.type == "cpu" and _is_awkward(length)


def _is_long(x: Tensor, length: int) -> bool:
    return x.device.type == "cpu" and length % 2 == 0 and _steps(length // 2) is not None


def _dft(x: Tensor, length: int) -> Tensor:
    """The half spectrum of the rows of ``x`` [C, d], followed by zeros up to ``length``."""
    x = x.to(accumulate_type(x.dtype)).contiguous()
    if length != x.shape[1]:
        x = torch.nn.functional.pad(x, (0, length - x.shape[1]))
    if _use_chirps(x, length):
        return _awkward_dft(x)
    return _long_dft(x) if _is_long(x, length) else _rfft_rows(x)


def _idft(half_spectrum: Tensor, length: int, size: int) -> Tensor:
    """The first ``size`` values of the inverse transform, without 1/length."""
    if _use_chirps(half_spectrum, length):
        result = _awkward_idft(half_spectrum, length)
    elif _is_long(half_spectrum, length):
        result = _long_idft(half_spectrum, length)
    else:
        result = _irfft_rows(half_spectrum, length)
    return result[:, :size]


def _real_dft_reference(x: Tensor, length: int) -> Tensor:
    if x.dim() != 2 or x.dtype not in FLOATS or not 0 < x.shape[1] <= length:
        raise ValueError(
            f"x is {describe(x)} for a transform of length {length}; a matrix of floating type is accepted"
        )
    return _dft(x, length)


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
    return _idft(half_spectrum, length, size).contiguous()


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
    if _FORMS[form] == "normalized":
        empty = z == 0
        safe = torch.where(empty, one, z)
        loss = torch.where(empty, torch.zeros_like(z), a / safe - safe.log() + total.log())
        alpha = torch.where(empty, torch.zeros_like(z), 1 / safe)
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


def _divergence_reference(
    p: Tensor, log_q: Tensor, total: Tensor, length: int, count: int, form: int, need_grad: bool
) -> tuple[Tensor, Tensor]:
    half_spectrum = _real_dft_reference(p, length)
    loss = _half_divergence(half_spectrum, log_q, total, length, count, form, need_grad)
    if not need_grad:
        return loss, p.new_empty((0,))
    return loss, _idft(half_spectrum, length, p.shape[1]).to(p.dtype).contiguous()


def _divergence_fake(
    p: Tensor, log_q: Tensor, total: Tensor, length: int, count: int, form: int, need_grad: bool
) -> tuple[Tensor, Tensor]:
    loss = p.new_empty((p.shape[0],), dtype=accumulate_type(p.dtype))
    return loss, p.new_empty(p.shape if need_grad else (0,))


def _divergence_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.need_grad = inputs[-1]
    ctx.save_for_backward(output[1])


def _divergence_backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
    if not ctx.need_grad:
        raise RuntimeError("pfl_ext::spectral_divergence was called with need_grad=False and has no gradient")
    (grad,) = ctx.saved_tensors
    return _scale_gradient(grad, grad_loss), None, None, None, None, None, None


_divergence = declare(
    "spectral_divergence(Tensor p, Tensor log_q, Tensor total, int length, int count, int form, bool need_grad) "
    "-> (Tensor, Tensor)",
    reference=_divergence_reference,
    fake=_divergence_fake,
    setup_context=_divergence_setup,
    backward=_divergence_backward,
    plain_on=_COMPOSED,
)


def _scale_gradient_reference(grad: Tensor, scale: Tensor) -> Tensor:
    return (grad * scale[:, None]).to(grad.dtype)


def _scale_gradient_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _scale_gradient_backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("spectral_divergence computes its gradient in forward and cannot be differentiated twice")


_scale_gradient = declare(
    "spectral_scale_gradient(Tensor grad, Tensor scale) -> Tensor",
    reference=_scale_gradient_reference,
    fake=lambda grad, scale: torch.empty_like(grad),
    setup_context=_scale_gradient_setup,
    backward=_scale_gradient_backward,
    plain_on=_COMPOSED,
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
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            raise ValueError(f"{what}: tensor {t} is {describe(tensor)}, tensor 0 is {describe(tensors[0])}")
    if sum(tensor.numel() for tensor in tensors) == 0:
        raise ValueError(f"{what} holds no weights: {', '.join(map(describe, tensors[:3]))}")
    return tensors


def _matrices(x: Any, what: str, scope: str) -> tuple[list[Tensor], bool]:
    """The weights as matrices [clients, d], one for each transform, and whether there is a dimension of clients."""
    tensors = _tensors(x, what)
    if isinstance(x, Tensor):
        return [x if x.dim() == 2 else x[None]], x.dim() == 2
    if scope == "tensor":
        return [tensor.reshape(1, -1) for tensor in tensors if tensor.numel() != 0], False
    if len(tensors) == 1:
        return [tensors[0].reshape(1, -1)], False
    return [torch.cat([tensor.reshape(-1) for tensor in tensors])[None]], False


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
    (matrix,), batched = _matrices(x, "x", "model")
    points = _transform_length(matrix.shape[1], length)
    magnitudes = _real_dft(matrix, points).abs()
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
            matrices, self.batched = _matrices(q, "q", scope)
            self._sizes = [matrix.shape[1] for matrix in matrices]
            self._dtype, self._device = matrices[0].dtype, matrices[0].device
            self._parts: list[tuple[Tensor, Tensor, int, int]] = []
            for matrix in matrices:
                points = _transform_length(matrix.shape[1], length)
                count = _entries(tau, points)
                self._parts.append((*_teacher(_real_dft(matrix, points), points, count), points, count))

    @property
    def clients(self) -> int:
        """How many rows it has; one serves any number of students."""
        return self._parts[0][0].shape[0]

    def __repr__(self) -> str:
        """Sizes and options."""
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

    See the module's text for the equations of the three forms and for the readings of the paper.

    Args:
        p: a vector ``[d]``, a matrix ``[clients, d]``, or a list of parameters (one model).
        q: the teacher: weights of the same form (a vector or one row serves all clients of ``p``), or a
            :class:`SpectralTeacher`, which saves its transform in every step after the first. It gets no gradient.
        tau: compare the first ``ceil(tau * d)`` entries of the spectrum of length d, in (0, 1]. Default 1, or the
            teacher's.
        form: ``"normalized"``, ``"paper"`` or ``"generalized"``.
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
    matrices, batched = _matrices(p, "p", teacher.scope)
    sizes = [matrix.shape[1] for matrix in matrices]
    first = matrices[0]
    if sizes != teacher._sizes:
        raise ValueError(f"p has weights of sizes {sizes}, q of {teacher._sizes}")
    if (first.dtype, first.device) != (teacher._dtype, teacher._device):
        raise ValueError(f"p is {describe(first)}, q is {teacher._dtype} on {teacher._device}")
    if teacher.clients not in (1, first.shape[0]):
        raise ValueError(f"p has {first.shape[0]} clients, q has {teacher.clients}; 1 or {first.shape[0]} are accepted")
    need_grad = (
        torch.is_grad_enabled() and first.requires_grad
        if len(matrices) == 1
        else torch.is_grad_enabled() and any(matrix.requires_grad for matrix in matrices)
    )
    losses = [
        _divergence(matrix, log_q, total, points, count, _FORMS.index(form), need_grad)[0]
        for matrix, (log_q, total, points, count) in zip(matrices, teacher._parts, strict=True)
    ]
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
    return loss if batched else loss[0]
