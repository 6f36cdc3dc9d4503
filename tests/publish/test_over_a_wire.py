"""A trainer whose states are with an owner publishes: links are cut, owners and trainers killed, and no version is
ahead of what is durable, or of other weights than those of its step.

What is promised everywhere is tested in the other files; here with an owner by `pytest --served`, and in a choice.
"""

import contextlib
import copy
import random
import signal
import time

import pytest
import torch
from support.forked import process
from support.killed import killed_at
from support.kills import OWNER, Killing, restarting
from support.optimizers import MUON
from support.owner_here import OwnerHere
from support.owners import Owner
from support.published import (
    BLIND,
    Model,
    Published,
    assert_weights,
    chain,
    edits,
    gradients,
    publishes_on,
    weights,
    weights_by_step,
)
from support.replacing import replaced

from csd_optim import CSDAdam, CSDError, CSDRankError
from csd_optim.engine.commit.commit import Commit
from csd_optim.publish.folder import Folder
from csd_optim.serve.owner.owner_session import OwnerSession
from csd_optim.serve.requests import op_of
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.trainer.remote_native import RemoteNative

pytestmark = pytest.mark.at_hand("owners of this process keep what they own in directories of their own")

PATIENCE = 300  # seconds for which a program tries again
CODES = {"state_dtype": "8bit", "lr": 1e-4}


@contextlib.contextmanager
def published(tmp_path, **options):
    with OwnerHere(tmp_path / "owner") as owner, Published(tmp_path / "policy", owner.address, **options) as t:
        yield t, owner


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "lr": 1e-3},
        CODES,
        {**CODES, "dtype": torch.float32, "amsgrad": True},
        {"optimizer": MUON.ours, **MUON.kwargs},
        {"topk": 0.1, "max_grad_norm": 0.5},
    ],
    ids=str,
)
def test_what_is_sent(options, tmp_path):
    """Just what differs, but for what is not recorded; what is set from outside is not missed."""
    with published(tmp_path, **options) as (t, _):
        t.steps(2)
        for _ in range(2):
            t.step()
            changed, sent = t.check()
            for name in t.names():
                if name not in BLIND:
                    assert changed[name] <= sent[name] <= changed[name] * 16 / 15 + 1024, name
        for edit in edits(t):
            edit()
            t.steps(1)
        t.steps(2, without=())
        t.steps(2, without=("late", "odd"))


@pytest.mark.parametrize("mode", [{}, {"backward": True}, {"free_gradients": True}], ids=["plain", "backward", "free"])
def test_overlap(mode, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 301), torch.nn.ReLU(), torch.nn.Linear(301, 30)).bfloat16()
    with published(tmp_path, model=model, tile_size=4096) as (t, _):
        t.opt.overlap(model, **mode)
        for i in range(8):
            if i == 4 and "free_gradients" not in mode:
                t.opt.param_groups[0]["lr"] = 3e-4  # a wrong guess
            t.opt.zero_grad()
            model(torch.randn(8, 50).bfloat16()).square().sum().backward()
            if i == 6 and "free_gradients" not in mode:
                model[0].weight.grad.mul_(2)  # another one
            t.opt.step()
            t.done += 1
            if i % 3 != 1:  # else the next one follows at once
                t.check()


def appears(t, step):
    until = time.monotonic() + PATIENCE
    while t.pub.step != step:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_version_appears_while_training_goes_on(tmp_path):
    """Nobody has to ask for it, and close() names the last one."""
    with published(tmp_path) as (t, _):
        t.step()
        appears(t, 1)
        t.step()
    assert [v.step for v in chain(tmp_path / "policy")] == [0, 1, 2]


def test_a_version_appears_after_a_state_dict_of_an_earlier_step(tmp_path):
    with published(tmp_path) as (t, _):
        t.steps(1)
        early = copy.deepcopy(t.opt.state_dict())
        t.steps(3)
        t.opt.load_state_dict(early)
        t.step()
        appears(t, 2)
        t.done = 2
        t.check()
        t.steps(2)


