"""Cases of the ops that stand for layers of a network."""

from __future__ import annotations

import random
from typing import Any

import torch
from call import NATIVE, Call, compare, covers, leaf
from guarded_tensors import FLOATS, Memory, draw_tensor
from torch import Tensor
from torch.nn import functional as F

from pfl_ext import ops
from pfl_ext.ops._arguments import accumulate_type
from pfl_ext.ops._declare import OPS
from pfl_ext.ops.training import LAYERS, _outputs

_VALUES = ("normal", "normal", "normal", "small", "zeros", "equal")


def _draw(choice: random.Random, shape: list[int], dtype: str, raw: bool) -> dict[str, Any]:
    layout = choice.choice(["contiguous", "offset"]) if raw and choice.random() < 0.9 else None
    return draw_tensor(choice, shape, dtype, choice.choice(_VALUES), layout)


def _draw_linear(choice: random.Random) -> dict[str, Any]:
    raw = choice.random() < 0.7
    rows = choice.choice([0, 1, 2, 3, 7, 10, 13])
    inputs, outputs = choice.choice([0, 1, 5, 17, 33, 84, 130]), choice.choice([0, 1, 3, 10, 16, 37])
    if not raw or choice.random() < 0.1:
        inputs, outputs = choice.choice([(256, 257), (128, 512), (521, 131), (1024, 120)])
    dtype = choice.choice(FLOATS if not raw else FLOATS[:2])
    return {
        "op": choice.choice(["forward", "backward"]) if raw else "public",
        **{name: _draw(choice, shape, dtype, raw) for name, shape in (
            ("x", [rows, inputs]), ("weight", [outputs, inputs]), ("bias", [outputs]), ("grad", [rows, outputs]),
            ("y", [rows, outputs]),
        )},
        "for_x": choice.random() < 0.7,
    }  # fmt: skip


def _contiguous(*tensors: Tensor) -> bool:
    return all(t.is_contiguous() for t in tensors)


@covers("raw.linear_relu_forward", "raw.linear_relu_backward", "ops.linear_relu", draw=_draw_linear)
def linear_relu(case: dict[str, Any], memory: Memory) -> Call:
    x, weight, bias, grad, y = (memory.make(case[name]) for name in ("x", "weight", "bias", "grad", "y"))
    a, w, b, g, mask = (memory.before(t).double() for t in (x, weight, bias, grad, y))
    # torch's own product of half matrices rounds sums as it likes.
    accumulate = accumulate_type(x.dtype) if x.dtype in (torch.float32, torch.float64) else x.dtype

    def forward(got: Tensor) -> str | None:
        size = a.abs() @ w.abs().T + b.abs()
        return compare("y", got, F.relu(a @ w.T + b), size, a.shape[1] + 8, accumulate)

    def backward(got: Any, cut: Tensor, needs_x: bool) -> str | None:
        to_x, to_weight, to_bias = got
        if wrong := compare("to weight", to_weight, cut.T @ a, cut.abs().T @ a.abs(), len(a) + 8, accumulate):
            return wrong
        if wrong := compare("to bias", to_bias, cut.sum(0), cut.abs().sum(0), len(a) + 8, accumulate):
            return wrong
        return compare("to x", to_x, cut @ w, cut.abs() @ w.abs(), len(w) + 8, accumulate) if needs_x else None

    if case["op"] == "forward":
        return Call(
            torch.ops.pfl_ext.linear_relu_forward,
            [x, weight, bias],
            check=forward,
            may_refuse=not _contiguous(x, weight, bias),
        )
    if case["op"] == "backward":
        for_x = case["for_x"]
        return Call(
            torch.ops.pfl_ext.linear_relu_backward,
            [grad, y, x, weight, for_x],
            check=lambda got: backward(got, torch.where(mask <= 0, 0, g), for_x),
            may_refuse=not _contiguous(grad, y, x, weight),
        )

    def with_gradients(x: Any, weight: Any, bias: Any) -> Any:
        leaves = [leaf(t) for t in (x, weight, bias)]
        result = ops.linear_relu(*leaves)
        return result, torch.autograd.grad(result, leaves, grad)

    def check(got: Any) -> str | None:
        # Masked by what the op itself gave: beside zero either side is right.
        return forward(got[0]) or backward(got[1], torch.where(got[0].double() <= 0, 0, g), True)

    return Call(with_gradients, [x, weight, bias], check=check, again=x.dtype in (torch.float32, torch.float64))


