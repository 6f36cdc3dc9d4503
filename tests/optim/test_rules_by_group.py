"""A parameter group may name another rule than its optimizer's: it has the bits of an optimizer of that rule alone."""

import copy
import functools
import gc
import pickle
import signal
from collections import defaultdict

import pytest
import torch
from support.comparing import assert_matches, assert_same, make_pair, params_of, set_grads
from support.forked import python
from support.inside import engine_of
from support.optimizers import ADAM, ADAMW, FULL, LION, MIXED, OF_RULES, PAIRS, SGD, by_group
from support.owner_here import OwnerHere
from support.training import give_gradients, never_stopped, parameters, resumed, train

from csd_optim import CSDSGD, CSDAdam, CSDLion, CSDRuntimeError, CSDStoreError, CSDValueError
from csd_optim.checkpoint.consolidate import consolidated_stores
from csd_optim.checkpoint.export import export_safetensors, export_torch
from csd_optim.checkpoint.importing import import_store
from csd_optim.checkpoint.state_dict import EXPORT_WITH_RULE, EXPORT_WITH_RULES
from csd_optim.checkpoint.verify import verify
from csd_optim.optim.rules import NAMED
from csd_optim.store import format as store_format
from csd_optim.store.format import read_contents

pytestmark = pytest.mark.fp32_states("most rules have no codes")

bf16 = torch.bfloat16
SHAPES = (3000,), (40, 50), (17,)


def made(*dtypes):
    torch.manual_seed(0)
    dtypes = dtypes or (torch.float32, bf16, torch.complex64)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def lions(ps, **options):
    """Return groups of which the second has Lion's rule."""
    return [{"params": ps[:1]}, {"params": ps[1:], "rule": "lion", **options}]


def image(opt):
    return [{"itself": p.detach().clone(), **{k: v.clone() for k, v in opt.state[p].items()}} for p in params_of(opt)]


# ---- arithmetic, against optimizers of their own -----------------------------------------------


@pytest.mark.parametrize("of", [*FULL, SGD, LION, ADAM], ids=str)
def test_a_group_beside_adamw_matches_torchs_optimizer(of):
    ours, theirs = made(), made()
    groups = [{"params": ours[:1], "lr": 0.02}, {"params": ours[1:], "rule": of.rule.name, **of.kwargs}]
    opt = CSDAdam(groups, devices="ram:")
    _, adamw = make_pair(theirs[:1], "ram:", lr=0.02)
    _, other = make_pair(theirs[1:], "ram:", of=of)
    for _ in range(10):
        set_grads(opt, Both(adamw, other))
        for optimizer in (opt, adamw, other):
            optimizer.step()
    assert_matches(opt, Both(adamw, other))


