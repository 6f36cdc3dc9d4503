"""vLLM's own code applies our files of patches, on a CPU: after each version the model has the bits of the training.

One file of the wheel, checkpoint_weight_patch.py, is loaded alone. It imports nothing but torch, and nothing in it is
replaced. CSD_OPTIM_VLLM_WHEEL names a wheel that is there already; otherwise pip downloads the newest one, 340 MB.
"""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.published import Published, weights

from csd_optim import Replica
from csd_optim.replica import vllm

pytestmark = [pytest.mark.soak, pytest.mark.at_hand("its updates are on the owner's machine")]
FILE = "vllm/model_executor/model_loader/checkpoint_weight_patch.py"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The module of vLLM that applies patches."""
    place = tmp_path_factory.mktemp("vllm")
    wheel = os.environ.get("CSD_OPTIM_VLLM_WHEEL")
    if not wheel:
        command = [sys.executable, "-m", "pip", "download", "vllm", "--no-deps", "--quiet", f"--dest={place}"]
        subprocess.run(command, check=True, timeout=1200)
        (wheel,) = place.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as files:
        path = Path(files.extract(FILE, place))
    spec = importlib.util.spec_from_file_location("checkpoint_weight_patch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attention(torch.nn.Module):
    """What a training has: projections of their own, as checkpoints name them."""

    def __init__(self, width=96):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def new(*shape):
            return torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).bfloat16())

        self.q_proj, self.k_proj, self.v_proj = new(width, width), new(width // 3, width), new(width // 3, width)
        self.up = new(700, width)  # more than a block
        self.scale = new()
        self.norm = new(width)
        self.frozen = torch.nn.Parameter(new(50).detach(), requires_grad=False)
        self.late = new(33)


class Engine(torch.nn.Module):
    """What vLLM makes of it: one packed parameter, which load_weights() fills by parts, as its models do."""

    def __init__(self, model):
        super().__init__()
        heads = ("q_proj", "k_proj", "v_proj")
        self.rows, first = {}, 0
        for name in heads:
            self.rows[name] = first, len(getattr(model, name))
            first += len(getattr(model, name))
        self.qkv = torch.nn.Parameter(torch.zeros(first, model.q_proj.shape[1], dtype=torch.bfloat16))
        for name, p in model.named_parameters():
            if name not in heads:
                setattr(self, name, torch.nn.Parameter(torch.zeros_like(p)))

    def load_weights(self, loaded):
        names = set()
        for name, tensor in loaded:
            names.add(name)
            if name in self.rows:
                self.qkv.data.narrow(0, *self.rows[name]).copy_(tensor)
            else:
                getattr(self, name).data.copy_(tensor)
        return names

    def bits(self):
        parts = {name: self.qkv.data.narrow(0, *rows) for name, rows in self.rows.items()}
        parts |= {name: p.data for name, p in self.named_parameters() if name != "qkv"}
        return {n: p.contiguous().view(-1).clone().view(torch.int16).numpy().view(np.uint16) for n, p in parts.items()}


def load(theirs, engine, patches):
    """Dense ones and sparse ones are two calls, because vLLM does not take both in one."""
    for is_sparse in (False, True):
        theirs.load_checkpoint_weight_patches(engine, [p for p in patches if (p.indices is not None) == is_sparse])


def apply_file(theirs, engine, path):
    """Apply a file of patches, as docs/publish.md shows it. Returns the names of whole tensors, and of others."""
    with safe_open(path, "pt") as file:
        patches = [
            theirs.CheckpointWeightPatch(
                t["name"],
                tuple(t["shape"]),
                getattr(torch, t["dtype"]),
                file.get_tensor(f"values/{t['name']}"),
                None if t["whole"] else file.get_tensor(f"indices/{t['name']}"),
            )
            for t in json.loads(file.metadata()["csd_optim.patches"])
        ]
    load(theirs, engine, patches)
    return {p.name for p in patches if p.indices is None}, {p.name for p in patches if p.indices is not None}


def assert_bits(engine, model):
    wanted, found = weights(model), engine.bits()
    assert found.keys() == wanted.keys()
    assert [name for name, values in wanted.items() if not np.array_equal(values, found[name])] == []


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_versions_reach_vllm(theirs, state_dtype, tmp_path):
    """Steps, edits, NaNs, a parameter that comes late, a rollback, full versions; from files and in the process."""
    policy, out, model = tmp_path / "policy", tmp_path / "patches", Attention()
    options = {"lr": 1e-5, "state_dtype": state_dtype, "tile_size": 4096, "publish": {"full_every": 6, "keep": 8}}
    from_files, in_process, kinds = Engine(model), Engine(model), []
    replica, at = Replica(policy), None

    def follow():
        nonlocal at
        path, version = vllm.follow(policy, out)
        whole, sparse = apply_file(theirs, from_files, path)
        assert_bits(from_files, model)
        patches = [*replica.patches(since=at, whole_if_nan=True)]
        load(theirs, in_process, [theirs.CheckpointWeightPatch(**p.to_torch()) for p in patches])
        assert_bits(in_process, model)
        assert {p.version for p in patches} == {version.number}
        at = version.number
        kinds.append("full" if path.name.startswith("full") else "mixed" if whole else "sparse")
        return whole, sparse

    with Published(policy, str(tmp_path / "store"), model=model, **options) as t:
        follow()
        for _ in range(3):
            t.steps(1)
            _, sparse = follow()
            assert {"q_proj", "k_proj", "v_proj", "up"} <= sparse
        with torch.no_grad():  # edits after a step, of parameters with and without a state
            model.up[5, :7] = -0.0
            model.frozen[3] = 7.0
        t.steps(1)
        whole, sparse = follow()
        assert (whole, "frozen" in sparse) == (set(), True)
        t.steps(1, without=())
        assert "late" in follow()[1]
        t.steps(3)
        follow()  # several at once, a full one among them
        with torch.no_grad():
            model.frozen[4] = float("nan")
        t.steps(1)
        assert follow()[0] == {"frozen"}
        t.steps(2)
        assert follow()[0] == set()
        t.opt.save(tmp_path / "snapshot")
        done = t.done
        t.steps(1)
        follow()
    options |= {"done": done, "resume": True}
    with Published(policy, str(tmp_path / "snapshot/device-0"), model=model, **options) as t:  # a rollback
        follow()
        t.steps(1)
        follow()
        t.opt.load_state_dict(t.opt.state_dict())
        t.steps(1)
        follow()
    assert kinds == ["full", *["sparse"] * 5, "full", "mixed", "sparse", "full", "full", "sparse", "sparse"]


def test_vllm_refuses_what_we_do_not_send(theirs):
    """NaNs in a sparse patch, and both kinds in one call: why a tensor comes whole, and why there are two calls."""
    engine = Engine(Attention())
    zero, one = torch.zeros(1), torch.tensor([0])
    nan = theirs.CheckpointWeightPatch("frozen", (50,), torch.bfloat16, zero.bfloat16() * float("nan"), one)
    with pytest.raises(ValueError, match="NaN"):
        theirs.load_checkpoint_weight_patches(engine, [nan])
    whole = theirs.CheckpointWeightPatch("norm", (96,), torch.bfloat16, torch.zeros(96).bfloat16(), None)
    with pytest.raises(ValueError, match="cannot be mixed"):
        theirs.load_checkpoint_weight_patches(engine, [whole, nan._replace(values=zero.bfloat16())])