def _draw_convolution(choice: random.Random) -> dict[str, Any]:
    raw = choice.random() < 0.7
    samples, channels, outputs = (
        choice.choice([0, 1, 2, 5]),
        choice.choice([1, 2, 3, 6, 17]),
        choice.choice([1, 3, 6, 16, 19]),
    )
    height, width = choice.choice([1, 2, 5, 6, 9, 14]), choice.choice([1, 2, 4, 7, 12, 16])
    tall, wide = choice.choice([1, 2, 3, 5]), choice.choice([1, 2, 3, 5])
    if not raw:  # torch's layers refuse images without a cell
        height, width = max(height, tall + 1), max(width, wide + 1)
    dtype = choice.choice(FLOATS[:2])
    cells = [samples, max(0, height - tall + 1) // 2, max(0, width - wide + 1) // 2, outputs]
    case = {
        "op": choice.choice(["forward", "backward"]) if raw else "public",
        "x": _draw(
            choice, [samples, height, width, channels] if raw else [samples, channels, height, width], dtype, raw
        ),
        "weight": _draw(
            choice, [outputs, tall, wide, channels] if raw else [outputs, channels, tall, wide], dtype, raw
        ),
        "bias": _draw(choice, [outputs], dtype, raw),
        "grad": _draw(choice, cells, dtype, raw),
        "which": {
            "shape": cells,
            "dtype": "uint8",
            "layout": "contiguous",
            "values": "",
            "seed": choice.randrange(2**31),
            "range": [0, 256] if choice.random() < 0.05 else [0, 5],
        },
        "for_x": choice.random() < 0.7,
    }
    return case


@covers("raw.conv_pool_relu_forward", "raw.conv_pool_relu_backward", "ops.conv_pool_relu", draw=_draw_convolution)
def conv_pool_relu(case: dict[str, Any], memory: Memory) -> Call:
    x, weight, bias, grad, which = (memory.make(case[name]) for name in ("x", "weight", "bias", "grad", "which"))
    a, w, b, g = (memory.before(t).double().contiguous() for t in (x, weight, bias, grad))
    accumulate, public = x.dtype, case["op"] == "public"
    if not public:
        a, w = a.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
    fits = a.shape[2] >= w.shape[2] and a.shape[3] >= w.shape[3]
    terms = w.shape[1] * w.shape[2] * w.shape[3] + 8

    def cells(z: Tensor) -> Tensor:
        """[samples, outputs, rows, columns, 4]"""
        rows, columns = z.shape[2] // 2, z.shape[3] // 2
        z = z[:, :, : 2 * rows, : 2 * columns].reshape(*z.shape[:2], rows, 2, columns, 2)
        return z.permute(0, 1, 2, 4, 3, 5).reshape(*z.shape[:3], columns, 4)

    def forward(got: Tensor, places: Tensor | None) -> str | None:
        each, size = cells(F.conv2d(a, w, b)), cells(F.conv2d(a.abs(), w.abs(), b.abs()))
        large = size.amax(-1) if size.numel() else size.sum(-1)
        truth = F.relu(each.amax(-1)) if each.numel() else each.sum(-1)
        if wrong := compare("y", got, truth, large, terms, accumulate):
            return wrong
        if places is None or not places.numel():
            return None
        if int(places.max()) > 4:
            return f"which holds {int(places.max())}"
        bound = 2 * terms * torch.finfo(accumulate).eps * large + 1e-300
        chosen = torch.where(places == 4, 0.0, each.gather(-1, places.long().clamp(max=3).unsqueeze(-1)).squeeze(-1))
        if bool(((chosen - truth).abs() > bound).any()):
            return "which names a place that is not the largest"
        return None

    needs_layout = not public and not _contiguous(x, weight, bias, grad)
    if case["op"] == "forward":
        return Call(
            torch.ops.pfl_ext.conv_pool_relu_forward,
            [x, weight, bias],
            check=lambda got: forward(got[0].permute(0, 3, 1, 2), got[1].permute(0, 3, 1, 2)),
            may_refuse=needs_layout or not fits,
        )

    def backward(got: Any, places: Tensor, for_x: bool = True) -> str | None:
        reference = OPS["conv_pool_relu_backward"].reference
        double = [g, *(t.permute(0, 2, 3, 1).contiguous() for t in (a, w))]
        truth = reference(double[0], places, double[1], double[2], True)
        sizes = reference(double[0].abs(), places, double[1].abs(), double[2].abs(), True)
        count = g.numel() // max(g.shape[3], 1) + terms + len(w)
        for name, mine, right, size in zip(("x", "weight", "bias"), got, truth, sizes, strict=True):
            if name == "x" and not for_x:
                continue
            if wrong := compare(f"to {name}", mine, right, size, count, accumulate):
                return wrong
        return None

    def check_public(got: Any) -> str | None:
        if wrong := forward(got[0], None):
            return wrong
        each, size = cells(F.conv2d(a, w, b)), cells(F.conv2d(a.abs(), w.abs(), b.abs()))
        best = torch.cat([each, torch.zeros_like(each[..., :1])], -1).topk(2, -1)  # the fifth: cut by ReLU
        clear = best.values[..., 0] - best.values[..., 1] > 4 * terms * torch.finfo(accumulate).eps * size.amax(-1)
        if not bool(clear.all()):  # either place is right, and has another gradient
            return None
        images = [t.permute(0, 2, 3, 1) if t.dim() == 4 else t for t in got[1]]
        return backward(images, best.indices[..., 0].permute(0, 2, 3, 1))

    if public:

        def with_gradients(x: Any, weight: Any, bias: Any) -> Any:
            leaves = [leaf(t) for t in (x, weight, bias)]
            result = ops.conv_pool_relu(*leaves)
            return result, list(torch.autograd.grad(result, leaves, grad.permute(0, 3, 1, 2)))

        return Call(with_gradients, [x, weight, bias], check=check_public, may_refuse=min(a.shape) == 0)

    wild = case["which"]["range"][1] > 5
    empty = 0 in (*x.shape, *weight.shape, *grad.shape)
    return Call(
        torch.ops.pfl_ext.conv_pool_relu_backward,
        [grad, which, x, weight, case["for_x"]],
        check=(lambda got: None) if empty or wild else lambda got: backward(got, memory.before(which), case["for_x"]),
        may_refuse=needs_layout or not fits or wild,
    )


def _draw_training(choice: random.Random) -> dict[str, Any]:
    dtype, samples = choice.choice(FLOATS[:2]), choice.choice([1, 2, 7, 10])
    convolutions, hidden = choice.choice([0, 0, 1]), choice.choice([0, 1, 2])
    shapes, image = [], [samples, choice.choice([1, 3]), choice.choice([6, 9]), choice.choice([6, 10])]
    inputs = choice.choice([1, 5, 33, 130])
    if convolutions:
        outputs = choice.choice([2, 17])
        shapes += [[outputs, image[1], 3, 3], [outputs]]
        inputs = outputs * ((image[2] - 2) // 2) * ((image[3] - 2) // 2)
    for _ in range(hidden + 1):
        outputs = choice.choice([2, 10, 37])
        shapes += [[outputs, inputs], [outputs]]
        inputs = outputs
    first, raw = [samples, shapes[0][1]], choice.random() < 0.3
    # Weights of convolutions are to be channels last; others are refused.
    images = "channels last" if choice.random() < 0.9 else "contiguous"
    layouts = [images if len(shape) == 4 else "contiguous" for shape in shapes]
    return {
        "layers": ["conv_pool_relu"] * convolutions + ["linear_relu"] * hidden + ["linear"],
        "x": draw_tensor(choice, image if convolutions else first, dtype, "normal", "contiguous" if raw else None),
        **{
            name: [
                draw_tensor(choice, shape, dtype, "normal", layout)
                for shape, layout in zip(shapes, layouts, strict=True)
            ]
            for name in ("params", "anchors", "buffers")
        },
        "targets": [choice.randrange(outputs) for _ in range(samples)],
        "lr": choice.choice([0.0, 0.1, 1.0]),
        "lam": choice.choice([0.0, 0.5]),
        "momentum": choice.choice([0.0, 0.9]),
        "weight_decay": choice.choice([0.0, 0.01]),
        "first": choice.random() < 0.3,
        "batch size": choice.choice([0, 0, 1, 3, samples, 2 * samples]),
        "teacher": draw_tensor(choice, [samples, outputs], dtype, "normal", "contiguous"),
        "temperature": choice.choice([0.5, 1.0, 9.0]),
        "soft scale": choice.choice([0.0, 0.0, 0.5, 20.0]),
        "hard scale": choice.choice([0.0, 0.5, 1.0]),
        "cross-entropy": choice.random() < 0.3,
        "raw": raw,
    }


@covers("raw.train_steps_", "ops.train_steps_", draw=_draw_training)
def train_steps(case: dict[str, Any], memory: Memory) -> Call:
    params, anchors, buffers = ([memory.make(t) for t in case[name]] for name in ("params", "anchors", "buffers"))
    x, targets, layers = memory.make(case["x"]), torch.tensor(case["targets"]), case["layers"]
    teacher = memory.make(case["teacher"])
    lr, lam, mu, decay = (case[name] for name in ("lr", "lam", "momentum", "weight_decay"))
    scales = [case[name] for name in ("temperature", "soft scale", "hard scale")]
    objective = dict(zip(("temperature", "soft_scale", "hard_scale"), scales, strict=True))
    objective["soft"] = "ce" if case["cross-entropy"] else "kl"
    wide = [[memory.before(t).double() for t in tensors] for tensors in (params, buffers, anchors)]
    numbers = [LAYERS.index(layer) for layer in layers]
    buffers, size = buffers if mu else [], case["batch size"]

    def one_by_one(got: Tensor) -> str | None:
        """Steps in one call are those of a call for each batch: a bound for several would be too wide to say much."""
        written = [[memory.before(t) for t in some] for some in (params, buffers)]
        options = {"anchors": anchors, "lam": lam, "momentum": mu, "weight_decay": decay, **objective}
        losses = [
            ops.train_steps_(
                written[0], inputs, classes, layers, lr,
                **options, momentum_buffers=written[1], first=case["first"] and step == 0, teacher=known,
            )
            for step, (inputs, classes, known) in enumerate(
                zip(x.split(size), targets.split(size), teacher.split(size), strict=True)
            )
        ]  # fmt: skip
        pairs = zip([got, *params, *buffers], [torch.cat(losses), *written[0], *written[1]], strict=True)
        if NATIVE:
            same = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)
        else:  # torch's own products have other last bits for other strides; a step more or less is seen all the same
            near = 1e-9 if x.dtype == torch.float64 else 1e-3
            same = all(torch.allclose(a, b, near, near * float(b.nan_to_num().abs().max()), True) for a, b in pairs)
        return None if same else f"steps on batches of {size} are others than in calls of their own"

    def check(got: Tensor) -> str | None:
        if 0 < size < len(x):
            return one_by_one(got)
        expected = [[t.clone() for t in tensors] for tensors in wide]
        image = memory.before(x).double()
        image = image.permute(0, 2, 3, 1) if image.dim() == 4 else image
        lists = [expected[0], expected[1] if mu else [], expected[2]]
        logits = _outputs(expected[0], image, numbers)
        known = memory.before(teacher).double()
        loss = OPS["train_steps_"].reference(
            *lists, image, targets, numbers, 0, lr, lam, mu, decay, case["first"], known, *scales, case["cross-entropy"]
        )
        temperature, soft, hard = scales
        # Each term is sums of logits; of a divergence both distributions' logarithms, which nearly cancel.
        size_of_loss = (hard + 1) * (1 + 2 * logits.abs().max())
        size_of_loss += 2 * soft * (4 + (logits.abs().max() + known.abs().max()) / temperature)
        if wrong := compare("loss", got, loss, size_of_loss, 1000, x.dtype):
            return wrong
        # A hundred roundings of the largest number of each tensor: beside ReLU's corner either side would be right,
        # but numbers that are drawn do not come that near to it.
        for what, mine, before, after in (
            *(("param", *t) for t in zip(params, wide[0], expected[0], strict=True)),
            *(("buffer", *t) for t in zip(buffers, wide[1], expected[1], strict=False)),
        ):
            largest = before.abs().max() + (after - before).abs().max()
            if wrong := compare(what, mine, after, largest, 1000, mine.dtype):
                return wrong
        return None

    written = [*params, *buffers]
    may_refuse = len(params[0].shape) == 4 and case["params"][0]["layout"] != "channels last"
    if case["raw"]:
        inputs = x.permute(0, 2, 3, 1).contiguous() if x.dim() == 4 else x
        arguments = [params, buffers, anchors, inputs, targets, numbers, size, lr, lam, mu, decay, case["first"]]
        arguments += [teacher, *scales, case["cross-entropy"]]
        return Call(torch.ops.pfl_ext.train_steps_, arguments, written=written, check=check, may_refuse=may_refuse)
    options = {"anchors": anchors, "lam": lam, "momentum": mu, "weight_decay": decay, "first": case["first"]}
    options |= {"batch_size": size, "teacher": teacher, **objective}
    return Call(
        ops.train_steps_,
        [params, x, targets, layers, lr],
        {**options, "momentum_buffers": buffers},
        written=written,
        check=check,
        may_refuse=may_refuse,
    )


@covers("raw.loss_and_gradients_", "ops.loss_and_gradients", draw=_draw_training)
def loss_and_gradients(case: dict[str, Any], memory: Memory) -> Call:
    params, gradients = ([memory.make(t) for t in case[name]] for name in ("params", "buffers"))
    x, targets, layers = memory.make(case["x"]), torch.tensor(case["targets"]), case["layers"]
    numbers = [LAYERS.index(layer) for layer in layers]

    def check(got: Tensor, found: list[Tensor]) -> str | None:
        wide = [memory.before(t).double() for t in params]
        image = memory.before(x).double()
        image = image.permute(0, 2, 3, 1) if image.dim() == 4 else image
        expected = [torch.empty_like(t) for t in wide]
        loss = OPS["loss_and_gradients_"].reference(expected, wide, image, targets, numbers)
        size = 1 + 2 * _outputs(wide, image, numbers).abs().max()
        if wrong := compare("loss", got.view(1), loss, size, 1000, x.dtype):
            return wrong
        # Where p is near y, p - y is rounded as they are: however small the gradient is.
        for mine, truth in zip(found, expected, strict=True):
            if wrong := compare("gradient", mine, truth, 1 + truth.abs().max(), 1000, mine.dtype):
                return wrong
        return None

    may_refuse = len(params[0].shape) == 4 and case["params"][0]["layout"] != "channels last"
    if case["raw"]:
        inputs = x.permute(0, 2, 3, 1).contiguous() if x.dim() == 4 else x
        return Call(
            torch.ops.pfl_ext.loss_and_gradients_,
            [gradients, params, inputs, targets, numbers],
            written=gradients,
            check=lambda got: check(got, gradients),
            may_refuse=may_refuse,
        )
    return Call(
        ops.loss_and_gradients,
        [params, x, targets, layers],
        check=lambda got: check(*got),
        may_refuse=may_refuse,
    )
