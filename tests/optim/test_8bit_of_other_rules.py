"""state_dtype="8bit" with rules other than AdamW's. Single codes: tests/compression/test_other_codecs.py."""

import re
from functools import partial

import pytest
import torch
from support.backends import BACKENDS, device_strings
from support.beside import everything
from support.comparing import assert_same, params_of
from support.optimizers import ADAGRAD, CODED, LION, MUON_CODES, RMSPROP, SGD, rules
from support.regression import assert_solved_alike, regression
from support.training import give_gradients, train

from csd_optim import CSDRMSprop, CSDStoreError, CSDValueError, bindings
from csd_optim.checkpoint.export import export_safetensors
from csd_optim.checkpoint.importing import import_store
from csd_optim.checkpoint.verify import verify
from csd_optim.store import format as store_format
from csd_optim.store.format import read_contents

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILE = 4096
OF = pytest.mark.parametrize("of", rules([*CODED, MUON_CODES]))


def parameters(*dtypes, seed=0):
    """Parameters over several tiles; some lengths are multiples of the group size 64, others are not."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(90, 70), (64, 3), (40, 129)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for dtype in dtypes for shape in shapes
    ]


def made(of, params, devices="ram:", **options):
    return of.ours(params, **{"lr": 1e-2, "devices": devices, "tile_size": TILE, **of.kwargs, **options})


def state_of(of):
    """The name of the state that has codes."""
    return of.rule.sections[1]


# ---- the same bits --------------------------------------------------------------------------


@OF
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"grad_dtype": torch.bfloat16}], ids=",".join)
def test_every_back_end_gives_the_same_bits(of, options, tmp_path):
    found = []
    for backend in BACKENDS:
        (tmp_path / backend).mkdir()
        with made(of, parameters(*DTYPES), device_strings(backend, tmp_path / backend), **options) as opt:
            found.append(everything(train(opt, 5)))
    for other in found[1:]:
        assert_same(found[0], other)


@OF
@pytest.mark.usefixtures("restored")
def test_bits_depend_on_no_instruction_set_thread_or_tile(of):
    found = []
    for i, isa in enumerate(bindings.isas()):
        bindings.isa_use(isa)
        bindings.threads_use(1 + i)
        with made(of, parameters(torch.bfloat16), "file:", tile_size=TILE << i) as opt:
            found.append(everything(train(opt, 4)))
    for other in found[1:]:
        assert_same(found[0], other)


@OF
def test_a_parameter_without_gradient_keeps_every_bit(of):
    params = parameters(torch.bfloat16)
    opt = train(made(of, params, "file:"), 3)
    before = [params[0].detach().clone(), *(t.clone() for t in opt.state[params[0]].values())]
    for step in range(3):
        give_gradients(params, step)
        params[0].grad = None
        opt.step()
    assert_same(before, [params[0].detach(), *opt.state[params[0]].values()])


# ---- what a step moves ----------------------------------------------------------------------


@OF
@pytest.mark.at_hand("devices that do not reach parameters read them from the drive")
@pytest.mark.parametrize(("dtype", "read", "written"), [(torch.bfloat16, 2.016, 4.016), (torch.float32, 1.016, 5.016)])
def test_bytes_of_a_step(of, dtype, read, written):
    n = 1 << 20
    p = torch.nn.Parameter(torch.zeros(1 << 10, n >> 10, dtype=dtype))
    with made(of, [p], "file:?cache=off", tile_size=1 << 18) as opt:
        for _ in range(2):
            p.grad = torch.ones_like(p)
            opt.step()
        stats = opt.stats()
        assert stats["flash_read_bytes"] / n == pytest.approx(read, abs=0.001)
        assert stats["flash_write_bytes"] / n == pytest.approx(written, abs=0.001)


# ---- states that are read, edited, loaded ---------------------------------------------------------


@OF
@pytest.mark.parametrize("dtype", DTYPES)
def test_who_only_looks_changes_nothing(of, backend, dtype, tmp_path):
    twins = [parameters(dtype), parameters(dtype)]
    (tmp_path / "a").mkdir()
    looked_at, other = made(of, twins[0], device_strings(backend, tmp_path / "a")), made(of, twins[1])
    for step in range(4):
        train(looked_at, 1, step)
        train(other, 1, step)
        for p in twins[0]:
            looked_at.state[p][state_of(of)].add_(0)  # torch counts this write, so the step starts from this tensor
    assert_same(everything(looked_at), everything(other))
    looked_at.close()


@OF
@pytest.mark.parametrize("then", ["step", "close"])
def test_an_edit_is_as_good_as_a_checkpoint(of, then, tmp_path):
    """The same bits whether states are written in place, replaced or loaded."""
    opts = [train(made(of, parameters(*DTYPES), where), 2) for where in ("ram:", "file:", str(tmp_path))]
    loaded = made(of, [torch.nn.Parameter(p.detach().clone()) for p in params_of(opts[0])])
    state, key = opts[0].state_dict(), state_of(of)
    for entry in state["state"].values():
        entry[key] = entry[key] * 0.3
    loaded.load_state_dict(state)
    for opt in opts:
        for entry in opt.state.values():
            if opt is opts[0]:
                entry[key] = entry[key] * 0.3
            else:
                entry[key].mul_(0.3)
    if then == "close":
        opts[2].close()
        opts[2:] = [made(of, parameters(*DTYPES, seed=1), str(tmp_path), resume=True)]
        assert_same(everything(opts[2]), everything(loaded))
    wanted = everything(train(loaded, 2, 2))
    for opt in opts:
        assert_same(everything(train(opt, 2, 2)), wanted)
    opts[2].close()


@OF
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dict_comes_back_exactly(of, dtype):
    params = parameters(dtype)
    opt = train(made(of, params, "file:"), 3)
    other = made(of, [torch.nn.Parameter(p.detach().clone()) for p in params])
    other.load_state_dict(opt.state_dict())
    assert_same(everything(opt), everything(other))
    assert_same(everything(train(opt, 2, 3)), everything(train(other, 2, 3)))


@OF
def test_torch_takes_our_checkpoints_and_we_its(of):
    params, key = parameters(torch.float32), state_of(of)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    oracle = train(of.reference(theirs, lr=1e-2, **of.kwargs), 5)
    opt = made(of, [torch.nn.Parameter(p.detach().clone()) for p in theirs])
    opt.load_state_dict(oracle.state_dict())
    for p, q in zip(params_of(opt), theirs, strict=True):
        wanted = oracle.state[q][key]
        torch.testing.assert_close(opt.state[p][key], wanted, rtol=0.07, atol=wanted.abs().max().item() / 100)
        assert torch.equal(opt.state[p]["master"], q)
    oracle.load_state_dict(opt.state_dict())
    train(oracle, 1)


# ---- stores -----------------------------------------------------------------------------------------


@OF
@pytest.mark.here("reads its store")
def test_a_store_says_what_older_versions_cannot_read(of, tmp_path, monkeypatch):
    with made(of, parameters(torch.bfloat16), [str(tmp_path)]) as opt:
        train(opt, 3)
        before = everything(opt)
    manifest = read_contents(tmp_path).manifest
    assert {extent["codec"] for extent in manifest["extents"]} == {of.rule.codec}
    assert {"codec", "codecs"} <= {*manifest["features"]}
    assert not any(verdict.damage for verdict in verify([tmp_path]))
    with made(of, parameters(torch.bfloat16, seed=1), [str(tmp_path)], resume=True) as resumed:
        assert_same(everything(resumed), before)
        other = train(made(of, parameters(torch.bfloat16)), 5)
        assert_same(everything(train(resumed, 2, 3)), everything(other))
    asked = "the states of parameter 0.0 are 8bit there, and state_dtype says fp32 here"
    with pytest.raises(CSDStoreError, match=asked):
        made(of, parameters(torch.bfloat16), [str(tmp_path)], resume=True, state_dtype="fp32")
    monkeypatch.setattr(store_format, "FEATURES", store_format.FEATURES - {"codecs"})
    with pytest.raises(CSDStoreError, match="it has codecs, which this csd_optim does not know: upgrade it"):
        read_contents(tmp_path)


@OF
@pytest.mark.at_hand("imports its store")
@pytest.mark.here("imports its store")
def test_exports_and_imports(of, tmp_path):
    """8-bit states become fp32 exactly, and codes again: the same ones."""
    with made(of, parameters(torch.bfloat16), [str(tmp_path / "a")]) as opt:
        before = everything(train(opt, 3))
    export_safetensors([tmp_path / "a"], tmp_path / "export")
    import_store(tmp_path / "export", [tmp_path / "b"])
    import_store(tmp_path / "a", [tmp_path / "wide"], state_dtype="fp32")
    found = import_store(tmp_path / "wide", [tmp_path / "c"], state_dtype="8bit")
    assert found["clipped"] == 0
    for place, state_dtype in (("b", "8bit"), ("wide", "fp32"), ("c", "8bit")):
        with made(
            of, parameters(torch.bfloat16, seed=1), [str(tmp_path / place)], resume=True, state_dtype=state_dtype
        ) as opt:
            assert_same(everything(opt), before)
            train(opt, 1, 3)


# ---- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "options", "says"),
    [
        (SGD, {"momentum": 0.9}, "no code for the momentum_buffer of sgd: no long training has shown"),
        (SGD, {}, "no code for the momentum_buffer of sgd"),
        (LION, {}, "no code for the exp_avg of lion: the update is a sign"),
        (RMSPROP, {"centered": True}, "no code for the grad_avg of rmsprop: square_avg - grad_avg**2 would become"),
        (RMSPROP, {"momentum": 0.9}, "no code for the momentum_buffer of rmsprop: no long training has shown"),
    ],
    ids=str,
)
def test_states_without_a_code_are_refused_with_the_reason(of, options, says, tmp_path):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(CSDValueError, match=f"Invalid state_dtype.*: '8bit' has {re.escape(says)}.* stay 'fp32'"):
        of.ours([p], devices=tmp_path / "csd", state_dtype="8bit", **options)
    assert not (tmp_path / "csd").exists()
    with pytest.raises(CSDValueError, match=f"of group 0: '8bit' has {re.escape(says)}"):
        of.ours([{"params": [p], "state_dtype": "8bit"}], devices="ram:", **options)


def test_a_checkpoint_with_more_states_is_refused_before_anything_changes():
    p, twin = (torch.nn.Parameter(torch.ones(100)) for _ in range(2))
    with_momentum = train(CSDRMSprop([twin], momentum=0.9, devices="ram:"), 1)
    opt = train(CSDRMSprop([p], devices="ram:", state_dtype="8bit"), 1)
    before = everything(opt)
    with pytest.raises(CSDValueError, match="of group 0: '8bit' has no code for the momentum_buffer of rmsprop"):
        opt.load_state_dict(with_momentum.state_dict())
    assert opt.param_groups[0]["momentum"] == 0
    assert_same(everything(opt), before)
    train(opt, 1, 1)


def test_cards_have_no_kernels_for_these_codes():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(CSDValueError, match="xrt:0 has no kernel for 8bit states of adagrad"):
        ADAGRAD.ours([p], devices=["ram:", "xrt:0"], state_dtype="8bit")


# ---- as the rule trains -------------------------------------------------------------------------------


@OF
def test_it_goes_where_torchs_goes(of):
    """A least-squares regression that torch's optimizer solves: ours reaches its loss, with weights close to its."""
    rate = {"adagrad": 0.5, "rmsprop": 0.02, "muon": 0.1}[of.rule.name]
    ours = regression(partial(of.ours, weight_decay=0.0, devices="ram:"), rate)
    assert_solved_alike(regression(partial(of.reference, weight_decay=0.0), rate), ours)
