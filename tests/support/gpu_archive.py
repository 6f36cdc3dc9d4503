"""`make gpu-archive`: packs all that `make gpu-check MINUTES=10` needs where there is no pip and no network.

A folder and an archive of it: the benches and tests, and in site/ the built package and the packages that it and the
tests need, unpacked. One folder is for every Python from 3.10 on: the package has a stable ABI, and the extension of
cffi another name for each version of Python. torch and NumPy are the other machine's own.
"""

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PACKAGES = ("cffi", "typer", "rich", "pytest", "hypothesis", "psutil", "msgspec", "exceptiongroup", "tomli")
PARTS = ("Makefile", "pyproject.toml", "bench/*.py", "tests", ":!tests/store/samples", "native")


def copy(patterns, to):
    """Copy what git does not ignore of these into `to`. Links become what they point to."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, to / name)


def download(python, wheels, *what):
    """Download wheels for a version of Python on this machine's architecture."""
    platforms = [f"--platform=manylinux{version}_{platform.machine()}" for version in ("2014", "_2_17", "_2_28")]
    options = ["--quiet", "--only-binary=:all:", f"--python-version={python}", *platforms, "--dest", wheels]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *what], check=True)


def unpack(site):
    """Unpack the packages, and what they require, into `site`: for all versions of Python the same versions."""
    with tempfile.TemporaryDirectory() as wheels:
        first, *others = PYTHONS
        download(first, wheels, *PACKAGES)
        tagged = [wheel.stem.split("-") for wheel in Path(wheels).iterdir()]
        own = [f"{name}=={version}" for name, version, _, abi, _ in tagged if abi == f"cp{first.replace('.', '')}"]
        for python in others:
            download(python, wheels, "--no-deps", *own)
        for wheel in Path(wheels).iterdir():
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)


def make(folder):
    """Make the folder, and return the path of its archive."""
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "site"
    copy(PARTS, folder)
    copy(("csd_optim",), site)
    for built in (ROOT / "csd_optim").glob("*.abi3.so"):
        shutil.copy(built, site / "csd_optim")
    unpack(site)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True)
    (folder / "COMMIT").write_bytes(commit.stdout)
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)
    return archive


if __name__ == "__main__":
    archive = make(ROOT / "build" / "gpu-check")
    print(f"{archive}, {archive.stat().st_size / 1e6:.0f} MB: docs/gpu-check.md")
