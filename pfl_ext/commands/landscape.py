"""``pfl-ext landscape FOLDER ...``: the loss around the models that runs have saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.federation import stream
from pfl_ext.options import nearest
from pfl_ext.reports import Surface, draw_landscapes, loss_surface, table
from pfl_ext.runs import SavedModels

from .flags import refuse_unknown
from .parser import Parser, UsageError
from .saved import experiment_of
from .trust import add_trust

__all__ = ["Request", "drawn", "execute", "flags", "parse"]

_SPLITS = ("train", "validation", "test", "global_test")


@dataclass(frozen=True)
class Request:
    """The runs around whose models the loss is drawn, and how finely."""

    folders: tuple[Path, ...]
    client: int
    models: tuple[str, ...] | None
    split: str
    samples: int
    points: int
    radius: float
    seed: int
    device: str | None
    data_root: Path | None
    trust_code: bool
    output: Path


def flags() -> dict[str, str]:
    """How names in messages are spelled on this command line."""
    return {"root": "--data-root"} | {name: f"--{name}" for name in ("client", "device", "points", "radius", "samples")}


def parse(arguments: Sequence[str]) -> Request:
    """Read from the command line which landscapes to draw."""
    parser = Parser(
        "landscape",
        " FOLDER ...",
        description="Draw the loss around the models of finished runs, along two random directions whose filters are\n"
        "as long as the model's own (Li et al., 2018): the same directions and one scale for all, so that runs of one\n"
        "network and one partition can be compared. The folders are those that pfl-ext run and compare write.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results folders of runs")
    parser.add_argument("--client", type=int, default=0, help="the client whose models and data are taken (default: 0)")
    parser.add_argument("--models", help="which models, such as global,personal (default: all that the runs evaluate)")
    parser.add_argument(
        "--split", choices=_SPLITS, default="train", help="the data that the loss is of (default: the client's train)"
    )
    parser.add_argument(
        "--samples", type=int, default=1000, help="the most samples to compute the loss on (default: 1000)"
    )
    parser.add_argument("--points", type=int, default=21, help="points of the grid in each direction (default: 21)")
    parser.add_argument(
        "--radius",
        type=float,
        default=1.0,
        help="how far the picture goes; 1: as far as the filters are long (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random directions (default: 0)")
    parser.add_argument("--device", help="where losses are computed, such as cuda (default: where the run was)")
    parser.add_argument("--data-root", type=Path, help="the folder with the data's files, if not that of the run")
    add_trust(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("landscape.png"), help="the picture to write (default: landscape.png)"
    )
    parsed, unknown = parser.parse_known_args(list(arguments))
    refuse_unknown(parser, unknown, {})
    if parsed.samples < 1:
        raise UsageError(f"--samples is {parsed.samples}; accepted is 1 or more")
    return Request(
        folders=tuple(parsed.folders),
        client=parsed.client,
        models=None if parsed.models is None else tuple(parsed.models.split(",")),
        split=parsed.split,
        samples=parsed.samples,
        points=parsed.points,
        radius=parsed.radius,
        seed=parsed.seed,
        device=parsed.device,
        data_root=parsed.data_root,
        trust_code=parsed.trust_code,
        output=parsed.output,
    )


def execute(request: Request) -> int:
    """Draw them, and print how steep they are."""
    print(table(drawn(request), digits=3))
    print(f"drawn into {request.output}")
    return 0


def drawn(request: Request, *, draw: bool = True) -> list[dict[str, Any]]:
    """Draw them; returns how steep they are, a row for each model."""
    surfaces, rows = {}, []
    for folder in request.folders:
        run = folder.resolve().name
        for name, surface in _surfaces(folder, request).items():
            surfaces[f"{run}, {name}"] = surface
            within = [share * request.radius for share in (0.2, 0.5, 1)]
            rises = {f"rise within {radius:g}": surface.rise(radius) for radius in within}
            rows.append({"run": run, "model": name, "loss": surface.centre, **rises})
    if draw:
        draw_landscapes(surfaces, request.output)
    return rows


def _surfaces(folder: Path, request: Request) -> dict[str, Surface]:
    """The loss around each model of a run."""
    experiment = experiment_of(folder, request.data_root, trusted=request.trust_code)
    saved = SavedModels(folder, experiment, request.client, request.device)
    chosen = saved.names if request.models is None else request.models
    for name in chosen:
        if name not in saved.names:
            close = nearest(name, saved.names)
            raise UsageError(f"--models {name}: {folder} has {', '.join(saved.names)}{close}")
    indices = saved.samples(request.split, request.samples, request.seed)
    if len(indices) == 0:
        raise UsageError(f"--split {request.split}: client {request.client} has no such data")
    return {
        name: loss_surface(
            saved.model,
            saved.state(name),
            lambda: saved.client.loss(indices),
            stream(request.seed, "landscape"),
            points=request.points,
            radius=request.radius,
        )
        for name in chosen
    }
