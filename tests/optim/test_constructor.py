"""Constructor arguments, checked like torch's and with torch's messages; and options of parameter groups."""

import copy
import inspect
import pickle
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.backends import TILE
from support.beside import (
    assert_same_weights,
    everything,
    gradients,
    leaf,
    pair_of_models,
    small_model,
    train_beside,
)
from support.comparing import assert_same, params_of
from support.optimizers import ADAGRAD, ADAM, ADAMW, LION, PAIRS, RMSPROP, SGD
from torch.optim import AdamW

from csd_optim import CSDSGD, CSDAdagrad, CSDAdam, CSDAdamL2, CSDLion, CSDTypeError, CSDValueError, CSDWarning

OWN_OPTIONS = {"devices", "grad_dtype", "max_grad_norm", "overwrite", "tile_size"}


# ---- Constructor ----------------------------------------------------------------


@pytest.mark.parametrize("of", [ADAMW, ADAM, SGD, ADAGRAD, RMSPROP, LION], ids=str)
def test_signature_is_torchs_then_ours(of):
    theirs = list(inspect.signature(of.reference.__init__).parameters.values())
    ours = list(inspect.signature(of.ours.__init__).parameters.values())
    for p, q in zip(ours, theirs, strict=False):
        assert (p.name, p.kind) == (q.name, q.kind)
        assert p.default == q.default or (of is ADAMW and p.name == "weight_decay")  # None: AdamW's or Adam's
    assert {p.name for p in ours[len(theirs) :]} >= OWN_OPTIONS
    for p in ours[len(theirs) :]:
        assert p.kind is p.KEYWORD_ONLY
        assert p.default is not p.empty


def test_the_class_of_torchs_adam_is_a_spelling_of_its_switch():
    """The same rule, also for groups, in a pickle, and in a store that the other one made."""
    runs = []
    for make in (CSDAdamL2, partial(CSDAdam, decoupled_weight_decay=False)):
        p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
        opt = make([{"params": [p], "weight_decay": 0.5}, {"params": [q]}], devices="ram:")
        opt = pickle.loads(pickle.dumps(opt))
        for _ in range(3):
            for parameter in (held := params_of(opt)):
                parameter.grad = torch.arange(5.0)
            opt.step()
        assert [group["weight_decay"] for group in opt.param_groups] == [0.5, 0]
        runs.append([p.detach() for p in held])
    assert_same(*runs)


@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_looks_like_torchs(of):
    ours, reference = of.ours([leaf(3)], devices="ram:"), of.reference([leaf(3)])
    assert isinstance(ours, of.reference) or of is LION
    assert isinstance(ours, torch.optim.Optimizer)
    assert ours.defaults == reference.defaults
    assert ours.param_groups[0].keys() == reference.param_groups[0].keys()
    assert repr(reference).removeprefix(type(reference).__name__) in repr(ours)
    assert "ram:" in repr(ours)


@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_a_copy_and_a_pickle_go_on_as_the_original(of):
    p = leaf(5)
    ours = of.ours([p], devices="ram:", lr=0.1, weight_decay=0.2)
    gradients([p], 0)
    ours.step()
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for optimizer in (ours, *copies):
        gradients(params_of(optimizer), 1)
        optimizer.step()
    for other in copies:
        assert type(other) is type(ours)
        assert_same(everything(other), everything(ours))


def test_a_rule_that_no_card_has_a_kernel_for_is_refused(monkeypatch):
    """A rule for which there is no kernel at all. For kernels that an xclbin lacks see smartssd/test_card_rules.py."""
    monkeypatch.setattr(CSDLion, "_rule", replace(LION.rule, name="newest"))
    with pytest.raises(CSDValueError, match=r"xrt:0 has no kernel for newest, the rule of a parameter group.*lion"):
        CSDLion([leaf(3)], devices=["ram:", "xrt:0"])


def test_adagrads_sums_are_made_with_the_first_step():
    """torch allocates them in its constructor, all at once, in memory."""
    p = leaf(5)
    ours = CSDAdagrad([p], devices="ram:", initial_accumulator_value=0.5)
    assert not ours.state
    with pytest.raises(RuntimeError, match="share_memory"):
        ours.share_memory()
    p.grad = torch.zeros_like(p)
    ours.step()
    assert torch.equal(ours.state[p]["sum"], torch.full((5,), 0.5))


@pytest.mark.parametrize(
    "kwargs",
    [{"lr": -1}, {"lr": torch.tensor([1.0, 2.0])}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"weight_decay": -1}],
    ids=str,
)
def test_bad_arguments_of_lion(kwargs):
    with pytest.raises(CSDValueError) as raised:
        CSDLion([leaf(3)], devices="ram:", **kwargs)
    with pytest.raises(ValueError, match=re.escape(str(raised.value))):  # torch's message
        AdamW([leaf(3)], **kwargs)


