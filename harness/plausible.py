"""A measured time that cannot be right: under the card's floor, or contradicted by the events around the call."""

from __future__ import annotations

from harness import ceilings as limits
from harness.record import Row
from harness.stamp import DTYPES
from kernels.registry import Case, Op

# A time this far under the floor has lost kernels; nearer, the ceiling's own measurement may be what was slow.
FLOOR_SLACK = 0.95
# On a call this long the events around it must agree with the sum of its kernels, or with the host's time to issue them.
LONG_US = 1000.0
LONG_RATIO = 1.5


def judge(row: Row, phase: str, op: Op, case: Case, ceilings: limits.Ceilings | None, l2_bytes: int) -> str | None:
    """Writes the phase's own floor into it, and says why its time cannot be right, or None."""
    times = row[phase]
    cost = op.cost(case.dims, DTYPES[row["dtype"]].itemsize, backward=phase == "fwdbwd")
    kind = "tf32" if row["tf32"] else row["dtype"]
    times["floor_us"] = limits.floor_us(ceilings, cost.bytes_read, cost.bytes_written, cost.flops, kind)
    if not times["dev_us"]:
        return None
    # A call can end before its last writes leave the L2, and its backward can find there what its forward read.
    written = max(0, cost.bytes_written - l2_bytes)
    read = cost.bytes_read - (row["bytes_read"] if phase == "fwdbwd" else 0)
    least = limits.floor_us(ceilings, read, written, cost.flops, kind)
    return implausible(min(times["dev_us"]), min(times["wall_us"]), times["host_us"], least, bool(row["l2_resident"]))


def implausible(dev_us: float, wall_us: float, host_us: float, floor: float | None, l2_resident: bool) -> str | None:
    """Why a device time cannot be right, or None; `floor` is the least time that the card needs."""
    if floor is not None and not l2_resident and dev_us < FLOOR_SLACK * floor:
        return f"{dev_us:.2f} µs is under the floor of {floor:.2f} µs"
    if wall_us > LONG_US and wall_us > LONG_RATIO * max(dev_us, host_us):
        return f"profiler saw {dev_us:.0f} µs of kernels, events around the call {wall_us:.0f} µs"
    return None
