from __future__ import annotations

import pytest

from pfl_ext.benchmarks import spectral_step


def test_every_part_of_a_step_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert spectral_step.main(["--networks", "mlp", "--seconds", "0"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| mlp"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "79,510" and len(cells) == 6 and all(float(cell) > 0 for cell in cells[2:])
