"""A link whose keys have been used for so many bytes is replaced by another one between steps, and nobody notices."""

import copy

import pytest
import torch
from support.nets import Net, assert_equal, own
from support.nets_on_ranks import Net as NetOnRanks
from support.owner_here import OwnerHere, OwnersHere
from support.ranks import on_ranks
from support.wires import files

from csd_optim.serve.wire import connection

__all__ = ["files"]

MODES = [None, {}, {"backward": True}]


@pytest.fixture
def worn_soon(monkeypatch):
    """Every link is worn by a step, and by a few of the other requests."""
    monkeypatch.setattr(connection, "MOST_BYTES", 20_000)


def overlapping(address, mode):
    """Return a net with overlap() of these options; None: without it."""
    net = Net(address)
    if mode is not None:
        net.opt.overlap(net.model, **mode)
    return net


def sessions_of(owner):
    return sum("attach" in line for line in owner.lines)


@pytest.mark.usefixtures("worn_soon")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_steps(mode, tmp_path):
    """In every mode, with states that are written and read, and a state dict that is loaded between them."""
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = overlapping(own(tmp_path), mode), overlapping(owner.address, mode)
        for k in range(4):
            ours.step()
            served.step()
            ours.opt.wait()
            served.opt.wait()
            if k == 1:
                for net in (ours, served):
                    net.opt.state[next(net.model.parameters())]["exp_avg"].mul_(2)
            if k == 2:
                for net in (ours, served):
                    net.opt.load_state_dict(copy.deepcopy(net.opt.state_dict()))
            assert_equal(ours, served)
        served.opt.synchronize()
        assert served.opt.committed_step == 4
        assert sessions_of(owner) >= 4
        assert all("attach" not in line or "step" in line for line in owner.lines)
        ours.opt.close()
        served.opt.close()
        resumed = Net(owner.address, resume=True)
        assert resumed.opt.committed_step == 4
        resumed.opt.close()


@pytest.mark.usefixtures("worn_soon")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_several_owners(mode, tmp_path):
    with OwnersHere(tmp_path / "owners", 2) as owners:
        ours, served = overlapping(own(tmp_path), mode), overlapping(owners.address, mode)
        for _ in range(4):
            ours.step()
            served.step()
        ours.opt.wait()
        served.opt.wait()
        assert_equal(ours, served)
        served.opt.synchronize()
        assert served.opt.committed_step == 4
        assert sum(map(sessions_of, owners.owners)) >= 4
        served.opt.close()


@pytest.mark.usefixtures("worn_soon")
def test_with_a_key(files, tmp_path):
    with OwnerHere(tmp_path / "owner", key=files.owner) as owner:
        ours, served = Net(own(tmp_path)).steps(4), Net(f"{owner.address}&key={files.owner}&connections=2").steps(4)
        assert_equal(ours, served)
        assert sessions_of(owner) >= 3
        served.opt.close()


def steps_on_worn_links(rank):
    with pytest.MonkeyPatch.context() as patch, OwnerHere(f"owner-{rank}") as owner:
        undisturbed = NetOnRanks(rank, owner.address).until(5)
        wanted = [p.detach().clone() for p in undisturbed.model.parameters()]
        undisturbed.opt.close()
        patch.setattr(connection, "MOST_BYTES", 2000)
        net = NetOnRanks(rank, owner.address, overwrite=True).until(5)
        net.opt.synchronize()
        assert all(map(torch.equal, net.model.parameters(), wanted))
        assert net.opt.committed_step == 5
        assert sessions_of(owner) >= 4
        net.opt.close()


def test_several_trainers(tmp_path):
    on_ranks(2, steps_on_worn_links, directory=tmp_path)


@pytest.mark.usefixtures("worn_soon")
def test_a_snapshot_is_made_in_one_session(tmp_path):
    with OwnerHere(tmp_path / "owner") as owner:
        served = Net(owner.address).steps(2)
        served.opt.save(tmp_path / "snapshot").result()
        served.steps(1).opt.close()
        (store,) = (tmp_path / "snapshot").rglob("csd_optim.store")
        again = Net(str(store.parent), resume=True)
        assert again.opt.committed_step == 2
        again.opt.close()