def test_news_that_come_late(tmp_path):
    """Steps follow one another at once, and what is durable is known from the answers to requests alone."""
    with replaced(OwnerSession, "_note_progress", lambda *_: None), published(tmp_path) as (t, _):
        for _ in range(4):
            t.step()
        wanted = weights(t.model)
    assert [v.step for v in chain(tmp_path / "policy")] == [0, 1, 2, 3, 4]
    t.replica.follow(t.copy)
    assert_weights(t.copy, wanted)


def test_it_has_no_name_before_its_step_is_durable(tmp_path):
    """The owner has kept the step, and its commit is not over: the files are there, and the name is not."""
    with published(tmp_path) as (t, _):
        t.steps(2)
        seen = []

        def slow(prepare, *arguments):
            time.sleep(0.3)
            seen.append((sorted(p.name for p in (tmp_path / "policy").glob("*v*")), t.pub.version))
            return prepare(*arguments)

        with replaced(Commit, "prepare", slow):
            t.step()
            t.check()
        names = ["v0000000001", "v0000000002", "v0000000003"]
        assert seen == [([".v0000000004.pending", *names], 3)]


# ---- links that are cut ------------------------------------------------------------------------------


def repeated(t):
    """Do as a program that waits until parameters have their values again, after a step has failed."""
    until = time.monotonic() + PATIENCE
    while True:
        assert time.monotonic() < until
        try:
            t.opt.wait()
            break
        except CSDError:
            time.sleep(0.01)
    t.opt.zero_grad()
    t.done = int(t.opt.state[t.model.odd]["step"])


@pytest.mark.parametrize("options", [{}, CODES], ids=["fp32", "8bit"])
@pytest.mark.parametrize(
    ("place", "calls"),
    [((RemoteNative, "push"), 20), ((RemoteNative, "pull"), 30), ((RemoteNative, "_keep"), 1)],
    ids=["push", "pull", "finish"],
)
def test_a_step_whose_link_is_cut(place, calls, options, tmp_path):
    """It is undone, or it counts, whichever the owner says; the next versions miss nothing."""
    with published(tmp_path, **options) as (t, owner):
        t.steps(2)
        for n in (1, calls):
            left = n

            def cutting(call, *arguments, **more):
                nonlocal left
                left -= 1
                if not left:
                    owner.owner.sessions[0].end("cut")
                return call(*arguments, **more)

            version, done = t.pub.version, t.done
            with replaced(*place, cutting), contextlib.suppress(CSDError):
                t.step()
            repeated(t)
            t.pub.wait()
            assert t.pub.version == version + (t.done > done)
            t.model.frozen.data[n] += 1
            t.steps(2)
        assert t.pub.error == ""


def test_a_finish_whose_answer_is_lost(tmp_path):
    """The step counts: if the trainer learns it at once, its version appears; if later, the next one has all of it."""
    with published(tmp_path) as (t, owner):
        t.steps(2)
        is_cut = is_away = False

        def lost(exchange, link, session, request, arrays):
            nonlocal is_cut
            answer = exchange(link, session, request, arrays)
            if op_of(request) == "finish":
                is_cut = True
                owner.owner.sessions[0].end("cut")
                link._lost(session, CSDRankError("cut"))
                raise CSDRankError("cut")
            return answer

        def attach(real, link):
            if is_cut and is_away:
                raise CSDRankError("gone")
            real(link)

        for is_away in (False, True):
            done, version, is_cut = t.done, t.pub.version, False
            with contextlib.ExitStack() as stack:
                stack.enter_context(replaced(Link, "_exchange", lost))
                stack.enter_context(replaced(Link, "attach", attach))
                if is_away:
                    stack.enter_context(pytest.raises(CSDError))
                t.step()
            repeated(t)
            assert t.done == done + 1
            t.pub.wait()
            assert t.pub.version == version + (not is_away)
            t.steps(2)


# ---- owners that are killed --------------------------------------------------------------------------


