"""state_dtype="8bit", seen by users. Single codes: tests/compression/test_codec.py; stores: tests/store/test_codes.py.

The suites that compare CSDAdam with itself also run unchanged on 8-bit states: pytest --state-dtype 8bit.
"""

import contextlib
import copy
import gc
import os
import pickle
import shutil
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from support import far as far_away
from support.backends import BACKENDS, device_strings
from support.beside import everything
from support.comparing import assert_same
from support.forked import printed
from support.inside import idle_engine_of, state_map_of
from support.regression import assert_solved_alike, regression
from support.training import give_gradients, train
from torch.optim import Adam, AdamW

from csd_optim import CSDAdam, CSDOSError, CSDStoreError, CSDTypeError, CSDValueError, CSDWarning
from csd_optim.engine.engine import Engine
from csd_optim.engine.tiles import Pieces
from csd_optim.params import state_map
from csd_optim.params.grad_source import GradSource
from csd_optim.store.format import FILE_NAME

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEYS = ["step", "exp_avg", "exp_avg_sq", "master"]
TILE = 4096


def parameters(*dtypes, seed=0):
    """Parameters over several tiles; some lengths are multiples of the group size 64, others are not."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(90, 70), (64,), (3,), (), (0, 4), (5000,)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for dtype in dtypes for shape in shapes
    ]


def adam(params, devices="ram:", **options):
    return CSDAdam(params, **{"lr": 1e-2, "devices": devices, "tile_size": TILE, "state_dtype": "8bit", **options})


# ---- the same bits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"maximize": True, "weight_decay": 0.3, "betas": (0.0, 0.95)},
        {"decoupled_weight_decay": False, "weight_decay": 0.3},
        {"topk": 0.05},
        {"max_grad_norm": 0.5},
        {"grad_dtype": torch.bfloat16},
    ],
    ids=lambda o: ",".join(o) or "plain",
)
def test_every_back_end_gives_the_same_bits(options, tmp_path):
    found = []
    for backend in BACKENDS:
        (tmp_path / backend).mkdir()
        with adam(parameters(*DTYPES, torch.complex64), device_strings(backend, tmp_path / backend), **options) as opt:
            found.append(everything(train(opt, 5)))
    for other in found[1:]:
        assert_same(found[0], other)


def test_without_decay_adam_is_adamw():
    found = [train(adam(parameters(*DTYPES), decoupled_weight_decay=d, weight_decay=0.0), 3) for d in (True, False)]
    assert_same(*map(everything, found))


@pytest.mark.parametrize("tile_size", [8192, 1 << 16, None])
def test_bits_do_not_depend_on_the_tiles(tile_size):
    """Nor on which parameters are neighbours in a tile, nor on when a parameter joins."""
    whole = adam(parameters(torch.bfloat16))
    cut = adam(parameters(torch.bfloat16)[::-1], ["file:", "file:"], tile_size=tile_size)
    train(whole, 1)
    give_gradients(whole.param_groups[0]["params"], 0)
    for p, q in zip(whole.param_groups[0]["params"], cut.param_groups[0]["params"][::-1], strict=True):
        q.grad = p.grad
    cut.step()
    for p, q in zip(whole.param_groups[0]["params"], cut.param_groups[0]["params"][::-1], strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(whole.state[p][key], cut.state[q][key]) for key in KEYS)


def test_a_parameter_without_gradient_keeps_every_bit():
    params = parameters(torch.bfloat16)
    opt = train(adam(params, "file:"), 3)
    before = [params[0].detach().clone(), *(opt.state[params[0]][key].clone() for key in KEYS)]
    for step in range(3):
        give_gradients(params, step)
        params[0].grad = None
        opt.step()
    assert_same(before, [params[0].detach(), *(opt.state[params[0]][key] for key in KEYS)])


@pytest.mark.parametrize("devices", ["file:", ["ram:", "file:", "file:"]], ids=str)
def test_groups_mix(devices):
    """8-bit and fp32 states in one optimizer: each group gets the same bits as in an optimizer of its own."""
    ours, alone = parameters(torch.bfloat16, torch.float32), parameters(torch.bfloat16, torch.float32)
    half = len(ours) // 2
    mixed = adam([{"params": ours[:half]}, {"params": ours[half:], "state_dtype": "fp32"}], devices)
    apart = [adam(alone[:half]), adam(alone[half:], state_dtype="fp32")]
    for step in range(3):
        give_gradients(ours, step)
        for p, q in zip(ours, alone, strict=True):
            q.grad = p.grad
        for opt in (mixed, *apart):
            opt.step()
    assert_same(ours, alone)
    assert not torch.equal(mixed.state[ours[0]]["exp_avg_sq"], mixed.state[ours[0]]["exp_avg_sq"] * 0)


def in_other_orders(dtype):
    """Parameters that are not contiguous, and contiguous ones with the same elements in the same memory order."""
    by_rows, image, wide = (p.detach() for p in parameters(dtype)[:1] + parameters(dtype, seed=1)[:2])
    image = image.reshape(9, 10, 10, 7)
    wide = torch.stack([wide, wide], 1).repeat(30, 1)
    pairs = [
        (by_rows.clone().t(), by_rows),
        (image.clone().permute(0, 3, 1, 2), image),
        (wide[:, 0], wide[:, 0].clone()),
    ]
    return [torch.nn.Parameter(p) for p, _ in pairs], [torch.nn.Parameter(p) for _, p in pairs]


def as_contiguous(t):
    """A parameter from `in_other_orders`, or its state, permuted to the order of its contiguous counterpart."""
    return t.permute(0, 2, 3, 1) if t.dim() == 4 else t.t()


def train_in_other_orders(opt, other, steps, first=0):
    ours, theirs = (o.param_groups[0]["params"] for o in (opt, other))
    for step in range(first, first + steps):
        give_gradients(theirs, step)
        for p, q in zip(ours, theirs, strict=True):
            p.grad = q.grad.permute(0, 3, 1, 2).contiguous() if q.dim() == 4 else q.grad.t().contiguous()
        opt.step()
        other.step()


def assert_same_in_other_orders(opt, other):
    for p, q in zip(*(o.param_groups[0]["params"] for o in (opt, other)), strict=True):
        assert torch.equal(as_contiguous(p), q)
        assert {*opt.state[p]} == {*other.state[q]}
        for key, value in other.state[q].items():
            assert torch.equal(as_contiguous(opt.state[p][key]) if value.dim() else opt.state[p][key], value), key


@pytest.mark.here("writes by .data")
@pytest.mark.parametrize("options", [{}, {"grad_dtype": torch.bfloat16}, {"topk": 0.1}], ids=lambda o: "".join(o))
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_that_are_not_contiguous(dtype, options, tmp_path, monkeypatch):
    """Transposed, channels last, with gaps: the same bits as contiguous ones, through edits, failures and resume."""
    ours, theirs = in_other_orders(dtype)
    opt, other = adam(ours, [str(tmp_path)], **options), adam(theirs, **options)
    train_in_other_orders(opt, other, 2)
    assert_same_in_other_orders(opt, other)
    for p, q in zip(ours, theirs, strict=True):
        for o, t in ((opt, p), (other, q)):
            o.state[t]["exp_avg"].mul_(0.5)
            o.state[t]["exp_avg_sq"] = o.state[t]["exp_avg_sq"] * 2
    if "topk" not in options:  # the failed step would leave other residuals, and so another selection
        fail_a_step(opt, ours, 5, monkeypatch)
    for step in (2, 3):
        train_in_other_orders(opt, other, 1, step)
        for p in (*ours, *theirs):
            p.data.mul_(0.5)  # torch does not count this write
    train_in_other_orders(opt, other, 1, 4)
    assert_same_in_other_orders(opt, other)
    opt.close()
    opt = adam(in_other_orders(dtype)[0], [str(tmp_path)], resume=True, **options)
    assert_same_in_other_orders(opt, other)
    train_in_other_orders(opt, other, 1, 5)
    assert_same_in_other_orders(opt, other)
    opt.close()


def by_a_closure(opt, step):
    params = [p for group in opt.param_groups for p in group["params"]]
    assert opt.step(lambda: give_gradients(params, step) or 7) == 7


def with_a_scaler(opt, step):
    """First a step with an overflow, which is skipped; then a step with a loss scale that is a power of two."""
    params = [p for group in opt.param_groups for p in group["params"]]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3)
    for overflow in (True, False):
        scaler.scale(torch.ones(()))
        give_gradients(params, step)
        for p in params:
            p.grad = (p.grad * scaler.get_scale()).to(p.dtype)
        params[0].grad.view(-1)[5] *= float("inf") if overflow else 1
        scaler.step(opt)
        scaler.update()
        assert opt.stats()["skipped"] == overflow


def downwards(opt, step):
    params = [p for group in opt.param_groups for p in group["params"]]
    give_gradients(params, step)
    for p in params:
        p.grad.neg_()
    opt.step()


@pytest.mark.parametrize(
    ("how", "options"),
    [(by_a_closure, {}), (with_a_scaler, {}), (downwards, {"maximize": True})],
    ids=["closure", "scaler", "maximize"],
)
def test_a_step_by_another_way_has_the_same_bits(how, options):
    opt, other = adam(parameters(*DTYPES), "file:", **options), adam(parameters(*DTYPES))
    for step in range(3):
        how(opt, step)
    assert_same(everything(opt), everything(train(other, 3)))


def test_a_group_that_joins_late():
    """It joins while edited states of the other groups are still to be written; bits as in an optimizer of its own."""
    ours, alone = parameters(torch.bfloat16, torch.float32), parameters(torch.bfloat16, torch.float32)
    half = len(ours) // 2
    opt, apart = adam(ours[:half], ["file:", "ram:"]), [adam(alone[:half]), adam(alone[half:], amsgrad=True)]
    train(opt, 2)
    train(apart[0], 2)
    opt.state[ours[0]]["exp_avg"].mul_(0.5)
    apart[0].state[alone[0]]["exp_avg"].mul_(0.5)
    opt.add_param_group({"params": ours[half:], "amsgrad": True})
    for step in range(2):
        give_gradients(ours, step)
        for p, q in zip(ours, alone, strict=True):
            q.grad = p.grad
        for o in (opt, *apart):
            o.step()
    assert_same(ours, alone)
    for p, q, o in zip(ours, alone, [apart[0]] * half + [apart[1]] * half, strict=True):
        assert all(torch.equal(opt.state[p][key], o.state[q][key]) for key in o.state[q])


# ---- fewer bytes --------------------------------------------------------------------------------


@pytest.fixture
def far(monkeypatch):
    """A context that simulates a GPU: the engine cannot reach parameters that have a GradSource.

    With a `grad_dtype` other than their own, all parameters have one.
    """

    @contextlib.contextmanager
    def here():
        with monkeypatch.context() as patched:
            patched.setattr(GradSource, "is_far", True)
            yield

    return here


ANOTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.bfloat16}
ANOTHER[torch.complex64] = torch.bfloat16


@pytest.mark.at_hand("devices that do not reach parameters read them from the drive")
@pytest.mark.parametrize("how", ["in reach", "grad_dtype", "far"])
@pytest.mark.parametrize(
    ("dtype", "amsgrad", "read", "written"),
    [
        (torch.bfloat16, False, 3.016, 5.016),
        (torch.float16, True, 4.031, 6.031),
        (torch.float32, False, 2.016, 6.016),
    ],
)
def test_bytes_of_a_step(dtype, amsgrad, read, written, how, far):
    """A step does not read the parameter from the drive: it is in host memory, or in the image."""
    n, tile = 1 << 20, 1 << 18
    p = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
    grad_dtype = None if how == "in reach" else ANOTHER[dtype]
    with (
        far() if how == "far" else contextlib.nullcontext(),
        adam([p], "file:?cache=off", tile_size=tile, amsgrad=amsgrad, grad_dtype=grad_dtype) as opt,
    ):
        for _ in range(2):
            p.grad = torch.ones_like(p)
            opt.step()
        stats = opt.stats()
        assert stats["flash_read_bytes"] / n == pytest.approx(read, abs=0.001)
        assert stats["flash_write_bytes"] / n == pytest.approx(written, abs=0.001)


RESIDENT = """
import sys
import torch
from csd_optim import CSDAdam

