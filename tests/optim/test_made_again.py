"""An optimizer that is made again on the same directories, in one process, takes the place of the older one."""

import contextlib
import gc
import threading
import warnings

import pytest
import torch
from support.beside import everything, small_model
from support.comparing import assert_same
from support.forked import python
from support.replacing import failing
from support.training import bf16, parameters, train
from torch import nn

from csd_optim import CSDAdam, CSDBusyError, CSDLion, CSDOSError, CSDRuntimeError, CSDWarning
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.store.format import read_contents

pytestmark = [
    pytest.mark.here("an owner keeps the stores of its trainers apart by itself"),
    pytest.mark.filterwarnings("ignore:there is no store:csd_optim.CSDWarning"),
]
REPLACED = r"this CSDAdam, made at .*\.py:\d+ .* was replaced by a newer one on .*, made at .*\.py:\d+ "
each_way = pytest.mark.parametrize("how", ["overwrite", "resume"])


def fit(model, opt, steps):
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        opt.step()
        opt.zero_grad()


def uses(opt, model):
    """Everything that a program may do with an optimizer, by name."""
    p = next(model.parameters())
    return {
        "step": opt.step,
        "state": lambda: opt.state[p],
        "state_dict": opt.state_dict,
        "load_state_dict": lambda: opt.load_state_dict({"state": {}, "param_groups": []}),
        "loading": lambda: opt.loading().__enter__(),
        "save": lambda: opt.save("never"),
        "publish": lambda: opt.publish("never", model),
        "overlap": lambda: opt.overlap(model),
        "wait": opt.wait,
        "synchronize": opt.synchronize,
        "restore": opt.restore,
        "stats": opt.stats,
        "consolidate_state_dict": opt.consolidate_state_dict,
        "add_param_group": lambda: opt.add_param_group({"params": parameters((2,))}),
    }


def assert_replaced(opt, model):
    for name, use in uses(opt, model).items():
        with pytest.raises(CSDRuntimeError, match=REPLACED):
            print(name, use())
    opt.zero_grad()
    opt.close()
    opt.close()


def made_twice(directory, how, steps, overlap, *, same_model, held):
    """Train, make the optimizer again, and train on.

    Returns the newer optimizer's contents after its construction and after its steps. `held`: the older one is neither
    closed nor dropped.
    """
    torch.manual_seed(0)
    models = [small_model(), small_model()]
    older_model, model = (models[0], models[0]) if same_model else models

    def made(model, **options):
        opt = CSDAdam(model.parameters(), lr=0.1, devices=[directory / "a", directory / "b"], tile_size=1024, **options)
        if overlap is not None:
            opt.overlap(model, **overlap)
        return opt

    older = made(older_model)
    fit(older_model, older, steps)
    if not held:
        older.close()
    newer = made(model, **{how: True})
    seen = [(newer.committed_step, everything(newer))]
    fit(model, newer, 3)
    newer.synchronize()
    seen.append((newer.committed_step, everything(newer)))
    if held:
        assert_replaced(older, older_model)
    fit(model, newer, 1)
    seen.append(everything(newer))
    newer.close()
    return seen


@each_way
@pytest.mark.parametrize("same_model", [False, True], ids=["other model", "same model"])
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("overlap", [None, {}, {"backward": True}, {"free_gradients": True}], ids=str)
def test_it_does_what_it_would_do_if_the_older_one_had_been_closed(how, same_model, steps, overlap, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "closed").mkdir()
    found, expected = (
        made_twice(tmp_path / where, how, steps, overlap, same_model=same_model, held=where == "held")
        for where in ("held", "closed")
    )
    assert_same(found, expected)
    assert found[0][0] == (steps if how == "resume" else 0)


def test_one_after_another(tmp_path):
    kept = []
    for k in range(4):
        model = small_model()
        kept.append((CSDAdam(model.parameters(), devices=tmp_path, resume=True), model))
        assert kept[-1][0].committed_step == k // 2  # every other one makes no step
        fit(model, kept[-1][0], k % 2)
    for opt, model in kept[:-1]:
        assert_replaced(opt, model)
    kept[-1][0].close()


def test_what_the_older_one_has_committed_stays_until_the_newer_one_steps(tmp_path):
    params = parameters((3000,))
    older = train(CSDAdam(params, devices=tmp_path), 2)
    expected = everything(older)
    newer = CSDAdam(parameters((3000,)), devices=tmp_path, overwrite=True)
    assert read_contents(tmp_path).superblock.step == 2
    newer.close()
    with CSDAdam(parameters((3000,)), devices=tmp_path, resume=True) as again:
        assert_same(everything(again), expected)


