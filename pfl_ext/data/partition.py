"""Which client holds which samples: checked, counted, hashed, saved."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .dataset import Dataset

__all__ = ["Partition"]

FORMAT = "pfl_ext.partition/1"
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each client, as indices into a :class:`Dataset`.

    Args:
        train, validation, test: for each client its int64 indices, sorted. No sample is in two places; every client
            has at least one training sample.
        server: samples that the server holds and no client has; may be empty.
        global_test: what the generic model is tested on: the official test part, or the union of the local tests.
        description: how it was made: partitioner, arguments, seed, dataset and its fingerprint.
    """

    train: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    server: Tensor
    global_test: Tensor
    description: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse anything but sorted, disjoint indices of at least one client."""
        if not self.train or not len(self.train) == len(self.validation) == len(self.test):
            raise ValueError(
                f"{len(self.train)} training, {len(self.validation)} validation and {len(self.test)} test sets; "
                "one of each for every client, and a client at least, are accepted"
            )
        everything = [*self.train, *self.validation, *self.test, self.server, self.global_test]
        for indices in everything:
            if indices.dtype != torch.int64 or indices.ndim != 1:
                raise ValueError(f"indices are {indices.dtype} {tuple(indices.shape)}; int64 [samples] is accepted")
            if indices.device.type != "cpu":
                raise ValueError(f"indices are on {indices.device}; a partition lives on the CPU")
            if len(indices) and (int(indices[0]) < 0 or bool((indices[1:] <= indices[:-1]).any())):
                raise ValueError("indices are negative, repeated or not sorted")
        empty = [client for client, indices in enumerate(self.train) if not len(indices)]
        if empty:
            raise ValueError(f"{len(empty)} clients have no training sample, the first is client {empty[0]}")
        held = torch.cat(everything[:-1]).sort().values
        if bool((held[1:] == held[:-1]).any()):
            sample = int(held[1:][held[1:] == held[:-1]][0])
            raise ValueError(f"sample {sample} is in two places; the parts of a partition are disjoint")

    @property
    def clients(self) -> int:
        """How many clients share the samples."""
        return len(self.train)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all indices and of the dataset's fingerprint: equal for equal partitions of equal data."""
        digest = hashlib.sha256(str(self.description.get("dataset_fingerprint")).encode())
        for name, tensor in sorted(_flat(self).items()):
            digest.update(f"{name}:{len(tensor)};".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def check(self, dataset: Dataset) -> None:
        """Raise ValueError unless this is a partition of that dataset."""
        expected = self.description.get("dataset_fingerprint")
        if expected is not None and expected != dataset.fingerprint:
            raise ValueError(
                f"the partition was made for {self.description.get('dataset')!r} with the fingerprint {expected[:16]}; "
                f"{dataset.name!r} has {dataset.fingerprint[:16]}: make a partition of this dataset"
            )
        sets = (*self.train, *self.validation, *self.test, self.server, self.global_test)
        largest = max(int(indices[-1]) for indices in sets if len(indices))
        if largest >= len(dataset):
            raise ValueError(f"the partition names sample {largest}; {dataset.name!r} has {len(dataset)} samples")

    # ---- what is in it ------------------------------------------------------------------------------------------

    def counts(self, dataset: Dataset, part: str = "train") -> Tensor:
        """How many samples of each class every client has in one part (or in ``"all"``): int64 [clients, classes].

        For multi-label data: how many samples with each label. Where samples have no classes, but numbers to predict or
        a class for each pixel or token: how many of each domain; where there are no domains either, how many.
        """
        if part not in (*PARTS, "all"):
            raise ValueError(f"part is {part!r}; {', '.join(PARTS)} or all is accepted")
        targets, names = _categories(dataset)
        table = torch.zeros(self.clients, len(names), dtype=torch.int64)
        for name in PARTS if part == "all" else (part,):
            sets = getattr(self, name)
            client = torch.repeat_interleave(torch.tensor([len(indices) for indices in sets]))
            chosen = targets[torch.cat(sets)]
            if dataset.multilabel:
                table.index_add_(0, client, (chosen > 0).to(torch.int64))
            else:
                table.view(-1).index_add_(0, client * table.shape[1] + chosen, torch.ones_like(client))
        return table

    def classes(self, dataset: Dataset) -> list[dict[str, Any]]:
        """The training samples as :meth:`counts` has them: a row for each client and class that it holds."""
        counts, names = self.counts(dataset), _categories(dataset)[1]
        held = counts.nonzero()
        return [
            {"client": client, "class": place, "name": names[place], "train": count}
            for (client, place), count in zip(held.tolist(), counts[held[:, 0], held[:, 1]].tolist(), strict=True)
        ]

    def table(self, dataset: Dataset, limit: int = 100) -> str:
        """A Markdown table: samples of each client by part, and its training samples as :meth:`counts` has them.

        Beyond 20 classes the number of classes stands for the columns; beyond ``limit`` clients the rest is summed up.
        """
        counts, names = self.counts(dataset), _categories(dataset)[1]
        wide = len(names) <= 20
        header = ["client", *PARTS, *(names if wide else ["classes" if names == dataset.classes else "domains"])]
        rows = []
        for client in range(min(self.clients, limit)):
            sizes = [len(getattr(self, part)[client]) for part in PARTS]
            rows.append([client, *sizes, *(counts[client].tolist() if wide else [int((counts[client] > 0).sum())])])
        totals = [sum(len(indices) for indices in getattr(self, part)) for part in PARTS]
        rows.append(["all", *totals, *(counts.sum(0).tolist() if wide else [int((counts.sum(0) > 0).sum())])])
        cells = [[str(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = ["| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
        lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
        if self.clients > limit:
            lines.append(f"\n{self.clients - limit} more clients are only counted in the last row.")
        return "\n".join(lines)

    def draw(self, dataset: Dataset, path: str | os.PathLike[str], note: str = "") -> Path:
        """Write a picture of it; see :func:`pfl_ext.data.picture.draw_partition`. Needs matplotlib.

        Args:
            dataset: whose samples it cuts.
            path: the file; its ending is the format.
            note: what the title says of it beside how it was made.
        """
        from .picture import draw_partition

        how = self.description
        title = [f"{dataset.name}: {how.get('partitioner', 'partition')}"]
        title += [f"{key} = {how[key]:g}" for key in ("alpha", "k", "sigma") if key in how]
        title += [note] if note else []
        parts = {part: [len(indices) for indices in getattr(self, part)] for part in PARTS}
        return draw_partition(", ".join(title), parts, self.counts(dataset), _categories(dataset)[1], path)

    # ---- on disk ------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; whoever reads ``path`` meanwhile finds the old file or the new one, whole."""
        from safetensors.torch import save

        path = Path(path)
        metadata = {
            "format": FORMAT,
            "description": json.dumps(self.description, sort_keys=True),
            "fingerprint": self.fingerprint,
        }
        data = save({name: tensor.contiguous() for name, tensor in _flat(self).items()}, metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp's files are private
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Partition:
        """Read what :meth:`save` wrote; ValueError for a file that is damaged or something else."""
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no partition at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            train, validation, test = (tensors[part].split(tensors[f"{part}_sizes"].tolist()) for part in PARTS)
            partition = Partition(
                tuple(train),
                tuple(validation),
                tuple(test),
                server=tensors["server"],
                global_test=tensors["global_test"],
                description=json.loads(metadata["description"]),
            )
            if partition.fingerprint != metadata["fingerprint"]:
                raise ValueError("its content does not match the fingerprint stored with it")
        except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
            raise ValueError(f"{path} is not a partition, or damaged: {error}") from error
        return partition


def _categories(dataset: Dataset) -> tuple[Tensor, tuple[str, ...]]:
    """What samples are counted by, of each of them, and its names."""
    if dataset.one_class or dataset.multilabel:
        return dataset.targets.cpu(), dataset.classes
    if dataset.domain is not None:
        return dataset.domain.cpu(), dataset.domains
    return torch.zeros(len(dataset), dtype=torch.int64), ("samples",)


def _flat(partition: Partition) -> dict[str, Tensor]:
    """A fixed number of tensors, however many clients there are."""

    def sizes(sets: Sequence[Tensor]) -> Tensor:
        return torch.tensor([len(indices) for indices in sets], dtype=torch.int64)

    flat = {"server": partition.server, "global_test": partition.global_test}
    for part in PARTS:
        sets = getattr(partition, part)
        flat |= {part: torch.cat(sets), f"{part}_sizes": sizes(sets)}
    return flat
