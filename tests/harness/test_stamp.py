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


def test_labels_and_how_to_cite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "_current_hashes", lambda: frozenset({"a" * 64, "b" * 64}))
    meta = {"gpu": "NVIDIA Test", "started": "2026-01-02T03:04:05", "git_revision": "f" * 40, "torch": "2.11"}
    clean = {**meta, "kernels_sha256": "a" * 64, "git_dirty": False}
    assert stamp.labels(clean) == [] and stamp.warning(clean) == ""
    assert stamp.cite(clean) == (
        "adapter-kernels, run of 2026-01-02 on NVIDIA Test, revision ffffffffffff, kernels aaaaaaaa, torch 2.11"
    )
    bad = {**clean, "kernels_sha256": "c" * 64, "git_dirty": True}
    assert stamp.labels(bad) == ["dirty tree", "stale kernels"] and stamp.cite(bad).endswith(
        "(dirty tree, stale kernels)"
    )
    assert stamp.warning(bad) == " DIRTY TREE, STALE KERNELS."
    both = stamp.combined({"one": bad, "other": {**clean, "started": "2026-02-01"}})
    assert stamp.labels(both) == ["dirty tree", "stale kernels"] and both["started"] == "2026-02-01"
    named = stamp.combined({"old": bad, "new": clean})
    assert stamp.warning(named) == " DIRTY TREE (old), STALE KERNELS (old)."
    assert stamp.warning(stamp.of_family(named, "new")) == "" and stamp.labels(stamp.of_family(named, "old")) == [
        "dirty tree",
        "stale kernels",
    ]
    assert stamp.of_family(bad, "old") == bad
    assert "state of the tree not recorded" in stamp.cite({**clean, "git_dirty": None})


def test_a_copy_of_the_tree_can_be_told_its_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    for value, dirty in (("0", False), ("1", True), ("", None)):
        stamp._git.cache_clear()
        monkeypatch.setenv("HARNESS_GIT_DIRTY", value)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert stamp._git()["git_dirty"] is dirty
    stamp._git.cache_clear()


def test_what_is_imported_counts_and_nothing_else(tree: Path) -> None:
    before = stamp.kernels_sha256("squares")
    (tree / "kernels/other/x.py").write_text("VALUE = 2\n")
    assert stamp.kernels_sha256("squares") == before
    (tree / "kernels/common/views.py").write_text("VALUE = 2\n")
    assert stamp.kernels_sha256("squares") != before
