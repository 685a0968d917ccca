"""Round records as scalars in TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .results import ResultsFolder, flatten

__all__ = ["TensorBoard", "tensorboard"]


class TensorBoard:
    """Writes what `ResultsFolder.append` takes, a scalar for each column of metrics.csv; made by `tensorboard`."""

    def __init__(self, writer: Any) -> None:
        """Take a ``torch.utils.tensorboard.SummaryWriter``."""
        self._writer = writer

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the scalars of a round."""
        for name, value in flatten(record).items():
            if name != "round" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def close(self) -> None:
        """End the event file."""
        self._writer.close()


def tensorboard(folder: ResultsFolder) -> TensorBoard:
    """A writer into the folder ``tensorboard`` of the results, beginning with the rounds that are recorded already.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard's files need its package: pip install 'pfl_ext[tensorboard]' ({error})"
        ) from None
    # The files of an earlier process may hold rounds that a resumed run repeats; from step 0 on they are void.
    board = TensorBoard(SummaryWriter(str(folder.path / "tensorboard"), purge_step=0))
    for record in folder.records():
        board.append(record)
    return board
