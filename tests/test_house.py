"""The package is layered like a house: a file imports only from lower floors or its own folder, and never in circles.

Imports within functions count, too. Imports for type checkers only, weak proxies and objects that change their class
hide that two files need each other: these are listed here, and the lists may only become shorter. So may the list of
classes that are too long to be read in one go. Tests have each helper once, and know little of the package's inside.
Docstrings name things instead of pointing at them.

`make numbers` prints all of this.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "csd_optim"
BENCH = PACKAGE.parent / "bench"
FLOORS = {  # the floor of each folder, and of each file beside them; a folder or file within a folder may have its own
    "__init__": 10,
    "__main__": 10,
    "cli": 9,
    "trainers": 9,
    "integrations": 9,
    "optim": 8,
    "overlap": 7,
    "serve.owner": 7,
    "serve.trainer": 7,
    "serve": 6.5,
    "publish": 7,
    "step": 6,
    "checkpoint": 6,
    "params": 5,
    "engine.open_engine": 4.8,
    "engine.commit": 4.5,
    "engine": 4,
    "engine.placing": 3.5,
    "planning": 4,
    "store": 3,
    "devices": 3,
    "distributed": 2,
    "serve.wire": 2,
    "compression": 2,
    "replica": 2,
    "kernels": 1.5,
    "bindings": 1,
    "finalize": 1,
    "signals": 1,
    "accelerator": 0,
    "commit_trace": 0,
    "grad_modes": 0,
    "muon": 0,
    "files": 0,
    "settings": 0,
    "rates": 0,
    "threads": 1,
    "errors": -1,
    "_native": 0,  # compiled
}

HIDDEN = {  # files that hide whom they need
    "imports for type checkers only": [
        "__init__",  # loads what it names when it is first used
    ],
    "weakref.proxy": [],
    "self.__class__ =": [],
}
TANGLED: list[set[str]] = []  # modules that need one another, also in bench/, imports for type checkers included

LONGEST = 360  # lines of a class
LONGER: list[str] = []


def modules(package):
    """Return the file of every module of a package, by the module's name within the package."""
    files = sorted(package.rglob("*.py"))
    return {".".join(f.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


@functools.cache
def parsed(file):
    return ast.parse(file.read_text())


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and any(
        "TYPE_CHECKING" in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(node.test)
    )


def is_import(node):
    """Return whether a node imports something that it names."""
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"
    return isinstance(node, ast.Import | ast.ImportFrom) or (is_call and isinstance(node.args[0], ast.Constant))


def statements(node, hints=False):
    """Yield all imports below a node; those that never run only with `hints`."""
    for child in ast.iter_child_nodes(node):
        if is_import(child):
            yield child
        elif is_for_type_checkers(child) and not hints:
            yield from statements(ast.Module(child.orelse, []))
        else:
            yield from statements(child, hints)


def imports(package, name, known, hints=False):
    """Return the modules of the package that a module imports, with the line: {name: line}."""
    path = known[name]
    folder = [package.name, *path.relative_to(package).parent.parts]
    found = {}
    for statement in statements(parsed(path), hints):
        if isinstance(statement, ast.Import):
            wanted = [alias.name.split(".") for alias in statement.names]
        elif isinstance(statement, ast.Call):
            wanted = [statement.args[0].value.split(".")]
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


def graph_of(package):
    """Return the modules that each module of a package imports, those for type checkers only included."""
    known = modules(package)
    return {name: imports(package, name, known, hints=True) for name in known}


def layer_of(name, floors):
    """Return the longest of the prefixes of a module's name that have a floor; the first part if none has."""
    parts = name.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in floors), parts[0])


def violations(package, floors):
    """Return what breaks the rules, a line each: `file:line: what it imports`, or a circle."""
    known = modules(package)
    graph = {name: imports(package, name, known) for name in known}
    wrong = [f"{folder}: has no floor" for folder in sorted({layer_of(name, floors) for name in known} - floors.keys())]
    for name, imported in graph.items():
        layer = layer_of(name, floors)
        for other, line in imported.items():
            there = layer_of(other, floors)
            if there != layer and not floors.get(there, 99) < floors.get(layer, 99):
                wrong.append(f"{known[name].relative_to(package)}:{line}: {layer} imports {other}")
    return wrong + [f"a circle: {' -> '.join(circle)}" for circle in circles(graph)]


def circles(graph):
    """Return a circle for each group of modules with circular imports."""
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


def tangles(graph):
    """Return the groups of modules that need one another, each as a set of names."""
    reached = {}
    for name in graph:
        reached[name], left = set(), [name]
        while left:
            new = {*graph.get(left.pop(), ())} - reached[name]
            reached[name] |= new
            left += new
    groups = {frozenset(other for other in reached[name] if name in reached.get(other, ())) for name in graph}
    return sorted(map(set, groups - {frozenset()}), key=min)


