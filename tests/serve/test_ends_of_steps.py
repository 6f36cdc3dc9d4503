"""The end of a step at owners: one message completes and commits it; its answer may be a failure, or be lost."""

import contextlib

import msgspec
import numpy as np
import pytest
import torch
from support.inside import engine_of
from support.nets import Net, assert_equal, own
from support.owner_here import OwnerHere, OwnersHere
from support.replacing import failing, replaced

from csd_optim import CSDError, CSDOSError, CSDRankError, CSDTornError
from csd_optim.bindings import Native
from csd_optim.engine.commit.commits import Commits
from csd_optim.engine.parts import Ending
from csd_optim.serve.messages import unpack_counts
from csd_optim.serve.owner.owner_requests import OwnerRequests
from csd_optim.serve.requests import op_of
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.trainer.remote_native import RemoteNative
from csd_optim.store.format import Record
from csd_optim.store.user_state import unpack_user_state


@pytest.fixture(params=[1, 2], ids=["", "two owners"])
def owner(tmp_path, request):
    with OwnerHere(tmp_path / "owner") if request.param == 1 else OwnersHere(tmp_path / "owners") as there:
        yield there


class Noted(Net):
    """A net whose steps each have another learning rate and `user_state`."""

    def step(self, touch=None):
        self.opt.param_groups[0]["lr"] = 0.01 / (1 + self.done)
        self.opt.user_state["done"] = self.done + 1
        super().step(touch)

    def assert_noted(self, step):
        """Compare with what was committed with this step, the last one."""
        assert (self.opt.committed_step, self.opt.user_state) == (step, {"done": step})
        assert self.opt.param_groups[0]["lr"] == 0.01 / step
        assert {int(entry["step"]) for entry in self.opt.state_dict()["state"].values()} == {step}


def assert_resumes(address, expected, step):
    """Compare a resume with a net that was not disturbed."""
    again = Noted(address, resume=True)
    again.assert_noted(step)
    again.done = step
    assert_equal(expected, again)
    assert_equal(expected.steps(1), again.steps(1))
    again.opt.close()


def count_steps(net):
    """Note that the last step is complete, although it has raised."""
    net.opt.zero_grad()
    net.done += 1


