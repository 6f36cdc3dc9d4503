"""`state` and `state_dict()` are like torch's: their content, loading, and copies of optimizers."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from support.backends import TILE
from support.beside import (
    SCRATCH,
    assert_close,
    assert_same_weights,
    everything,
    gradients,
    leaf,
    pair_of_models,
    small_model,
    train_beside,
)
from support.comparing import assert_same, params_of
from support.optimizers import ADAGRAD, ADAM, ADAMW, LION, RMSPROP, SGD
from torch.optim import AdamW

from csd_optim import CSDAdam, CSDRuntimeError, CSDValueError

OWN_OPTIONS = {"devices", "grad_dtype", "max_grad_norm", "overwrite", "tile_size"}


# ---- state and state_dict -----------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("states are read on demand")
def test_state_is_plain(devices, amsgrad):
    """Trainers and checkpointers expect a defaultdict of dicts of CPU tensors, not a class of ours."""
    params = [leaf(5), leaf(2, TILE, dtype=torch.bfloat16), leaf(3, dtype=torch.complex64), leaf()]
    optimizer = CSDAdam(params, devices=devices, amsgrad=amsgrad)
    assert optimizer.state_dict()["state"] == {}
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert type(optimizer.state) is defaultdict
    assert set(optimizer.state) == set(params)
    for p, entry in optimizer.state.items():
        assert type(entry) is dict
        extra = {"max_exp_avg_sq"} if amsgrad else set()
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master"} | extra
        assert entry["step"].shape == ()
        for name, value in entry.items():
            assert type(value) is torch.Tensor
            assert not value.requires_grad
            assert value.device.type == "cpu"
            wide = torch.complex64 if p.is_complex() and name != "step" else torch.float32
            assert value.dtype is wide
            assert value.shape == (() if name == "step" else p.shape)


def checkpoint(optimizer, path):
    torch.save(optimizer.state_dict(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(devices, tmp_path, dtype, used):
    model = small_model(dtype)
    start = copy.deepcopy(model.state_dict())
    uninterrupted = CSDAdam(model.parameters(), devices="file:", amsgrad=True)
    for k in range(6):
        gradients(model.parameters(), k)
        uninterrupted.step()
        if k == 2:
            weights = copy.deepcopy(model.state_dict())
            saved = checkpoint(uninterrupted, tmp_path / "saved.pt")

    resumed = small_model(dtype)
    resumed.load_state_dict(start)
    optimizer = CSDAdam(resumed.parameters(), devices=devices, amsgrad=True)
    if used:
        gradients(resumed.parameters(), 99)
        optimizer.step()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for k in range(3, 6):
        gradients(resumed.parameters(), k)
        optimizer.step()
    assert_same(everything(optimizer), everything(uninterrupted))


def test_weights_may_be_loaded_after_the_state(devices, tmp_path):
    model, resumed = small_model(torch.bfloat16), small_model(torch.bfloat16)
    uninterrupted = CSDAdam(model.parameters(), devices="file:")
    optimizer = CSDAdam(resumed.parameters(), devices=devices)
    for k in range(3):
        gradients(model.parameters(), k)
        uninterrupted.step()
    optimizer.load_state_dict(checkpoint(uninterrupted, tmp_path / "saved.pt"))
    resumed.load_state_dict(model.state_dict())
    for m, o in ((model, uninterrupted), (resumed, optimizer)):
        gradients(m.parameters(), 3)
        o.step()
    assert_same(everything(optimizer), everything(uninterrupted))


@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_a_checkpoint_of_adamw_loads(devices, used):
    model, ours, twin, reference = pair_of_models(devices)
    train_beside(AdamW(model.parameters()), reference, 3)  # the same first steps for both models
    if used:
        weights = copy.deepcopy(model.state_dict())
        gradients(model.parameters(), 99)
        ours.step()
        model.load_state_dict(weights)
    ours.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.state[p]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[p][name], reference.state[q][name])
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_adamw_loads_a_checkpoint_of_ours(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 3)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        q.data.copy_(p)
    reference.load_state_dict(copy.deepcopy(ours.state_dict()))  # load_state_dict() does not copy
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_fp32_states_are_not_cast_under_16_bit_parameters(devices):
    model, twin = small_model(torch.bfloat16), small_model()
    reference = AdamW(twin.parameters())
    gradients(twin.parameters(), 0)
    reference.step()
    optimizer = CSDAdam(model.parameters(), devices=devices)
    optimizer.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        state, expected = optimizer.state[p], reference.state[q]
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert not torch.equal(expected["exp_avg"], expected["exp_avg"].bfloat16().float())
        assert torch.equal(state["master"], p.detach().float())  # a checkpoint of AdamW has no masters


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_16_bit_states_widen(devices):
    """A checkpoint of AdamW on bf16 parameters has bf16 moments."""
    model, twin = small_model(torch.bfloat16), small_model(torch.bfloat16)
    reference = AdamW(twin.parameters())
    gradients(twin.parameters(), 0)
    reference.step()
    optimizer = CSDAdam(model.parameters(), devices=devices)
    optimizer.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"].float())


def test_load_state_dict_leaves_its_argument_alone(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    saved = reference.state_dict()
    before, groups = copy.deepcopy(saved), copy.deepcopy(saved["param_groups"])
    ours.load_state_dict(saved)
    train_beside(ours, AdamW([leaf(1)]), 2)
    assert saved["param_groups"] == groups
    assert saved["state"].keys() == before["state"].keys()
    for k, entry in saved["state"].items():
        assert entry.keys() == before["state"][k].keys()
        assert_same(list(entry.values()), list(before["state"][k].values()))


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_step_may_be_a_number_in_a_checkpoint(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(AdamW([p.detach().clone() for p in params_of(ours)]), reference, 4)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        p.data.copy_(q)
    saved = copy.deepcopy(reference.state_dict())
    for entry in saved["state"].values():
        entry["step"] = 4
    ours.load_state_dict(saved)
    train_beside(ours, reference, 2, start=4)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 6


def test_loading_its_own_state_dict_changes_nothing(devices):
    """Accelerate does this with each optimizer it prepares."""
    for used in (False, True):
        p = leaf(TILE + 1, dtype=torch.bfloat16)
        optimizer = CSDAdam([p], devices=devices, overwrite=True)
        if used:
            gradients([p], 0)
            optimizer.step()
        before = everything(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        assert_same(everything(optimizer), before)
        gradients([p], 1)
        optimizer.step()
        assert optimizer.state[p]["step"] == 1 + used
        optimizer.close()


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_a_checkpoint_of_part_of_the_parameters_loads(devices):
    """Parameters that never had a gradient have no entry, and start with new states."""
    _, ours, _, reference = pair_of_models(devices)
    gradients(params_of(reference), 0)
    params_of(reference)[1].grad = None
    reference.step()
    train_beside(ours, AdamW([leaf(1)]), 2)  # loading discards these states
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        p.data = q.detach().clone()
    ours.load_state_dict(reference.state_dict())
    train_beside(ours, reference, 2, start=1)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [3, 2, 3, 3]
    assert_same_weights(ours, reference)


def test_a_checkpoint_of_other_shapes_is_refused_before_anything_is_touched(devices):
    p, q = leaf(5), leaf(6)
    optimizer = CSDAdam([p], devices=devices)
    source = AdamW([q], lr=9.0)
    for o, t in ((optimizer, p), (source, q)):
        gradients([t], 0)
        o.step()
    before = everything(optimizer)
    with pytest.raises(CSDValueError, match="exp_avg"):
        optimizer.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert_same(everything(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize(
    ("of", "other", "missing"),
    [
        (ADAMW, SGD, "betas"),
        (ADAM, ADAGRAD, "betas"),
        (SGD, ADAMW, "momentum"),
        (ADAGRAD, RMSPROP, "lr_decay"),
        (RMSPROP, ADAM, "alpha"),
        (LION, SGD, "betas"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_optimizer_is_refused_before_anything_is_touched(tmp_path, of, other, missing):
    """torch loads it, and fails in the next step; a store would have kept its groups, and could not be resumed."""
    p = leaf(5)
    theirs = other.reference([leaf(5)])
    gradients(params_of(theirs), 0)
    theirs.step()
    ours = of.ours([p], devices=tmp_path)
    gradients([p], 1)
    ours.step()
    before = everything(ours)
    message = f"of another optimizer: its group 0 has no {missing}, which {type(ours).__name__} needs"
    with pytest.raises(CSDValueError, match=message):
        ours.load_state_dict(theirs.state_dict())
    assert_same(everything(ours), before)
    ours.step()
    ours.close()
    with of.ours([p], devices=tmp_path, resume=True) as ours:
        assert ours.committed_step == 2


def test_checkpoints_of_other_lions_load():
    """They come from implementations without `maximize`."""
    p, q = leaf(5), leaf(5)
    theirs, ours = LION.reference([p]), LION.ours([q], devices="ram:")
    gradients([p], 0)
    theirs.step()
    state_dict = theirs.state_dict()
    del state_dict["param_groups"][0]["maximize"]
    with torch.no_grad():
        q.copy_(p)
    ours.load_state_dict(state_dict)
    for optimizer, of in ((theirs, p), (ours, q)):
        gradients([of], 1)
        optimizer.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_a_checkpoint_turns_amsgrad_on_or_off(devices, amsgrad):
    model = small_model()
    twin = copy.deepcopy(model)
    ours = CSDAdam(model.parameters(), devices=devices, amsgrad=not amsgrad)
    reference = AdamW(twin.parameters(), amsgrad=amsgrad)
    train_beside(ours, reference, 3)
    model.load_state_dict(twin.state_dict())
    ours.load_state_dict(reference.state_dict())
    assert ours.param_groups[0]["amsgrad"] == amsgrad
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_an_edit_of_the_state_in_place_counts(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        for p in params_of(optimizer):
            optimizer.state[p]["exp_avg"].zero_()
            optimizer.state[p]["exp_avg_sq"].mul_(0.5)
            optimizer.state[p]["step"].fill_(7)
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 9


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_replaced_entries_are_adopted(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        for p in params_of(optimizer):
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.25)
            optimizer.state[p] = {**optimizer.state[p], "exp_avg_sq": torch.ones_like(p)}
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert_close(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        assert_close(ours.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_state_can_be_assigned(devices, used):
    _, ours, _, reference = pair_of_models(devices)
    if used:
        train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        optimizer.state = defaultdict(
            dict,
            {
                p: {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
                for p in params_of(optimizer)
            },
        )
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 7


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_cleared_state_starts_anew(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        optimizer.state.clear()
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 2


@pytest.mark.skipif(
    not hasattr(torch.optim, "swap_in_optimizer_params_and_state"), reason="this torch cannot swap parameters in"
)
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_parameters_and_state_swapped_in_for_a_while(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    before = everything(ours)
    other, theirs = ({str(i): p.detach().clone() for i, p in enumerate(params_of(o))} for o in (ours, reference))
    for optimizer, params in ((ours, other), (reference, theirs)):
        saved = copy.deepcopy(optimizer.state_dict())
        with torch.optim.swap_in_optimizer_params_and_state(optimizer, params, saved):
            gradients(params.values(), 2)
            optimizer.step()
    for name, p in other.items():
        assert_close(p, theirs[name])
    assert_same(everything(ours), before)
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)


# ---- Copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
def test_a_copy_goes_its_own_way(make_copy, devices, used):
    params = [leaf(TILE + 1, dtype=torch.bfloat16), leaf(7)]
    optimizer = CSDAdam(params, devices=devices, lr=0.1, max_grad_norm=5.0, tile_size=TILE)
    if used:
        gradients(params, 0)
        optimizer.step()
    other = make_copy(optimizer)
    before = everything(optimizer)
    assert_same(everything(other), before)
    gradients(params_of(other), 1)
    other.step()
    assert_same(everything(optimizer), before)
    gradients(params, 1)
    optimizer.step()
    assert_same(everything(other), everything(optimizer))


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_on_named_devices_is_not_copied(tmp_path, make_copy):
    p = leaf(3)
    optimizer = CSDAdam([p], devices=str(tmp_path / "csd"))
    with pytest.raises(CSDRuntimeError, match="state_dict"):
        make_copy(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_public_attributes_survive_a_copy():
    optimizer = CSDAdam([leaf(3)], devices="ram:", grad_dtype=torch.float16, max_grad_norm=1.0)
    other = copy.deepcopy(optimizer)
    public = [name for name in vars(optimizer) if not name.startswith("_")]
    assert {"devices", "grad_dtype", "max_grad_norm", "defaults", "param_groups"} <= set(public)
    assert {name for name in vars(other) if not name.startswith("_")} == set(public)
    for name in set(public) - {"param_groups"}:
        assert getattr(other, name) == getattr(optimizer, name)
    assert other._step_supports_amp_scaling
