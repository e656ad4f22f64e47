"""The verdict as one figure: every op's geometric means with their intervals, on each clock, against both baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness import stamp
from harness.figure import GRAPHED, STYLE, colour, marker
from harness.verdicts import BASELINES, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.0
CLOCKS = {"dev": "forward, device", "fbdev": "forward + backward, device", "fb": "forward + backward, wall"}


def draw_summary(made: Sequence[Verdict], meta: Mapping[str, Any], dtype: str = "fp16") -> Figure:
    """Ratios above 1 to the right; filled against eager, hollow against torch.compile. Graphed arms are left out."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    made = [verdict for verdict in made if not verdict.values["backend"].endswith(GRAPHED)]
    names = list(dict.fromkeys(verdict.values["op"] for verdict in made))
    backends = list(dict.fromkeys(verdict.values["backend"] for verdict in made))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(names)), layout="constrained")
        axes = figure.subplots(1, len(CLOCKS), sharey=True, sharex=True)
        for axis, (clock, title) in zip(axes, CLOCKS.items(), strict=True):
            for verdict in made:
                shade, shape = colour(verdict.values["backend"]), marker(verdict.values["backend"])
                for at, baseline in enumerate(BASELINES):
                    ratio = verdict.ratios[f"{clock}_{baseline}"]
                    if ratio is None:
                        continue
                    y = names.index(verdict.values["op"]) + 0.18 * (
                        backends.index(verdict.values["backend"]) * 2 + at - 1.5
                    )
                    face = shade if baseline == "eager" else "white"
                    axis.plot([ratio.low, ratio.high], [y, y], color=shade, lw=1)
                    axis.plot([ratio.value], [y], shape, color=shade, mfc=face, ms=4)
            axis.axvline(1, color="#777777", lw=0.8)
            axis.set(xscale="log", title=title, xlabel="×")
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="x", lw=0.3, alpha=0.5)
        axes[0].set_yticks(range(len(names)), names)
        axes[0].set_ylim(len(names) - 0.5, -0.5)
        figure.legend(handles=_handles(backends), loc="outside upper center", ncols=2 * len(backends), frameon=False)
        caption = f"{meta['gpu']}, {str(meta['started'])[:10]}.{stamp.warning(meta)} {dtype}, geometric means over an op's cases with 95 % intervals."
        figure.supxlabel(caption, fontsize=6, color="#555555", x=0.02, ha="left")
    return figure


def _handles(backends: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=colour(b), marker=marker(b), mfc=face, ls="none", ms=4, label=f"{b} over {baseline}")
        for b in backends
        for baseline, face in zip(BASELINES, (colour(b), "white"), strict=True)
    ]
