"""The generated code of every op, compiled for a card that this machine need not have."""

from __future__ import annotations

import shutil

import pytest

from harness.generated import generated
from kernels import UnsupportedCase
from kernels.registry import ops


@pytest.mark.parametrize("name", ops())
def test_triton_compiles_for_a_card_that_is_not_here(name):
    pytest.importorskip("triton", reason="triton is not installed")
    op = ops()[name]
    made = generated(name, op.quick.dims, "fp16", "triton")
    assert made and all(each.registers and each.spilled_bytes is not None and each.launches for each in made)
    assert all("ttg" in each.code["TTGIR"] and ".target sm_" in each.code["PTX"] for each in made)


def test_the_backward_can_be_left_out():
    pytest.importorskip("triton", reason="triton is not installed")
    (forward,) = generated("lora", ops()["lora"].quick.dims, "fp16", "triton", backward=False)
    assert forward.name == "_merge_kernel" and forward.launches == 1


def test_tilelang_gives_its_cuda_source():
    pytest.importorskip("tilelang", reason="tilelang is not installed")
    if shutil.which("nvcc") is None:
        pytest.skip("no CUDA compiler (nvcc) on the path")
    (merge,) = generated("lora", ops()["lora"].quick.dims, "fp16", "tilelang", backward=False)
    assert merge.name == "merge_kernel" and merge.launches == 1
    assert merge.registers and merge.spilled_bytes == 0
    assert "__global__" in merge.code["CUDA"] and ".target sm_" in merge.code["PTX"]


@pytest.mark.parametrize(
    ("dims", "backend", "why"),
    [({}, "eager", "PyTorch"), ({"O": 8}, "triton", "KeyError"), ({}, "tilelang", "KeyError")],
)
def test_why_there_is_none(dims, backend, why):
    with pytest.raises(UnsupportedCase, match=why):
        generated("lora", dims, "fp16", backend)
