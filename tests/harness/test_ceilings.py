"""Floors from measured ceilings: each row against its own mix of reads and writes, or against the matmul peak."""

from __future__ import annotations

import pytest
from fakes import CEILINGS

from harness.ceilings import bandwidth, describe, floor_us


@pytest.mark.parametrize(
    ("read", "written", "rate"), [(1, 0, 4200), (2, 1, 4100), (1, 1, 4000), (0, 1, 3200), (10**9, 0, 4200)]
)
def test_measured_mixes(read, written, rate):
    assert bandwidth(CEILINGS, read, written) == pytest.approx(rate)


def test_between_mixes():
    mostly_written = bandwidth(CEILINGS, 1, 3)
    assert 3200 < mostly_written < 4000
    assert 1 / mostly_written == pytest.approx((1 / 4000 + 1 / 3200) / 2)


def test_floor_is_memory_or_arithmetic():
    assert floor_us(CEILINGS, 0, 3200 * 10**3, 0, "fp16") == pytest.approx(1)
    assert floor_us(CEILINGS, 0, 3200 * 10**3, 14 * 10**8, "fp16") == pytest.approx(2)
    assert floor_us(CEILINGS, 0, 3200 * 10**3, 14 * 10**8, "fp32") == pytest.approx(28)
    assert floor_us(None, 1, 1, 1, "fp16") is None
    assert floor_us(CEILINGS, 0, 0, 0, "fp16") is None


def test_description():
    assert describe(CEILINGS).startswith("copy 4000, read 4200, write 3200, triad 4100 GB/s; matmul fp16 700")