class Both:
    """Two of torch's optimizers, as if they were one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        found = {p: entry for optimizer in self.optimizers for p, entry in optimizer.state.items()}
        return defaultdict(dict, found)


@pytest.mark.parametrize("devices", ["ram:", "file:"])
@pytest.mark.parametrize("host", PAIRS, ids=str)
def test_every_rule_in_every_class_has_the_bits_of_its_own_class(host, devices):
    ours, alone = (parameters(*[(1500,)] * len(PAIRS)) for _ in range(2))
    for p, q in zip(ours, alone, strict=True):
        q.data.copy_(p.data)
    groups = [{"params": [p], "rule": of.rule.name, **of.other} for p, of in zip(ours, PAIRS, strict=True)]
    opt = host.ours(groups, devices=devices, tile_size=1024, **host.kwargs)
    others = [
        of.ours([{"params": [p], **of.other}], devices=devices, tile_size=1024, **of.kwargs)
        for p, of in zip(alone, PAIRS, strict=True)
    ]
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(alone, step)
        for optimizer in (opt, *others):
            optimizer.step()
    assert_same(image(opt), [image(other)[0] for other in others])


@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_defaults_are_those_of_the_rules_class(of):
    alone = of.ours(parameters((3,)), devices="ram:").param_groups[0]
    expected = {name: alone[name] for name in of.rule.hyperparameters}
    assert dict(of.rule.defaults) == expected
    assert NAMED[of.rule.name] is of.rule
    given = {"lr": 0.5, "weight_decay": 0.25}
    for host, own in ((CSDAdam, ADAMW), (CSDSGD, SGD)):
        opt = host([{"params": parameters((3,)), "rule": of.rule.name}], devices="ram:", **given)
        found = {name: opt.param_groups[0][name] for name in of.rule.hyperparameters}
        assert found == (expected | given if of is own else expected)


def test_a_constructors_arguments_are_for_the_groups_of_its_rule():
    opt = CSDAdam(lions(made(), betas=(0.5, 0.6)), lr=0.3, betas=(0.7, 0.8), eps=0.1, devices="ram:")
    assert [group["lr"] for group in opt.param_groups] == [0.3, 1e-4]
    assert [group["betas"] for group in opt.param_groups] == [(0.7, 0.8), (0.5, 0.6)]


def test_schedules_copies_and_pickles():
    """OneCycleLR also sets `betas`, in a group of SGD, too, which ignores them."""
    ours = CSDAdam([{"params": p, **options} for p, options in zip(made(), OF_RULES, strict=False)], devices="ram:")
    schedule = torch.optim.lr_scheduler.OneCycleLR(ours, max_lr=[0.1, 0.01, 0.2], total_steps=10)
    train(ours, 2)
    schedule.step()
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for opt in (ours, *copies):
        train(opt, 2, first=2)
        assert_same(image(opt), image(ours))
        assert [group.get("rule") for group in opt.param_groups] == [None, "lion", "sgd"]


def test_a_group_of_adam_keeps_its_switch():
    """torch's AdamW sets `decoupled_weight_decay` in all groups that it loads."""
    opt = CSDAdam([{"params": p, "rule": name} for p, name in zip(made(), ("adamw", "adam", "adam"), strict=True)])
    assert [group["decoupled_weight_decay"] for group in opt.param_groups] == [True, False, False]
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][2]["decoupled_weight_decay"] = True
    opt.load_state_dict(state)
    assert [group["decoupled_weight_decay"] for group in opt.param_groups] == [True, False, True]


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"rule": "lyon"}, "Invalid rule of a parameter group: 'lyon'; there are adamw, adam, sgd, adagrad, rmsprop, "),
        ({"rule": None}, "Invalid rule of a parameter group: None"),
        ({"rule": []}, r"Invalid rule of a parameter group: \[\]"),
        ({"rule": "lion", "eps": 1e-3}, "Invalid eps of a parameter group: 0.001; its rule lion has no eps, only lr, "),
        ({"rule": "sgd", "alpha": 0.5}, "Invalid alpha of a parameter group: 0.5; its rule sgd has no alpha"),
        ({"rule": "adamw", "momentum": 0.5}, "its rule adamw has no momentum"),
        ({"rule": "adamw", "decoupled_weight_decay": False}, "its rule adamw has no decoupled_weight_decay"),
        (
            {"rule": "lion", "state_dtype": "8bit"},
            "Invalid state_dtype of group 1: '8bit' .* of lion: the update is a sign",
        ),
    ],
    ids=str,
)
def test_groups_that_are_refused(group, message):
    ps, kept = made(), dict(group)
    opt = CSDAdam(ps[:1], devices="ram:")
    for _ in range(2):
        with pytest.raises(CSDValueError, match=message):
            opt.add_param_group({"params": ps[1:], **group})
        with pytest.raises(CSDValueError, match=message):
            CSDAdam([{"params": ps[:1]}, {"params": ps[1:], **group}], devices="ram:")
    assert (len(opt.param_groups), group) == (1, kept)
    opt.add_param_group({"params": ps[1:], "rule": "lion", "of_the_user": 7})  # as in any group


def test_groups_that_another_optimizer_has_filled():
    first = CSDAdam(lions(made()), devices="ram:")
    assert CSDAdam(first.param_groups, devices="ram:").param_groups[1]["rule"] == "lion"


@pytest.mark.parametrize("steps", [0, 1])
def test_the_rule_of_a_group_cannot_be_changed(steps):
    opt = train(CSDAdam(lions(made()), devices="ram:"), steps)
    opt.param_groups[0]["rule"] = "rmsprop"
    give_gradients(params_of(opt), 1)
    with pytest.raises(CSDRuntimeError, match="the rule of group 0 was adamw when the group was added, and is rmsprop"):
        opt.step()
    del opt.param_groups[0]["rule"]
    train(opt)


def test_a_parameter_that_moves_to_a_group_of_another_rule():
    opt = train(CSDAdam(lions(made()), devices="ram:"))
    opt.param_groups[0]["params"].append(opt.param_groups[1]["params"].pop(0))
    give_gradients(params_of(opt), 1)
    with pytest.raises(
        CSDRuntimeError, match=r"the rule of parameter 1\.0 is adamw now, and its states are those of l"
    ):
        opt.step()


