"""A replica equals the model bit for bit after each version, whatever the steps and the program do in between.

The oracle is a snapshot of all weights after each step. What a version contains is also compared: just the elements
that differ, where nothing was set from outside.
"""

import hashlib

import numpy as np
import pytest
import torch
from support.backends import device_strings
from support.optimizers import ADAGRAD, ADAM, ADAMW, CODED, LION, MUON, MUON_IN_8_BITS, RMSPROP, SGD
from support.published import BLIND, Model, Published, bf16, edits, gradients, weights
from support.twins import checksum

from csd_optim import CSDAdam, CSDBusyError, CSDWarning, Replica, bindings

fp16 = torch.float16


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("of", [ADAMW, ADAM, SGD, ADAGRAD, RMSPROP, LION, MUON, *CODED, MUON_IN_8_BITS], ids=str)
@pytest.mark.parametrize("dtype", [bf16, fp16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("lr", [1e-6, 1e-3])
def test_each_rule(backend, of, dtype, lr, tmp_path, devices):
    """Each rule and dtype, on each back end: just what differs is sent, except for what is not recorded."""
    with Published(tmp_path / "policy", devices, of.ours, dtype, lr=lr, **of.kwargs) as t:
        t.steps(2)  # in the first one, all elements are sent
        for _ in range(3):
            t.step()
            changed, sent = t.check()
            for name in t.names():
                if name not in BLIND:
                    assert changed[name] <= sent[name] <= changed[name] * 16 / 15 + 1024, name


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [bf16, fp16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_8bit_states(backend, dtype, amsgrad, tmp_path, devices):
    with Published(tmp_path / "policy", devices, dtype=dtype, state_dtype="8bit", amsgrad=amsgrad, tile_size=4096) as t:
        t.steps(2)
        for _ in range(3):
            t.step()
            changed, sent = t.check()
            for name in t.names():
                if name not in BLIND:
                    assert changed[name] <= sent[name] <= changed[name] * 16 / 15 + 1024, name


def test_a_replica_of_inference_mode(tmp_path):
    """Its parameters, as those of a server, cannot be written by torch outside of that mode."""
    with Published(tmp_path / "policy", ["ram:"]) as t:
        with torch.inference_mode():
            model = Model(seed=1)
        replica = Replica(tmp_path / "policy")
        for _ in range(3):
            t.step_and_wait()
            replica.load(model)
            assert [checksum(p) for p in model.parameters()] == [checksum(p) for p in t.model.parameters()]


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_what_is_set_from_outside(backend, state_dtype, tmp_path, devices):
    """Writes to parameters, counted by torch or not; writes to states; loaded state dicts."""
    with Published(tmp_path / "policy", devices, state_dtype=state_dtype, tile_size=4096, lr=1e-6) as t:
        t.steps(2)
        for edit in edits(t):
            edit()
            t.steps(2)


def test_an_edit_between_two_versions_of_a_tensor_without_gradient(backend, tmp_path, devices):
    """A parameter that a step leaves out is compared; when it is updated again, nothing is missed."""
    with Published(tmp_path / "policy", devices) as t:
        t.steps(2)
        t.steps(2, without=("odd",))
        t.model.odd.data[1] = 3
        t.steps(1, without=("odd",))
        t.model.odd.data[1] = 4
        t.steps(2)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("mode", [{}, {"backward": True}, {"free_gradients": True}], ids=["plain", "backward", "free"])
def test_overlap(mode, state_dtype, tmp_path):
    """With steps that go on behind the program, begin in backward, or on a guess that is sometimes wrong."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 301), torch.nn.ReLU(), torch.nn.Linear(301, 30)).bfloat16()
    t = Published(tmp_path / "policy", str(tmp_path / "store"), model=model, state_dtype=state_dtype, tile_size=4096)
    with t:
        t.opt.overlap(model, **mode)
        for i in range(9):
            if i == 5 and "free_gradients" not in mode:
                t.opt.param_groups[0]["lr"] = 3e-4  # a wrong guess
            t.opt.zero_grad()
            model(torch.randn(8, 50).bfloat16()).square().sum().backward()
            if i == 7 and "free_gradients" not in mode:
                model[0].weight.grad.mul_(2)  # another one
            t.opt.step()
            t.done += 1
            t.opt.wait()
            t.check()


def test_edits_while_a_step_lands(tmp_path):
    """With overlap, a program may change a parameter as soon as it has arrived: that is no part of the version."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 301), torch.nn.ReLU(), torch.nn.Linear(301, 30)).bfloat16()
    with Published(tmp_path / "policy", f"file:{tmp_path / 'store'}?read=20MB/s&write=20MB/s", model=model) as t:
        t.opt.overlap(model)
        for i in range(6):
            t.opt.zero_grad()
            model(torch.randn(8, 50).bfloat16()).square().sum().backward()
            t.opt.step()
            t.done += 1
            if i % 2:
                t.check()
                continue
            with torch.no_grad():
                first = next(iter(t.opt.param_groups[0]["params"]))
                kept = first.detach().clone()
                first.clamp_(-0.05, 0.05)
            t.pub.wait()
            t.replica.follow(t.copy)
            assert np.array_equal(t.copy["0.weight"], kept.view(-1).view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("options", [{"topk": 0.1}, {"max_grad_norm": 0.5}, {"grad_dtype": bf16}], ids=str)
def test_options(options, backend, tmp_path, devices):
    with Published(tmp_path / "policy", devices, dtype=torch.float32, **options) as t:
        t.steps(4)


def test_groups_that_join_and_steps_that_are_skipped(backend, tmp_path, devices):
    """A group is added, a GradScaler skips a step: that makes no version."""
    model = Model()
    rest = [p for n, p in model.named_parameters() if n not in ("late", "bias")]
    with Published(tmp_path / "policy", devices, model=model, params=rest, lr=1e-4) as t:
        t.steps(2)
        t.opt.add_param_group({"params": [model.late, model.bias], "lr": 1e-3})
        t.steps(2, without=())
        t.opt.found_inf, t.opt.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
        version = t.pub.version
        gradients(model, 50)
        t.opt.step()
        t.pub.wait()
        assert t.pub.version == version
        t.opt.found_inf = torch.tensor(0.0)
        t.steps(2, without=())


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_parameters_that_leave_and_return(backend, state_dtype, tmp_path, devices):
    """A parameter goes on as another tensor with its states; a group leaves without states, and its space is reused."""
    model = Model()
    groups = [
        {"params": [model.embedding, model.odd, model.one, model.transposed]},
        {"params": [model.late, model.bias]},
    ]
    options = {"model": model, "params": groups, "state_dtype": state_dtype, "tile_size": 4096}
    with Published(tmp_path / "policy", devices, **options) as t:
        t.steps(2, without=())
        left = t.opt.param_groups.pop()
        for p in left["params"]:
            del t.opt.state[p]
        t.steps(1, without=())
        old, model.odd = model.odd, torch.nn.Parameter(model.odd.detach().clone())
        t.opt.param_groups[0]["params"][1] = model.odd
        t.opt.state[model.odd] = t.opt.state.pop(old)
        t.steps(2, without=())
        t.opt.add_param_group({"params": left["params"]})
        t.steps(2, without=())


class Strided(torch.nn.Module):
    """Two parameters: a dense one, and a view of some columns of a matrix."""

    def __init__(self, crooked):
        super().__init__()
        torch.manual_seed(0)
        self.plain = torch.nn.Parameter(torch.randn(5000).to(bf16))
        matrix = torch.randn(600, 40).t() if crooked else torch.randn(40, 600)
        self.columns = torch.nn.Parameter(matrix.to(bf16)[:, ::2])


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_parameters_with_gaps(backend, state_dtype, tmp_path, devices):
    """Those in row-major order are published; others get their values too late, and are refused."""
    with Published(tmp_path / "policy", devices, model=Strided(crooked=False), state_dtype=state_dtype) as t:
        t.steps(3)
        t.model.columns.data[3, 4] += 1
        t.steps(2)
        t.step()
        changed, sent = t.check()
        for name in t.names():
            assert changed[name] <= sent[name] <= changed[name] * 16 / 15 + 1024, name
    (beside := tmp_path / "beside").mkdir()
    with Published(tmp_path / "other", device_strings(backend, beside), model=Strided(crooked=True)) as t:
        with pytest.warns(CSDWarning, match=r"parameter columns are neither in row-major order"):
            t.step_and_wait()
        assert t.pub.version == 1


def test_every_third_step_and_full_versions(backend, tmp_path, devices):
    """Steps between two versions are in the later one; every fourth version is full; old ones go."""
    path = tmp_path / "policy"
    with Published(path, devices, publish={"every": 3, "full_every": 4, "keep": 3}) as t:
        full = []
        for i in range(1, 37):
            if i % 2 == 0:
                t.model.bias.data += 0.01
            t.step(without=("late", "odd") if i % 3 == 0 else ())
            if i % 3 == 0:
                t.check(step=i)
                full += [t.pub.version] if (path / f"v{t.pub.version:010d}/model.safetensors").exists() else []
        assert full == [5, 9, 13]
        assert [p.name for p in sorted(path.glob("v*"))] == [f"v{n:010d}" for n in range(11, 14)]


def test_tied_weights_have_one_tensor(tmp_path):
    """A module follows, and versions name all names of a tied parameter."""
    with Published(tmp_path / "policy", "ram:") as t:
        t.steps(3)
        other, replica = Model(seed=5), Replica(tmp_path / "policy")
        replica.load(other)
        t.steps(1)
        assert replica.follow(other) == 1
        assert {n: v.tolist() for n, v in weights(other).items()} == {
            n: v.tolist() for n, v in weights(t.model).items()
        }
        other.head = torch.nn.Parameter(other.head.detach().clone())
        with pytest.raises(ValueError, match="tie them"):
            replica.load(other)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", [bf16, fp16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_each_instruction_set_makes_the_same_bytes(dtype, state_dtype, tmp_path):
    """Scalar code, AVX2 and AVX-512 write the same files, at rates at which all three forms of a block occur."""
    used, found = bindings.isa_used(), {}
    try:
        for isa in bindings.isas():
            bindings.isa_use(isa)
            path = tmp_path / isa
            lr = torch.tensor(1e-6)
            with Published(path, "ram:", dtype=dtype, state_dtype=state_dtype, lr=lr, tile_size=4096) as t:
                for lr.data in map(torch.tensor, (1e-6, 1e-6, 1e-5, 1e-4, 1e-1)):
                    t.steps(1)
            files = sorted(path.glob("v*/delta-0.bin"))
            found[isa] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    finally:
        bindings.isa_use(used)
    assert len({*map(tuple, found.values())}) == 1
    assert len(found[used]) == 5


def test_other_memory_than_the_masks_is_not_taken(tmp_path):
    """No copy of the weights: beside the files, checks of 8-bit states take 1/8 byte per parameter."""
    model = torch.nn.Linear(1000, 1000, bias=False).bfloat16()
    with Published(tmp_path / "policy", "ram:", model=model, state_dtype="8bit") as t:
        t.steps(2)
        held = sum(a.nbytes for a in t.pub.arrays())
        assert 0 < held <= 1000 * 1000 / 8 + 4096


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "at least 1"),
        ({"dtype": "fp8"}, ValueError, "dtype is None or"),
        ({"model": torch.nn.ReLU()}, ValueError, "no parameters"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, 'publish(..., dtype="bf16") rounds it'),
        ({"model": torch.nn.Linear(2, 2, dtype=torch.complex64)}, TypeError, "cannot be published"),
        ({"model": torch.nn.Linear(2, 2, device="meta", dtype=bf16)}, TypeError, "no plain tensor"),
    ],
)
def test_refused_arguments(arguments, error, text, tmp_path):
    model = torch.nn.Linear(2, 2, dtype=bf16)
    with CSDAdam(model.parameters(), devices="ram:") as opt:
        with pytest.raises(error) as e:
            opt.publish(tmp_path / "policy", **{"model": model, **arguments})
        assert text in str(e.value)
        opt.publish(tmp_path / "policy", model=model).close()


def test_one_publisher_at_a_time(tmp_path):
    model = torch.nn.Linear(2, 2, dtype=bf16)
    with CSDAdam(model.parameters(), devices="ram:") as opt, CSDAdam(model.parameters(), devices="ram:") as other:
        pub = opt.publish(tmp_path / "policy", model=model)
        with pytest.raises(ValueError, match="publishes already"):
            opt.publish(tmp_path / "another", model=model)
        with pytest.raises(CSDBusyError, match="somebody else"):
            other.publish(tmp_path / "policy", model=model)
        pub.close()
        pub.close()
        other.publish(tmp_path / "policy", model=model)


def test_a_closed_publisher_is_out_of_the_way(backend, tmp_path, devices):
    """Steps go on without it, and a second one goes on with the next number."""
    with Published(tmp_path / "policy", devices) as t:
        t.steps(3)
        t.pub.close()
        version = t.pub.version
        t.step()
        t.pub = t.opt.publish(tmp_path / "policy", model=t.model)
        t.check()
        assert t.pub.version == version + 1
        t.steps(2)


def test_devices_whose_updates_record_nothing(tmp_path):
    model = torch.nn.Linear(2, 2, dtype=bf16)
    with CSDAdam(model.parameters(), devices="null:") as opt, pytest.raises(ValueError, match="record nothing"):
        opt.publish(tmp_path / "policy", model=model)
