"""What `pfl-ext bench --device cuda` writes down."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pfl_ext.benchmarks import gpu_race
from pfl_ext.benchmarks.gpu_race import GpuRow

ROOT = Path(__file__).resolve().parents[2]
_OURS = GpuRow(
    "restore_", "lenet", "float32", "pfl_ext", 9.0, 10.0, 11.0, 30, 1.0, 50.0, "A GPU", "clocks", "later clocks",
    "2.14", "c0ffee",
)  # fmt: skip
_THEIRS = dataclasses.replace(_OURS, contestant="_foreach", middle=20.0, by_ours=2.0)


def test_a_table_goes_into_the_page_that_a_checkout_has(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / gpu_race.PAGE).read_text())
    gpu_race.publish([_OURS, _THEIRS], page)
    assert "| restore_ | lenet | float32 | 10.0 | 50 | _foreach 2.00x |" in page.read_text()
    assert "Measured on A GPU, torch 2.14, commit c0ffee" in page.read_text()


def test_a_checkouts_readme_has_a_place_for_each_op_against_its_opponents_in_float32(tmp_path: Path) -> None:
    page, readme = tmp_path / "gpu.md", tmp_path / "README.md"
    page.write_text((ROOT / gpu_race.PAGE).read_text())
    readme.write_text((ROOT / gpu_race.README).read_text())
    others = [dataclasses.replace(row, dtype="bfloat16", middle=5.0) for row in (_OURS, _THEIRS)]
    larger = [dataclasses.replace(row, size="resnet18", middle=99.0) for row in (_OURS, _THEIRS)]
    alone = dataclasses.replace(_OURS, op="all_finite")
    gpu_race.publish([_OURS, _THEIRS, *others, *larger, alone], page, readme)
    before, after = ((ROOT / gpu_race.README).read_text().splitlines(), readme.read_text().splitlines())
    new = [line for line in after if line not in before]
    assert new == [
        "On A GPU; 2.00x: the other took twice as long. All of it: [docs/gpu.md](docs/gpu.md).",
        "| op | size | type | pfl_ext us | GB/s | opponents, by ours |",
        "| --- | --- | --- | ---: | ---: | --- |",
        "| restore_ | lenet | float32 | 10.0 | 50 | _foreach 2.00x |",
    ]
    assert len(after) <= 150


def test_times_of_a_simulated_gpu_go_into_no_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / gpu_race.PAGE).read_text())
    simulated = dataclasses.replace(_OURS, gpu="A GPU" + gpu_race.SIMULATED)
    with pytest.raises(ValueError, match="this GPU is simulated: its times are those of an interpreter"):
        gpu_race.publish([simulated, _THEIRS], page)
    assert page.read_text() == (ROOT / gpu_race.PAGE).read_text()
    assert gpu_race.markdown([simulated]).startswith("A rehearsal, not a measurement, on")
