"""``pfl-ext export FOLDER --to FILE``: a run's global model, or a client's personal one, as safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pfl_ext.experiment import restored
from pfl_ext.exported import save_model

from .flags import refuse_unknown
from .parser import Parser, UsageError
from .saved import experiment_of
from .trust import add_trust

__all__ = ["Request", "execute", "flags", "parse"]


@dataclass(frozen=True)
class Request:
    """The model to write, and where to."""

    folder: Path
    client: int | None
    network: int | None
    to: Path
    data_root: Path | None
    overwrite: bool
    trust_code: bool


def flags() -> dict[str, str]:
    """How names in messages are spelled on this command line."""
    return {"root": "--data-root", "client": "--client", "network": "--network", "overwrite": "--overwrite"}


def parse(arguments: Sequence[str]) -> Request:
    """Read from the command line which model to write."""
    parser = Parser(
        "export",
        " FOLDER --to FILE",
        description="Write the global model of a run, or the personal one of a client, into a safetensors file: all\n"
        "tensors of the network by its own names, frozen ones too, as its state_dict has them. Its header says what\n"
        "it is, with the classes and the normalisation of the inputs. torch and safetensors are enough to read it;\n"
        "pfl-ext run --network-pretrained FILE starts a new run from it.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the results folder of a run")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--client", type=int, help="number of the client whose personal model is written (default: the global model)"
    )
    parser.add_argument("--network", type=int, help="with several networks in the run: the number of one, from 0")
    parser.add_argument("--data-root", type=Path, help="the folder with the data's files, if not that of the run")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    add_trust(parser)
    parsed, unknown = parser.parse_known_args(list(arguments))
    refuse_unknown(parser, unknown, {})
    if parsed.to.exists() and not parsed.overwrite:
        raise UsageError(f"--to: {parsed.to} is there already; --overwrite replaces it")
    return Request(
        parsed.folder, parsed.client, parsed.network, parsed.to, parsed.data_root, parsed.overwrite, parsed.trust_code
    )


def execute(request: Request) -> int:
    """Write the model that the request names into its file."""
    experiment = experiment_of(request.folder, request.data_root, trusted=request.trust_code)
    federation = restored(request.folder, experiment)
    if request.client is None:
        module, whose = federation.global_model(request.network), "global model"
    else:
        module, whose = federation.personal_model(request.client), f"personal model of client {request.client}"
    save_model(module, request.to, federation, experiment, request.client)
    print(f"the {whose} after round {federation.round}: {request.to}")
    return 0
