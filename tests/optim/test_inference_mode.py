"""torch.inference_mode(): csd_optim makes no tensors of that mode, and takes gradients and parameters that are."""

import contextlib

import pytest
import torch
from support.comparing import assert_matches, assert_same, make_pair, params_of, set_grads
from support.inside import engine_of
from torch import nn

from csd_optim import CSDAdam

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
on_each_device = pytest.mark.parametrize("devices", ["ram:", "file:?scratch=1", "named"])


def place(devices, directory):
    if devices != "named":
        return devices
    directory.mkdir()
    return [directory]


def image(opt):
    """The parameters and all states, after it was tested that these can be written anywhere."""
    values = []
    for p in params_of(opt):
        states = {name: t for name, t in opt.state[p].items() if isinstance(t, torch.Tensor)}
        assert not any(t.is_inference() for t in states.values())
        values.append([p.detach().clone(), {name: t.clone() for name, t in states.items()}])
    return values


def construct(opt, directory):
    with CSDAdam([nn.Parameter(torch.ones(300))], devices="ram:") as other:
        other.param_groups[0]["params"][0].grad = torch.ones(300)
        other.step()


def load(opt, directory):
    opt.load_state_dict(opt.state_dict())


def load_directly(opt, directory):
    with opt.loading():
        for p in params_of(opt):
            opt.state[p]["exp_avg"].mul_(0.5)


def edit(opt, directory):
    opt.state[params_of(opt)[0]]["exp_avg"].mul_(0.5)


def replace(opt, directory):
    p = params_of(opt)[0]
    opt.state[p]["exp_avg"] = opt.state[p]["exp_avg"] * 0.5


def step(opt, directory):
    for p in params_of(opt):
        p.grad = torch.full_like(p, 0.25)
    opt.step()


def write(opt, directory):
    for p in params_of(opt):
        p.mul_(0.5)


def save(opt, directory):
    opt.synchronize()
    if engine_of(opt).durable:
        opt.save(directory / "snapshot")


ACTS = {
    "construct": construct,
    "state": lambda opt, _: [{**opt.state[p]} for p in params_of(opt)],
    "state_dict": lambda opt, _: opt.state_dict(),
    "load_state_dict": load,
    "loading": load_directly,
    "edit": edit,
    "replace": replace,
    "step": step,
    "write": write,
    "zero_grad": lambda opt, _: opt.zero_grad(),
    "stats": lambda opt, _: opt.stats(),
    "wait": lambda opt, _: opt.wait(),
    "save": save,
}


def run(act, mode, devices, directory, **options):
    """Act twice in a training, in this mode: before the first step, and between steps. Returns what it has come to."""
    torch.manual_seed(0)
    directory.mkdir()
    params = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(300).bfloat16())]
    opt = CSDAdam(params, lr=1e-2, devices=place(devices, directory / "csd"), tile_size=1024, **options)
    for number in range(4):
        if number == 2 or (number == 0 and act in (ACTS["step"], ACTS["state_dict"], ACTS["zero_grad"])):
            with mode(), torch.no_grad() if act in (edit, load_directly, write) else contextlib.nullcontext():
                act(opt, directory)
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        opt.step()
    with opt:
        return image(opt)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@on_each_device
@pytest.mark.parametrize("act", ACTS)
def test_acts(act, devices, state_dtype, tmp_path):
    """Whatever is done in inference mode has the same bits as outside of it, and its tensors can be used outside."""
    act, options = ACTS[act], {"state_dtype": state_dtype}
    found = {name: run(act, mode, devices, tmp_path / name, **options) for name, mode in MODES.items()}
    assert_same(found["inference"], found["grad"])
    assert_same(found["no_grad"], found["grad"])


