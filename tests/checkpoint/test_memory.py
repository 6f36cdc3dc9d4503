"""Copying, loading and exporting a store takes little memory, whatever the store's size."""

import json
import mmap
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.stores import (
    sparse_store,
)

from csd_optim.checkpoint import export as convert

GIB = 1 << 30
LIMIT = 640 << 20


LIMITED = """
import json, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), int(sys.argv[2])))
from csd_optim.checkpoint import export, snapshot
place = Path(sys.argv[1])
snapshot.snapshot(place / "store", place / "snap")
export.export_torch(place / "snap", place / "out.pt")
export.export_safetensors(place / "snap", place / "out")
# Not ru_maxrss, which a process has from whoever forked it.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps(int(peak.split()[1]) * 1024))
"""


@pytest.fixture
def large(tmp_path):
    """A directory for some GB, emptied after the test in any case; pytest would keep it."""
    if shutil.disk_usage(tmp_path).free < 12 * GIB:
        pytest.skip("needs 12 GiB of disk")
    yield tmp_path
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()


@pytest.mark.ci
def test_7b_parameters_in_640_mib_of_memory(large):
    """A copy and both exports of a sparse store of 162 GB, with 0.75 GB of data, which is more than the memory allowed.

    RLIMIT_DATA makes larger allocations fail; the peak resident memory also covers what was mapped from files.
    """
    wide, deep = 4096, 11008
    shapes = [("embed", (32000, wide)), ("head", (32000, wide))]
    for i in range(32):
        shapes += [(f"layer{i}.{name}", (wide, wide)) for name in "qkvo"]
        shapes += [(f"layer{i}.{name}", (deep, wide)) for name in ("gate", "up")]
        shapes += [(f"layer{i}.down", (wide, deep)), (f"layer{i}.norm", (wide,))]
    n = sparse_store(large / "store", shapes, dense=60)
    assert n > 6.7e9
    command = [sys.executable, "-c", LIMITED, str(large), str(LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < LIMIT
    assert (large / "out.pt").stat().st_size > 12 * n
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # a private one would count as memory
        held = torch.load(large / "out.pt", mmap=True, weights_only=True)["state"]
    assert len(held) == len(shapes)
    noise = torch.frombuffer(bytearray(np.random.default_rng(0).bytes(4 << 20)), dtype=torch.int32)
    embed = held[0]["exp_avg"].flatten().view(torch.int32)
    assert torch.equal(embed[: len(noise)], noise)
    assert not embed[len(noise) : 3 * len(noise)].any()
    index = json.loads((large / "out" / convert.INDEX_NAME).read_text())
    assert len(index["weight_map"]) == 3 * len(shapes)
