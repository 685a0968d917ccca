from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfl_ext.federation import WorkingModel
from pfl_ext.reports import Surface, draw_landscapes, filter_direction, loss_surface


def _model() -> WorkingModel:
    torch.manual_seed(0)
    return WorkingModel(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)))


def test_each_filter_of_a_direction_is_as_long_as_the_models() -> None:
    model = _model()
    state = model.state()
    direction = filter_direction(model, state, torch.Generator().manual_seed(0))
    sizes = [shape.numel() for shape in model.shapes]
    seen = 0
    for shape, d, w in zip(model.shapes, direction.split(sizes), state.split(sizes), strict=True):
        if len(shape) < 2:
            assert not d.any()  # biases, normalisation, buffers
            continue
        seen += 1
        rows = [x.view(shape[0], -1) for x in (d, w)]
        torch.testing.assert_close(rows[0].norm(dim=1), rows[1].norm(dim=1))
        assert not torch.allclose(*rows)
    assert seen == 2


def test_a_frozen_layer_stays_where_it_is() -> None:
    model = _model()
    network = model.module
    network[0].weight.requires_grad_(False)
    frozen = WorkingModel(network)
    direction = filter_direction(frozen, frozen.state(), torch.Generator().manual_seed(0))
    assert len(direction) == frozen.size == model.size - network[0].weight.numel() and direction.any()


def test_the_surface_is_the_loss_at_each_point_and_the_model_is_left_as_it_was() -> None:
    model = WorkingModel(nn.Linear(3, 2, bias=False).double())
    state = model.state()

    def loss() -> float:
        return float((model.state() - state).square().sum())

    generator = torch.Generator().manual_seed(3)
    surface = loss_surface(model, state, loss, generator, points=5, radius=2.0)
    again = torch.Generator().manual_seed(3)
    first, second = filter_direction(model, state, again), filter_direction(model, state, again)
    assert surface.offsets.tolist() == [-2, -1, 0, 1, 2]
    expected = float((2 * second - 1 * first).square().sum())
    assert surface.losses[4, 1] == pytest.approx(expected, rel=1e-12)
    assert surface.centre == 0 and torch.equal(model.state(), state)


def test_the_rise_is_the_mean_above_the_centre_within_the_radius() -> None:
    losses = np.full((3, 3), 9.0)
    losses[1, 1], losses[0, 1], losses[1, 0], losses[1, 2], losses[2, 1] = 1.0, 2.0, 3.0, 4.0, 5.0
    surface = Surface(np.array([-1.0, 0.0, 1.0]), losses)
    assert surface.rise(1.0) == 2.5 and math.isnan(surface.rise(0.5))
    assert surface.rise(1.5) == pytest.approx((14 + 36) / 8 - 1)


@pytest.mark.parametrize(("options", "message"), [({"points": 4}, "points is 4"), ({"radius": 0.0}, "radius is 0")])
def test_a_grid_that_misses_the_model_is_refused(options: dict[str, float], message: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=message):
        loss_surface(model, model.state(), lambda: 0.0, torch.Generator(), **options)  # type: ignore[arg-type]


def test_a_diverged_corner_does_not_flatten_the_picture(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    from pfl_ext.reports import landscape

    saved = []
    save = landscape._save
    monkeypatch.setattr(landscape, "_save", lambda figure, path: (saved.append(figure), save(figure, path)))
    losses: Tensor = torch.rand(5, 5) + 1
    losses[0, 0], losses[4, 4] = math.inf, 1e9
    surface = Surface(np.linspace(-1, 1, 5), losses.numpy())
    draw_landscapes({"a": surface, "b": surface}, tmp_path / "l.png")
    (figure,) = saved
    assert len(figure.axes) == 5  # two in perspective, two contours, the colours
    assert figure.axes[0].get_zlim()[1] < 30
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no surface"):
        draw_landscapes({}, tmp_path / "l.png")
