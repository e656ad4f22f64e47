"""The environment is one list, its packages are this project's, and the check cannot pass by running nothing."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
PINS = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))


def ranges() -> dict[str, Requirement]:
    listed = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    return {requirement.name: requirement for requirement in map(Requirement, listed)}


def pins() -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, PINS[:-1])}


def test_environment_and_project_list_the_same_packages():
    assert PINS[-1] == "-e ."
    assert pins().keys() == ranges().keys()


@pytest.mark.parametrize("name", sorted(ranges()))
def test_pin_is_exact_and_inside_its_range(name):
    pin, wanted = pins()[name], ranges()[name]
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    assert wanted.specifier.contains(specifier.version), f"{pin} is outside {wanted}"
    assert pin.marker == wanted.marker


def test_python_of_environment_is_supported():
    (entry,) = [entry for entry in CONDA if isinstance(entry, str) and entry.startswith("python=")]
    supported = SpecifierSet(PROJECT["requires-python"])
    assert supported.contains(entry.removeprefix("python="))
    assert [minor for minor in range(20) if supported.contains(f"3.{minor}")] == [11, 12]


def test_make_installs_the_pins():
    """The Makefile's sed expression, run as it stands there, finds every pin and nothing else."""
    (script,) = re.findall(r"sed -n '(s/.*/p)' environment\.yml", (ROOT / "Makefile").read_text())
    found = subprocess.run(["sed", "-n", script, ROOT / "environment.yml"], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == PINS[:-1]


@pytest.mark.parametrize("package", ["kernels", "harness"])
def test_package_is_this_projects(package):
    """Other distributions use these names too; one earlier on the path would be measured instead."""
    found = Path(importlib.import_module(package).__file__).resolve()
    assert found == ROOT / package / "__init__.py"


@pytest.mark.parametrize(
    ("test", "ok"),
    [
        ("def test_one(): pass", True),
        ("import pytest\n@pytest.mark.gpu(devices=99)\ndef test_one(): pass", False),
        ("", False),
    ],
    ids=["one passes", "all skipped", "none found"],
)
def test_a_run_of_nothing_fails(tmp_path, test, ok):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(tmp_path / "none.ini"),
        "test_it.py",
    ]
    (tmp_path / "none.ini").write_text("[pytest]\n")
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode == 0) == ok, run.stdout + run.stderr


def test_ci_runs_the_readmes_test_command():
    assert "make test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("\nmake test")


def _untyped(path: Path) -> list[str]:
    """Public functions and methods with a missing annotation; a DSL's device functions, which it decorates, apart."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if any(ast.unparse(each).startswith(("triton.", "T.", "tl.")) for each in node.decorator_list):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
            if bare or node.returns is None:
                found.append(f"{path.name}:{node.lineno} {node.name}({', '.join(bare)})")
    return found


@pytest.mark.parametrize("package", ["kernels", "harness"])
def test_public_functions_have_full_type_hints(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 5
    assert not [line for path in paths for line in _untyped(path)]
