"""The wheel built from the sdist is complete: README's first example runs from it in an environment of its own."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[1]
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may have a csd_optim
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(kind, source, directory):
    """Build in `source`, without a network and without optimization, which would take a minute and prove nothing."""
    directory.mkdir()
    for name in ("cc", "c++"):
        compiler = directory / name
        compiler.write_text(f'#!/bin/bash\nexec {name} "${{@/#-O3/-O0}}"\n')
        compiler.chmod(0o700)
    environment = ALONE | {"CC": str(directory / "cc"), "CXX": str(directory / "c++")}
    command = [sys.executable, "-c", BUILD, kind, directory]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    return next(path for path in directory.iterdir() if path.suffix in (".gz", ".whl"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="compiled", marks=pytest.mark.soak), pytest.param(False, id="as compiled here")],
)
def installed(tmp_path_factory, request):
    """The interpreter of an environment with the wheel, made from the sdist, and its dependencies.

    Compiling the extensions again takes longer than everything else here. Except in soak runs, it is enough that all
    their sources are there, and are those that this package's extensions were compiled from.
    """
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(build("build_sdist", ROOT, directory / "sdist")) as sdist:
        sdist.extractall(directory / "source", filter="data")
    [source] = (directory / "source").iterdir()
    if not request.param:
        for part in "native", "hls_kernels":
            for path in (ROOT / part).rglob("*.*"):
                inside = path.relative_to(ROOT)
                if path.suffix in (".h", ".cpp", ".py") and "build" not in inside.parts:
                    assert (source / inside).read_bytes() == path.read_bytes()
        built = source / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/csd_optim"
        built.mkdir(parents=True)
        for name in "csd_optim._native", "csd_optim._emulator":
            extension = Path(shutil.copy(importlib.util.find_spec(name).origin, built))
            os.utime(extension, (2**32, 2**32))  # newer than all its dependencies
    wheel = build("build_wheel", source, directory / "built")
    assert re.fullmatch(r"csd_optim-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)  # for every Python from 3.10 on
    venv.create(directory / "empty")
    python = directory / "empty/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(pip, env=ALONE, check=True)
    # A .pth file adds the directory, but .pth files in it are not read: an editable csd_optim stays invisible.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory / "empty")}))
    (packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def run(python, program, cwd):
    return subprocess.run([python, "-I", "-c", program], cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_the_first_example_of_readme(installed, tmp_path):
    """Both of its lines run as they stand, and a step of either optimizer gives the same numbers, with this package."""
    assert "CSDAdam" in EXAMPLE
    before, after = EXAMPLE.replace("/mnt/nvme0", str(tmp_path)).splitlines()
    program = f"""if True:
        import copy, csd_optim, torch
        from csd_optim import CSDAdam
        first = torch.nn.Linear(40, 50)
        found = []
        for line in {before!r}, {after!r}:
            model = copy.deepcopy(first)
            exec(line)
            model(torch.ones(3, 40)).square().sum().backward()
            opt.step()
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        torch.testing.assert_close(*found)
        print(type(opt), csd_optim.__file__)
    """
    kind, file = run(installed, program, tmp_path).rsplit(maxsplit=1)
    assert "CSDAdam" in kind
    assert Path(file).is_relative_to(installed.parents[1])
    assert (tmp_path / "csd_optim.store").exists()


def test_all_of_the_package_is_there(installed, tmp_path):
    """Every module of the sources can be imported, and there are no others. Integrations import their framework."""
    program = (
        "import csd_optim, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(csd_optim.__path__, 'csd_optim.'):\n"
        "    if '__main__' not in module.name and '.integrations.' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
    )
    package = ROOT / "csd_optim"
    paths = {path.parent if path.name == "__init__.py" else path.with_suffix("") for path in package.rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in paths if path.name != "__main__"}
    found = {*run(installed, program, tmp_path).split()} - {"csd_optim._native", "csd_optim._emulator"}
    assert found == {name for name in names if name != "csd_optim" and ".integrations." not in name}


def test_the_headers_of_kernels_are_there(installed, tmp_path):
    program = "from csd_optim.kernels.sources import headers; print(*headers())"
    sources = [path for folder in ("gpu", "include") for path in (ROOT / "native" / folder).glob("*.h")]
    assert {*run(installed, program, tmp_path).split()} == {path.name for path in sources}


def test_the_command(installed, tmp_path):
    [script] = installed.parent.glob("csd-optim")
    done = subprocess.run([script, "--version"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert re.fullmatch(r"csd.optim \d+\.\d+\.\d+\S*\n", done.stdout)


def test_the_class_is_named_where_users_find_it(installed, tmp_path):
    program = (
        "import csd_optim, pickle, pickletools\n"
        "pickled = pickle.dumps(csd_optim.CSDAdam, 0)\n"
        "print(csd_optim.CSDAdam, pickle.loads(pickled) is csd_optim.CSDAdam, pickled.splitlines()[:2])\n"
    )
    wanted = "<class 'csd_optim.CSDAdam'> True [b'ccsd_optim', b'CSDAdam']\n"
    assert run(installed, program, tmp_path) == wanted


def test_a_clone_beside_a_script_is_not_the_package(tmp_path):
    """A directory csd_optim without __init__.py beside a script does not hide the package, be it editable or not."""
    (tmp_path / "csd_optim").mkdir()
    script = tmp_path / "train.py"
    script.write_text("import csd_optim\nprint(csd_optim.CSDError.__name__)\n")
    assert subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout == "CSDError\n"