def anonymous():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

dtype, n = getattr(torch, sys.argv[1]), 16 << 20
p = torch.nn.Parameter(torch.ones(n, dtype=dtype))
p.grad = torch.ones_like(p)
with CSDAdam([torch.nn.Parameter(torch.ones(64, dtype=dtype))], devices="ram:", state_dtype="8bit") as opt:
    opt.param_groups[0]["params"][0].grad = torch.ones(64, dtype=dtype)
    opt.step()
    opt.add_param_group({"params": [p]})
    before = anonymous()
    opt.step()
    print((anonymous() - before) / n)
"""


@pytest.mark.at_hand("such devices keep the parameters, too")
@pytest.mark.parametrize(
    ("dtype", "each"),
    [("bfloat16", 3.078), ("float32", 2.016), pytest.param("float16", 3.078, marks=pytest.mark.soak)],
)
def test_memory_of_states_in_memory(dtype, each):
    """States in memory do not store the parameter a second time."""
    assert float(printed(RESIDENT, dtype)) == pytest.approx(each, abs=0.2)


def test_null_moves_parameters_only():
    params = parameters(torch.bfloat16)
    before = [p.detach().clone() for p in params]
    with train(adam(params, "null:"), 2):
        assert_same(before, [p.detach() for p in params])


# ---- what `state` shows --------------------------------------------------------------------------


def test_state_is_decoded_when_somebody_looks():
    params = parameters(torch.bfloat16)
    opt = train(adam(params, "file:"), 2)
    entry = opt.state[params[0]]
    assert isinstance(entry, dict)
    assert [*entry] == KEYS
    assert len(entry) == 4
    assert "exp_avg" in entry
    assert "residual" not in entry
    assert entry.pop("residual", 7) == 7
    with pytest.raises(KeyError, match="residual"):
        entry.pop("residual")
    assert idle_engine_of(opt).decoded._states == {}  # nothing was decoded yet
    master = entry["master"]
    assert master.dtype is torch.float32
    assert master.shape == params[0].shape
    assert torch.equal(master.bfloat16(), params[0])
    assert {**entry}["master"] is master
    assert entry.get("exp_avg") is opt.state[params[0]]["exp_avg"]
    assert [name for name, _ in entry.items()] == KEYS
    for made in (copy.copy(entry), copy.deepcopy(entry), pickle.loads(pickle.dumps(entry)), entry.copy(), entry | {}):
        assert not isinstance(made, type(entry))
        assert torch.equal(made["exp_avg"], entry["exp_avg"])
    assert [*idle_engine_of(opt).decoded._states] == [0]


def test_what_was_decoded_is_let_go_of():
    """The next step frees it. A tensor that the user keeps still holds the values of the step before."""
    params = parameters(torch.bfloat16)
    opt = train(adam(params, "file:"), 2)
    kept, gone = opt.state[params[0]]["exp_avg"], weakref.ref(opt.state[params[0]]["exp_avg_sq"])
    before = kept.clone()
    train(opt, 1, 2)
    gc.collect()
    assert gone() is None
    assert torch.equal(kept, before)
    assert not torch.equal(opt.state[params[0]]["exp_avg"], before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_only_looks_changes_nothing(backend, dtype, tmp_path):
    twins = [parameters(dtype), parameters(dtype)]
    (tmp_path / "a").mkdir()
    looked_at, other = adam(twins[0], device_strings(backend, tmp_path / "a")), adam(twins[1])
    for step in range(4):
        train(looked_at, 1, step)
        train(other, 1, step)
        for p in twins[0]:
            opt_state = looked_at.state[p]
            opt_state["exp_avg"].add_(0)  # torch counts this write, so the step starts from this tensor
    assert_same(everything(looked_at), everything(other))
    looked_at.close()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
def test_edits_count(backend, key, tmp_path):
    """Edits to powers of two, which 8 bits hold exactly."""
    params = parameters(torch.bfloat16, torch.float32)
    opt = train(adam(params, device_strings(backend, tmp_path)), 2)
    p = params[0]
    edited = {"exp_avg": 0.25, "exp_avg_sq": 4.0, "master": 0.5}[key]
    opt.state[p][key].fill_(edited)
    give_gradients(params, 7)
    for q in params:
        q.grad.zero_()
    opt.step()
    decay = {"exp_avg": 0.9, "exp_avg_sq": 0.999, "master": 1 - 1e-4}[key]
    found = opt.state[p][key]
    tolerance = {"exp_avg": 0.07, "exp_avg_sq": 0.13, "master": 0.2}[key]  # the step has moved the master
    torch.testing.assert_close(found.mean(), torch.tensor(edited * decay), rtol=tolerance, atol=0)
    opt.close()


def test_replaced_tensors_count():
    params = parameters(torch.bfloat16)
    opt = train(adam(params, "file:"), 2)
    opt.state[params[0]]["exp_avg"] = torch.full(params[0].shape, 0.015)
    give_gradients(params, 3)
    for p in params:
        p.grad.zero_()
    opt.step()
    torch.testing.assert_close(opt.state[params[0]]["exp_avg"].mean(), torch.tensor(0.0135), rtol=0.05, atol=0)
    assert [*opt.state[params[0]]] == KEYS


@pytest.mark.parametrize("then", ["step", "close"])
@pytest.mark.parametrize("keys", [["exp_avg"], ["exp_avg_sq"], ["exp_avg", "exp_avg_sq"]], ids="+".join)
def test_an_edit_is_as_good_as_a_checkpoint(keys, then, tmp_path):
    """The same bits whether states are written in place, replaced or loaded; the other states keep their bits."""
    made = [train(adam(parameters(*DTYPES, torch.complex64), where), 2) for where in ("ram:", "file:", str(tmp_path))]
    loaded = adam([torch.nn.Parameter(p.detach().clone()) for p in made[0].param_groups[0]["params"]])
    state = made[0].state_dict()
    for entry in state["state"].values():
        for key in keys:
            entry[key] = entry[key] * 0.3
    loaded.load_state_dict(state)
    for opt in made:
        for entry in opt.state.values():
            for key in keys:
                if opt is made[0]:
                    entry[key] = entry[key] * 0.3
                else:
                    entry[key].mul_(0.3)
    if then == "close":
        made[2].close()
        made[2:] = [adam(parameters(*DTYPES, torch.complex64, seed=1), str(tmp_path), resume=True)]
        assert_same(everything(made[2]), everything(loaded))
    wanted = everything(train(loaded, 2, 2))
    for opt in made:
        assert_same(everything(train(opt, 2, 2)), wanted)
    made[2].close()


def test_a_forked_child_has_no_states():
    """Access raises in the child, without waiting for threads that it lacks; the parent's states stay intact."""
    params = parameters(torch.bfloat16)
    opt = train(adam(params, "file:"), 2)
    opt.state[params[0]]["exp_avg"].mul_(0.5)
    entry, child = opt.state[params[1]], os.fork()
    if child == 0:
        said = ""
        try:
            entry["exp_avg"]
        except RuntimeError as e:
            said = str(e)
        os._exit(0 if "belongs to process" in said else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other = train(adam(parameters(torch.bfloat16)), 2)
    other.state[other.param_groups[0]["params"][0]]["exp_avg"].mul_(0.5)
    assert_same(everything(train(opt, 1, 2)), everything(train(other, 1, 2)))


# ---- parameters that are set from outside ---------------------------------------------------------


UNCOUNTED = pytest.mark.at_hand("devices that do not reach parameters find only writes that torch counts")


def by_data(p):
    p.data[3] = 0.125


def by_numpy(p):
    np.from_dlpack(p.detach().view(torch.int16))[3] = torch.tensor(0.125, dtype=p.dtype).view(torch.int16).item()


def counted(p):
    with torch.no_grad():
        p[3] = 0.125


@pytest.mark.parametrize("cache", ["off", "1MiB"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [pytest.param(by_data, marks=UNCOUNTED), pytest.param(by_numpy, marks=UNCOUNTED), counted]
)
def test_a_parameter_that_is_set_is_the_master(how, dtype, cache):
    """However it is written: a step compares the parameter with its codes. Elsewhere masters keep their bits."""
    twins = [torch.nn.Parameter(torch.linspace(-1, 1, 9000).to(dtype)) for _ in range(2)]
    opt, other = (train(adam([p], f"file:?cache={cache}"), 2) for p in twins)
    how(twins[0])
    for o, p in zip((opt, other), twins, strict=True):
        p.grad = torch.zeros_like(p)
        o.param_groups[0].update(lr=0.0)
        o.step()
    ours, theirs = opt.state[twins[0]]["master"], other.state[twins[1]]["master"]
    assert ours[3] == 0.125
    assert torch.equal(ours[4:], theirs[4:])
    assert (ours[4:] != twins[0][4:].float()).any()


def of_the_same_groups(elems, numel):
    """Mask of the elements in all groups of 64 that contain one of `elems`."""
    groups = torch.zeros(-(-numel // 64), dtype=torch.bool)
    groups[torch.tensor(elems) // 64] = True
    return groups.repeat_interleave(64)[:numel]


@pytest.mark.at_hand("such devices keep the parameters, too")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [by_data, by_numpy, counted])
def test_in_memory_the_group_around_is_its_16_bits(how, dtype):
    """`ram:` keeps no copy of a parameter, only a checksum per group of 64; other groups' masters keep their bits."""
    if how is by_numpy and dtype is torch.float32:
        pytest.skip("writes 16 bits")
    p = torch.nn.Parameter(torch.linspace(-1, 1, 9030).to(dtype))
    opt = train(adam([p]), 2)
    before = opt.state[p]["master"].clone()
    how(p)
    with torch.no_grad():
        p[9029] = 0.0  # the last group has 6 elements
    expected = torch.where(of_the_same_groups([3, 9029], 9030), p.detach().float(), before)
    train(opt, 0)
    p.grad = torch.zeros_like(p)
    opt.param_groups[0].update(lr=0.0)
    opt.step()
    assert torch.equal(opt.state[p]["master"], expected)
    assert torch.equal(p, expected.to(dtype))
    if dtype is not torch.float32:
        assert (expected != p.float()).sum() > 8000


@pytest.mark.at_hand("such devices keep the parameters, too")
def test_what_was_set_is_shown_at_once_in_memory():
    """This includes zeros and infinities, whose codes have no correction."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 200).bfloat16())
    opt = train(adam([p]), 2)
    p.data[:100:2] = 0.0
    p.data[1:100:2] = torch.inf
    assert torch.equal(opt.state[p]["master"][:128], p.detach()[:128].float())
    assert not torch.equal(opt.state[p]["master"][128:], p.detach()[128:].float())


def is_section(opt, p):
    """Return whether a parameter is its own section."""
    return state_map_of(opt).param_states[id(p)].is_section


def in_place(devices):
    """Return whether these devices make parameters their own sections."""
    return devices == "ram:" and not far_away.assumed()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("then", ["gradient", "none", "set"])
def test_masters_that_the_parameters_are_not(dtype, then):
    """Even in memory, a parameter without gradients is not written: until the first, its master is stored apart."""
    found = []
    for devices in ("ram:", "file:"):
        params = parameters(dtype)
        opt = train(adam(params, devices), 2)
        state = copy.deepcopy(opt.state_dict())
        state["state"][0]["master"] += 1
        before = params[0].detach().clone()
        opt.load_state_dict(state)
        assert torch.equal(params[0], before)
        if in_place(devices):
            assert not is_section(opt, params[0])
            assert is_section(opt, params[1])
        torch.testing.assert_close(opt.state[params[0]]["master"], state["state"][0]["master"], rtol=2**-15, atol=1e-6)
        if then == "set":
            with torch.no_grad():
                params[0].copy_(state["state"][0]["master"])
        give_gradients(params, 2)
        if then == "none":
            params[0].grad = None
        opt.step()
        if in_place(devices):
            assert is_section(opt, params[0]) == (then != "none")
        found.append(everything(train(opt, 2, 3)))
        assert is_section(opt, params[0]) == in_place(devices)
    assert_same(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_that_gets_another_order_in_memory(dtype):
    """Then it cannot serve as its own section. Nothing is lost then, nor when its old order is back."""
    found = []
    for devices in ("ram:", "file:"):
        params = parameters(dtype)
        opt = train(adam(params, devices), 2)
        for in_order in (False, True):
            p = params[0]
            p.data = p.data.contiguous() if in_order else p.data.t().contiguous().t()
            train(opt, 2, 3)
        assert is_section(opt, params[0]) == in_place(devices)
        found.append(everything(opt))
    assert_same(*found)


def test_another_memory_of_the_same_parameter():
    """`p.data = ...` with the same values does not count as a write."""
    params, twins = parameters(torch.bfloat16), parameters(torch.bfloat16)
    opt, other = train(adam(params), 2), train(adam(twins), 2)
    for p in params:
        p.data = p.data.clone()
    assert_same(everything(train(opt, 2, 2)), everything(train(other, 2, 2)))
    assert all(is_section(opt, p) == in_place("ram:") for p in params)


# ---- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dict_comes_back_exactly(dtype):
    params = parameters(dtype)
    opt = train(adam(params, "file:"), 3)
    saved = opt.state_dict()
    assert all(type(entry) is dict for entry in saved["state"].values())
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = adam(twins)
    other.load_state_dict(saved)
    assert_same(everything(opt), everything(other))
    assert_same(everything(train(opt, 2, 3)), everything(train(other, 2, 3)))


def test_adamw_takes_our_checkpoints_and_we_its():
    params = parameters(torch.float32)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = [torch.nn.Parameter(p.detach().clone()) for p in params]
    oracle, opt = AdamW(theirs, lr=1e-2), adam(ours)
    train(oracle, 20)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    opt.load_state_dict(oracle.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        root = oracle.state[q]["exp_avg_sq"].sqrt()
        torch.testing.assert_close(opt.state[p]["exp_avg_sq"].sqrt(), root, rtol=0.035, atol=1e-6)
        error = (opt.state[p]["exp_avg"] - oracle.state[q]["exp_avg"]).abs()
        assert (error <= 0.04 * oracle.state[q]["exp_avg"].abs() + root / 200).all()
        assert torch.equal(opt.state[p]["master"], q)
    oracle.load_state_dict(opt.state_dict())
    train(oracle, 1)


@pytest.mark.parametrize("devices", ["ram:", "file:"])
def test_loading_takes_the_memory_of_a_few_parameters(devices, monkeypatch):
    """Without commits, states are loaded 64 MB at a time; in this test, less."""
    monkeypatch.setattr(state_map, "STATES_WAITING", 100_000)
    params = parameters(*DTYPES)
    saved = train(adam(params), 2).state_dict()
    other = adam([torch.nn.Parameter(p.detach().clone()) for p in params], devices)
    decoded, most = idle_engine_of(other).decoded, []
    replace = decoded.replace

    def counts(param, states):
        replace(param, states)
        most.append(sum(state.nbytes for states in decoded._states.values() for state in states.values()))

    monkeypatch.setattr(decoded, "replace", counts)
    other.load_state_dict(saved)
    largest = 12 * max(p.numel() for p in params)
    assert largest <= max(most) <= 100_000 + largest < 12 * sum(p.numel() for p in params)
    want = [p.detach() for p in params]
    assert_same(
        [other.state[p]["exp_avg"] for p in other.param_groups[0]["params"]],
        [entry["exp_avg"] for entry in saved["state"].values()],
    )
    assert_same([p.detach() for p in other.param_groups[0]["params"]], want)


def test_what_8_bits_cannot_hold_is_said_once():
    p = torch.nn.Parameter(torch.ones(100))
    opt = adam([p])
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.full((100,), 20.0), "exp_avg_sq": torch.ones(100)}
    entry["exp_avg"][50:] = 1.0
    groups = opt.state_dict()["param_groups"]
    with pytest.warns(CSDWarning, match="of 15.5 times the root of exp_avg_sq at most: 50 larger ones") as said:
        opt.load_state_dict({"state": {0: entry}, "param_groups": groups})
    assert len(said) == 1
    assert opt.state[p]["exp_avg"].tolist() == [15.5] * 50 + [1.0] * 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_goes_on_from_a_store(dtype, tmp_path):
    with adam(parameters(dtype), [str(tmp_path)]) as opt:
        train(opt, 3)
        before = everything(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = adam(parameters(dtype, seed=1), [str(tmp_path)], resume=True)
    assert_same(everything(resumed), before)
    with adam(parameters(dtype)) as other:
        assert_same(everything(train(resumed, 2, 3)), everything(train(other, 5)))
    resumed.close()


# ---- refused ---------------------------------------------------------------------------------------


def test_state_dtypes_that_there_are_not():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(CSDValueError, match=r"Invalid state_dtype: 'int8'; it is 'fp32' or '8bit'"):
        CSDAdam([p], devices="ram:", state_dtype="int8")
    with pytest.raises(CSDValueError, match="Invalid state_dtype of group 0: 8"):
        CSDAdam([{"params": [p], "state_dtype": 8}], devices="ram:")


@pytest.mark.parametrize(("made", "asked"), [("8bit", "fp32"), ("fp32", "8bit")])
def test_a_store_keeps_its_state_dtype(made, asked, tmp_path):
    with adam(parameters(torch.bfloat16), [str(tmp_path)], state_dtype=made) as opt:
        train(opt, 1)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(CSDStoreError, match=f"parameter 0.0 are {made} there, and state_dtype says {asked} here"):
        adam(parameters(torch.bfloat16), [str(tmp_path)], state_dtype=asked, resume=True)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_model_that_is_converted_is_refused():
    """The parameter's 16 bits are part of its state."""
    params = [torch.nn.Parameter(torch.ones(100))]
    opt = train(adam(params), 1)
    params[0].data = params[0].data.bfloat16()
    params[0].grad = None
    params[0].grad = torch.ones(100, dtype=torch.bfloat16)
    with pytest.raises(CSDTypeError, match=r"0\.0 is torch\.bfloat16 now; its 8-bit .* torch\.float32"):
        opt.step()


# ---- steps that are skipped or fail ------------------------------------------------------------------


def test_an_overflow_is_skipped():
    params = parameters(torch.float16)
    opt = train(adam(params, "file:"), 2)
    before = everything(opt)
    opt.found_inf, opt.grad_scale = torch.tensor(1.0), torch.tensor(1024.0)
    give_gradients(params, 2)
    opt.step()
    assert_same(everything(opt), before)


def fail_a_step(opt, params, number, monkeypatch):
    """Makes a step fail and be undone after its new parameters have been written."""
    finish = idle_engine_of(opt).finish

    def fails(keep=True, **_):
        finish(keep=False)
        if keep:
            raise CSDOSError(5, "Input/output error")

    give_gradients(params, number)
    with monkeypatch.context() as patched:
        patched.setattr(idle_engine_of(opt), "finish", fails)
        with pytest.raises(CSDOSError):
            opt.step()


def test_a_step_that_fails_changes_nothing(monkeypatch):
    params = parameters(torch.bfloat16, torch.float32)
    opt, twin = train(adam(params, ["file:", "file:"]), 2), parameters(torch.bfloat16, torch.float32)
    other = train(adam(twin), 2)
    for o, ps in ((opt, params), (other, twin)):
        o.state[ps[0]]["exp_avg"].fill_(0.5)
    before = [p.detach().clone() for p in params]
    fail_a_step(opt, params, 2, monkeypatch)
    assert_same(before, [p.detach() for p in params])
    assert_same(everything(train(opt, 2, 2)), everything(train(other, 2, 2)))


# ---- as AdamW trains ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        (AdamW, {"betas": (0.9, 0.999)}),
        (AdamW, {"betas": (0.9, 0.95)}),
        (partial(Adam, decoupled_weight_decay=False), {"weight_decay": 1e-3}),
    ],
    ids=["adamw", "0.95", "adam"],
)
def test_it_goes_where_torchs_goes(reference, options):
    """A least-squares regression that AdamW solves: ours reaches the same loss, with weights close to AdamW's."""
    options = {"weight_decay": 0.0, **options}
    ours = partial(adam, decoupled_weight_decay=reference is AdamW, **options)
    assert_solved_alike(regression(partial(reference, **options), 2e-2), regression(ours, 2e-2))


# ---- states that move, steps that fail -----------------------------------------------------------------


def test_amsgrad_that_is_turned_on_in_state_keeps_the_other_states():
    p = parameters(torch.bfloat16)[0]
    opt = train(adam([p], "file:"), 2)
    before = {key: opt.state[p][key].clone() for key in KEYS}
    opt.param_groups[0]["amsgrad"] = True
    opt.state[p]["max_exp_avg_sq"] = opt.state[p]["exp_avg_sq"].clone()
    p.grad = None
    opt.step()
    assert all(torch.equal(opt.state[p][key], before[key]) for key in KEYS)
    assert torch.equal(opt.state[p]["max_exp_avg_sq"], before["exp_avg_sq"])


def test_an_entry_of_another_parameter_can_be_assigned():
    p, q = parameters(torch.bfloat16)[0], parameters(torch.bfloat16, seed=1)[0]
    opt = train(adam([p, q], "file:"), 2)
    want = opt.state[p]["exp_avg"].clone()
    opt.state[q] = opt.state[p]
    p.grad = q.grad = None
    opt.step()
    assert torch.equal(opt.state[q]["exp_avg"], want)


def test_who_joined_in_a_step_that_failed_keeps_its_values(tmp_path, monkeypatch):
    """It has no gradient in the next step: its master is the parameter, not the zeros of a new store."""
    for devices in (f"file:{tmp_path}", "ram:"):
        params = parameters(torch.bfloat16)
        opt = adam(params, devices)
        with monkeypatch.context() as patched:

            def fails(*_, **__):
                raise CSDOSError(5, "Input/output error")

            patched.setattr(Engine, "begin", fails)
            give_gradients(params, 0)
            with pytest.raises(CSDOSError):
                opt.step()
        params[0].grad = None
        opt.step()
        assert torch.equal(opt.state[params[0]]["master"], params[0].float())
        opt.close()
    again = parameters(torch.bfloat16, seed=1)
    with adam(again, f"file:{tmp_path}", resume=True):
        assert torch.equal(again[0], params[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("devices", ["file:", ["file:", "file:"]])
def test_a_step_that_fails_leaves_parameters_as_they_were_set(dtype, devices, monkeypatch):
    params = parameters(dtype)
    opt = train(adam(params, devices), 2)
    with torch.no_grad():
        for p in params[::2]:
            p.fill_(3)
    before = [p.detach().clone() for p in params]
    fail_a_step(opt, params, 2, monkeypatch)
    assert_same(before, [p.detach() for p in params])
    opt.param_groups[0]["lr"] = 0.0
    train(opt, 1, 3)
    assert_same(before, [p.detach() for p in params])
    assert all((opt.state[p]["master"].to(dtype) == 3).all() for p in params[::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_of_another_checkpoint_survive_the_first_step(dtype):
    """Including masters close to a tie: if first rounded to 24 bits, they would round to another parameter."""
    p = torch.nn.Parameter(torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(dtype))
    theirs = train(adam([p], state_dtype="fp32"), 2)
    master = theirs.state[p]["master"].clone()
    q = torch.nn.Parameter(p.detach().clone())
    ours = adam([q], weight_decay=0.0)
    ours.load_state_dict(theirs.state_dict())
    ours.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(ours, 1)
    assert torch.equal(q, p)
    torch.testing.assert_close(ours.state[q]["master"], master, rtol=2**-14.5, atol=2**-30)


def test_a_parameter_set_to_infinity_is_infinite():
    p = torch.nn.Parameter(torch.full((64,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16))
    opt = train(adam([p], lr=0.0), 1)
    opt.state[p]["master"] = torch.full((64,), torch.finfo(torch.bfloat16).max * (1 + 2**-9 - 2**-16))
    with torch.no_grad():
        p.fill_(torch.inf)
    train(opt, 1)
    assert (opt.state[p]["master"] == torch.inf).all()


def test_resume_does_not_keep_what_it_decodes(tmp_path):
    with train(adam(parameters(torch.bfloat16), f"file:{tmp_path}"), 1):
        pass
    with adam(parameters(torch.bfloat16), f"file:{tmp_path}", resume=True) as opt:
        assert not idle_engine_of(opt).decoded.in_memory


@pytest.mark.here("replaces the committer")
@pytest.mark.parametrize("how", ["load", "assign"])
def test_a_crash_finds_what_is_committed_beside_fp32_states(how, tmp_path, monkeypatch):
    """Changes of 8-bit and fp32 states that are about to be committed: after a crash, all are there, or none."""

    def groups(params):
        half = len(params) // 2
        return [{"params": params[:half]}, {"params": params[half:], "state_dtype": "fp32"}]

    params, crashes = parameters(torch.bfloat16, torch.bfloat16), []
    opt = train(adam(groups(params), f"file:{tmp_path / 'store'}"), 2)
    opt.synchronize()
    before = everything(opt)
    loaded = copy.deepcopy(opt.state_dict())
    for entry in loaded["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 2
    opt.state[params[0]]["exp_avg"].mul_(0.5)  # this edit is to be committed, too
    committer = idle_engine_of(opt).committer
    commit = committer.commit

    def crashes_before(*args, **options):
        crashes.append(tmp_path / f"crash{len(crashes)}")
        shutil.copytree(tmp_path / "store", crashes[-1])
        commit(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(committer, "commit", crashes_before)
        if how == "load":
            opt.load_state_dict(loaded)
        else:
            for p, entry in zip(params, loaded["state"].values(), strict=True):
                opt.state[p] = entry
                p.grad = None
            opt.step()
    opt.close()
    assert crashes
    for crash in crashes:
        with adam(groups(parameters(torch.bfloat16, torch.bfloat16, seed=1)), f"file:{crash}", resume=True) as again:
            assert_same(everything(again), before)
            train(again, 1)  # reads every tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_parameters_were_set_to_belongs_to_the_step(dtype, tmp_path, monkeypatch):
    """If the step fails, no commit has the value. The parameter is one that the engine cannot access in place."""
    p = torch.nn.Parameter(torch.randn(90, 70).t().to(dtype))
    opt = train(adam([p], f"file:{tmp_path}"), 2)
    committed = p.detach().clone()
    with torch.no_grad():
        p.fill_(3)
    with monkeypatch.context() as patched:

        def fails(*_, **__):
            raise CSDOSError(5, "Input/output error")

        patched.setattr(Engine, "begin", fails)
        give_gradients([p], 2)
        with pytest.raises(CSDOSError):
            opt.step()
    opt.close()
    q = torch.nn.Parameter(torch.zeros(90, 70).t().to(dtype))
    with adam([q], f"file:{tmp_path}", resume=True):
        assert torch.equal(q, committed)


@UNCOUNTED
@pytest.mark.parametrize("devices", ["ram:", "file:?cache=off", "file:?cache=1GB"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_parameters_that_images_have(dtype, devices, far, monkeypatch):
    """As on a GPU: the same bits as in host memory, even where a parameter is written without torch counting it."""
    found = []
    for there in (far, contextlib.nullcontext):
        params = parameters(dtype)
        opt = adam(params, devices, grad_dtype=ANOTHER[dtype])
        with there():
            train(opt, 2)
            for p in params:
                p.data.view(-1)[:1] = 0.125
            train(opt, 1, 2)
            assert all(p.numel() == 0 or (p.flatten()[0] - 0.125).abs() < 0.05 for p in params)
            with torch.no_grad():
                params[0][2] = 3
            opt.state[params[1]]["exp_avg"].mul_(0.5)
            if devices != "ram:":
                fail_a_step(opt, params, 3, monkeypatch)
                assert (params[0][2] == 3).all()
            train(opt, 1, 4)
            assert ((params[0][2] - 3).abs() < 0.1).all()
            give_gradients(params, 5)
            params[0].grad = None
            opt.step()
            params[0].data[3] = 0.5
            found.append(everything(train(opt, 1, 6)))
    assert_same(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("then", ["step", "flush"])
def test_an_edited_master_waits_for_a_gradient(then, dtype, tmp_path):
    """Until it has a gradient, the parameter stays as it is, which does not count as a write from outside."""
    p, q = parameters(dtype)[0], parameters(dtype, seed=1)[0]
    opt = train(adam([p, q], f"file:{tmp_path / 'store'}", lr=0.0), 2)
    before = p.detach().clone()
    opt.state[p]["master"].fill_(2)
    if then == "flush":
        opt.save(tmp_path / "saved")
    else:
        p.grad = None
        opt.step()
    assert torch.equal(p, before)
    assert (opt.state[p]["master"] == 2).all()
    train(opt, 1, 2)
    assert (p == 2).all()
    with torch.no_grad():
        p.fill_(5)
    train(opt, 2, 3)
    assert (p == 5).all()


@UNCOUNTED
def test_a_parameter_set_without_a_gradient_can_be_set_again():
    """Even by a write that torch does not count: the step compares parameter and master."""
    p, q = parameters(torch.bfloat16)[0], parameters(torch.bfloat16, seed=1)[0]
    opt = train(adam([p, q], "file:", lr=0.0), 2)
    with torch.no_grad():
        p.fill_(3)
    p.grad = None
    opt.step()
    p.data.fill_(5)
    train(opt, 1, 2)
    assert (p == 5).all()


def test_reading_states_of_many_parameters_looks_at_the_places_of_each_once(monkeypatch):
    """Reading one parameter's states looked through the places of all."""
    looked, of = [], Pieces.of
    monkeypatch.setattr(Pieces, "of", lambda self, param: looked.append((id(self), param)) or of(self, param))
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(50)]
    with CSDAdam(params, devices="ram:", state_dtype="8bit") as opt:
        for p in params:
            p.grad = torch.ones(8)
        opt.step()
        looked.clear()
        assert all(opt.state[p]["exp_avg"].any() for p in params)
        assert [param for _, param in looked] == [*range(50)]
        assert len({table for table, _ in looked}) == 1  # made once for all


@pytest.mark.parametrize(("large", "least", "most"), [(1e4, 0.98, 1.02), (1e6, 0.82, 0.9)])
def test_one_huge_gradient_slows_the_others_that_share_its_exponent(large, least, most):
    """As docs/8-bit-states.md says. Other groups of 64 elements are not concerned."""
    moved = []
    for state_dtype in ("fp32", "8bit"):
        p = torch.nn.Parameter(torch.zeros(128))
        with CSDAdam([p], devices="ram:", state_dtype=state_dtype) as opt:
            for step in range(20):
                p.grad = torch.ones(128)
                p.grad[0] *= large if step == 5 else 1
                opt.step()
        moved.append((p[1:64].mean().item(), p[64:].mean().item()))
    (right, _), (beside, elsewhere) = moved
    assert least < beside / right < most
    assert 0.98 < elsewhere / right < 1.02