def tangled():
    """Return the groups of the package and of bench/."""
    return [group for package in (PACKAGE, BENCH) for group in tangles(graph_of(package))]


def hidden(package):
    """Return the names of the modules that hide whom they need, by how."""
    known = modules(package)
    sources = {name: path.read_text() for name, path in known.items()}
    only_hints = [name for name in known if imports(package, name, known, hints=True) != imports(package, name, known)]
    texts = {text: [name for name in known if text in sources[name]] for text in ("weakref.proxy", "self.__class__ =")}
    return {"imports for type checkers only": only_hints, **texts}


def lines_of_classes(package):
    """Return how many lines each class has, by its module and name."""
    return {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in modules(package).items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }


def test_no_class_is_too_long():
    lines = lines_of_classes(PACKAGE)
    assert sorted(name for name in lines if lines[name] > LONGEST) == LONGER


def test_a_file_imports_from_lower_floors_only():
    assert not violations(PACKAGE, FLOORS)


def test_what_files_hide():
    assert hidden(PACKAGE) == HIDDEN


def test_who_needs_one_another():
    assert tangled() == TANGLED


def test_every_layer_has_a_floor():
    assert FLOORS.keys() - {"_native"} == {layer_of(name, FLOORS) for name in modules(PACKAGE)}


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("low/a.py", "from ..high import b", "low/a.py:1: low imports high.b"),
        ("low/a.py", "from ..high.b import f", "low/a.py:1: low imports high.b"),
        ("low/a.py", "import house.high.b", "low/a.py:1: low imports high.b"),
        ("low/a.py", "def f():\n    from house.high import b", "low/a.py:2: low imports high.b"),
        ("low/a.py", "import importlib\nimportlib.import_module('house.high.b').f()", "low/a.py:2: low imports high.b"),
        ("low/a.py", "try:\n    pass\nfinally:\n    from .. import top", "low/a.py:4: low imports top"),
        ("low/a.py", "from ..other.c import g", "low/a.py:1: low imports other.c"),  # on the same floor
        ("low/a.py", "from .. import name", "low/a.py:1: low imports __init__"),
        ("low/d.py", "from .a import f", "a circle: low.d -> low.a -> low.d"),
        ("low/a.py", "from . import a", "a circle: low.a -> low.a"),
        ("nowhere/e.py", "", "nowhere: has no floor"),
        ("low/attic/f.py", "from ..a import f", None),
        ("low/attic/f.py", "from ...high import b", "low/attic/f.py:1: low.attic imports high.b"),
        ("low/a.py", "from .attic.f import g", "low/a.py:1: low imports low.attic.f"),
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
    floors = {"top": 3, "__init__": 3, "high": 2, "low": 1, "low.attic": 1.5, "other": 1, "_native": 0}
    assert violations(tmp_path / "house", floors) == ([wrong] if wrong else [])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("imports for type checkers only", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B"),
        ("weakref.proxy", "import weakref\ndef hides(b):\n    return weakref.proxy(b)"),
        ("self.__class__ =", "class A:\n    def hides(self, b):\n        self.__class__ = b"),
    ],
)
def test_what_is_hidden_is_found(tmp_path, how, text):
    package = tmp_path / "house"
    package.mkdir()
    (package / "a.py").write_text(text)
    (package / "b.py").write_text("from . import a\n")
    assert hidden(package) == {other: ["a"] if other == how else [] for other in HIDDEN}
    assert tangles(graph_of(package)) == ([{"a", "b"}] if "import" in how else [])


# ---- the tests themselves ----------------------------------------------------------------

TESTS = Path(__file__).parent
ROOT = TESTS.parent
HELPERS = ["Training", "assert_same", "train", "trained"]
REACHES = 60
NOT_OURS = {"_replace", "_step_supports_amp_scaling", "_version"}  # names that Python's and torch's objects have, too


def places(nodes):
    return "".join(f"\n{file.relative_to(TESTS.parent)}:{node.lineno}" for file, node in nodes)


@functools.cache
def nodes(folder):
    return [(file, node) for file in sorted(folder.rglob("*.py")) for node in ast.walk(parsed(file))]


def nodes_of(folder, *kinds):
    """Return all nodes of these kinds below a folder, each with its file."""
    return [(file, node) for file, node in nodes(folder) if isinstance(node, kinds)]


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


def test_no_test_module_imports_another():
    """Else a file cannot be read, or run, alone."""
    found = [
        (file, node)
        for file, node in nodes_of(TESTS, ast.Import, ast.ImportFrom)
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        if name and any(part.startswith("test_") for part in name.split("."))
    ]
    assert not found, f"what several test modules need is in tests/support/: {places(found)}"