def test_a_group_decays_as_the_optimizer_does_or_as_it_says():
    with pytest.raises(CSDValueError, match="Invalid decoupled_weight_decay of a group: False"):
        CSDAdam([{"params": [leaf(3)], "decoupled_weight_decay": False}], devices="ram:")
    ours = CSDAdam([leaf(3)], devices="ram:", decoupled_weight_decay=False)
    for reference in (torch.optim.AdamW([leaf(3)]), torch.optim.Adam([leaf(3)])):
        ours.load_state_dict(reference.state_dict())
        assert ours.param_groups[0]["decoupled_weight_decay"] == isinstance(reference, AdamW)


def test_works_with_no_argument_but_parameters():
    p = leaf(5)
    optimizer = CSDAdam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_devices_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_DEVICES", "ram:, file:")
    assert "[ram:, file:]" in repr(CSDAdam([leaf(5)]))


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16"])
def test_grad_dtype_by_name(name):
    """As configuration files have it: they know no dtypes."""
    p = torch.nn.Parameter(torch.ones(9))
    p.grad = torch.rand(9)
    with CSDAdam([p], devices="ram:", grad_dtype=name) as optimizer:
        optimizer.step()
        assert optimizer.grad_dtype is torch.bfloat16
        assert optimizer.stats()["push_bytes"] == 2 * 9


# ---- Options from the environment ---------------------------------------------------


def test_options_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(
        "CSD_OPTIM_OPTIONS", "state_dtype=8bit, grad_dtype=bf16,topk=0.01,error_feedback=false,max_grad_norm=2.5"
    )
    with CSDAdam([leaf(5)]) as optimizer:
        assert (optimizer.state_dtype, optimizer.grad_dtype) == ("8bit", torch.bfloat16)
        assert (optimizer.topk, optimizer.error_feedback, optimizer.max_grad_norm) == (0.01, False, 2.5)


def test_a_run_is_resumed_by_the_environment_alone(monkeypatch, tmp_path):
    def run_a_step():
        p = torch.nn.Parameter(torch.ones(9))
        with CSDAdam([p], devices=tmp_path / "csd") as optimizer:
            p.grad = torch.ones(9)
            optimizer.step()
            return p

    monkeypatch.setenv("CSD_OPTIM_OPTIONS", "resume=1")
    with pytest.warns(CSDWarning, match="there is no store"):
        run_a_step()
    p = run_a_step()
    reference = torch.nn.Parameter(torch.ones(9))
    adamw = AdamW([reference])
    for _ in range(2):
        reference.grad = torch.ones(9)
        adamw.step()
    torch.testing.assert_close(p, reference)


def test_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_OPTIONS", "state_dtype=8bit,sharded=1")
    with (
        pytest.warns(
            CSDWarning, match="state_dtype=8bit in CSD_OPTIM_OPTIONS has no effect: .*='fp32' counts"
        ) as caught,
        CSDAdam([leaf(5)], state_dtype="fp32", sharded=True) as optimizer,
    ):
        assert optimizer.state_dtype == "fp32"
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "stat_dtype=8bit",
            "Invalid CSD_OPTIM_OPTIONS: there is no option 'stat_dtype'; it takes state_dtype, grad_dtype",
        ),
        ("devices=ram:", "there is no option 'devices'; .*CSD_OPTIM_DEVICES names the devices"),
        ("state_dtype", "Invalid CSD_OPTIM_OPTIONS: 'state_dtype'; write name=value"),
        ("topk=", "Invalid CSD_OPTIM_OPTIONS: 'topk='; write name=value"),
        ("topk=0.1,topk=0.2", "Invalid CSD_OPTIM_OPTIONS: 'topk' is in it twice"),
        ("state_dtype=4bit", "Invalid state_dtype in CSD_OPTIM_OPTIONS: '4bit'; it is 'fp32' or '8bit'"),
        ("grad_dtype=int8", "Invalid grad_dtype in CSD_OPTIM_OPTIONS: 'int8'"),
        ("topk=much", "Invalid topk in CSD_OPTIM_OPTIONS: 'much'; it is a number"),
        ("topk=2", "Invalid topk in CSD_OPTIM_OPTIONS: 2.0; it is the share"),
        ("max_grad_norm=nan", "Invalid max_grad_norm in CSD_OPTIM_OPTIONS: nan"),
        ("topk_warmup=1.5", "Invalid topk_warmup in CSD_OPTIM_OPTIONS: '1.5'; it is a number of steps"),
        ("tile_size=0", "Invalid tile_size in CSD_OPTIM_OPTIONS: 0"),
        ("resume=yes", "Invalid resume in CSD_OPTIM_OPTIONS: 'yes'; it is 1 or 0"),
        ("resume=1", r"exclude each other \(CSD_OPTIM_OPTIONS is 'resume=1'\)"),
        ("resume=0,resume_from=old", "resume_from needs resume=True.*CSD_OPTIM_OPTIONS"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch, tmp_path, text, error):
    """They are refused before anything is touched, also where arguments would win."""
    monkeypatch.setenv("CSD_OPTIM_OPTIONS", text)
    with pytest.raises(CSDValueError, match=error):
        CSDAdam([leaf(5)], devices=tmp_path / "csd", overwrite=True)
    assert not (tmp_path / "csd").exists()


