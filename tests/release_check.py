"""Checks what a release would publish: `make release-check`.

1. sdist and wheel in dist/, which `make wheels` has made: names, metadata (twine), and that the version is the same
   everywhere.
2. For each Python at hand, an empty environment with the wheel and what it requires: trains, resumes, and reads every
   store of tests/store/samples with the bits that it had. PYTHONS="3.11 3.13" tries these alone.
3. Prints what the owner of the project has yet to fill in: lines with OWNER.

PIP_EXTRA_INDEX_URL names an index of CPU builds of torch; without it, a build for CUDA of several GB is downloaded for
each Python.

`python tests/release_check.py --tag v1.2.3`, which the workflow of a release runs, does not build: it fails unless the
tag is the version, CHANGELOG.md has its date, and nothing is left to fill in.
"""

import argparse
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "tests" / "store" / "samples"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
FILLED_IN = ("setup.cfg", "CITATION.cff", "SECURITY.md")  # by the owner; a mark elsewhere would not be found


def version() -> str:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings["metadata"]["version"]


def disagreements() -> list[str]:
    """Return the files that name another version than setup.cfg."""
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    found = {"CHANGELOG.md": first, "CITATION.cff": cited}
    return [name for name, match in found.items() if match is None or match[1] != version()]


def to_fill_in() -> list[str]:
    """Return the lines that the owner has to fill in, each with its place."""
    lines = ((name, n, line) for name in FILLED_IN for n, line in enumerate((ROOT / name).read_text().splitlines(), 1))
    return [f"{name}:{n}: {line.strip()}" for name, n, line in lines if "OWNER" in line]


def check_tag(tag: str) -> None:
    """Exit with what stands in the way of a release by this tag."""
    problems = [f"{name} names another version than setup.cfg" for name in disagreements()]
    if tag != f"v{version()}":
        problems.append(f"the tag is {tag}, the version {version()}")
    if not re.search(rf"^## {re.escape(version())} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        problems.append(f"CHANGELOG.md has no date for {version()}: ## {version()} (YYYY-MM-DD)")
    problems += [f"to be filled in: {line}" for line in to_fill_in()]
    sys.exit("\n".join(problems) or None)


# ---- in an environment of its own -----------------------------------------------------------


def train_and_read(directory: Path) -> None:
    """Run by the Python of an environment with the wheel: train, resume, and go on from each sample."""
    sys.path.insert(0, str(SAMPLES))
    import make
    import torch

    import csd_optim

    assert Path(csd_optim.__file__).is_relative_to(sys.prefix), f"{csd_optim.__file__} is not the installed package"
    assert csd_optim.__version__ == version()
    (directory / "new").mkdir()
    wholes = {}
    for name in make.FEATURES:
        params, whole = make.model(), directory / "new" / name
        whole.mkdir()
        with make.optimizer(params, whole, name) as opt:  # trains without a break, and as the sample was trained
            make.make_steps(params, opt, make.STEPS)
            first = make.image(params, opt)
            make.make_steps(params, opt, 2)
            wholes[name] = first, make.image(params, opt)
        params = make.model()
        with make.optimizer(params, whole, name, resume=True) as opt:
            assert make.image(params, opt) == wholes[name][1], f"{name}: resumed with other bits"
    for name in make.FEATURES:
        place = directory / name
        with tarfile.open(SAMPLES / f"{name}.tar.xz") as archive:
            archive.extractall(place, filter="data")
        expected = json.loads((SAMPLES / f"{name}.json").read_text())
        params = make.model()
        with make.optimizer(params, place, name, resume=True) as opt:
            assert make.image(params, opt) == expected == wholes[name][0], f"{name}: read with other bits"
            make.make_steps(params, opt, 2)
            assert make.image(params, opt) == wholes[name][1], f"{name}: trained with other bits"
    print(f"torch {torch.__version__}; {len(make.FEATURES)} samples", end="")


def verify_commands(scripts: Path, directory: Path) -> None:
    """Read stores by the installed command, also those with one slot, which cannot be trained."""
    with tarfile.open(SAMPLES / "one-slot.tar.xz") as archive:
        archive.extractall(directory / "one-slot", filter="data")
    for name in ("one-slot", "format-1", "format-4-codes"):
        stores = [directory / name / f"csd{i}" for i in range(2)]
        subprocess.run([scripts / "csd-optim", "verify", *stores], check=True, stdout=subprocess.DEVNULL)


# ---- all of it ------------------------------------------------------------------------------


def interpreter(wanted: str) -> str | None:
    """Return the path of this version of Python, on PATH or among pyenv's, if it can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in [shutil.which(f"python{wanted}"), *sorted(pyenv.glob(f"{wanted}.*/bin/python{wanted}"))]:
        check = [found, "-c", "import ensurepip, venv"]  # a shim of pyenv may be there without its Python
        if found and subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


def check_installed(python: str, wheel: Path) -> str:
    """Install the wheel into an empty environment, use it there, return what was tried. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        place = Path(temporary)
        subprocess.run([python, "-m", "venv", place / "environment"], check=True)
        scripts = place / "environment" / "bin"
        pip = [scripts / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, wheel], check=True)
        subprocess.run([scripts / "python", "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
        (place / "stores").mkdir()
        # As a script it has tests/ on its path, and not the directory with the sources of the package.
        command = [scripts / "python", Path(__file__), "--inside", place / "stores"]
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=alone, cwd=place, check=True, stdout=subprocess.PIPE, text=True)
        verify_commands(scripts, place / "stores")
        return done.stdout


def check_files(dist: Path) -> Path:
    """Check what is in dist/, and return the wheel. Raises CalledProcessError."""
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    assert sdist.name == f"csd_optim-{version()}.tar.gz", sdist.name
    assert re.fullmatch(rf"csd_optim-{re.escape(version())}-cp310-abi3-manylinux\S+\.whl", wheel.name), wheel.name
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel], check=True)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    lacking = {"LICENSE", "SECURITY.md", "CITATION.cff", "docs/in_one_file.py", "tests/store/samples/make.py"} - names
    assert not lacking, f"{sdist.name} lacks {lacking}"
    assert not disagreements(), f"another version than {version()} in {disagreements()}"
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=PYTHONS, help="versions of Python, such as 3.12")
    parser.add_argument("--tag", help="check only that this tag can be released")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return train_and_read(arguments.inside)
    if arguments.tag:
        return check_tag(arguments.tag)
    wheel, failed = check_files(ROOT / "dist"), False
    for wanted in arguments.pythons or PYTHONS:
        begin, python = time.monotonic(), interpreter(wanted)
        if python is None:
            print(f"release-check: Python {wanted}: not tried, it is not on this machine", flush=True)
            continue
        try:
            result = check_installed(python, wheel)
        except subprocess.CalledProcessError as e:
            failed, result = True, f"FAILED: {' '.join(map(str, e.cmd))}"
        print(f"release-check: Python {wanted}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
    for line in to_fill_in():
        print(f"release-check: the owner has to fill in {line}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
