"""A store that does not fit or is damaged is refused, with an error that names it, and stays as it was."""

import shutil
import warnings

import pytest
import torch
from support.backends import named_devices, place, reading_all
from support.comparing import assert_same
from support.training import (
    JOIN,
    Training,
    bf16,
    flip,
    groups_of,
    never_stopped,
    parameters,
    stored,
    train,
)

from csd_optim import (
    CSDAdam,
    CSDStoreError,
    CSDValueError,
    CSDWarning,
)

pytestmark = pytest.mark.cards


# ---- what cannot be resumed ----------------------------------------------------------------


@pytest.mark.fp32_states("with 8 bits the warning names a file of the tests, which sets the option")
def test_where_no_store_is_a_new_one_is_begun_and_said_so(tmp_path):
    with pytest.warns(CSDWarning, match="a new one is begun") as caught:
        opt = CSDAdam(parameters((30,)), devices=named_devices(tmp_path, 2), resume=True)
    assert caught[0].filename == __file__
    assert opt.committed_step == 0
    assert opt.user_state == {}
    opt.restore()
    train(opt)
    opt.close()
    with CSDAdam(parameters((30,)), devices=named_devices(tmp_path, 2), resume=True) as opt:
        assert opt.committed_step == 1


def test_devices_that_do_not_belong_together(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        with CSDAdam(parameters((3000,)), devices=named_devices(tmp_path / name, 3)) as opt:
            train(opt)
    a, b = named_devices(tmp_path / "a", 3), named_devices(tmp_path / "b", 3)
    empty = str(tmp_path / "empty")
    before = stored(*a, *b)
    for devices, message in [
        ([*a[:2], empty], "empty"),
        ([*a[:2], b[2]], "another optimizer"),
        (a[:2], "name all 3"),
        (a[:1], "name all 3"),
        ([*a, empty], "empty"),
        (["ram:"], "cannot resume on ram:"),
        ([*a[:2], "file:"], "cannot resume on file:"),
        ("null:", "cannot resume on null:"),
    ]:
        with pytest.raises(CSDStoreError, match=message):
            CSDAdam(parameters((3000,)), devices=devices, resume=True)
    shutil.copytree(place(a[0]), place(empty), dirs_exist_ok=True)
    with pytest.raises(CSDStoreError, match="each once"):
        CSDAdam(parameters((3000,)), devices=[*a[:2], empty], resume=True)
    with pytest.raises(CSDValueError, match="exclude"):
        CSDAdam(parameters((3000,)), devices=a, resume=True, overwrite=True)
    assert stored(*a, *b) == before
    CSDAdam(parameters((3000,)), devices=a, resume=True).close()
    assert not list((tmp_path / "a").glob(".*"))


RIGHT = ([(30,), (4, 5)], [(6,)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: groups_of(*RIGHT, names=["a", "x", "c"]), "parameter 1 of group 0 is b there and x here"),
        (
            lambda: groups_of([(30,), (5, 4)], [(6,)], names="abc"),
            r"shape of parameter b is \[4, 5\] there and \[5, 4\]",
        ),
        (lambda: groups_of(*RIGHT, dtype=bf16, names="abc"), "dtype of parameter a is float32 there and bfloat16 here"),
        (lambda: groups_of(RIGHT[0], names="ab"), "only the store has a parameter 0 in group 1: c"),
        (lambda: groups_of(*RIGHT, [(2,)], names="abcd"), "only the model has a parameter 0 in group 2: d"),
        (lambda: groups_of(RIGHT[0], [(6,), (2,)], names="abcd"), "only the model has a parameter 1 in group 1: d"),
        (lambda: groups_of([(30,)], [(6,)], names="ac"), "only the store has a parameter 1 in group 0: b"),
        (lambda: groups_of([(30,), (4, 5), (6,)], names="abc"), "only the model has a parameter 2 in group 0: c"),
    ],
    ids=["name", "shape", "dtype", "group missing", "group more", "more", "fewer", "membership"],
)
def test_another_model_is_refused_by_its_first_difference(tmp_path, model, message):
    devices = named_devices(tmp_path, 2)
    with CSDAdam(groups_of(*RIGHT, names="abc"), devices=devices) as opt:
        train(opt)
    before, groups = stored(*devices), model()
    values = [p.detach().clone() for p in named_values(groups)]
    with pytest.raises(CSDStoreError, match=message) as caught:
        CSDAdam(groups, devices=devices, resume=True)
    assert "another model" in str(caught.value)
    assert all(map(torch.equal, values, named_values(groups)))
    assert stored(*devices) == before
    for names in ("abc", None):  # None: parameters are named by group and position
        with CSDAdam(groups_of(*RIGHT, names=names), devices=devices, resume=True) as opt:
            assert opt.committed_step == 1


