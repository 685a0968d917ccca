"""``pfl-ext bench --gpu-model``: what each op moves on a GPU, how often it launches and waits, and the time that means.

Counted on a simulated GPU. The time is an estimate: nothing here has run on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .gpu_cases import GpuCase, cases

__all__ = ["BANDWIDTH", "LAUNCH", "NAME", "Counted", "count", "counted_cases", "markdown"]

NAME = "gpu-model"
BANDWIDTH = 1.0e12
"""Bytes a second to and from the GPU's memory."""
LAUNCH = 4.0e-6
"""Seconds from one small kernel to the next in a stream."""
_SECTOR = 32
_COLUMNS = (
    *("op", "size", "type", "MB read", "by the least", "MB written", "by the least"),
    *("launches", "ops of torch", "waits", "estimate us"),
)

# What torch's own ops wait for inside, where the simulator has put another in their place.
_WAITING = ("aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::bincount")


@dataclass(frozen=True)
class Counted:
    """One call of an op."""

    case: GpuCase
    reads: int
    """Bytes of the sectors that its kernels read."""
    writes: int
    launches: int
    torch_ops: int
    """Ops of torch beside them, whose launches and bytes are not counted."""
    waits: int
    """How often the host waits for the GPU."""
    local_bytes: int
    """Bytes that kernels put into local memory: spilled registers, arrays on the stack."""

    @property
    def read_ratio(self) -> float:
        """Bytes read by what must be."""
        return self.reads / self.case.reads

    @property
    def write_ratio(self) -> float:
        """Bytes written by what must be; a result of a few numbers is none."""
        return self.writes / self.case.writes if self.case.writes else 1.0

    def microseconds(self, bandwidth: float = BANDWIDTH, launch: float = LAUNCH) -> float:
        """Launches and bytes one after the other: an estimate."""
        return 1e6 * ((self.launches + self.torch_ops) * launch + (self.reads + self.writes) / bandwidth)


def simulated() -> bool:
    """Whether this process has a simulated GPU."""
    try:
        import fakegpu
    except ImportError:
        return False
    return bool(fakegpu.active())


def count(case: GpuCase) -> Counted:
    """Run it once and count.

    Raises:
        ValueError: there is no simulated GPU, or it found a mistake.
    """
    if not simulated():
        raise ValueError(
            "the model is counted on a simulated GPU: `python SIMULATOR/fakegpu.py --python PYTHON -m pfl_ext bench "
            "--gpu-model` (docs/gpu.md)"
        )
    import fakegpu

    case.run()  # what is made at the first call is not counted
    with fakegpu.Recording() as record:
        case.run()
    if record.findings:
        raise ValueError(f"{case.op} ({case.size}, {case.dtype}): the simulator found {record.findings} mistakes")
    stats = [launch.stats for launch in record.launches]
    if case.rows:
        of_launches = [launch.sector_bytes for launch in record.launches]
        reads, writes = (sum(side) for side in zip(*of_launches, strict=True)) if of_launches else (0, 0)
    else:
        reads = _SECTOR * sum(s["global_load_sectors"] for s in stats)
        writes = _SECTOR * sum(s["global_store_sectors"] for s in stats)
    waiting = [op for op in record.torch_ops if op.split(".")[0] in _WAITING]
    return Counted(
        case, reads, writes, len(stats), len(record.torch_ops), len(record.of("sync")) + len(waiting),
        sum(s["local_read_bytes"] + s["local_write_bytes"] for s in stats),
    )  # fmt: skip


def counted_cases() -> list[Counted]:
    """Every op called once on the simulated GPU, with what it moved."""
    return [count(case) for case in cases("cuda")]


def markdown(counted: Sequence[Counted], bandwidth: float = BANDWIDTH, launch: float = LAUNCH) -> str:
    """The table, with what it is and what it is not above it."""
    lines = [
        "**An estimate, not a measurement.** Bytes, launches and waits were counted on a simulated GPU; the time is",
        f"what they would take at {bandwidth / 1e12:g} TB/s and {launch * 1e6:g} us a launch, one after the other. No",
        'GPU has run this. "by the least": bytes by those that the passes of the op must move.',
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"| --- | --- | --- | {' | '.join(['---:'] * (len(_COLUMNS) - 3))} |",
    ]
    for c in counted:
        read = f"{c.read_ratio:.2f}" if c.launches else "-"
        written = f"{c.write_ratio:.2f}" if c.launches and c.case.writes else "-"
        lines.append(
            f"| {c.case.op} | {c.case.size} | {c.case.dtype} | {c.reads / 1e6:.2f} | {read} | {c.writes / 1e6:.2f} | "
            f"{written} | {c.launches} | {c.torch_ops} | {c.waits} | {c.microseconds(bandwidth, launch):.0f} |"
        )
    return "\n".join(lines) + "\n"
