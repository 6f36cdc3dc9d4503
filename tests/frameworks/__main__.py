"""Trains a tiny model with each training framework that installs on a CPU: `make trainers`.

Each gets an environment of its own, deleted after its run, on top of build/venv: packages there are not installed
again, and a framework with other pinned versions gets these in its own environment. With arguments, only the named
frameworks: `make trainers TRAINERS="torchtitan timm"`. docs/trainers.md lists the other frameworks, with the reasons
for leaving them out.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "trainers"
SECONDS = 3600  # for an installation, and for a run


@dataclass(frozen=True)
class Framework:
    """What pip installs for a script on_NAME.py. `alone`: packages whose requirements are not installed."""

    name: str
    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


FRAMEWORKS = [
    Framework("lightning_cli", ("jsonargparse[signatures]>=4.40",)),
    Framework("hydra", ("hydra-core==1.3.*",)),
    Framework("timm", ("timm==1.0.*",)),
    Framework("skorch", ("skorch==1.*",)),
    Framework("fastai", ("fastai==2.8.*",)),
    Framework("ignite", ("pytorch-ignite==0.5.*",)),
    Framework("torchtitan", ("torchtitan==0.3.*", "triton")),
    Framework("axolotl", ("axolotl==0.19.*",)),
    # What these two import for their optimizers; all that they require takes GPUs.
    Framework(
        "verl",
        ("ray>=2.41", "tensordict<=0.10.0", "codetiming", "datasets", "dill", "hydra-core", "pylatexenc", "torchdata"),
        ("verl==0.9.*",),
    ),
    Framework(
        "nemo",
        ("torchao", "datasets", "torchdata", "tiktoken", "flashoptim", "mistral-common"),
        ("nemo_automodel==0.7.*", "megatron-fsdp==0.5.0"),
    ),
]


def environment(framework: Framework) -> Path:
    """Make the framework's environment. Returns its interpreter. Raises CalledProcessError, TimeoutExpired."""
    place = BUILD / "environment"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    inside = place / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    below = Path(torch.__file__).resolve().parents[1]  # build/venv's packages, found after the environment's own
    (place / "lib" / version / "site-packages" / "below.pth").write_text(f"{below}\n")
    install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    install += ["--constraint", ROOT / "constraints.txt"]
    if framework.packages:
        subprocess.run([*install, *framework.packages], check=True, timeout=SECONDS)
    if framework.alone:
        subprocess.run([*install, "--no-deps", *framework.alone], check=True, timeout=SECONDS)
    return inside


def run(framework: Framework, inside: Path) -> tuple[bool, str]:
    """Run the framework's script. Returns whether it passed, and its output. Raises TimeoutExpired."""
    report = BUILD / f"{framework.name}.txt"
    paths = [ROOT, HERE, ROOT / "tests", ROOT / "tests" / "ecosystem"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_VISIBLE_DEVICES": ""}
    command = [inside, HERE / f"on_{framework.name}.py"]
    with report.open("w") as out:
        # A session of its own, so that the processes of a script that is given up end with it.
        process = subprocess.Popen(
            command, cwd=BUILD, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = report.read_text().splitlines() or [""]
    if process.returncode:
        return False, f"{framework.name}: {lines[-1]} ({report})"
    return True, next((line for line in reversed(lines) if "from AdamW" in line), lines[-1])


def main() -> None:
    wanted = sys.argv[1:]
    if unknown := {*wanted} - {f.name for f in FRAMEWORKS}:
        sys.exit(f"trainers: no {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in FRAMEWORKS)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    results = []
    for framework in FRAMEWORKS:
        if wanted and framework.name not in wanted:
            continue
        begin = time.monotonic()
        try:
            results.append(run(framework, environment(framework)))
        except subprocess.CalledProcessError:
            results.append((False, f"{framework.name}: cannot be installed"))
        except subprocess.TimeoutExpired as e:
            results.append((False, f"{framework.name}: has not ended after {e.timeout:.0f} s"))
        shutil.rmtree(BUILD / "environment", ignore_errors=True)
        print(f"trainers: {results[-1][1]} ({(time.monotonic() - begin) / 60:.1f} minutes)", flush=True)
    sys.exit(not all(passed for passed, _ in results))


if __name__ == "__main__":
    main()
