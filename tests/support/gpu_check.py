"""`make gpu-check`: the checks that people with an accelerator run, and send us the result of: docs/gpu-check.md."""

import datetime
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# -v: also a run that is cut names the tests that have failed.
TESTS = [sys.executable, "-m", "pytest", "tests/accelerator", "--accelerator", "-v"]

ORDERED = "dense or lifetimes or overlap or gpu"  # tests of the order of accesses among streams


@dataclass
class Step:
    name: str
    command: list[str]
    needs: str = ""  # a program without which the step is skipped
    environment: dict[str, str] = field(default_factory=dict)
    seconds: int = 900


STEPS = [
    Step("environment", [sys.executable, "-m", "torch.utils.collect_env"]),
    Step("tests", [*TESTS, "--durations=20"]),
    # torch's own sanitizer for accesses from several streams, which supports only CUDA.
    Step("streams", [*TESTS, "-k", ORDERED], "nvidia-smi", {"TORCH_CUDA_SANITIZER": "1"}),
    Step("memory", ["compute-sanitizer", "--tool", "memcheck", *TESTS, "-k", "test_layouts"], "compute-sanitizer"),
    Step("bench", [sys.executable, "-m", "bench.accelerator", "--json"]),
    Step("overlap", [sys.executable, "-m", "bench.overlap", "--accelerator", "--quick", "--json"]),
    Step("timeline", [sys.executable, "-m", "bench.accelerator", "--quick"], "", {"CSD_OPTIM_TRACE": "trace.json"}),
]


def run(steps, into):
    """Run all steps, even if some fail. Returns the archive of their output, and the names of the failed ones."""
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M")
    results = into / f"gpu-check-{now}"
    results.mkdir(parents=True)
    summary, failed = [], []
    for step in steps:
        if step.needs and not shutil.which(step.needs):
            summary.append(f"{step.name}: skipped, {step.needs} is not there")
            continue
        print(f"{step.name} ...", flush=True)
        environment = {**os.environ, **step.environment}
        if "CSD_OPTIM_TRACE" in step.environment:
            environment["CSD_OPTIM_TRACE"] = str(results / step.environment["CSD_OPTIM_TRACE"])
        start = time.monotonic()
        with (results / f"{step.name}.txt").open("w") as said:
            try:
                code = subprocess.run(
                    step.command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, timeout=step.seconds
                ).returncode
            except subprocess.TimeoutExpired:
                code = "late"
        if code:
            failed.append(step.name)
        summary.append(f"{step.name}: exit={code},{time.monotonic() - start:.0f}s")
    (results / "summary.txt").write_text("\n".join(summary) + "\n")
    archive = results.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(results, results.name)
    return archive, failed


if __name__ == "__main__":
    import torch

    if not torch.accelerator.is_available():
        sys.exit(f"torch {torch.__version__} has no accelerator here: see docs/gpu-check.md")
    archive, failed = run(STEPS, ROOT / "build")
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all is well'}; send {archive}")
    sys.exit(bool(failed))
