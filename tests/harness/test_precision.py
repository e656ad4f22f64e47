"""Planted wrong kernels: each has to be caught, and by what is wrong with it."""

from __future__ import annotations

import math

import pytest
import torch
from fakes import product, toy_op

from harness import behaviour, precision
from harness.measure import check_arms, start_row

CPU = torch.device("cpu")
DIMS = {"O": 24, "I": 16, "R": 4}


class Planted(torch.autograd.Function):
    """scale · a @ b whose forward and backward can be broken."""

    @staticmethod
    def forward(ctx, a, b, scale, forward, backward):
        ctx.save_for_backward(a, b)
        ctx.scale, ctx.broken = scale, backward
        return forward(product(a, b, scale))

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grads = (ctx.scale * grad @ b.T, ctx.scale * a.T @ grad)
        return (*ctx.broken(*grads), None, None, None)


def same(*values):
    return values if len(values) > 1 else values[0]


def planted(forward=same, backward=same):
    return toy_op(lambda a, b, scale, *, backend: Planted.apply(a, b, scale, forward, backward))


def reason(op, dtype=torch.float32, baseline=None):
    truth = precision.make_truth(op, DIMS, dtype, CPU, 7)
    return precision.check(op, truth, "triton", baseline).reason


def spoil(value, at, by):
    value = value.clone()
    value.view(-1)[at] = by(value.view(-1)[at])
    return value


def never_written(value):
    out = torch.empty_like(value)
    out.view(-1)[1:] = value.view(-1)[1:]
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_right_kernel(dtype):
    assert reason(planted(), dtype) is None


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (planted(lambda out: 1.05 * out), "output: relative error 0.05"),
        (planted(lambda out: spoil(out, 3, lambda v: v + 4)), "output: relative error"),
        (planted(lambda out: spoil(out, 3, lambda v: v * torch.nan)), "output: 1 of 384 elements are not finite"),
        (planted(never_written), "output: 1 of 384 elements are not finite"),
        (planted(torch.zeros_like), "output: all zero"),
        (planted(lambda out: out.double()), "output: got torch.float64"),
        (planted(lambda out: out[:-1]), "output: got torch.float32 (23, 16), wanted torch.float32 (24, 16)"),
        (planted(backward=lambda a, b: (a, 0.9 * b)), "b: relative error 0.1"),
        (planted(backward=lambda a, b: (None, b)), "a: no gradient"),
        (planted(backward=lambda a, b: (a, torch.zeros_like(b))), "b: all zero"),
        (planted(backward=lambda a, b: (never_written(a), b)), "a: 1 of 96 elements are not finite"),
    ],
)
def test_planted_errors(op, says):
    assert reason(op).startswith(says)


def test_forward_alone_is_checked_too():
    def call(a, b, scale, *, backend):
        return product(a, b, scale) * (1 if torch.is_grad_enabled() else 2)

    assert reason(toy_op(call)).startswith("forward without autograd: output: relative error 1")


def test_changed_input():
    def call(a, b, scale, *, backend):
        out = product(a, b, scale)
        a.data[0, 0] += 1  # a kernel writes without telling autograd
        return out

    assert reason(toy_op(call)) == "changed its input a"


def test_twice_eagers_error_and_a_floor():
    eager = precision.Check(ulps={"output": 10.0, "a": 1.0, "b": 1.0})
    want = {"output": torch.ones(64, dtype=torch.float64)}
    for ulps, fine in ((27, True), (29, False)):
        got = {"output": spoil(torch.ones(64).half(), 5, lambda v, by=ulps: v + by * 2**-10)}
        found = precision.compare(got, want, torch.float16, eager)
        assert found.ulps["output"] == pytest.approx(ulps) and (found.reason is None) is fine


def test_ulp_is_scaled_by_the_references_rms():
    want = {"output": torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)}
    got = {"output": torch.tensor([3.0, 4.0 + 2**-9, 0.0], dtype=torch.float16)}
    rms = math.sqrt(25 / 3)
    ulp = precision.compare(got, want, torch.float16, None).ulps["output"]
    assert ulp == pytest.approx(2**-9 / (2**-10 * rms), rel=1)


def test_non_finite_has_no_ulp_and_says_so():
    op = planted()
    truth = precision.make_truth(op, DIMS, torch.float16, CPU, 7)
    with torch.no_grad():
        truth.inputs["a"][0, 0] = torch.inf
    truth.values["output"][0] = torch.inf
    found = precision.check(op, truth, "triton")
    assert found.ulp is None and found.ulps["output"] is None
    assert found.reason == "output: 16 of 384 elements are not finite, as has the reference"


def test_wrong_arm_is_a_failed_row_and_the_others_go_on():
    def call(a, b, scale, *, backend):
        if backend == "tilelang":
            raise RuntimeError("launch failed")
        return product(a, b, scale) * (1.1 if backend == "triton" else 1)

    op = toy_op(call)
    rows = {b: start_row(op, op.tiny, "fp32", b, None) for b in ("triton", "tilelang", "eager")}
    check_arms(op, precision.make_truth(op, op.tiny.dims, torch.float32, CPU, 7), rows, rows)
    assert rows["eager"]["status"] is None and rows["eager"]["ulp"] >= rows["eager"]["ulp_out"] > 0
    assert set(rows["eager"]["ulp_grads"]) == {"a", "b"}
    assert rows["triton"]["status"] == "failed" and rows["triton"]["reason"].startswith("wrong result: output")
    assert rows["tilelang"]["status"] == "failed" and rows["tilelang"]["reason"] == "RuntimeError: launch failed"


def test_poison_is_lifted_again():
    with behaviour.poisoned(torch.ones(4), torch.float32, "triton"):
        assert torch.empty(64).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