# ---- two at work --------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("first", ["older", "newer"])
def test_two_equal_models_at_work(how, before, first, tmp_path):
    """The older one says so at its first step, and what is in the store is one training, whole."""
    one, two = parameters((3000,)), parameters((3000,))
    older = train(CSDAdam(one, devices=tmp_path, **{how: True}), before)
    before_both = everything(older)
    newer = CSDAdam(two, devices=tmp_path, **{how: True})
    if first == "newer":
        train(newer, 1)
    with pytest.raises(CSDRuntimeError, match=REPLACED + ".*Two optimizers at work need directories of their own"):
        train(older, 1, first=before)
    expected = before_both if first == "older" else everything(newer)
    newer.close()
    with CSDAdam(parameters((3000,)), devices=tmp_path, resume=True) as opt:
        if before or first == "newer":
            assert_same(everything(opt), expected)
        assert opt.committed_step == (before if first == "older" else before * (how == "resume") + 1)


# ---- those that are refused ----------------------------------------------------------


def described(**changes):
    """Return groups of parameters, devices and options; `changes` makes others."""
    names = changes.pop("names", ["a", "b", "c"])
    shapes = changes.pop("shapes", [(1500,), (7, 3), ()])
    dtype = changes.pop("dtype", torch.float32)
    divided = changes.pop("divided", 2)
    options = {"devices": ["a", "b"], "tile_size": 1024, **changes}
    named = [(n, nn.Parameter(torch.ones(s, dtype=dtype))) for n, s in zip(names, shapes, strict=True)]
    return [{"params": named[:divided]}, {"params": named[divided:], "lr": 0.1}], options


OTHERS = {
    "name": ({"names": ["a", "x", "c"]}, "parameter 1 of group 0 is b there and x here"),
    "shape": ({"shapes": [(1500,), (3, 7), ()]}, "shape of parameter b"),
    "more": ({"names": "abcd", "shapes": [(1500,), (7, 3), (), ()]}, "only the model has a parameter 1 in group 1"),
    "dtype": ({"dtype": bf16}, "dtype of parameter a"),
    "groups": ({"divided": 1}, "group"),
    "fewer directories": ({"devices": ["a"]}, "the directories of the newer one are"),
    "another order": ({"devices": ["b", "a"]}, "the directories of the newer one are"),
    "more directories": ({"devices": ["a", "b", "c"]}, "the directories of the newer one are"),
}
CANNOT_RESUME = {
    "rule": ({"of": CSDLion}, "its states of group 0 are adamw, fp32, and those of the newer one lion, fp32"),
    "state_dtype": ({"state_dtype": "8bit"}, "adamw, fp32, and those of the newer one adamw, 8bit"),
}


def made_as(of=CSDAdam, **changes):
    groups, options = described(**changes)
    return of(groups, **options)


