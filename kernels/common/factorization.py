"""Splitting a dimension into two factors, as LyCORIS does for LoKr and Diag-OFT."""

from __future__ import annotations

from math import isqrt


def factorization(n: int, factor: int) -> tuple[int, int]:
    """(small, large) with small · large = n.

    A positive `factor` that divides n gives (factor, n / factor), ordered; otherwise the most balanced pair of
    divisors whose smaller one is at most `factor` (-1: no limit).
    """
    if factor > 0 and n % factor == 0:
        return min(factor, n // factor), max(factor, n // factor)
    limit = isqrt(n) if factor <= 0 else min(factor, isqrt(n))
    small = next(d for d in range(limit, 0, -1) if n % d == 0)
    return small, n // small
