"""Where cases sit on a card's roofline: arithmetic intensity against the rate reached, and the bound that applies."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import ceilings as limits
from harness import stamp
from harness.figure import CEILING, STYLE, colour, marker
from harness.record import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (3.5, 3.0)


@dataclass(frozen=True)
class Point:
    """One call: what it has to move and compute at the least, its floor, and its device time where it was measured."""

    case: str
    bytes_moved: int
    flops: int
    floor_us: float | None
    dev_us: float | None = None

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes_moved

    def tflops(self, microseconds: float | None) -> float | None:
        """The rate in TFLOP/s over that time."""
        return self.flops / microseconds / 1e6 if microseconds else None


def point(row: Row) -> Point:
    """The forward of a recorded row."""
    times = row["fwd"]["dev_us"] if row["status"] == "ok" and row["fwd"] else []
    moved = row["bytes_read"] + row["bytes_written"]
    return Point(row["case"], moved, row["flops"], row["floor_us"], min(times, default=None))


def draw_roofline(
    points: Sequence[Point],
    chosen: Sequence[Point],
    measured: limits.Ceilings,
    *,
    title: str,
    backend: str,
    kind: str,
    meta: Mapping[str, Any],
) -> Figure:
    """The roof (memory at the copy's rate, matrix products at `kind`'s peak), each point under it, and the chosen ones ringed.

    A point that was not measured stands at its floor, hollow.
    """
    import matplotlib
    from matplotlib.figure import Figure

    peak = measured["matmul_tflops"].get(kind)
    copy = measured["copy_gbps"] / 1e3
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        everything = [*points, *chosen]
        low, high = (edge(p.intensity for p in everything) for edge in (min, max))
        low, high = low / 3, max(high * 3, 2 * (peak or 0) / copy)
        corner = peak / copy if peak else high
        roof = [(x, min(copy * x, peak or copy * x)) for x in (low, min(corner, high), high)]
        axis.plot(
            *zip(*roof, strict=True),
            color=CEILING,
            lw=1.1,
            ls="--",
            label=f"copy {copy:.2f} TB/s, {kind} {peak or 0:.0f} TFLOP/s",
        )
        done = [(p.intensity, rate) for p in points if (rate := p.tflops(p.dev_us))]
        if done:
            style: dict[str, Any] = {
                "color": colour(backend),
                "marker": marker(backend),
                "ls": "none",
                "ms": 4,
                "alpha": 0.7,
            }
            axis.plot(*zip(*done, strict=True), label=f"{backend}, recorded", gid=f"arm:{backend}:bold", **style)
        for p in chosen:
            rate = p.tflops(p.dev_us or p.floor_us)
            if rate:
                face = colour(backend) if p.dev_us else "none"
                what = f"{p.case}: {'measured' if p.dev_us else 'at its floor'}"
                axis.plot([p.intensity], [rate], "o", ms=8, mec=CEILING, mfc=face, mew=1.2, label=what)
        axis.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=title)
        axis.grid(lw=0.3, alpha=0.5)
        figure.legend(loc="outside upper center", ncols=1, frameon=False)
        caption = (
            f"{meta.get('gpu')}, {str(meta.get('started'))[:10]}.{stamp.warning(meta)} Forward, device time, cold L2."
        )
        figure.supxlabel(caption, fontsize=5.5, color="#555555", x=0.02, ha="left")
    return figure


def roofline_table(points: Sequence[Point]) -> str:
    """The points as an HTML table."""
    names = ("case", "MB", "GFLOP", "FLOP per byte", "floor µs", "device µs", "of the floor's rate")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    lines = []
    for p in points:
        share = f"{p.floor_us / p.dev_us:.0%}" if p.floor_us and p.dev_us else "–"
        numbers = (p.bytes_moved / 1e6, p.flops / 1e9, p.intensity, p.floor_us, p.dev_us)
        cells = [f"{number:.4g}" if number is not None else "–" for number in numbers]
        body = "".join(f"<td>{cell}</td>" for cell in [*cells, share])
        lines.append(f"<tr><th scope=row>{html.escape(p.case)}</th>{body}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
