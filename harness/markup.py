"""How a figure with controls reaches a reader: as a widget, as an image, or as HTML that switches by itself."""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Set during an export: figures then carry every combination of their controls, for a page without a kernel.
FRAMES = "HARNESS_PANEL_FRAMES"
COLORS = 64
DPI = 140


@dataclass(frozen=True)
class Frame:
    """One drawn combination: its image (base64 of a PNG), what the image shows in words, and its numbers as a table."""

    png: str
    alt: str
    table: str


def png(figure: Any) -> str:
    """The figure as base64 of a PNG of few colours, a third of the size and no different to the eye."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI)
    Image.open(raw).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(small, "png")
    return base64.b64encode(small.getvalue()).decode()


def mimebundle(
    frame: Frame, live: Callable[[], Any], whole: Callable[[], str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a notebook stores: words and an image, with a live widget over them; in an export, the whole HTML instead."""
    data: dict[str, Any] = {"text/plain": frame.alt}
    if os.environ.get(FRAMES):
        return {**data, "text/html": whole()}, {}
    data["image/png"] = frame.png
    try:
        data = {**live()._repr_mimebundle_(), **data}
    except ImportError:
        pass  # without ipywidgets the image is all there is
    return data, {"image/png": {"alt": frame.alt}}


def body(frame: Frame) -> str:
    """The image with its alternative text, and the table beside it or, on a narrow page, beneath."""
    alt = html.escape(frame.alt, quote=True)
    image = f'<img src="data:image/png;base64,{frame.png}" alt="{alt}" style="max-width: 100%">'
    numbers = f'<div class="numbers" tabindex="0">{frame.table}</div>'
    return f'{_STYLE}<div class="panel-body"><div class="figure">{image}</div>{numbers}</div>'


def page(first: Frame, labels: Sequence[str], tree: Mapping[str, Any]) -> str:
    """Every combination as HTML that needs neither a kernel nor a network.

    Args:
        first: what shows before the script runs, and where none may run.
        labels: the controls' names.
        tree: nested by the controls' values in that order, with a Frame at each leaf.
    """
    data = json.dumps({"labels": list(labels), "tree": tree}, default=lambda f: [f.png, f.alt, f.table])
    return _PAGE.format(body=body(first), data=data.replace("</", "<\\/"))


_STYLE = """<style>
.panel-body { display: flex; flex-wrap: wrap; gap: 1em; align-items: flex-start }
.panel label { margin-right: 1em; white-space: nowrap }
.numbers { max-height: 44em; overflow: auto }
.numbers table { border-collapse: collapse; font-size: 90% }
.numbers td, .numbers th { padding: 0 0.6em; text-align: right; white-space: nowrap }
</style>"""
_PAGE = """<div class="panel"><div class="controls"></div>{body}
<script type="application/json">{data}</script>
<script>
document.querySelectorAll(".panel:not([data-live])").forEach((panel) => {{
  panel.dataset.live = "";
  const {{ labels, tree }} = JSON.parse(panel.querySelector("script[type='application/json']").textContent);
  const selects = labels.map((text) => {{
    const label = panel.querySelector(".controls").appendChild(document.createElement("label"));
    label.textContent = text + " ";
    const select = label.appendChild(document.createElement("select"));
    select.onchange = draw;
    return select;
  }});
  function draw() {{
    let node = tree;
    for (const select of selects) {{
      const wanted = select.value, offered = Object.keys(node);
      select.replaceChildren(...offered.map((name) => new Option(name)));
      select.value = offered.includes(wanted) ? wanted : offered[0];
      select.parentElement.hidden = offered.length < 2;
      node = node[select.value];
    }}
    const image = panel.querySelector("img");
    image.src = "data:image/png;base64," + node[0];
    image.alt = node[1];
    panel.querySelector(".numbers").innerHTML = node[2];
  }}
  draw();
}});
</script></div>"""