def test_a_state_dtype_in_the_environment_that_a_rule_cannot_have(monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_OPTIONS", "state_dtype=8bit")
    wrong = "Invalid state_dtype in CSD_OPTIM_OPTIONS: '8bit' has no code for the exp_avg of lion"
    with pytest.raises(CSDValueError, match=wrong):
        CSDLion([leaf(5)])


def test_commands_measure_what_their_arguments_say(monkeypatch, run):
    monkeypatch.setenv("CSD_OPTIM_OPTIONS", "resume=1,topk=0.5,max_grad_norm=1")
    code, out, err = run("plan", "--params", "1e6", "--optimizer", "CSDLion")
    assert code == 0, err
    assert out


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lr": -1},
        {"lr": float("nan")},
        {"lr": torch.tensor(-0.1)},
        {"lr": torch.tensor([1e-3, 1e-3])},
        {"lr": torch.tensor(1e-3), "foreach": True},
        {"betas": (1.0, 0.9)},
        {"betas": (-0.1, 0.9)},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9, torch.tensor(0.9))},
        {"betas": (torch.tensor([0.9, 0.8]), torch.tensor(0.9))},
        {"eps": -1e-8},
        {"weight_decay": -0.5},
        {"fused": True, "foreach": True},
    ],
    ids=str,
)
def test_bad_arguments_in_torchs_words(kwargs):
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        AdamW([leaf(3)], **kwargs)
    with pytest.raises(theirs.type) as ours:
        CSDAdam([leaf(3)], devices="ram:", **kwargs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("bad", ["tensor", "empty", "set", "not tensors", "non-leaf", "twice", "half named"])
def test_bad_params_in_torchs_words(bad):
    def params():
        p = leaf(3)
        return {
            "tensor": p,
            "empty": [],
            "set": [{"params": {p}}],
            "not tensors": [1.0],
            "non-leaf": [p * 2],
            "twice": [{"params": [p]}, {"params": [p]}],
            "half named": [("a", p), leaf(2)],
        }[bad]

    with pytest.raises((TypeError, ValueError)) as theirs:
        AdamW(params())
    with pytest.raises(theirs.type) as ours:
        CSDAdam(params(), devices="ram:")
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"grad_dtype": torch.float64}, "Invalid grad_dtype: torch.float64"),
        ({"grad_dtype": "float64"}, "Invalid grad_dtype: 'float64'; it is one of torch.float32"),
        ({"grad_dtype": 16}, "Invalid grad_dtype: 16"),
        ({"max_grad_norm": 0.0}, "Invalid max_grad_norm: 0.0"),
        ({"max_grad_norm": float("nan")}, "Invalid max_grad_norm: nan"),
        ({"tile_size": 0}, "Invalid tile_size: 0"),
        ({"tile_size": 1.5}, "Invalid tile_size: 1.5"),
        ({"devices": []}, "Invalid devices: []"),
        ({"devices": "tape:"}, "Invalid device: 'tape:'"),
    ],
    ids=str,
)
def test_bad_options_of_ours(kwargs, error):
    with pytest.raises(CSDValueError) as raised:
        CSDAdam([leaf(3)], **kwargs)
    assert isinstance(raised.value, ValueError)
    assert error in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_other_dtypes_are_refused_before_anything_is_touched(tmp_path, dtype):
    directory = tmp_path / "csd"
    with pytest.raises(CSDTypeError, match=f"{dtype}.*0.1.*3") as raised:
        CSDAdam([leaf(3), leaf(3).detach().to(dtype).requires_grad_()], devices=str(directory))
    assert isinstance(raised.value, TypeError)
    assert not directory.exists()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float64, torch.float8_e4m3fn])