@pytest.mark.parametrize("overlap", [None, {}, {"backward": True}], ids=["in step", "forward", "backward"])
@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype, devices, overlap, tmp_path):
    """Gradients that were made in inference mode, in some steps, have the effect that they have in AdamW."""
    if overlap and devices == "ram:":
        pytest.skip("ram: has no second copy of the states, which backward=True needs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8)).to(dtype)
    ours, reference = make_pair([*model.parameters()], place(devices, tmp_path / "csd"), lr=1e-2, tile_size=1024)
    if overlap is not None:
        ours.overlap(model, **overlap)
    for number in range(6):
        model(torch.randn(4, 32).to(dtype)).square().sum().backward()
        with torch.inference_mode(number in (2, 3)):
            made = [p.grad.clone() for p in model.parameters()]
        for p, copy, grad in zip(model.parameters(), params_of(reference), made, strict=True):
            p.grad, copy.grad = grad, grad.float().clone()
        ours.step()
        with torch.inference_mode(number in (2, 3)):
            for grad in made if overlap is None or number in (2, 3) else ():
                grad.zero_()  # the step has used it, or a copy
        ours.zero_grad()
        reference.step()
    with ours:
        assert_matches(ours, reference)


@pytest.mark.parametrize("free", [False, True], ids=["backward", "free"])
def test_a_backward_in_inference_mode(free, tmp_path):
    """Its gradients are inference tensors."""
    options, results = {"free_gradients": True} if free else {"backward": True}, []
    for name, mode in MODES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))
        with CSDAdam(model.parameters(), devices=place("named", tmp_path / name), tile_size=1024) as opt:
            opt.overlap(model, **options)
            for number in range(6):
                loss = model(torch.randn(4, 32)).square().sum()
                with mode() if number > 1 else contextlib.nullcontext():
                    loss.backward()
                opt.step()
                opt.zero_grad()
            results.append(image(opt))
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])


LAYOUTS = {
    "fp32": lambda: torch.randn(40, 30),
    "bf16": lambda: torch.randn(40, 30).bfloat16(),
    "transposed": lambda: torch.randn(30, 40).bfloat16().t(),
    "strided": lambda: torch.randn(40, 60)[:, ::2],
}


@on_each_device
@pytest.mark.parametrize("layout", ["fp32", "bf16", "strided"])
def test_parameters_with_8_bit_states(layout, devices, tmp_path):
    """They have the bits of parameters that were made outside."""
    results = []
    for name, mode in MODES.items():
        torch.manual_seed(0)
        with mode():
            params = [nn.Parameter(LAYOUTS[layout]()), nn.Parameter(torch.randn(7))]
        options = {"lr": 1e-2, "tile_size": 1024, "state_dtype": "8bit"}
        with CSDAdam(params, devices=place(devices, tmp_path / name), **options) as opt:
            for number in range(5):
                if number == 3:
                    with mode(), torch.no_grad():
                        params[0].mul_(0.5)
                for p in params:
                    p.grad = torch.randn(p.shape).to(p.dtype)
                opt.step()
            results.append(image(opt))
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@on_each_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters(layout, devices, inside, tmp_path):
    """Parameters of inference mode are trained as by AdamW, also outside that mode, where AdamW cannot; and what is
    written to them between steps counts, although torch does not count it.
    """
    torch.manual_seed(0)
    with torch.inference_mode():
        params = [nn.Parameter(LAYOUTS[layout]()), nn.Parameter(torch.randn(7))]
    with torch.inference_mode(inside):
        ours, reference = make_pair([{"params": params}], place(devices, tmp_path / "csd"), lr=1e-2, tile_size=1024)
    copies = params_of(reference)
    with torch.inference_mode():
        reference.param_groups[0]["params"] = copies = [nn.Parameter(copy.detach().clone()) for copy in copies]
    for number in range(5):
        if number == 3:
            with torch.inference_mode():
                for p, copy in zip(params, copies, strict=True):
                    copy.copy_(p.mul_(0.5))
        set_grads(ours, reference)
        with torch.inference_mode(inside):
            ours.step()
        with torch.inference_mode():
            reference.step()
    with ours:
        assert_matches(ours, reference)