@pytest.mark.parametrize(
    ("how", "change", "why"),
    [
        *((how, *OTHERS[name]) for how in ("overwrite", "resume") for name in OTHERS),
        *(("resume", *CANNOT_RESUME[name]) for name in CANNOT_RESUME),
        ("tile_size", {"tile_size": 1024}, "pass resume=True or overwrite=True"),  # neither
    ],
)
def test_another_one_is_refused_and_the_older_one_goes_on(how, change, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with train(made_as(state_dtype="fp32"), 2) as older:
        before = everything(older)
        change = {"state_dtype": "fp32", **change}
        with pytest.raises(CSDBusyError, match=f"another optimizer of this process, the CSDAdam made at .*{why}"):
            made_as(**change, **({} if how == "tile_size" else {how: True}))
        assert_same(everything(older), before)
        train(older, 1, first=2)
        older.synchronize()
        after = everything(older)
    with made_as(state_dtype="fp32", resume=True) as again:
        assert again.committed_step == 3
        assert_same(everything(again), after)


@pytest.mark.parametrize("change", CANNOT_RESUME)
def test_what_it_erases_may_have_had_other_states(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older = train(made_as(state_dtype="fp32"), 2)
    newer = made_as(**{"state_dtype": "fp32", **CANNOT_RESUME[change][0]}, overwrite=True)
    train(newer, 1)
    with pytest.raises(CSDRuntimeError, match=REPLACED):
        train(older, 1)
    newer.close()


def test_one_that_was_dropped_is_in_nobodys_way(tmp_path):
    older = train(CSDAdam(parameters((5,)), devices=tmp_path), 1)
    older.cycle = older
    gc.disable()
    try:
        del older
        with CSDAdam(parameters((6,)), devices=tmp_path, overwrite=True) as newer:
            train(newer, 1)
    finally:
        gc.enable()


@each_way
def test_a_step_on_another_thread_is_not_interrupted(how, tmp_path):
    params = parameters((5,))
    older = CSDAdam(params, devices=tmp_path)
    begun, ends = threading.Event(), threading.Event()

    def closure():
        begun.set()
        assert ends.wait(60)
        params[0].grad = torch.ones(5)

    thread = threading.Thread(target=older.step, args=[closure])
    thread.start()
    assert begun.wait(60)
    with pytest.raises(CSDBusyError, match=r"step\(\) is under way"):
        CSDAdam(parameters((5,)), devices=tmp_path, **{how: True})
    ends.set()
    thread.join()
    assert older.state[params[0]]["step"] == 1
    with CSDAdam(parameters((5,)), devices=tmp_path, **{how: True}) as newer:
        assert newer.committed_step == (how == "resume")


@pytest.mark.at_hand("opens windows")
def test_within_a_closure_and_within_loading(tmp_path):
    def again():
        with pytest.raises(CSDBusyError, match=r"step\(\) is under way|within loading\(\)"):
            CSDAdam(parameters((5,)), devices=tmp_path, resume=True)

    with train(CSDAdam(parameters((5,)), devices=tmp_path), 1) as opt:
        opt.step(again)
        with opt.loading():
            again()
        opt.step()


def test_a_forked_child_replaces_nothing(tmp_path):
    script = """if True:
        import os, sys, torch, warnings
        from csd_optim import CSDAdam
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside threads
        def made(**how):
            p = torch.ones(3000, requires_grad=True)
            p.grad = torch.ones_like(p)
            return CSDAdam([p], devices=sys.argv[1], **how)
        older = made()
        older.step()
        child = os.fork()
        if not child:
            for how in ("overwrite", "resume"):
                try:
                    made(**{how: True})
                except BlockingIOError as e:
                    print("child:", "in use by process" in str(e), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        older.step()
        newer = made(resume=True)
        print("parent:", newer.committed_step)
    """
    done = python(script, tmp_path / "csd")
    assert (done.stdout, done.stderr, done.returncode) == ("child: True\nchild: True\nparent: 2\n", "", 0)


# ---- the older one fails -------------------------------------------------------------


@pytest.mark.parametrize("overlap", [None, {}, {"backward": True}], ids=str)
def test_a_last_commit_that_fails(overlap, tmp_path):
    """With resume the constructor raises, and the older one goes on as if nothing had been; overwrite only warns."""
    gc.collect()  # else an optimizer of another test is closed within failing()
    model = small_model()
    older = CSDAdam(model.parameters(), devices=tmp_path)
    if overlap is not None:
        older.overlap(model, **overlap)
    fit(model, older, 4)
    with failing(DurableCommitter, "before_close", 1, "no power"), pytest.raises(CSDOSError, match="no power"):
        CSDAdam(small_model().parameters(), devices=tmp_path, resume=True)
    fit(model, older, 1)
    assert ("overlap" in older.stats()) == (overlap is not None)
    newer = CSDAdam(small_model().parameters(), devices=tmp_path, resume=True)
    assert newer.committed_step == 5
    with failing(DurableCommitter, "before_close", 1, "no power"), pytest.warns(CSDWarning, match="no power"):
        newest = CSDAdam((last := small_model()).parameters(), devices=tmp_path, overwrite=True)
    fit(last, newest, 1)
    assert_replaced(newer, model)
    newest.close()


@each_way
@pytest.mark.parametrize("fails", [False, True], ids=["before step()", "in backward"])
def test_made_again_after_a_backward_without_step(how, fails, tmp_path):
    """As where memory runs out in backward, with a step that has begun there: it is undone, and the loop goes on."""
    model = small_model()
    older = CSDAdam(model.parameters(), devices=tmp_path, lr=0.1)
    older.overlap(model, free_gradients=True)
    fit(model, older, 2)
    before = [p.detach().clone() for p in model.parameters()]
    hook = model[0].weight.register_hook(lambda _: 1 / 0) if fails else contextlib.nullcontext()
    with hook, pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        model(torch.ones(4, 6)).sum().backward()
    again = model if fails else small_model()  # before step(), reading the parameters of the first one is an error
    newer = CSDAdam(again.parameters(), devices=tmp_path, lr=0.1, **{how: True})
    assert_same([p.detach() for p in model.parameters()], before)
    newer.overlap(again, free_gradients=True)
    fit(again, newer, 2)
    assert_replaced(older, model)
    newer.close()


def test_with_resume_from(tmp_path):
    with train(CSDAdam(parameters((3000,)), devices=tmp_path / "old"), 2):
        pass
    options = {"devices": tmp_path / "new", "resume": True, "resume_from": tmp_path / "old"}
    older = train(CSDAdam(parameters((3000,)), **options), 1)
    expected = everything(older)
    with CSDAdam(parameters((3000,)), **options) as newer:
        assert newer.committed_step == 3
        assert_same(everything(newer), expected)


def test_a_snapshot_in_the_making_is_completed(tmp_path):
    older = train(CSDAdam(parameters((3000,)), devices=tmp_path / "csd"), 2)
    saving = older.save(tmp_path / "snapshot", wait=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newer = CSDAdam(parameters((3000,)), devices=tmp_path / "csd", overwrite=True)
    assert saving.result() == tmp_path / "snapshot"
    newer.close()
    assert CSDAdam.load(tmp_path / "snapshot")["csd_optim"]["step"] == 2
