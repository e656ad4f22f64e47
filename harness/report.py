"""Notebooks as reports: executed, refreshed in place, and exported to HTML that needs no network and no kernel.

python -m harness.report html [--out out/reports]   every notebook executed and exported, with a contents page
python -m harness.report refresh                    the committed notebooks re-executed in place, and the README
python -m harness.report readme [--check]           only the README's verdict table and figure
"""

from __future__ import annotations

import argparse
import html
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from harness import figure, record, stamp, verdicts
from harness.markup import FRAMES
from harness.summary import draw_summary

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
README = ROOT / "README.md"
FIGURE = ROOT / "docs" / "verdict"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
TABLE = re.compile(r"(<!-- verdict: begin -->\n).*?(<!-- verdict: end -->)", re.DOTALL)


def sources() -> list[Path]:
    """The notebooks in the order in which a reader meets them: the overview, then the families."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def title(notebook: NotebookNode) -> str:
    """The first heading of a notebook."""
    for cell in notebook.cells:
        found = re.search(r"^# (.+)$", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else None
        if found:
            return found[1].strip()
    raise ValueError("the notebook has no heading of the first level")


def execute(path: Path, *, frames: bool = False, timeout: int = 3600) -> NotebookNode:
    """Runs a notebook in its own folder and returns it with its outputs; the file is left as it was.

    Args:
        path: the notebook.
        frames: panels carry every combination of their controls, for a page without a kernel.
        timeout: seconds that one cell may take (a cell that sweeps takes minutes).

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        # Its warning about unencrypted local sockets, one a notebook.
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    with _environment(FRAMES, "1" if frames else ""):
        client.execute()
    return notebook


def settle(notebook: NotebookNode) -> NotebookNode:
    """Drops what changes from run to run and tells a reader nothing: widget state and views, versions, timings."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            # A view whose model died with the kernel draws an error in place of the image that is beside it.
            output.get("data", {}).pop(WIDGET_VIEW, None)
    return notebook


def refresh() -> None:
    """Re-executes the committed notebooks in place, then redraws the README's table and figure."""
    for path in sources():
        started = time.monotonic()
        text = nbformat.writes(settle(execute(path))) + "\n"
        changed = text != path.read_text(encoding="utf-8")
        if changed:
            path.write_text(text, encoding="utf-8")
        print(
            f"{path.relative_to(ROOT)}: {'refreshed' if changed else 'unchanged'}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    write_readme()


def to_mathml(markdown: str) -> str:
    """The text with its $…$ and $$…$$ formulas as MathML, which browsers draw without any script."""
    from latex2mathml.converter import convert

    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.DOTALL)
    for i in range(0, len(parts), 2):
        text = re.sub(r"\$\$(.+?)\$\$", lambda found: convert(found[1], display="block"), parts[i], flags=re.DOTALL)
        parts[i] = re.sub(r"\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)", lambda found: convert(found[1]), text)
    return "".join(parts)