def test_groups_keep_their_rules_when_others_leave():
    """Also the store does, which tells the next process what each group was given."""
    opt = train(CSDAdam(lions(made()), devices="ram:"))
    last = opt.param_groups[1]
    del opt.param_groups[0]
    opt.add_param_group({"params": parameters((50,)), "rule": "adagrad"})
    train(opt, 2, first=1)
    last["rule"] = "adamw"
    with pytest.raises(CSDRuntimeError, match="the rule of group 0 was lion when the group was added"):
        train(opt)


# ---- 8 bits ------------------------------------------------------------------------------------


def test_8_bits_by_group():
    message = """'8bit' .* of lion: the update is a sign.*; say so in the group: "state_dtype": "fp32"""
    with pytest.raises(CSDValueError, match=message):
        CSDAdam(lions(made()), state_dtype="8bit", devices="ram:")
    ours = CSDAdam(lions(made(), state_dtype="fp32"), state_dtype="8bit", devices="file:")
    ps = made()
    alone = CSDAdam(ps[:1], state_dtype="8bit", devices="file:"), CSDLion(ps[1:], state_dtype="fp32", devices="file:")
    eight = CSDLion([{"params": made()[:1], "rule": "adamw", "state_dtype": "8bit"}], devices="file:")
    for step in range(3):
        give_gradients(params_of(ours), step)
        for p, q in zip(params_of(ours), ps, strict=True):
            q.grad = p.grad.clone()
        params_of(eight)[0].grad = ps[0].grad.clone()
        for opt in (ours, *alone, eight):
            opt.step()
    assert_same(image(ours), [*image(alone[0]), *image(alone[1])])
    assert_same(image(eight), image(alone[0]))
    assert {e.codec for e in engine_of(ours).tiles.extents} == {"8bit", "fp32"}


# ---- state dicts -------------------------------------------------------------------------------


def test_state_dicts_keep_the_rule():
    ours = train(by_group(made(), devices="ram:"), 2)
    other = by_group([torch.nn.Parameter(p.detach().clone()) for p in params_of(ours)], devices="file:")
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert [group.get("rule") for group in other.state_dict()["param_groups"]] == [None, "lion", "sgd"]
    assert_same(image(train(other, 2, first=2)), image(train(ours, 2, first=2)))


def test_a_checkpoint_of_torchs_leaves_each_group_its_rule():
    """Its groups name none, and torch's SGD counts no steps."""
    theirs, ours = parameters((20,), (30,)), parameters((20,), (30,))
    torchs = torch.optim.SGD([{"params": theirs[:1]}, {"params": theirs[1:]}], lr=0.1, momentum=0.9)
    train(torchs, 2)
    for p, q in zip(theirs, ours, strict=True):
        q.data.copy_(p.data)
    opt = CSDAdam([{"params": p, "rule": "sgd"} for p in ours], devices="ram:")
    opt.load_state_dict(torchs.state_dict())
    assert [(group["rule"], group["momentum"]) for group in opt.param_groups] == [("sgd", 0.9)] * 2
    assert [opt.state[p]["step"] for p in ours] == [1, 1]
    for optimizer in (opt, torchs):
        train(optimizer, 1, first=2)
    assert all(torch.allclose(p, q) for p, q in zip(ours, theirs, strict=True))


def test_states_of_another_rule_are_refused_where_the_checkpoint_names_none():
    """Lion's hyperparameters are among AdamW's, so that groups alone do not tell."""
    of_adamw = train(CSDAdam([{"params": [p]} for p in made()])).state_dict()
    opt = train(CSDAdam([{"params": [p], **({"rule": "lion"} if k == 1 else {})} for k, p in enumerate(made())]))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(CSDValueError, match="group 1 have exp_avg_sq, which the rule lion has not"):
        opt.load_state_dict(of_adamw)
    assert_same(opt.state_dict()["state"], before["state"])