def test_frozen_parameters_may_be_anything(devices, dtype):
    """Like the frozen parameters of a quantized model with LoRA."""
    frozen = torch.nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    lazy = torch.nn.LazyLinear(2).weight
    p = leaf(3)
    optimizer = CSDAdam([frozen, p, lazy], devices=devices)
    p.grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state) == [p]


def test_a_frozen_parameter_that_is_trained_after_all_is_looked_at(devices):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    optimizer = CSDAdam([p], devices=devices)
    p.requires_grad_().grad = torch.ones_like(p)
    with pytest.raises(CSDTypeError, match="float64"):
        optimizer.step()


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_capturable_and_differentiable_are_refused(tmp_path, name):
    with pytest.raises(RuntimeError, match=name):
        CSDAdam([leaf(3)], devices=str(tmp_path / "csd"), **{name: True})
    with pytest.raises(RuntimeError, match=name):
        CSDAdam([{"params": [leaf(3)], name: True}], devices=str(tmp_path / "csd"))
    assert not (tmp_path / "csd").exists()


def test_sparse_gradients_are_refused_before_anything_is_touched(devices):
    dense, sparse = leaf(5), leaf(4, 2)
    optimizer = CSDAdam([dense, sparse], devices=devices)
    before = dense.detach().clone()
    dense.grad = torch.ones_like(dense)
    sparse.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="CSDAdam does not support sparse gradients, please consider SparseAdam ins"):
        optimizer.step()
    assert torch.equal(dense.detach(), before)
    with pytest.raises(RuntimeError, match="CSDSGD does not support sparse gradients, please consider SGD, Adagrad or"):
        CSDSGD([sparse], devices="ram:").step()
    sparse.grad = sparse.grad.to_dense()
    optimizer.step()
    assert optimizer.state[dense]["step"] == 1


def test_a_gradient_of_another_shape_is_refused_before_anything_is_touched(devices):
    p, q = leaf(5), leaf(5)
    optimizer = CSDAdam([p, q], devices=devices)
    train = [torch.ones(5), torch.ones(5)]
    p.grad, q.grad = train
    optimizer.step()
    before = everything(optimizer)
    q.grad.data = torch.ones(7)
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()
    assert_same(everything(optimizer), before)


# ---- Parameter groups -------------------------------------------------------------


@pytest.mark.parametrize("how", ["list", "tensor", "generator", "amsgrad"])
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_add_param_group_while_training(devices, how):
    first, later = [leaf(5), leaf(2 * TILE)], [leaf(17), leaf(3, 3)]
    if how == "tensor":
        later = later[:1]
    copies = [[p.detach().clone().requires_grad_() for p in params] for params in (first, later)]
    ours, reference = CSDAdam(first, devices=devices), AdamW(copies[0])
    train_beside(ours, reference, 3)

    def group(params):
        if how == "amsgrad":
            return {"params": params, "amsgrad": True}
        return {"params": {"list": params, "tensor": params[0], "generator": (p for p in params)}[how], "lr": 0.1}

    ours.add_param_group(group(later))
    reference.add_param_group(group(copies[1]))
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [6, 6] + [3] * len(later)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        ours.add_param_group({"params": first})


def test_named_parameters(devices):
    model = small_model()
    named = list(model.named_parameters())
    optimizer = CSDAdam(named[:2], devices=devices)
    optimizer.add_param_group({"params": iter(named[2:])})
    gradients(model.parameters(), 0)
    optimizer.step()
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]
    assert optimizer.state_dict()["param_groups"][1]["param_names"] == ["2.weight", "2.bias"]
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_frozen_parameters_take_no_part(devices):
    model, ours, twin, reference = pair_of_models(devices)
    for m in (model, twin):
        m[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    x = torch.randn(8, 6)
    for m, optimizer in ((model, ours), (twin, reference)):
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in ours.state
    assert set(ours.state) == set(model.parameters()) - {model[0].weight}


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_thawed_parameters_join(devices):
    _, ours, _, reference = pair_of_models(devices)
    for optimizer in (ours, reference):
        gradients(params_of(optimizer), 0)
        params_of(optimizer)[0].grad = None
        optimizer.step()
    train_beside(ours, reference, 2, start=1)
    assert_same_weights(ours, reference)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [2, 3, 3, 3]


def test_a_removed_parameter_stays_as_it_is(devices):
    p, q = leaf(5), leaf(6)
    optimizer = CSDAdam([{"params": [p]}, {"params": [q]}], devices=devices)
    gradients([p, q], 0)
    optimizer.step()
    del optimizer.param_groups[0]
    before = p.detach().clone()
    gradients([p, q], 1)
    optimizer.step()
    assert torch.equal(p.detach(), before)
    assert optimizer.state[q]["step"] == 2
