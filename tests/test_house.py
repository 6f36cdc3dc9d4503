"""The package is layered like a house: a file imports only from lower floors or its own folder, and never in circles.

Imports within functions count, too; imports for type checkers only do not. Tests have each helper once, and know little
of the package's inside.
"""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "csd_optim"
FLOORS = {  # the floor of each folder, and of each file beside them
    "__init__": 10,
    "__main__": 10,
    "cli": 9,
    "trainers": 9,
    "optim": 8,
    "overlap": 7,
    "serve": 7,
    "step": 6,
    "checkpoint": 6,
    "params": 5,
    "engine": 4,
    "planning": 4,
    "store": 3,
    "devices": 3,
    "distributed": 2,
    "compression": 2,
    "bindings": 1,
    "finalize": 1,
    "signals": 1,
    "accelerator": 0,
    "settings": 0,
    "threads": 1,
    "errors": -1,
    "_native": 0,  # compiled
}


def modules(package):
    """Return the file of every module of a package, by the module's name within the package."""
    files = sorted(package.rglob("*.py"))
    return {".".join(f.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node):
    """Yield all import statements below a node, except those that never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif is_for_type_checkers(child):
            yield from statements(ast.Module(child.orelse, []))
        else:
            yield from statements(child)


def imports(package, name, known):
    """Return the modules of the package that a module imports, with the line: {name: line}."""
    path = known[name]
    folder = [package.name, *path.relative_to(package).parent.parts]
    found = {}
    for statement in statements(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            wanted = [alias.name.split(".") for alias in statement.names]
        else:
            base = folder[: len(folder) - statement.level + 1] if statement.level else []
            base = base + (statement.module.split(".") if statement.module else [])
            wanted = [[*base, alias.name] for alias in statement.names]
        for parts in wanted:
            if parts[0] != package.name:
                continue
            inside = ".".join(parts[1:])
            # `from .store import format` imports a module, `from .store.format import PAGE` a name of one.
            module = inside if inside in known or inside == "_native" else ".".join(parts[1:-1]) or "__init__"
            found.setdefault(module, statement.lineno)
    return found


def violations(package, floors):
    """Return what breaks the rules, a line each: `file:line: what it imports`, or a circle."""
    known = modules(package)
    graph = {name: imports(package, name, known) for name in known}
    wrong = [f"{folder}: has no floor" for folder in sorted({name.split(".")[0] for name in known} - floors.keys())]
    for name, imported in graph.items():
        room = name.split(".")[0]
        for other, line in imported.items():
            there = other.split(".")[0]
            if there != room and not floors.get(there, 99) < floors.get(room, 99):
                wrong.append(f"{known[name].relative_to(package)}:{line}: {room} imports {other}")
    return wrong + [f"a circle: {' -> '.join(circle)}" for circle in circles(graph)]


def circles(graph):
    """Return one circle of each group of modules that import one another."""
    done, found = set(), []

    def walk(name, way):
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for other in graph.get(name, ()):
                walk(other, [*way, name])
            done.add(name)

    for name in graph:
        walk(name, [])
    return found


def test_a_file_imports_from_lower_floors_only():
    assert not violations(PACKAGE, FLOORS)


def test_every_floor_is_lived_on():
    assert FLOORS.keys() - {"_native"} == {name.split(".")[0] for name in modules(PACKAGE)}


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("low/a.py", "from ..high import b", "low/a.py:1: low imports high.b"),
        ("low/a.py", "from ..high.b import f", "low/a.py:1: low imports high.b"),
        ("low/a.py", "import house.high.b", "low/a.py:1: low imports high.b"),
        ("low/a.py", "def f():\n    from house.high import b", "low/a.py:2: low imports high.b"),
        ("low/a.py", "try:\n    pass\nfinally:\n    from .. import top", "low/a.py:4: low imports top"),
        ("low/a.py", "from ..other.c import g", "low/a.py:1: low imports other.c"),  # on the same floor
        ("low/a.py", "from .. import name", "low/a.py:1: low imports __init__"),
        ("low/d.py", "from .a import f", "a circle: low.d -> low.a -> low.d"),
        ("low/a.py", "from . import a", "a circle: low.a -> low.a"),
        ("nowhere/e.py", "", "nowhere: has no floor"),
        ("low/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..high import b", None),
        ("low/a.py", "import os, low.b\nfrom high import b\nfrom .._native import ffi", None),
        ("high/b.py", "from ..low.a import f\nfrom . import f", None),
    ],
)
def test_what_is_noticed(tmp_path, file, text, wrong):
    """Violations are found in a house of four files, after one of them is replaced or added."""
    house = {"high/__init__.py": "", "high/b.py": "from ..low.d import f", "other/c.py": "", "top.py": ""}
    house |= {"low/__init__.py": "", "low/a.py": "def f():\n    from . import d", "low/d.py": "", file: text}
    for name, content in house.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    floors = {"top": 3, "__init__": 3, "high": 2, "low": 1, "other": 1, "_native": 0}
    assert violations(tmp_path / "house", floors) == ([wrong] if wrong else [])


# ---- the tests themselves ----------------------------------------------------------------

TESTS = Path(__file__).parent
HELPERS = ["Training", "assert_same", "train", "trained"]
REACHES = 60
NOT_OURS = {"_replace", "_step_supports_amp_scaling", "_version"}  # names that Python's and torch's objects have, too


def places(nodes):
    return "".join(f"\n{file.relative_to(TESTS)}:{node.lineno}" for file, node in nodes)


@functools.cache
def trees(folder):
    return {file: ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py"))}


def nodes_of(folder, *kinds):
    """Return all nodes of these kinds below a folder, each with its file."""
    return [(file, node) for file, tree in trees(folder).items() for node in ast.walk(tree) if isinstance(node, kinds)]


def private_names():
    """Return the private names of what the package defines or sets."""
    names = {node.name for _, node in nodes_of(PACKAGE, ast.FunctionDef, ast.ClassDef)}
    names |= {node.attr for _, node in nodes_of(PACKAGE, ast.Attribute) if isinstance(node.ctx, ast.Store)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - NOT_OURS


def test_each_helper_is_there_once():
    methods = {node for _, outer in nodes_of(TESTS, ast.ClassDef) for node in outer.body}
    found = [(file, node) for file, node in nodes_of(TESTS, ast.FunctionDef, ast.ClassDef) if node.name in HELPERS]
    found = [(file, node) for file, node in found if node not in methods]
    assert sorted(node.name for _, node in found) == HELPERS, (
        f"use those of tests/support/, and call what does something else by a name that says what: {places(found)}"
    )


def test_tests_reach_into_few_private_members():
    private = private_names()
    found = [(file, node) for file, node in nodes_of(TESTS, ast.Attribute) if node.attr in private]
    found = [(file, node) for file, node in found if ast.unparse(node.value) not in ("self", "cls", "super()")]
    assert len(found) <= REACHES, (
        f"{len(found)} reaches into private members of the package: use what a user sees, such as stats(), state and "
        f"committed_step, or a function of tests/support/inside.py, which counts once: {places(found)}"
    )