def test_a_checkpoint_of_other_rules_is_refused_before_anything_is_touched():
    opt = train(CSDAdam(lions(made(), state_dtype="fp32"), devices="ram:"))
    before = image(opt)
    other = CSDAdam([{"params": made()[:1]}, {"params": made()[1:], "rule": "rmsprop"}], devices="ram:")
    with pytest.raises(CSDValueError, match="another optimizer: the rule of its group 1 is rmsprop, and here it is l"):
        opt.load_state_dict(train(other).state_dict())
    sgd = torch.optim.SGD([{"params": p} for p in (made()[:1], made()[1:])], lr=0.1)
    with pytest.raises(CSDValueError, match="its group 0 has no betas, which CSDAdam needs"):
        opt.load_state_dict(sgd.state_dict())
    mixed = CSDSGD([{"params": made()[:1]}, {"params": made()[1:], "rule": "lion"}], devices="ram:")
    with pytest.raises(CSDValueError, match="its group 1 has no betas, which its rule lion needs"):
        mixed.load_state_dict(sgd.state_dict())
    assert_same(image(opt), before)
    train(opt)


# ---- stores ------------------------------------------------------------------------------------


def stored(path):
    """Return the rules in a store (the store's own, each parameter's, each group's), and the store's features."""
    contents = read_contents(path)
    params = [*contents.manifest["params"], *contents.manifest["waiting"]]
    groups = [group.get("rule") for group in contents.record.groups]
    assert [group.get("rule") for group in contents.record.given] == groups
    return contents.manifest.get("rule"), [p.get("rule") for p in params], groups, contents.manifest["features"]


def test_a_store_names_the_rules_that_are_not_its_own(tmp_path):
    ps = made()
    with CSDAdam(lions(ps), devices=tmp_path / "a") as opt:
        give_gradients(ps[:2], 0)
        ps[2].grad = None
        opt.step()
    features = ["chunk_sums", "rules", "tile_numbers"]
    assert stored(tmp_path / "a") == (None, [None, "lion", "lion"], [None, "lion"], features)
    with CSDLion([{"params": made()[:1], "rule": "adamw"}, {"params": made()[1:]}], devices=tmp_path / "b") as opt:
        train(opt)
    assert stored(tmp_path / "b") == (
        "lion",
        ["adamw", None, None],
        ["adamw", None],
        ["chunk_sums", "rule", *features[1:]],
    )
    assert not any(verdict.damage for verdict in verify(tmp_path / "a"))


def test_a_group_that_names_its_class_rule_changes_no_byte(tmp_path):
    found = []
    for name, options in (("a", {}), ("b", {"rule": "adamw"})):
        with CSDAdam([{"params": made(), **options}], devices=tmp_path / name) as opt:
            train(opt)
        contents = read_contents(tmp_path / name)
        found.append((contents.manifest, contents.record, [sums.tolist() for sums in contents.sums]))
    assert found[0] == found[1]
    assert "rules" not in found[0][0]["features"]


def test_an_older_version_refuses_the_store_by_name(tmp_path, monkeypatch):
    with CSDAdam(lions(made()), devices=tmp_path) as opt:
        train(opt)
    monkeypatch.setattr(store_format, "FEATURES", store_format.FEATURES - {"rules"})
    with pytest.raises(CSDStoreError, match="it has rules, which this csd_optim does not know: upgrade it"):
        read_contents(tmp_path)


def test_resume_compares_the_rule_of_each_parameter(tmp_path):
    with CSDAdam(lions(made()), devices=tmp_path) as opt:
        before = image(train(opt))
    for groups, message in [
        (
            [{"params": made()[:1]}, {"params": made()[1:]}],
            r"parameter 1\.0 are .* lion, and that of its group is adamw",
        ),
        ([{"params": made()[:1], "rule": "sgd"}, *lions(made())[1:]], r"parameter 0\.0 are those of the rule adamw"),
    ]:
        with pytest.raises(CSDStoreError, match=f"cannot be resumed: the states of {message}"):
            CSDAdam(groups, devices=tmp_path, resume=True)
    with pytest.raises(CSDStoreError, match=r"the states of parameter 0\.0 are those of the rule adamw"):
        CSDLion([{"params": made()[:1]}, {"params": made()[1:]}], devices=tmp_path, resume=True)
    with CSDAdam(lions(made()), devices=tmp_path, resume=True) as opt:
        assert_same(image(opt), before)
    # The class is another one, and each parameter has the rule that it had.
    with CSDLion(
        [{"params": made()[:1], "rule": "adamw"}, {"params": made()[1:]}], devices=tmp_path, resume=True
    ) as opt:
        assert_same(image(opt), before)
        train(opt, first=1)
    assert stored(tmp_path)[:3] == ("lion", ["adamw", None, None], ["adamw", None])


