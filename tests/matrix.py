"""Runs the tests that touch torch's interface with other versions of torch and Python: `make matrix`.

Each pair of versions gets an environment of its own, which is deleted after its run: most builds of torch on PyPI bring
several GB of CUDA packages. The installed package is the wheel that users get. With arguments, only those pairs:
`make matrix PAIRS="3.13:2.15.0"`.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from csd_optim import bindings

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "matrix"
TESTED = ("optim", "step", "params", "store", "checkpoint", "overlap", "distributed")
PACKAGES = (
    "pytest",
    "pytest-xdist",
    "expecttest",
    "hypothesis",
    "safetensors",
    "psutil",
)  # beside what the package requires


@dataclass(frozen=True)
class Pair:
    """A version of Python and one of torch. `each_isa`: run with each instruction set that the CPU has."""

    python: str
    torch: str
    each_isa: bool = False

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"


# Each torch on one Python, each other Python with one torch: not a product.
PAIRS = [
    Pair("3.11", "2.9.1"),
    Pair("3.11", "2.11.0"),
    Pair("3.11", "2.13.0", each_isa=True),
    Pair("3.11", "2.14.1"),
    Pair("3.11", "2.15.0"),
    Pair("3.10", "2.9.1"),
    Pair("3.12", "2.14.1"),
    Pair("3.13", "2.15.0"),
    Pair("3.14", "2.15.0"),
]


def interpreter(version: str) -> str | None:
    """Return the path of this version of Python if it is on PATH, or among pyenv's, and can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]:
        check = [found, "-c", "import ensurepip, venv"]  # a shim of pyenv may be there without its Python
        if found and subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


def wheel() -> Path:
    """Build the package once: its wheel is for every Python."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", BUILD, ROOT], check=True
    )
    return next(BUILD.glob("csd_optim-*.whl"))


def environment(pair: Pair, python: str, package: Path) -> Path:
    """Make the pair's environment. Returns its interpreter. Raises CalledProcessError."""
    place = BUILD / "environment"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", place], check=True)
    inside = place / "bin" / "python"
    install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*install, f"torch=={pair.torch}", package, *PACKAGES], check=True)
    return inside


def tree() -> Path:
    """Return a directory with the tests, but without the package: they import the one that is installed."""
    place = BUILD / "tree"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("tests", "native", "hls_kernels", "docs", "bench", "pyproject.toml"):
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(ROOT / name)
    return place


def run(pair: Pair, isa: str, inside: Path) -> tuple[bool, str]:
    """Run the tests with one instruction set ("": the best). Returns whether they passed, and pytest's summary."""
    report = BUILD / f"{pair.python}-{pair.torch}{isa and '-' + isa}.txt"
    variables = {**os.environ, "CSD_OPTIM_ISA": isa} if isa else dict(os.environ)
    command = [inside, "-m", "pytest", "-q", "--tier", "test", "-n", str(len(os.sched_getaffinity(0)))]
    command += ["--dist", "loadfile", "-m", "not serial and not signals", *(f"tests/{name}" for name in TESTED)]
    with report.open("w") as out:
        done = subprocess.run(command, cwd=tree(), env=variables, stdout=out, stderr=subprocess.STDOUT, check=False)
    lines = report.read_text().splitlines() or [""]
    if done.returncode:
        print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n", flush=True)
    return done.returncode == 0, lines[-1].strip("= ")


def main() -> None:
    wanted = sys.argv[1:]
    if unknown := {*wanted} - {str(pair) for pair in PAIRS}:
        sys.exit(f"matrix: no pair {', '.join(sorted(unknown))}; there are {', '.join(map(str, PAIRS))}")
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    package, results = wheel(), []
    for pair in PAIRS:
        if wanted and str(pair) not in wanted:
            continue
        begin, python = time.monotonic(), interpreter(pair.python)
        if python is None:
            results.append((True, f"{pair}: not run, there is no Python {pair.python} on this machine"))
        else:
            try:
                inside = environment(pair, python, package)
                for isa in bindings.isas() if pair.each_isa else [""]:
                    passed, summary = run(pair, isa, inside)
                    results.append((passed, f"{pair}{isa and ' ' + isa}: {summary}"))
            except subprocess.CalledProcessError:
                results.append((False, f"{pair}: torch {pair.torch} cannot be installed on Python {pair.python}"))
            shutil.rmtree(BUILD / "environment", ignore_errors=True)
        print(f"matrix: {results[-1][1]} ({(time.monotonic() - begin) / 60:.1f} minutes)", flush=True)
    print("", *(f"matrix: {line}" for _, line in results), sep="\n")
    sys.exit(not all(passed for passed, _ in results))


if __name__ == "__main__":
    main()