def trains_on(t, expected, until):
    """Train as a program does that repeats a step after an error. Checks all versions; returns how often it failed."""
    failures, end = 0, time.monotonic() + PATIENCE
    while t.done < until:
        assert time.monotonic() < end
        try:
            t.step()
        except CSDError:
            failures += 1
            repeated(t)
        else:
            with contextlib.suppress(CSDError):
                t.pub.wait()
        t.replica.follow(t.copy)
        t.replica.verify(t.copy)
        assert_weights(t.copy, expected[t.replica.step])
    return failures


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if (i + k) % 4 == 0 else pytest.mark.soak, id=f"{name}-{k}")
        for i, name in enumerate(OWNER)
        for k, options in enumerate(({}, CODES))
    ],
)
def test_a_trainer_goes_on_when_its_owner_was_killed(name, options, tmp_path):
    expected = weights_by_step(10, **{"tile_size": 2048, **options})
    call = random.Random(name).randint(2, 4) * (30 if "PUSH" in name or "PARAMS" in name else 1) + 1
    (tmp_path / "kill").write_text(f"{name} {call}")
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(Owner(tmp_path, before=Killing(tmp_path / "kill"), timeout=30))
        stack.enter_context(restarting(owner))
        t = stack.enter_context(Published(tmp_path / "policy", owner.address, **{"lr": 1e-4, **options}))
        trains_on(t, expected, 9)
        t.steps(1)
        assert owner.runs == 2, owner.said
    assert chain(tmp_path / "policy")[-1].step == 10


# ---- trainers that are killed ------------------------------------------------------------------------


def trains_and_publishes(address, policy, n, after, state_dtype):
    torch.set_num_threads(1)
    model = Model()
    options = {"lr": 1e-4, "tile_size": 4096, "state_dtype": state_dtype}
    opt = CSDAdam(model.parameters(), devices=address, **options)

    def body():
        pub = opt.publish(policy, model=model, keep=1, full_every=3)
        for step in range(1, 4):
            gradients(model, step)
            opt.step()
        pub.wait()
        opt.close()

    killed_at(n, after=after, body=body)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:there is no store")
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_trainer_that_is_killed(state_dtype, tmp_path):
    """Killed at every third call that changes a file: another one resumes, and goes on with the chain."""
    expected = weights_by_step(5, state_dtype=state_dtype, tile_size=4096)
    n, was_killed = random.Random(state_dtype).randint(1, 3), True
    while was_killed:
        policy = tmp_path / f"policy-{n}"
        with OwnerHere(tmp_path / f"owner-{n}") as owner:
            child = process(trains_and_publishes, owner.address, policy, n, n % 2 == 0, state_dtype)
            child.join(PATIENCE)
            assert child.exitcode in (0, -signal.SIGKILL)
            was_killed = child.exitcode != 0
            model = Model(seed=1)
            options = {"lr": 1e-4, "tile_size": 4096, "state_dtype": state_dtype}
            with CSDAdam(model.parameters(), devices=owner.address, resume=True, **options) as opt:
                publishes_on(opt, policy, model, expected)
        n += 3
    assert n > 30


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_resume_goes_on_with_the_chain(state_dtype, tmp_path):
    options = {"state_dtype": state_dtype, "tile_size": 4096}
    with OwnerHere(tmp_path / "owner") as owner:
        with Published(tmp_path / "policy", owner.address, **options) as t:
            t.steps(3)
        with Published(tmp_path / "policy", owner.address, resume=True, model=Model(seed=9), done=3, **options) as t:
            t.steps(2)
    versions = chain(tmp_path / "policy")
    assert [(v.number, v.is_full) for v in versions] == [(n, n == 1) for n in range(1, 7)]
    assert len({v.run for v in versions}) == 1


# ---- what cannot be written --------------------------------------------------------------------------


def step_until_error(t):
    """Take a step, and wait for what the publisher says about it, which pub.wait() would make it act on."""
    t.step()
    t.opt.wait()
    until = time.monotonic() + PATIENCE
    while not t.pub.error:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_version_that_cannot_be_written_or_named(tmp_path):
    """Training goes on, and the next version that can be written is full."""
    with published(tmp_path) as (t, _):
        t.steps(2)
        for at in ("add", "name"):
            version = t.pub.version

            def full(real, *arguments):
                raise OSError(28, "No space left on device")

            with replaced(Folder, at, full), pytest.warns(UserWarning, match="were not published"):
                step_until_error(t)
            assert (t.pub.version, t.pub.error) == (version, "No space left on device")
            for _ in range(3):  # in the first of them, the publisher of a version that has no name learns of it
                t.step()
            t.check()
            assert any(v.is_full and v.number > version for v in chain(tmp_path / "policy"))
            t.steps(2)
