"""What commands about finished runs share: the experiment of a run's folder."""

from __future__ import annotations

from pathlib import Path

from pfl_ext.experiment import Experiment
from pfl_ext.reports import read_config
from pfl_ext.sections import SECTIONS

from .trust import load_code, load_named

__all__ = ["experiment_of"]


def experiment_of(folder: Path, data_root: Path | None, *, trusted: bool) -> Experiment:
    """The experiment of a run's folder.

    Args:
        folder: the run's.
        data_root: the folder with the data's files, if not that of the run.
        trusted: whether the code that the folder names may be run.
    """
    content = read_config(folder)
    sections = {section: content[section] for section in SECTIONS if isinstance(content.get(section), dict)}
    if "method" not in sections:
        raise ValueError(f"{folder} is not the folder of a run: its config.toml has no [method]")
    if data_root is not None:
        sections.setdefault("data", {})["root"] = str(data_root)
    load_code("method", str(sections["method"].get("name")), trusted=trusted)
    load_named(sections, trusted=trusted)
    return Experiment.from_sections(sections)
