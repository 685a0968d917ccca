r"""Sharpness-aware perturbation of weights, for whole models (SAM) and layer by layer (LWSAM of PLGU).

With the gradient :math:`g`, a radius :math:`\rho`, :math:`1/p + 1/q = 1` and a score :math:`\xi_l` for each layer:

* :func:`personalization_scores`: :math:`\xi_l = r_l / \sum_k r_k` with :math:`r_l = \|a_l - b_l\|_2 / \dim(a_l)`
* :func:`lwsam_perturb_`: :math:`w \leftarrow w + \epsilon` with
  :math:`\epsilon_l = \rho\, \xi_l\, \mathrm{sign}(g_l)\, |g_l|^{q-1} / (\|g\|_q^q)^{1/p}`
* :func:`restore_`: :math:`w` as it was before, to the bit.

Sums are taken in float64 over pieces of fixed size and in fixed order: the result does not depend on the number of
threads, on the instruction set or on the run. Nothing waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from ._arguments import accumulate_type, check_dense, check_lists, check_memory, describe, without_gradients
from ._declare import declare
from .prepared import Prepared, handed, written

__all__ = ["backup_bytes", "layer_groups", "lwsam_perturb_", "personalization_scores", "restore_"]

Norm: TypeAlias = Literal["global", "layer"]
Model: TypeAlias = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]

_BACKUP_ALIGNMENT = 64
"""Bytes; each tensor's part of a backup begins at a multiple of it (``csrc/glue/sharpness.h`` has the same number)."""

_MOST_LAYERS = 2**20
"""Memory is taken for each (``csrc/glue/sharpness.h`` has the same number)."""


# ---- the ops -------------------------------------------------------------------------------------------------------