def reaches():
    """Return the places where tests use private members of the package: (file, node)."""
    private = private_names()
    found = [(file, node) for file, node in nodes_of(TESTS, ast.Attribute) if node.attr in private]
    return [(file, node) for file, node in found if ast.unparse(node.value) not in ("self", "cls", "super()")]


def test_tests_reach_into_few_private_members():
    found = reaches()
    assert len(found) <= REACHES, (
        f"{len(found)} reaches into private members of the package: use what a user sees, such as stats(), state and "
        f"committed_step, or a function of tests/support/inside.py, which counts once: {places(found)}"
    )


# ---- a step's number, record and counts --------------------------------------------------


def touches_of_steps(package):
    """Return the places outside States that set a step's number or record, or use the arrays of counts."""
    return [
        (file, node)
        for file, node in nodes_of(package, ast.Attribute)
        if ast.unparse(node.value).endswith("states")
        if node.attr == "steps" or (node.attr.lstrip("_") in ("step", "record") and isinstance(node.ctx, ast.Store))
    ]


def test_a_step_has_one_writer():
    found = touches_of_steps(PACKAGE)
    found = [(file, node) for file, node in found if file != PACKAGE / "params/place.py"]  # it shows counts in `state`
    assert not found, f"call States.go_to() or States.set_counts(): {places(found)}"


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("engine.states.step += 1", 1),
        ("states.step, states.record = 1, record", 2),
        ("self._states._record = record", 1),
        ("for own in states.steps:\n    own[:] = 1", 1),
        ("self.step = states.step\nstates.record.seconds", 0),
    ],
)
def test_other_writers_are_found(tmp_path, text, n):
    (tmp_path / "a.py").write_text(text)
    assert len(touches_of_steps(tmp_path)) == n


# ---- names -------------------------------------------------------------------------------


def test_a_class_name_means_one_class():
    files = {}
    for file, node in nodes_of(PACKAGE, ast.ClassDef):
        files.setdefault(node.name, set()).add(str(file.relative_to(PACKAGE)))
    assert not {name: sorted(where) for name, where in files.items() if len(where) > 1}


# ---- docstrings --------------------------------------------------------------------------

PRONOUNS = re.compile(
    "its?|itself|they|them|theirs?|that|those|this|these|which|who|whom|whose|ones?|what|others?|another|any|none",
    re.IGNORECASE,
)
WORDS, PRONOUNS_SHARE, RIDDLES = 8, 0.27, 20


def is_riddle(sentence):
    """Return whether most readers would have to guess what a sentence points at."""
    words = re.findall(r"[A-Za-z']+", sentence)
    return len(words) >= WORDS and sum(map(bool, map(PRONOUNS.fullmatch, words))) > PRONOUNS_SHARE * len(words)


def riddles():
    """Return the riddles in docstrings of the package, the benchmarks and the tests: `file:line: sentence`."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {' '.join(sentence.split())}"
        for folder in ("csd_optim", "bench", "tests")
        for file, node in nodes_of(ROOT / folder, *kinds)
        for sentence in re.split("[.:;!?]", ast.get_docstring(node) or "")
        if is_riddle(sentence)
    ]


def test_docstrings_are_no_riddles():
    found = riddles()
    assert len(found) <= RIDDLES, (
        f"{len(found)} sentences of docstrings are hard to resolve: name the thing itself (the tile, the rank, the "
        "gradient) instead of pointing at it with a pronoun:\n" + "\n".join(found)
    )


def test_a_riddle_is_found():
    assert is_riddle(" The one whose tiles it takes is that which others have")
    assert not is_riddle(" It is the one")  # short
    assert not is_riddle(" The owner of a tile updates it, and sends the parameters to the other ranks")


# ---- the numbers -------------------------------------------------------------------------


def print_numbers():
    known = modules(PACKAGE)
    back = [line for line in violations(PACKAGE, FLOORS) if not line.startswith("a circle")]
    lines = lines_of_classes(PACKAGE)
    longest = sorted(lines, key=lines.get, reverse=True)[:5]
    print(f"lines of Python in csd_optim: {sum(len(path.read_text().splitlines()) for path in known.values())}")
    print(f"longest classes: {', '.join(f'{name} {lines[name]}' for name in longest)}")
    print(f"imports of higher layers: {len(back)}")
    print(f"circles: {len(groups := tangled())}")
    for tangle in groups:
        print(f"    {', '.join(sorted(tangle))}")
    print(f"private members that tests use: {len(reaches())}")
    print(f"sentences of docstrings that are riddles: {len(riddles())}")


if __name__ == "__main__":
    print_numbers()
