"""What makes a record stale: code, not its description."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import stamp

SOURCE = '''"""What it is."""

import kernels.common.views


def area(a, b):
    """What it does."""
    return a * b  # why
'''


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("kernels/__init__.py", "kernels/common/__init__.py", "kernels/common/views.py", "kernels/other/x.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("VALUE = 1\n")
    (tmp_path / "kernels/squares").mkdir()
    (tmp_path / "kernels/squares/area.py").write_text(SOURCE)
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# why", "# another reason"),
        ("What it is", "What it was"),
        ("(a, b)", "(\n    a,\n    b,\n)"),
        ("What it does.", "x" * 9),
    ],
)
def test_description_and_layout_do_not_count(tree: Path, old: str, new: str) -> None:
    before = stamp.kernels_sha256("squares")
    (tree / "kernels/squares/area.py").write_text(SOURCE.replace(old, new))
    assert stamp.kernels_sha256("squares") == before


def test_code_counts(tree: Path) -> None:
    before = stamp.kernels_sha256("squares")
    (tree / "kernels/squares/area.py").write_text(SOURCE.replace("a * b", "a + b"))
    assert stamp.kernels_sha256("squares") != before


def test_what_is_imported_counts_and_nothing_else(tree: Path) -> None:
    before = stamp.kernels_sha256("squares")
    (tree / "kernels/other/x.py").write_text("VALUE = 2\n")
    assert stamp.kernels_sha256("squares") == before
    (tree / "kernels/common/views.py").write_text("VALUE = 2\n")
    assert stamp.kernels_sha256("squares") != before