def page(notebook: NotebookNode) -> str:
    """A notebook that was executed with `frames`, as one HTML page that loads nothing."""
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = to_mathml(cell.source)
    notebook.metadata.pop("widgets", None)
    notebook.metadata["title"] = title(notebook)
    urls = dict.fromkeys(("require_js_url", "mathjax_url", "jquery_url"), "")
    exporter = HTMLExporter(template_name="lab", config=Config(HTMLExporter=urls))
    body, _ = exporter.from_notebook_node(notebook)
    body = re.sub(r'<script src="">\s*</script>', "", body)
    body = re.sub(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", "", body, flags=re.DOTALL)
    body = re.sub(r'<script type="module">.*?mermaid.*?</script>', "", body, flags=re.DOTALL)
    return body


def export(out: Path, notebooks: list[Path] | None = None) -> list[Path]:
    """Executes notebooks and writes one page each, and `index.html` with what every one of them is about."""
    out.mkdir(parents=True, exist_ok=True)
    pages = []
    entries = []
    for path in sources() if notebooks is None else notebooks:
        notebook = execute(path, frames=True)
        target = out / f"{path.stem}.html"
        name, summary = title(notebook), _first_paragraph(notebook)
        target.write_text(page(notebook), encoding="utf-8")
        pages.append(target)
        entries.append(
            f'<li><a href="{target.name}">{html.escape(name)}</a><p>{to_mathml(html.escape(summary))}</p></li>'
        )
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB", flush=True)
    index = out / "index.html"
    index.write_text(_INDEX.format(entries="\n".join(entries)), encoding="utf-8")
    return [index, *pages]


def _first_paragraph(notebook: NotebookNode) -> str:
    text = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    blocks = [block for block in re.split(r"\n\s*\n", text) if not block.lstrip().startswith("#")]
    return re.sub(r"[*`]", "", blocks[0]).replace("\n", " ") if blocks else ""


_INDEX = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Adapter kernels: reports</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1rem }}
li {{ margin-bottom: 1rem }} p {{ margin: 0.2rem 0; color: #444 }}</style></head>
<body><h1>Adapter kernels: reports</h1>
<p>Each page is whole: it opens from a file, without a network and without Python, and its figures have controls.</p>
<ol>
{entries}
</ol></body></html>
"""


def readme_table() -> str:
    """The verdict of the committed runs as the README shows it: a table per card and dtype, families with a record only.

    The first dtype of a card stands open and the others fold away; graphed arms are in the notebooks.
    """
    parts = []
    for folder in stamp.recorded_dirs():
        for number, dtype in enumerate(_dtypes(folder)):
            lines = verdicts.verdict(folder, dtype, format="markdown").splitlines()
            table = "\n".join(line for line in lines if f"{figure.GRAPHED} |" not in line)
            title = f"{_card(folder)}, {dtype}"
            folded = f"<details><summary>{title}</summary>\n\n{table}\n\n</details>\n"
            parts.append(folded if number else f"{title}:\n\n{table}\n")
    return "\n".join(parts) if parts else "No run is recorded yet.\n"


def write_readme() -> None:
    """Puts the verdict of the recorded runs between the README's markers, and draws its figure."""
    text = README.read_text(encoding="utf-8")
    if len(TABLE.findall(text)) != 1:
        raise ValueError(f"{README}: wanted one <!-- verdict: begin --> … <!-- verdict: end -->")
    README.write_text(TABLE.sub(lambda found: found[1] + readme_table() + found[2], text), encoding="utf-8")
    for folder in stamp.recorded_dirs()[:1]:
        meta = stamp.combined({name: run.meta for name, run in record.load_families(folder).items()})
        figure.save(draw_summary(verdicts.verdicts(folder), meta), FIGURE)


def _dtypes(folder: Path) -> list[str]:
    found = {row["dtype"] for run in record.load_families(folder).values() for row in run.rows}
    return [dtype for dtype in stamp.DTYPES if dtype in found]


def _card(folder: Path) -> str:
    """The card, and when each family was recorded, with what a reader of that run has to be told."""
    runs = record.load_families(folder)
    families: dict[str, list[str]] = {}
    for name, run in runs.items():
        families.setdefault(", ".join([str(run.meta["started"])[:10], *stamp.labels(run.meta)]), []).append(name)
    lists = {when: " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) for when, names in families.items()}
    said = "; ".join(f"{names} {when}" for when, names in lists.items())
    return f"{next(iter(runs.values())).meta['gpu']}, recorded: {said}"


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description="Notebooks as reports.")
    parser.add_argument("command", choices=("html", "refresh", "readme"))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "reports", help="folder of the pages")
    arguments = parser.parse_args()
    if arguments.command == "html":
        print(f"open {export(arguments.out)[0]}")
    elif arguments.command == "refresh":
        refresh()
    else:
        write_readme()


if __name__ == "__main__":
    main()
