"""The card's clocks, throttle reasons and load, read through NVML or nvidia-smi and never changed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# NVML's clock event bits that mean the card ran slower than it could: software power cap, hardware slowdown,
# software thermal, hardware thermal, power brake.
THROTTLING = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
BUSY_PERCENT = 10
# A clock that moved by more than this between two readings makes a row noisy.
DRIFT = 0.05


class BusyGpu(RuntimeError):
    """Something else is computing on the card, so its times would mean nothing."""


@dataclass(frozen=True)
class State:
    """One reading; None where the driver doesn't say."""

    clock_mhz: int | None = None
    reasons: int | None = None
    utilization: int | None = None

    @property
    def throttled(self) -> bool | None:
        return None if self.reasons is None else bool(self.reasons & THROTTLING)


def drift(before: State, after: State) -> str | None:
    """How far the SM clock moved between two readings, or None where it stayed or is not known."""
    if not before.clock_mhz or not after.clock_mhz or abs(after.clock_mhz / before.clock_mhz - 1) <= DRIFT:
        return None
    return f"the clock drifted from {before.clock_mhz} to {after.clock_mhz} MHz"


def drifted(before: State, after: State) -> bool:
    """Whether the SM clock moved between two readings."""
    return drift(before, after) is not None


def state() -> State:
    """The current device's clocks, throttle reasons and load."""
    handle = _handle()
    if handle is None:
        return _state_from_smi()
    nvml = _nvml()
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )
    rates = _ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return State(
        clock_mhz=_ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        reasons=_ask(lambda: reasons(handle)) if reasons else None,
        utilization=None if rates is None else rates.gpu,
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where nothing tells it."""
    nvml = _nvml()
    if nvml is None:
        return _smi("driver_version")
    text = _ask(nvml.nvmlSystemGetDriverVersion)
    return text.decode() if isinstance(text, bytes) else text


def refuse_busy(allow: bool, *, read: Callable[[], State] = state, seconds: float = 1.0) -> None:
    """Raises BusyGpu where the card stays loaded for a second before this process has given it any work."""
    if allow:
        return
    lowest = None
    for _ in range(5):
        load = read().utilization
        if load is None:
            return
        lowest = load if lowest is None else min(lowest, load)
        if lowest <= BUSY_PERCENT:
            return
        time.sleep(seconds / 5)
    raise BusyGpu(
        f"the GPU is {lowest} % busy with other work; wait for it, choose another card with CUDA_VISIBLE_DEVICES, "
        "or pass --allow-busy to measure all the same"
    )


@cache
def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: nvidia-smi is asked instead
        return None
    return pynvml


@cache
def _handle() -> Any:
    nvml = _nvml()
    if nvml is None or not torch.cuda.is_available():
        return None
    uuid = _uuid()
    if uuid is not None:
        return _ask(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
    # Without a UUID the index is right only where all cards are visible.
    return _ask(lambda: nvml.nvmlDeviceGetHandleByIndex(0)) if torch.cuda.device_count() == 1 else None


def _uuid() -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # NVMLError: this card or driver doesn't answer that question
        return None


def _state_from_smi() -> State:
    # The second name is the older drivers'.
    text = _smi("clocks.sm,utilization.gpu,clocks_event_reasons.active") or _smi(
        "clocks.sm,utilization.gpu,clocks_throttle_reasons.active"
    )
    clock, load, reasons = (part.strip() for part in text.split(",")) if text else ("", "", "")
    return State(
        clock_mhz=int(clock) if clock.isdigit() else None,
        reasons=int(reasons, 16) if reasons.startswith("0x") else None,
        utilization=int(load) if load.isdigit() else None,
    )


def _smi(fields: str) -> str | None:
    if shutil.which("nvidia-smi") is None or not torch.cuda.is_available():
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    uuid = _uuid()
    if uuid is not None:
        command += ["-i", uuid]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