def backup_bytes(params: Sequence[Tensor]) -> int:
    """Bytes that a backup of these parameters takes, each aligned."""
    return sum(-(-x.numel() * x.element_size() // _BACKUP_ALIGNMENT) * _BACKUP_ALIGNMENT for x in params)


def _check_groups(groups: Sequence[int], tensors: int, layers: int) -> None:
    if len(groups) != tensors:
        raise ValueError(f"{len(groups)} group indices for {tensors} tensors; one a tensor is expected")
    if layers > _MOST_LAYERS:
        raise ValueError(f"{layers} layers; at most {_MOST_LAYERS} are accepted")
    for t, group in enumerate(groups):
        if not 0 <= group < layers:
            raise ValueError(f"the group of tensor {t} is {group}; 0 to {layers - 1} are accepted")


def _check_scores(scores: Tensor | None, layers: int, device: torch.device | None) -> None:
    if scores is None:
        return
    right = scores.dim() == 1 and scores.numel() == layers and scores.dtype == torch.float64
    if not right or (device is not None and scores.device != device):
        raise ValueError(f"scores are {describe(scores)}; a float64 vector of {layers} values on {device} is accepted")


def _check_numbers(rho: float, p: float, literal: bool) -> None:
    if not 0 <= rho < math.inf:
        raise ValueError(f"rho is {rho}; a finite number that is not negative is accepted")
    if not p >= 1:
        raise ValueError(f"p is {p}; 1 or more is accepted, infinity included")
    if literal and (p == 1 or math.isinf(p)):
        raise ValueError(f"the literal exponent p - 1 needs 1 < p < infinity, p is {p}")


def _check_backup(backup: Tensor, params: Sequence[Tensor]) -> None:
    if not isinstance(backup, Tensor):
        raise TypeError(f"the backup is {describe(backup)}; what lwsam_perturb_ returned is accepted")
    needed = backup_bytes(params)
    elsewhere = bool(params) and backup.device != params[0].device
    if backup.dtype != torch.uint8 or backup.dim() != 1 or backup.numel() < needed or elsewhere:
        raise ValueError(
            f"the backup is {describe(backup)}; "
            f"a vector of at least {needed} bytes (uint8) on the params' device is needed"
        )


def _perturb_check(
    params: list[Tensor],
    backup: Tensor,
    grads: list[Tensor],
    scores: Tensor | None,
    groups: Sequence[int],
    layers: int,
    rho: float,
    p: float,
    literal: bool,
    per_layer: bool,
) -> None:
    _check_numbers(rho, p, literal)
    check_lists(params=params, grads=grads)
    _check_groups(groups, len(params), layers)
    _check_scores(scores, layers, params[0].device if params else None)
    _check_backup(backup, params)


def _perturb_memory(params: list[Tensor], backup: Tensor, grads: list[Tensor], scores: Tensor | None) -> None:
    read = {"grads": grads, "scores": [] if scores is None else [scores]}
    check_memory({"params": params, "backup": [backup]}, read)


def _memory_order(x: Tensor) -> Tensor | None:
    """The elements as one vector over the same memory; None where they do not fill it without gaps."""
    if not x.is_contiguous() and torch.empty_like(x).stride() != x.stride():
        return None
    # Not view(-1): a vector of one element or none is contiguous with any stride, which a view as bytes refuses.
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def _backup_parts(params: Sequence[Tensor], backup: Tensor) -> list[Tensor]:
    """Each tensor's part of the backup, as a vector of the tensor's type."""
    parts, begin = [], 0
    for x in params:
        size = x.numel() * x.element_size()
        # Through a copy where the caller's buffer begins at an odd address, which a view of wider elements refuses.
        parts.append(backup[begin : begin + size])
        begin += -(-size // _BACKUP_ALIGNMENT) * _BACKUP_ALIGNMENT
    return parts


def _perturbation(
    norm_of: Sequence[int], grads: Sequence[Tensor], p: float, literal: bool, norms: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each norm: the maximum and the factor of rho * xi, as in ``csrc/common/sharpness.h``."""
    device = grads[0].device
    none = torch.zeros((), dtype=torch.float64, device=device)
    members: list[list[Tensor]] = [[] for _ in range(norms)]
    for norm, g in zip(norm_of, grads, strict=True):
        if g.numel():
            members[norm].append(g.double().abs())
    maxima, factors = [], []
    for values in members:
        maximum = torch.stack([x.amax() for x in values]).amax() if values else none
        if math.isinf(p):
            factor = torch.ones_like(none)
        elif p == 2:
            total = torch.stack([(x * x).sum() for x in values]).sum() if values else none
            factor = torch.where(total == 0, none, 1 / total if literal else total.rsqrt())
        else:
            q = p / (p - 1) if p > 1 else math.inf
            total = torch.stack([((x / maximum) ** q).sum() for x in values]).sum() if values else none
            if literal:
                factor = maximum ** (1 / (p - 1) - p) * total ** (1 - p)
            else:
                factor = total ** (-1 / p)
            factor = torch.where((maximum == 0) | maximum.isinf(), none, factor)
        maxima.append(maximum)
        factors.append(factor)
    return maxima, factors


def _perturb_reference(
    params: list[Tensor],
    backup: Tensor,
    grads: list[Tensor],
    scores: Tensor | None,
    groups: Sequence[int],
    layers: int,
    rho: float,
    p: float,
    literal: bool,
    per_layer: bool,
) -> None:
    _perturb_check(params, backup, grads, scores, groups, layers, rho, p, literal, per_layer)
    _perturb_memory(params, backup, grads, scores)
    if not params:
        return
    norm_of = groups if per_layer else [0] * len(params)
    maxima, factors = _perturbation(norm_of, grads, p, literal, layers if per_layer else 1)
    parts = _backup_parts(params, backup)
    for w, g, part, group, norm in zip(params, grads, parts, groups, norm_of, strict=True):
        dense = _memory_order(w)
        part.copy_((w.contiguous().view(-1) if dense is None else dense).view(torch.uint8))
        scale = rho * factors[norm] * (1 if scores is None else scores[group])
        accumulate = accumulate_type(w.dtype)
        scale = scale.clamp(max=torch.finfo(accumulate).max).to(accumulate)
        value = g.to(accumulate)
        if math.isinf(p):
            step = scale * value.sign()
        elif p == 2:
            step = scale * value
        else:
            exponent = 1 / (p - 1) if p > 1 else math.inf
            magnitude = (value.abs() / maxima[norm].to(accumulate)) ** exponent
            step = torch.where(value == 0, value * scale, scale * magnitude * value.sign())
        step = torch.where(value.isnan(), value, step)  # sign(NaN) is 0
        w.copy_(torch.where(scale == 0, w, (w.to(accumulate) + step).to(w.dtype)))


_perturb = declare(
    "lwsam_perturb_(Tensor(a!)[] params, Tensor(b!) backup, Tensor[] grads, Tensor? scores, int[] groups, int layers, "
    "float rho, float p, bool literal, bool per_layer) -> ()",
    reference=_perturb_reference,
    fake=_perturb_check,
)


def _restore_check(params: list[Tensor], backup: Tensor) -> None:
    check_lists(params=params)
    _check_backup(backup, params)


def _restore_reference(params: list[Tensor], backup: Tensor) -> None:
    _restore_check(params, backup)
    check_memory({"params": params}, {"backup": [backup]})
    for w, part in zip(params, _backup_parts(params, backup), strict=True):
        dense = _memory_order(w)
        if dense is None:
            w.copy_(part.clone().view(w.dtype).view(w.shape))
        else:
            dense.view(torch.uint8).copy_(part)


_restore = declare(
    "restore_(Tensor(a!)[] params, Tensor backup) -> ()",
    reference=_restore_reference,
    fake=_restore_check,
)


def _scores_check(a: list[Tensor], b: list[Tensor], groups: Sequence[int], layers: int) -> None:
    if not a or layers < 1:
        raise ValueError(f"{len(a)} tensors in {layers} groups; at least one of each is needed")
    check_lists(a=a, b=b)
    _check_groups(groups, len(a), layers)


def _scores_reference(a: list[Tensor], b: list[Tensor], groups: Sequence[int], layers: int) -> Tensor:
    _scores_check(a, b, groups, layers)
    squares = torch.zeros(layers, dtype=torch.float64, device=a[0].device)
    elements = [0] * layers
    for x, y, group in zip(a, b, groups, strict=True):
        squares[group] += (x.double() - y.double()).square().sum()
        elements[group] += x.numel()
    count = torch.tensor(elements, dtype=torch.float64).to(a[0].device)
    raw = torch.where(count == 0, 0, squares.sqrt() / count)
    equal = (count > 0).double() / (count > 0).sum()
    shares = torch.where(raw.sum() == 0, equal, raw / raw.sum())
    return torch.where(count == 0, 0, shares)  # also where the sum is NaN


def _scores_fake(a: list[Tensor], b: list[Tensor], groups: Sequence[int], layers: int) -> Tensor:
    _scores_check(a, b, groups, layers)
    return a[0].new_empty((layers,), dtype=torch.float64)


_scores = declare(
    "personalization_scores(Tensor[] a, Tensor[] b, int[] groups, int layers) -> Tensor",
    reference=_scores_reference,
    fake=_scores_fake,
)


# ---- what users call -----------------------------------------------------------------------------------------------


def layer_groups(parameters: nn.Module | Iterable[str]) -> list[int]:
    """The layer of each parameter: a module's own parameters, such as weight and bias, are one layer.

    Layers are numbered in the order in which they first occur.

    Args:
        parameters: a module, or the names of parameters such as ``"features.0.weight"``.

    >>> layer_groups(["conv.weight", "conv.bias", "head.weight", "head.bias"])
    [0, 0, 1, 1]
    """
    names = [name for name, _ in parameters.named_parameters()] if isinstance(parameters, nn.Module) else parameters
    if isinstance(names, (str, Tensor)) or not isinstance(names, Iterable):
        raise TypeError(f"parameters is {describe(names)}; a module or a list of names is accepted")
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name.rpartition(".")[0], len(numbers)) for name in names]


def _tensors_of(model: Model, what: str) -> tuple[list[str] | None, list[Tensor]]:
    if isinstance(model, nn.Module):
        model = dict(model.named_parameters())
    if isinstance(model, Mapping):
        return list(model.keys()), list(model.values())
    if isinstance(model, Tensor) or not isinstance(model, Iterable):
        raise TypeError(
            f"{what} is {describe(model)}; a module, a dict of named tensors or a list of tensors is accepted"
        )
    return None, list(model)


def personalization_scores(a: Model, b: Model, groups: Sequence[int] | Mapping[str, int] | None = None) -> Tensor:
    r"""How far each layer of a personal model ``a`` is from the global model ``b``, as shares that add up to 1.

    .. math:: \xi_l = \frac{r_l}{\sum_k r_k}, \qquad r_l = \frac{\|a_l - b_l\|_2}{\dim(a_l)}

    Equations (6) and (10) of PLGU; the paper prints :math:`r_l` and states that the scores add up to 1. Where the
    models are equal, as in the first round, each of the L layers gets 1/L. A layer without elements gets 0 and does not
    count. Infinity or NaN in a model makes scores NaN. Not differentiable.

    Args:
        a, b: modules (their parameters), dicts of named tensors, or lists of tensors, with the same shapes.
        groups: the layer of each tensor, as numbers 0 to L - 1 in the order of ``a``, or a dict from name to number. By
            default the tensors of one module are a layer (:func:`layer_groups`), and in a list, which has no names,
            each tensor is one.

    Returns:
        L scores, float64, on the models' device.

    Raises:
        ValueError, TypeError: models that do not fit each other, or groups that do not fit them.

    >>> personalization_scores([torch.ones(4), torch.ones(2)], [torch.zeros(4), torch.zeros(2)], groups=[0, 1])
    tensor([0.4142, 0.5858], dtype=torch.float64)
    """
    names, first = _tensors_of(a, "a")
    other_names, second = _tensors_of(b, "b")
    if names != other_names:
        if names is None or other_names is None or set(names) != set(other_names):
            raise ValueError(f"a has the tensors {names or 'without names'}, b {other_names or 'without names'}")
        by_name = dict(zip(other_names, second, strict=True))
        second = [by_name[name] for name in names]
    if groups is None:
        indices = list(range(len(first))) if names is None else layer_groups(names)
    elif isinstance(groups, Mapping):
        if names is None or (missing := [name for name in names if name not in groups]):
            raise ValueError(
                f"groups by name need a group for each of the named tensors; missing: {missing if names else 'names'}"
            )
        indices = [groups[name] for name in names]
    else:
        indices = list(groups)
    layers = max(indices, default=-1) + 1
    with torch.no_grad():
        try:
            return _scores(first, second, indices, layers)
        except (RuntimeError, TypeError):
            _scores_check(first, second, indices, layers)
            raise


def _as_list(tensors: Iterable[Tensor]) -> list[Tensor] | Prepared:
    return tensors if type(tensors) is list or type(tensors) is Prepared else list(tensors)


def _as_scores(scores: Tensor | Sequence[float], device: torch.device) -> Tensor:
    if not isinstance(scores, Tensor):
        vector = torch.tensor(scores, dtype=torch.float64)
    elif scores.device == device:
        return scores.detach().to(device, torch.float64).contiguous()
    else:
        # Pinned memory may be overwritten before it has been sent.
        vector = scores.detach().clone() if scores.is_cpu else scores.detach()
    # Sent to a GPU without waiting for it. From a GPU the host has to wait, or it reads what has not arrived yet.
    return vector.to(device, torch.float64, non_blocking=device.type != "cpu").contiguous()


def lwsam_perturb_(
    params: Iterable[Tensor],
    grads: Iterable[Tensor],
    scores: Tensor | Sequence[float] | None = None,
    rho: float = 0.05,
    p: float = 2.0,
    norm: Norm = "global",
    *,
    groups: Sequence[int] | None = None,
    literal_exponent: bool = False,
    backup: Tensor | None = None,
) -> Tensor:
    r"""Move ``params`` to where the loss is largest within :math:`\rho`, in place; :func:`restore_` moves them back.

    .. math:: \epsilon_l = \rho\, \xi_l\, \mathrm{sign}(g_l) \frac{|g_l|^{q-1}}{(\|g\|_q^q)^{1/p}},
              \qquad \frac1p + \frac1q = 1

    Equation (5) of PLGU. The paper prints the exponent p - 1 where SAM's derivation, which it cites, gives 1/p, the one
    that makes :math:`\|\epsilon\|_p = \rho` for scores of 1. ``literal_exponent=True`` takes the printed one. For p = 2
    that is :math:`\rho \xi_l g_l / \|g\|_2`, or divided by :math:`\|g\|_2^2` in the literal form.

    The limits: p = infinity gives :math:`\rho \xi_l \mathrm{sign}(g_l)`; p = 1 moves the elements of the largest
    :math:`|g|` alone, each of k such elements by :math:`\rho \xi_l / k`.

    Where the gradient of a norm's scope is zero, or its norm infinite, nothing is changed, to the bit. NaN in a
    gradient makes the parameters of the norm's scope NaN (with p = infinity, which has no norm, that element alone);
    :func:`restore_` brings them back. Sums and ``rho`` times score by norm are float64, the elements are computed in
    float32 (float64 for float64) and rounded once. Where p is not 1, 2 or infinity, an element of less than 1.2e-38
    (2.2e-308) times the largest may count as zero.

    Args:
        params: tensors to move; float32, float64, float16 or bfloat16, also mixed, on one device.
        grads: their gradients, of the same shapes and types. In a loop, give both as :func:`~pfl_ext.ops.prepare` makes
            them.
        scores: one number per layer, on any device, best float64 on the params'. By default 1 for all, which is SAM;
            equal scores are SAM of another radius. Used as they are: negative ones descend.
        rho: the radius, not negative.
        p: the norm of the ball, 1 to infinity.
        norm: ``"global"`` divides by the norm of the whole gradient, as printed; ``"layer"`` by that of the layer.
        groups: the layer of each tensor, numbers from 0 on (:func:`layer_groups`); by default each tensor is one.
        literal_exponent: see above; needs 1 < p < infinity.
        backup: the backup of an earlier call with the same params, to be overwritten: saves an allocation each step.

    Returns:
        The backup, the bytes of the parameters as they were; :func:`restore_` takes it.

    Raises:
        ValueError, TypeError: tensors, groups or scores that do not fit each other, ``rho`` negative or not finite,
            ``p`` below 1, parameters that overlap in memory. Nothing has been changed then.

    >>> w, g = torch.zeros(2), torch.tensor([3.0, 4.0])
    >>> backup = lwsam_perturb_([w], [g], rho=0.5)
    >>> w
    tensor([0.3000, 0.4000])
    >>> restore_([w], backup)
    >>> w
    tensor([0., 0.])
    """
    params, grads = _as_list(params), _as_list(grads)
    if norm not in ("global", "layer"):
        raise ValueError(f"norm={norm!r} is not known; accepted: 'global', 'layer'")
    if groups is None:
        groups, layers = range(len(params)), len(params)
    else:
        layers = max(groups, default=-1) + 1
    if not params:
        check_lists(params=params, grads=grads)
        return torch.empty(0, dtype=torch.uint8)
    per_layer, vector = norm == "layer", None
    try:
        if scores is not None:
            vector = _as_scores(scores, params[0].device)
            layers = vector.numel()
        if backup is None:
            backup = torch.empty(backup_bytes(params), dtype=torch.uint8, device=params[0].device)
        moved, along = handed(params, grads)
        with without_gradients():
            _perturb(moved, backup, along, vector, groups, layers, rho, p, literal_exponent, per_layer)
    except (RuntimeError, TypeError, AttributeError):
        params, grads = list(params), list(grads)
        check_lists(params=params, grads=grads)
        if isinstance(scores, Tensor):
            check_dense("scores", scores)
        if backup is not None:
            _perturb_check(params, backup, grads, vector, groups, layers, rho, p, literal_exponent, per_layer)
            _perturb_memory(params, backup, grads, vector)
        raise
    written(params)
    return backup


def restore_(params: Iterable[Tensor], backup: Tensor) -> None:
    """Give ``params`` the bits that they had when :func:`lwsam_perturb_` returned ``backup``, in the memory they have.

    Raises:
        ValueError, TypeError: a backup that is too small for the parameters or on another device. Nothing has been
            changed then.
    """
    params = _as_list(params)
    try:
        (moved,) = handed(params)
        with without_gradients():
            _restore(moved, backup)
    except (RuntimeError, TypeError):
        params = list(params)
        _restore_check(params, backup)
        check_memory({"params": params}, {"backup": [backup]})
        raise
    written(params)