def named_values(groups):
    return [p[1] if isinstance(p, tuple) else p for g in groups for p in g["params"]]


@pytest.mark.fp32_states("with 8 bits the warning names a file of the tests, which sets the option")
def test_hyperparameters_given_otherwise(tmp_path):
    [device] = named_devices(tmp_path, 1)

    def script(**options):
        return CSDAdam(parameters((30,)), devices=device, resume=(tmp_path / "csd0").exists(), **options)

    given = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, "amsgrad": True, "maximize": True}
    with script(**given) as opt:
        train(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script(**given).close()
    for name, other in [("lr", 0.2), ("betas", (0.8, 0.95)), ("eps", 1e-8), ("weight_decay", 0.0), ("maximize", False)]:
        with (
            pytest.warns(CSDWarning, match=f"^{name} of group 0 goes on as") as caught,
            script(**given | {name: other}) as opt,
        ):
            assert opt.param_groups[0][name] == given[name]
        assert [w.filename for w in caught] == [__file__]


def test_a_share_given_otherwise(tmp_path):
    [device] = named_devices(tmp_path, 1)
    [p] = parameters((8, 8))

    def script(**own):
        resume = (tmp_path / "csd0").exists()
        return CSDAdam([{"params": [p], **own}], devices=device, resume=resume, topk=0.02)

    with script(topk=0.1) as opt:
        p.grad = torch.randn_like(p)
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in {"topk": 0.1}, {}:
            with script(**own) as opt:
                assert opt.param_groups[0]["topk"] == 0.1
    with pytest.warns(CSDWarning, match=r"^topk of group 0 goes on as 0\.1, not 0\.5"), script(topk=0.5) as opt:
        assert opt.param_groups[0]["topk"] == 0.1


# ---- damage --------------------------------------------------------------------------------


@pytest.mark.parametrize("section", range(4))
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_damaged_state_is_named(tmp_path, section):
    [device] = named_devices(tmp_path, 1)
    ps = dict(zip("abc", parameters((100,), (2000,), (3,)), strict=True))

    def script(**options):
        return CSDAdam(ps.items(), devices=device, amsgrad=True, tile_size=1024, **options)

    with script() as opt:
        train(opt, 3)
    names = ["master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    before = [p.detach().clone() for p in ps.values()]
    for tile, element, lying in [
        (0, 50, "elements 0 to 99 of a, elements 0 to 911 of b"),
        (0, 105, "of a"),  # in the gap between a and b
        (1, 0, "elements 912 to 1935 of b"),
        (2, 1023, "elements 1936 to 1999 of b, elements 0 to 2 of c"),  # the tile's end is behind c
    ]:
        flip(device, section, element, tile=tile)
        file = stored(device)
        with torch.no_grad():
            [p.zero_() for p in ps.values()]
        with pytest.raises(CSDStoreError, match=f"{names[section]} of tile {tile} is damaged: .*{lying}") as caught:
            script(resume=True)
        assert str(place(device)) in str(caught.value)
        assert not any(p.any() for p in ps.values())
        assert stored(device) == file
        flip(device, section, element, tile=tile)
        flip(device, section, element, tile=tile, current=False)
        with script(resume=True) as opt:
            assert all(map(torch.equal, before, ps.values()))


@pytest.mark.parametrize("section", range(3))
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_damage_while_training(tmp_path, section):
    devices = reading_all(named_devices(tmp_path, 3))
    training = Training(devices).steps(JOIN)
    training.opt.synchronize()
    before = training.image()
    flip(devices[1], section, 3)
    for _ in range(2):
        with pytest.raises(CSDStoreError, match="of fp32") as caught:
            training.step()
        assert str(place(devices[1])) in str(caught.value)
    flip(devices[1], section, 3)
    assert_same(training.image(), before)
    assert_same(training.steps(2).close(), never_stopped(JOIN + 2))