def test_each_step_is_completed_and_committed_by_one_message_with_its_own_values(owner):
    """Its number, record, counts and round: owners get none of them twice, nor those of another step."""
    served, seen = Noted(owner.address), []

    def execute(execute, requests, request, arrays):
        if (op := op_of(request)) in ("finish", "commit"):
            lr = msgspec.json.decode(request.record)["groups"][0]["lr"]
            done = unpack_user_state(bytes(arrays[1]))["done"]
            counts = {*unpack_counts(arrays[0], len(arrays[0]) // 4).tolist()}
            seen.append((op, request.step, request.round, lr, done, counts))
        return execute(requests, request, arrays)

    n = len(owner.address) if isinstance(owner.address, list) else 1
    with replaced(OwnerRequests, "execute", execute):
        served.steps(4)
    served.opt.close()
    expected = [("finish", step, step + 1, 0.01 / (1 + step), step + 1, {step + 1.0}) for step in range(4)]
    assert seen == [each for each in expected for _ in range(n)]


@pytest.mark.parametrize(
    ("owner", "failing_commit", "then"),
    [(1, 1, "step"), (1, 1, "commit"), (1, 1, "close"), *((2, k, then) for k in (1, 2) for then in ("step", "close"))],
    indirect=["owner"],
)
def test_a_commit_that_fails_is_said_once_and_does_not_undo_its_step(owner, tmp_path, then, failing_commit):
    ours, served = Noted(own(tmp_path)).steps(3), Noted(owner.address).steps(2)
    served.opt.synchronize()
    with (
        failing(Commits, "_replaced_by_a_commit", failing_commit, "No space left"),
        pytest.raises(CSDOSError, match="No space left"),
    ):
        served.step()
    count_steps(served)
    assert all(map(torch.equal, ours.model.parameters(), served.model.parameters()))
    if then == "step":
        served.opt.wait()
        assert_equal(ours.steps(2), served.steps(2))
    elif then == "commit":
        engine_of(served.opt).committer.commit()
    served.opt.close()
    assert_resumes(owner.address, ours, ours.done)


def test_a_commit_that_has_failed_is_not_reported_once_its_step_is_undone(tmp_path):
    """One owner has completed the step, but cannot commit it; the other one cannot complete it."""
    with OwnersHere(tmp_path / "owners") as owners:
        ours, served = Noted(own(tmp_path)).steps(2), Noted(owners.address).steps(2)
        served.opt.synchronize()
        image = served.image()
        kept = 0

        def breaks(finish, native, keep, *ending):
            nonlocal kept
            kept += keep
            if keep and kept == 2:
                finish(native, False)
                raise CSDOSError(5, "broken")
            return finish(native, keep, *ending)

        with (
            failing(Commits, "_replaced_by_a_commit", 1, "No space left"),
            replaced(Native, "finish", breaks),
            pytest.raises(CSDOSError, match="broken"),
        ):
            served.step()
        served.opt.zero_grad()
        assert all(map(torch.equal, image, served.image()))
        assert_equal(ours.steps(2), served.steps(2))
        served.opt.close()
        assert_resumes(owners.address, ours, 4)


@contextlib.contextmanager
def losing_the_answer(owner, *, stays_away, executed=True, index=0):
    """Cut the link to owner `index` as FINISH is executed, or instead. `stays_away`: until the end of the block."""
    finished = 0

    def lost(exchange, link, session, request, arrays):
        nonlocal finished
        finished += op_of(request) == "finish"
        if op_of(request) != "finish" or finished != index + 1:
            return exchange(link, session, request, arrays)
        if executed:
            exchange(link, session, request, arrays)
        owner.owner.sessions[index].end("cut")
        link.lose(CSDRankError("cut"))
        raise CSDRankError("cut")

    def attach(real, link):
        if finished > index and stays_away and link.is_lost:
            raise CSDRankError("gone")
        real(link)

    with replaced(Link, "_exchange", lost), replaced(Link, "attach", attach):
        yield


@pytest.mark.parametrize("asks", ["at once", "later", "in close"])
def test_a_step_whose_answer_is_lost_counts_if_the_owner_says_so(tmp_path, asks):
    """Whenever it is asked, the step has its record, too: nothing that is committed later brings back an older one."""
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Noted(own(tmp_path)).steps(3), Noted(owner.address).steps(2)
        served.opt.synchronize()
        if asks == "at once":
            with losing_the_answer(owner, stays_away=False):
                served.step()
        else:
            with (
                losing_the_answer(owner, stays_away=True),
                pytest.raises(CSDTornError, match="cannot be read back"),
            ):
                served.step()
            count_steps(served)
            if asks == "later":
                served.opt.wait()
        if asks != "in close":
            assert_equal(ours, served)
            assert_equal(ours.steps(1), served.steps(1))
        else:
            served.opt.state_dict()  # asks, and changes nothing
        served.opt.close()
        assert_resumes(owner.address, ours, ours.done)


@pytest.mark.parametrize("asks", ["at once", "later"])
def test_a_step_whose_message_is_lost_does_not_count(tmp_path, asks):
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Noted(own(tmp_path)).steps(2), Noted(owner.address).steps(2)
        served.opt.synchronize()
        image = served.image()
        with losing_the_answer(owner, stays_away=asks == "later", executed=False), pytest.raises(CSDError):
            served.step()
        served.opt.zero_grad()
        assert all(map(torch.equal, image, served.image()))
        assert_equal(ours.steps(2), served.steps(2))
        served.opt.close()
        assert_resumes(owner.address, ours, 4)


def test_a_step_that_one_owner_cannot_be_asked_about_is_undone_whatever_it_says_later(tmp_path):
    """Another owner has taken the step back by then: a resume begins with the last step that both have."""
    with OwnersHere(tmp_path / "owners") as owners:
        ours, served = Noted(own(tmp_path)).steps(2), Noted(owners.address).steps(2)
        served.opt.synchronize()
        with losing_the_answer(owners.owners[1], stays_away=True, index=1), pytest.raises(CSDError):
            served.step()
        for _ in range(2):
            with pytest.raises(CSDError, match="at step 3, and this trainer is at step 2: start again"):
                served.opt.wait()
        with contextlib.suppress(CSDError):
            served.opt.close()
        assert_resumes(owners.address, ours, 2)


@pytest.mark.parametrize("there", [1, 2, 3, 4])
def test_the_owner_decides_once_about_an_unanswered_end(there):
    native = RemoteNative(None)
    native.owner_step = 2
    ending = native.unanswered = Ending(3, Record(), np.zeros(0, np.float32), 3)
    assert native.settle(there) is (ending if there == 3 else None)
    assert native.owner_step == (3 if there == 3 else 2)
    assert native.unanswered is native.settle(3) is None
