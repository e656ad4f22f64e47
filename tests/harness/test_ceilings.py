"""Floors from measured ceilings: each row against its own mix of reads and writes, or against the matmul peak."""

from __future__ import annotations

import pytest
from fakes import CEILINGS

from harness import ceilings
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


def test_a_stream_is_taken_at_its_largest_size(monkeypatch):
    """Smaller streams end with writes still in the L2; a stream without a valid time is an error that says why."""
    rates = {2**28: 5000.0, 2**30: 4100.0}

    def streams(device, delimiters, size):
        return [{"kind": k, "bytes": size, "gbps": rates[size], "reason": None} for k in ceilings.WRITE_SHARE]

    def matmuls(device, delimiters, shape):
        return [{"kind": "matmul_fp16", "shape": shape, "tflops": float(shape[0]), "reason": None}]

    monkeypatch.setattr(ceilings, "_sizes", lambda device: list(rates))
    monkeypatch.setattr(ceilings, "_stream_rows", streams)
    monkeypatch.setattr(ceilings, "_matmul_rows", matmuls)
    monkeypatch.setattr(ceilings, "_short_write_rows", lambda *args: [])
    measured, rows = ceilings.measure(None, None)
    assert measured["copy_gbps"] == 4100 and measured["matmul_tflops"] == {"fp16": 8192.0} and len(rows) == 10

    lost = {"kind": "read", "bytes": 1, "gbps": None, "reason": "profiler lost events"}
    monkeypatch.setattr(ceilings, "_stream_rows", lambda *args: [lost])
    with pytest.raises(RuntimeError, match="read ceiling could not be measured: profiler lost events"):
        ceilings.measure(None, None)


def test_description():
    assert describe(CEILINGS).startswith("copy 4000, read 4200, write 3200, triad 4100 GB/s; matmul fp16 700")