def test_a_process_that_is_killed(tmp_path):
    code = f"import os, support.training as t; from support.optimizers import MIXED; tr = t.Training({str(tmp_path)!r}"
    process = python(f"{code}, of=MIXED).steps(6); tr.opt.synchronize(); os.kill(os.getpid(), 9)")
    assert (process.returncode, process.stderr) == (128 + signal.SIGKILL, "")
    training = resumed(str(tmp_path), 6, of=MIXED)
    assert_same(training.image(), never_stopped(6, None, MIXED))
    assert_same(training.steps(1).close(), never_stopped(7, None, MIXED))


@pytest.mark.parametrize("export", [export_torch, export_safetensors])
def test_exports_and_imports(export, tmp_path):
    with by_group(made(), devices=tmp_path / "a") as opt:
        before = image(train(opt, 2))
    file = tmp_path / "exported"
    export(tmp_path / "a", file)
    import_store(file, [tmp_path / "b"])
    import_store(tmp_path / "a", [tmp_path / "c"])
    for made_of in "bc":
        assert stored(tmp_path / made_of) == stored(tmp_path / "a")
        with by_group(made(), devices=tmp_path / made_of, resume=True) as opt:
            assert_same(image(opt), before)
            train(opt)
    with pytest.raises(CSDValueError, match="stay fp32: those of lion are exp_avg, for which there are no codes"):
        import_store(tmp_path / "a", [tmp_path / "d"], state_dtype="8bit")
    loaded = CSDAdam.load(tmp_path / "a")
    assert loaded["csd_optim"]["format"] == EXPORT_WITH_RULES > EXPORT_WITH_RULE
    with by_group([torch.nn.Parameter(entry["itself"]) for entry in before], devices="file:") as opt:
        opt.load_state_dict(loaded)
        assert_same(image(opt), before)
    del loaded
    gc.collect()
    with consolidated_stores(tmp_path / "a") as source:
        assert [p.get("rule") for p in source.contents.manifest["params"]] == [None, "lion", "sgd"]


def test_snapshots_and_resume_from(tmp_path):
    with CSDAdam(lions(made()), devices=tmp_path / "a") as opt:
        before = image(train(opt))
        opt.save(tmp_path / "snapshot").result()
    with pytest.raises(
        CSDStoreError, match=r"parameter 1\.0 are those of the rule lion, and that of its group is adam"
    ):
        CSDAdam(
            [{"params": made()[:1]}, {"params": made()[1:], "rule": "adam"}],
            devices=tmp_path / "b",
            resume=True,
            resume_from=tmp_path / "snapshot",
        )
    with CSDAdam(lions(made()), devices=tmp_path / "b", resume=True, resume_from=tmp_path / "snapshot") as opt:
        assert_same(image(opt), before)
    assert stored(tmp_path / "b")[1:3] == ([None, "lion", "lion"], [None, "lion"])


# ---- everything else that drives a step --------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"backward": True}, {"free_gradients": True}], ids=str)
def test_overlap(mode, tmp_path):
    def after_four_steps(devices, mode):
        torch.manual_seed(1)
        net = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(6)))
        opt = by_group([*net.parameters()], devices=devices, tile_size=1024)
        if mode is not None:
            opt.overlap(net, **mode)
        for _ in range(4):
            opt.zero_grad()
            net(torch.randn(5, 30)).square().mean().backward()
            opt.step()
        opt.wait()
        with opt:
            return image(opt)

    assert_same(after_four_steps(tmp_path / "a", mode), after_four_steps("file:", None))


def test_top_k():
    optimizers = [by_group(made(), devices=devices, topk=0.05) for devices in ("ram:", "file:")]
    for opt in optimizers:
        train(opt, 3)
    assert_same(*map(image, optimizers))


@pytest.mark.here("starts an owner itself")
def test_an_optimizer_rank(tmp_path):
    expected = train(by_group(made(), devices="file:"), 3)
    with OwnerHere(tmp_path / "owner") as there:
        open_ = functools.partial(by_group, devices=there.address)
        opt = train(open_(made()), 2)
        opt.synchronize()
        opt.close()
        with pytest.raises(
            CSDStoreError, match=r"parameter 2\.0 are those of the rule sgd, and that of its group is l"
        ):
            CSDAdam([{"params": p, "rule": r} for p, r in zip(made(), ("adamw", "lion", "lion"), strict=True)],
                    devices=there.address, resume=True)  # fmt: skip
        opt = open_(made(), resume=True)
        assert_same(image(train(opt, 1, first=2)), image(expected))
        opt.close()
    assert stored(tmp_path / "owner")[1:3] == ([None, "lion", "sgd"], [None, "lion", "sgd"])
