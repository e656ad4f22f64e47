"""How a figure with controls reaches a reader: as a widget, as an image, or as HTML that switches by itself."""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Set during an export: figures then carry every combination of their controls, for a page without a kernel.
FRAMES = "HARNESS_PANEL_FRAMES"
COLORS = 64
DPI = 140


@dataclass(frozen=True)
class Frame:
    """One drawn combination: its image (SVG), what the image shows in words, and its numbers as a table."""

    svg: str
    alt: str
    table: str


def png(figure: Any) -> str:
    """The figure as base64 of a PNG of few colours, a third of the size and no different to the eye."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI)
    # An octree keeps rare colours, such as an arm's that another arm's line covers; a median cut merges them away.
    few = Image.open(raw).convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(small, "png")
    return base64.b64encode(small.getvalue()).decode()


def svg(figure: Any, words: Mapping[str, Sequence[str]] | None = None) -> str:
    """The figure as SVG to put into a page: half a raster's size, with an arm's parts marked `data-arm`.

    words: what each point of an arm's bold line says when the pointer rests on it, in the order of its points.
    """
    import matplotlib

    raw = io.StringIO()
    # Text as text; the hashes in place of random ids let two figures share a page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "harness"}):
        figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = raw.getvalue()
    text = re.sub(
        r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text[text.index("<svg") :]
    )
    text = re.sub(r"\s*<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    for arm, each in (words or {}).items():
        text = _say(text, arm, each)
    text = re.sub(r'id="arm:([^":]+):\w+"', r'data-arm="\1"', text)
    text = re.sub(r' id="(?![mp][0-9a-f]{10}"|glyph)[^"]*"', "", text)
    return re.sub(r">\s+<", "><", text)


def _say(text: str, arm: str, words: Sequence[str]) -> str:
    """Gives the points of an arm's bold line their words, and the style that they share to the group around them."""

    def rewrite(group: re.Match[str]) -> str:
        points = re.findall(r"<use ([^>]*?) style=\"([^\"]*)\"/>", group[0])
        if len(points) != len(words):  # a point outside the axes: better none than another one's
            return group[0]
        said = iter(words)
        return re.sub(
            r"<use ([^>]*?) style=\"[^\"]*\"/>",
            lambda use: f'<use {use[1]} style="{points[0][1]}"><title>{html.escape(next(said))}</title></use>',
            group[0],
        )

    return re.sub(rf'<g id="arm:{re.escape(arm)}:bold">.*?</g>\s*</g>', rewrite, text, count=1, flags=re.DOTALL)


def mimebundle(
    frame: Frame, still: Callable[[], str], live: Callable[[], Any], whole: Callable[[], str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a notebook stores: words and an image, with a live widget over them; in an export, the whole HTML instead.

    still: the image as base64 of a PNG, which every viewer shows.
    """
    data: dict[str, Any] = {"text/plain": frame.alt}
    if os.environ.get(FRAMES):
        return {**data, "text/html": whole()}, {}
    data["image/png"] = still()
    try:
        data = {**live()._repr_mimebundle_(), **data}
    except ImportError:
        pass  # without ipywidgets the image is all there is
    return data, {"image/png": {"alt": frame.alt}}


def body(frame: Frame) -> str:
    """The image with its words, and the table beside it or, on a narrow page, beneath."""
    return (
        f'{_STYLE}<div class="panel-body"><div class="figure" role="img" aria-label="{html.escape(frame.alt)}">'
        f'{frame.svg}</div><div class="numbers" tabindex="0">{frame.table}</div></div>'
    )


def page(first: Frame, labels: Sequence[str], tree: Mapping[str, Any], hidden: Sequence[str] = ()) -> str:
    """Every combination as HTML that needs neither a kernel nor a network.

    Args:
        first: what shows before the script runs, and where none may run.
        labels: the controls' names.
        tree: nested by the controls' values in that order, with a Frame at each leaf.
        hidden: arms that show once a reader ticks them.
    """
    what = {"labels": list(labels), "tree": tree, "hidden": list(hidden)}
    data = json.dumps(what, default=lambda f: [f.svg, f.alt, f.table]).encode()
    # Figures of one panel differ by little: packed together they take a tenth. No time of packing, for equal bytes.
    return _PAGE.format(body=body(first), data=base64.b64encode(gzip.compress(data, mtime=0)).decode())


_STYLE = """<style>
.panel-body { display: flex; flex-wrap: wrap; gap: 1em; align-items: flex-start }
.panel label { margin-right: 1em; white-space: nowrap }
.panel fieldset { display: inline; border: 0; margin: 0; padding: 0 }
.panel-body .figure svg { width: 30em; max-width: 100%; height: auto; background: white }
.numbers { max-height: 44em; overflow: auto }
.numbers table { border-collapse: collapse; font-size: 90% }
.numbers td, .numbers th { padding: 0 0.6em; text-align: right; white-space: nowrap }
</style>"""
_PAGE = """<div class="panel"><div class="controls"></div>{body}
<script type="application/gzip">{data}</script>
<script>
document.querySelectorAll(".panel:not([data-live])").forEach(async (panel) => {{
  panel.dataset.live = "";
  if (!window.DecompressionStream) {{
    panel.querySelector(".controls").textContent = "The controls of this figure need a browser of 2023 or later.";
    return;
  }}
  const packed = atob(panel.querySelector("script[type='application/gzip']").textContent);
  const bytes = new Blob([Uint8Array.from(packed, (letter) => letter.charCodeAt(0))]);
  const unpacked = new Response(bytes.stream().pipeThrough(new DecompressionStream("gzip")));
  const {{ labels, tree, hidden }} = await unpacked.json();
  const controls = panel.querySelector(".controls"), off = new Set(hidden);
  const selects = labels.map((text) => {{
    const label = controls.appendChild(document.createElement("label"));
    label.textContent = text + " ";
    const select = label.appendChild(document.createElement("select"));
    select.onchange = draw;
    return select;
  }});
  const arms = controls.appendChild(document.createElement("fieldset"));
  function show() {{
    panel.querySelectorAll(".panel-body [data-arm]").forEach((part) => {{
      const out = off.has(part.dataset.arm);
      if (part.closest("svg")) part.style.visibility = out ? "hidden" : "";
      else part.style.display = out ? "none" : "";
    }});
  }}
  function draw() {{
    let node = tree;
    for (const select of selects) {{
      const wanted = select.value, offered = Object.keys(node);
      select.replaceChildren(...offered.map((name) => new Option(name)));
      select.value = offered.includes(wanted) ? wanted : offered[0];
      select.parentElement.hidden = offered.length < 2;
      node = node[select.value];
    }}
    const figure = panel.querySelector(".figure");
    figure.innerHTML = node[0];
    figure.setAttribute("aria-label", node[1]);
    panel.querySelector(".numbers").innerHTML = node[2];
    const names = new Set([...panel.querySelectorAll(".numbers th[data-arm]")].map((head) => head.dataset.arm));
    arms.replaceChildren(...[...names].map((name) => {{
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = !off.has(name);
      box.onchange = () => {{ box.checked ? off.delete(name) : off.add(name); show(); }};
      label.append(box, " " + name);
      return label;
    }}));
    show();
  }}
  draw();
}});
</script></div>"""
