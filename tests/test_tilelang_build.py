"""TileLang kernels built for GPUs that this machine need not have: they compile, use tensor cores and wide accesses."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.generated import fused_op
from kernels.common.tilelang_target import Target, compiled
from kernels.registry import Dims, ops

pytest.importorskip("tilelang", reason="tilelang is not installed")
SMS = 132
Wanted = dict[tuple[Any, ...], None]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc) on the path")

# A large matrix, few tokens with split sums, many tokens with one launch; ranks on both sides of 8, which differ in launch.
SIZES = {
    "merge": ("lora", {"O": 3072, "I": 3072, "R": 4}),
    "merge_by_pair": ("lora", {"O": 1280, "I": 1280, "R": 16}),
    "merge_odd": ("lora", {"O": 193, "I": 229, "R": 33}),
    "bypass": ("lora_bypass", {"O": 1280, "I": 1280, "R": 16, "T": 512}),
}
# A build takes ten seconds of a core, so no full product: both launches of the merge's backward, the bypass, each
# architecture and each way to multiply.
BUILDS = [
    ("merge_by_pair", "sm_90a", torch.float16),
    ("bypass", "sm_90a", torch.float16),
    ("merge", "sm_80", torch.bfloat16),
    ("merge_odd", "sm_90a", torch.float32),
]


# LoKr's (a, b, rank of w1 or 0, c, d, rank of w2), whose kernels TileLang once could not build: 128 rows of a float16
# product, which are scaled by their largest value, and bfloat16 loads of w1's columns, each repeated.
LOKR = (
    ("lokr_bypass", (64, 48, 1, 128, 64, 33), torch.float16, ("forward", "backward")),
    ("lokr_bypass", (32, 32, 0, 32, 2048, 0), torch.float16, ("apply",)),
    ("lokr", (16, 16, 4, 2048, 512, 128), torch.bfloat16, ("merge",)),
)


def recorded(
    op: str,
    dims: Dims,
    dtype: torch.dtype,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    shapes: dict[str, tuple[int, ...]] | None = None,
    trained: str | None = None,
) -> Wanted:
    """The kernels that one forward and backward of an op would build, found by running its launchers on no data.

    `shapes` are the arguments' where they don't follow from `dims`; one that is left out is None. `trained`: the only
    argument that wants a gradient.
    """
    entry = ops()[op]
    fused = fused_op(op)
    implementation = importlib.import_module(f"kernels.{entry.family}.tilelang_impl")
    wanted: Wanted = {}

    def build(factory: Callable[..., Any], target: Target, **constants: Any) -> Callable[..., None]:
        wanted[(factory, *constants.items())] = None
        return lambda *args: None

    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.") and name != "kernels.common.tilelang_target":
            replaced = {"build": build, "target_of": lambda tensor: target, "sm_count": lambda device: SMS}
            for attribute, value in replaced.items():
                if hasattr(module, attribute):
                    monkeypatch.setattr(module, attribute, value)
    shapes = shapes or entry.shapes(dims)
    tensors = tuple(
        torch.empty(shapes[arg], dtype=dtype, device="meta") if arg in shapes else None for arg in fused.args
    )
    needs = tuple(t is not None and trained in (None, arg) for arg, t in zip(fused.args, tensors, strict=True))
    assert implementation is sys.modules[f"{fused.package}.tilelang_impl"]
    out, saved = fused.forward("tilelang", tensors, (1.0,), None, dtype, needs)
    fused.backward("tilelang", torch.empty_like(out), tensors, (1.0,), saved, needs)
    return wanted


@pytest.mark.parametrize(("case", "arch", "dtype"), BUILDS, ids=lambda value: str(value).removeprefix("torch."))
def test_builds(case: str, arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    op, dims = SIZES[case]
    target = Target(arch)
    wanted = recorded(op, dims, dtype, target, monkeypatch)
    assert len(wanted) >= 2
    for factory, *constants in wanted:
        source = compiled(factory, target, **dict(constants)).get_kernel_source(kernel_only=True)
        products = "wgmma_ss" in source or "mma_sync" in source
        assert products == (dtype is not torch.float32 and "reduce" not in factory.__name__), factory.__name__
        if not any(size % 8 for size in dims.values() if size > 128):
            wide = ("uint4", "cp_async_gs<16>", "cp_async_gs_conditional<16>", "tma_load", "float4")
            assert any(access in source for access in wide), f"{factory.__name__} has no 16-byte access"


@pytest.mark.parametrize(
    ("op", "dims", "trained"),
    (("oft", {"O": 64, "I": 128, "dim": 16}, "weight"), ("oft_bypass", {"O": 64, "T": 77, "dim": 16}, "y")),
)
def test_builds_without_a_sum_that_nothing_needs(
    op: str, dims: dict[str, int], trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recorded(op, dims, torch.float16, Target("sm_90a"), monkeypatch, trained=trained)
    for factory, *constants in wanted:
        compiled(factory, Target("sm_90a"), **dict(constants))


def test_nan_is_not_taken_for_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagonal of a block's gradient is an entry less itself, which the compiler once made 0 whatever the entry was."""
    dims, target = {"O": 8, "I": 16, "dim": 2}, Target("sm_90a")
    wanted = {k[0].__name__: k for k in recorded("oft", dims, torch.float32, target, monkeypatch)}
    factory, *constants = wanted["scalars_backward"]
    source = compiled(factory, target, **dict(constants)).get_kernel_source(kernel_only=True)
    last = re.findall(r"result\[[03]\] = (.*);", source)
    assert len(last) == 2 and all("both" in value for value in last), last


