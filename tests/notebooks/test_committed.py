"""The committed notebooks are reports: executed, without errors, and nothing in them that only a kernel could show."""

from __future__ import annotations

import ast

import nbformat
import pytest

from harness import report, stamp
from kernels.registry import FAMILIES

NOTEBOOKS = report.sources()
LINES = 25


def code_cells(path):
    return [
        cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code" and cell.source.strip()
    ]


def test_every_recorded_family_has_a_notebook():
    recorded = {path.stem for folder in stamp.recorded_dirs() for path in folder.glob("*.json")} & set(FAMILIES)
    stems = {path.stem for path in NOTEBOOKS}
    assert {"00_overview", *recorded} <= stems <= {"00_overview", *FAMILIES}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_executed_in_order_and_whole(path):
    cells = code_cells(path)
    assert cells and [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_shows_everything_without_a_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    outputs = [output for cell in code_cells(path) for output in cell.outputs if "data" in output]
    assert not [output for output in outputs if report.WIDGET_VIEW in output.data]
    images = [output for output in outputs if "image/png" in output.data]
    assert images and all(output.metadata["image/png"]["alt"] for output in images)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_defines_nothing_and_stays_short(path):
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= LINES, cell.source
        defined = [
            node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        assert not defined, f"{path.name} defines {defined[0].name}; it belongs in harness or kernels"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_settled(path):
    """`make refresh` leaves a notebook in one form, so that a diff shows what was measured and nothing else."""
    text = path.read_text(encoding="utf-8")
    assert nbformat.writes(report.settle(nbformat.reads(text, as_version=4))) + "\n" == text
