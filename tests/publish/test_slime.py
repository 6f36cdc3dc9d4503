"""The receiver that slime adds to SGLang applies our directories: after each version its checkpoint has our bits.

CSD_OPTIM_PULL_WEIGHTS names slime's docker/patch/latest/sglang-pull_weights.patch, of which the one new file is loaded
alone. It needs `zstandard`, and nothing in it is replaced.
"""

import importlib.util
import os
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.published import Model, Published, weights

from csd_optim.replica import slime

pytestmark = [pytest.mark.soak, pytest.mark.at_hand("its updates are on the owner's machine")]
FILE = "b/python/sglang/srt/weight_sync/local_checkpoint.py"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    pytest.importorskip("zstandard", reason="slime's receiver needs zstandard, which is not installed")
    patch = os.environ.get("CSD_OPTIM_PULL_WEIGHTS")
    if not patch:
        pytest.skip("CSD_OPTIM_PULL_WEIGHTS does not name slime's sglang-pull_weights.patch")
    with open(patch) as file:
        text = file.read()
    new = re.search(rf"^\+\+\+ {re.escape(FILE)}\n@@.*\n((?:\+.*\n)+)", text, re.MULTILINE)[1]
    path = tmp_path_factory.mktemp("slime") / "local_checkpoint.py"
    path.write_text("".join(line[1:] for line in new.splitlines(keepends=True)))
    spec = importlib.util.spec_from_file_location("local_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("compressed", [True, False])
def test_versions_reach_sglang(theirs, compressed, tmp_path, monkeypatch):
    """Steps, edits, NaNs, full versions, a restarted follower, and a host that comes late."""
    if not compressed:
        monkeypatch.setitem(sys.modules, "zstandard", None)
    policy, out, host, late = (str(tmp_path / name) for name in ("policy", "out", "host", "late"))
    base, model, fulls = tmp_path / "base", Model(), []
    base.mkdir()
    (base / "config.json").write_text("{}")
    follower = slime.Follower(tmp_path / "policy", tmp_path / "out", base)
    with Published(policy, str(tmp_path / "store"), model=model, publish={"full_every": 6, "keep": 8}) as t:
        for number in range(1, 12):
            path, version = follower.follow()
            assert (path.name, version.step) == (f"weight_v{number:06d}", t.done)
            fulls.append(slime.is_full_directory(path))
            theirs.pull(host, str(base), out, number)
            assert_bits(host, model)
            if number == 4:
                model.odd.data[3] = float("nan")
                model.frozen.data[7] = 1.0
            if number == 8:
                follower = slime.Follower(tmp_path / "policy", tmp_path / "out", base)
            t.steps(2 if number == 9 else 1, **({"without": ()} if number == 6 else {}))
    theirs.pull(late, str(base), out, 11)
    assert_bits(late, weights_of=host)
    assert [n for n, is_full in enumerate(fulls, 1) if is_full] == [1, 7]
    assert sorted(os.listdir(late)) == [".weight_sync", "config.json", "model.safetensors"]


def assert_bits(checkpoint, model=None, weights_of=None):
    wanted = weights(model) if model else in_checkpoint(weights_of)
    found = in_checkpoint(checkpoint)
    assert {*found} == {*wanted} - {"head"}  # a tied one is there once
    assert [name for name, values in found.items() if not np.array_equal(values, wanted[name])] == []


def in_checkpoint(checkpoint):
    found = load_file(f"{checkpoint}/model.safetensors")
    return {name: t.view(-1).view(torch.int16).numpy().view(np.uint16) for name, t in found.items()}