@pytest.mark.parametrize(("op", "sizes", "dtype", "names"), LOKR, ids=("rows of a pair", "rows of tokens", "columns"))
def test_builds_lokr(
    op: str, sizes: tuple[int, ...], dtype: torch.dtype, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, rank1, c, d, rank2 = sizes
    shapes = {"x": (77, b * d), "w1": (a, rank1 or b), "w2": (c, rank2 or d)}
    shapes |= {"w1_b": (rank1, b)} if rank1 else {}
    shapes |= {"w2_b": (rank2, d)} if rank2 else {}
    target = Target("sm_90a")
    wanted = {k[0].__name__: k for k in recorded(op, {}, dtype, target, monkeypatch, shapes)}
    for factory, *constants in (wanted[name] for name in names):
        source = compiled(factory, target, **dict(constants)).get_kernel_source(kernel_only=True)
        assert "wgmma" in source or "mma_sync" in source


# Tiles of 48 columns, rank 33's, once had no layout: LoRA's for their largest value, LoHa's for being read both ways.
@pytest.mark.parametrize(("op", "name"), (("lora_bypass", "up_kernel"), ("loha_bypass", "factor_backward")))
def test_builds_a_rank_between_powers_of_two(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dims, target = {"O": 53, "I": 101, "R": 33, "T": 33}, Target("sm_90a")
    wanted = {k[0].__name__: k for k in recorded(op, dims, torch.float16, target, monkeypatch)}
    factory, *constants = wanted[name]
    source = compiled(factory, target, **dict(constants)).get_kernel_source(kernel_only=True)
    assert "wgmma" in source or "mma_sync" in source


def test_tf32_is_the_only_way_to_float32_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("sm_80", tf32=True)
    wanted = recorded("lora", {"O": 256, "I": 256, "R": 16}, torch.float32, target, monkeypatch)
    factory, *constants = next(iter(wanted))
    source = compiled(factory, target, **dict(constants)).get_kernel_source(kernel_only=True)
    assert "mma_sync" in source and "TensorFloat32" in source


def test_shared_memory_fits_every_card() -> None:
    """The launches chosen for a card ask for no more shared memory than a block can have there."""
    from kernels.lora.tilelang_dual import dual_config, rank_block
    from kernels.lora.tilelang_merge import Pair, merge_backward_config

    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"):
        target = Target(arch)
        for size in (640, 1280, 3072, 4096, 12288):
            for n_r in (4, 16, 64, 128):
                rank = rank_block("lora", n_r, target)
                dual = dual_config(size, size, n_r, torch.float16, target, SMS)
                assert dual.span % dual.block_m == 0
                held = dual.stages * dual.block_m * (dual.block_n + rank) + rank * dual.block_n
                assert 2 * held <= target.shared_bytes, (arch, size, n_r, dual)
                config = merge_backward_config(size, size, n_r, torch.float16, target, SMS)
                if isinstance(config, Pair):
                    widest = max(config.block_m, config.block_n) + rank
                    assert config.stages >= 2 and 2 * config.stages * widest * config.block_k <= target.shared_bytes


@pytest.mark.parametrize("two_passes", (False, True), ids=("strips", "rows"))
def test_loha_backward_of_one_gradient(two_passes: bool) -> None:
    """Registers for the gradients that are not asked for would have no layout."""
    from kernels.loha import tilelang_merge, tilelang_rows
    from kernels.loha.tilelang_merge_launch import MergeBackward, Rows

    same = {"I": 192, "R": 16, "BLOCK_R": 16, "dtype": "float16", "needs": (True, False, False, False)}
    if two_passes:
        spans = {"up_split": False, "down_split": False, "up_spans": 1, "up_steps": 3, "down_steps": 1}
        kernel = compiled(tilelang_rows.row_backward, Target("sm_90a"), **same, **spans, config=Rows(64, 64, 0))
    else:
        config = MergeBackward(64, 64, 128)
        kernel = compiled(tilelang_merge.factor_backward, Target("sm_90a"), **same, has_x=False, config=config)
    assert "wgmma_ss" in kernel.get_kernel_source(kernel_only=True)


@pytest.mark.parametrize("kind", ("merge", "strips"))
def test_loha_products_are_under_way_together(kind: str) -> None:
    """No wait between the products of a tile, and no refill of the tiles they read before they are waited for."""
    from kernels.loha import tilelang_merge, tilelang_strips
    from kernels.loha.tilelang_merge_launch import Merge, Strips

    same = {"I": 192, "R": 16, "BLOCK_R": 16, "dtype": "float16"}
    if kind == "merge":
        more = {"out_dtype": "float16", "base_dtype": None, "config": Merge(64, 64, 3, 128, 2, overlap=True)}
        kernel, together = compiled(tilelang_merge.merge, Target("sm_90a"), **same, **more), 2
    else:
        kernel = compiled(tilelang_strips.strip_backward, Target("sm_90a"), **same, config=Strips(64, 64, 192, subs=1))
        together = 4
    source = kernel.get_kernel_source(kernel_only=True)
    marks = re.findall(r"tl::(wgmma_ss|warpgroup_wait|cp_async_gs|cp_async_commit)", source)
    text = " ".join(marks[marks.index("wgmma_ss") :])
    assert " ".join(["wgmma_ss"] * together + ["warpgroup_wait"]) in text
    assert not re.search(r"wgmma_ss cp_async", text)
