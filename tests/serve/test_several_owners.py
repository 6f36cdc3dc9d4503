"""One trainer with several owners: a step is complete on all of them or on none, whatever happens to one of them."""

import contextlib
import os
import random
import signal
from unittest import mock

import pytest
import torch
from support.forked import process
from support.kills import OWNER, PATIENCE, TRAINER, Killing, assert_like, done_of, expected, train_in_process
from support.nets import MODES, Net, assert_equal, own, synchronize_once_cut
from support.nets_on_ranks import Net as RankNet
from support.nets_on_ranks import assert_equal as assert_all_equal
from support.owner_here import OwnersHere
from support.owners import Owner
from support.ranks import on_ranks
from support.replacing import replaced
from support.stores import whole_copies

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRankError, CSDStoreError, CSDValueError
from csd_optim.bindings import Native
from csd_optim.checkpoint.export import export_torch
from csd_optim.checkpoint.reshard import reshard
from csd_optim.serve.owner.owner_requests import OwnerRequests
from csd_optim.serve.trainer import remote_engine
from csd_optim.store.file import StoreFile
from csd_optim.store.format import read_contents


@pytest.fixture
def owners(tmp_path):
    with OwnersHere(tmp_path / "owners") as there:
        yield there


def part(owners, k):
    """Return what owner k has of the trainer."""
    return owners.owners[k].owner._parts[k]


def resumed(address, done, **options):
    net = Net(address, resume=True, **options)
    assert net.opt.committed_step == done
    net.done = done
    return net


# ---- a device of one owner fails -----------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("stage", ["begin", "push", "params_ready", "finish"])
@pytest.mark.parametrize("mode", [None, {}, {"backward": True}], ids=str)
def test_a_device_fails_and_the_step_is_undone_on_all_owners(owners, tmp_path, stage, owner, mode):
    ours, served = Net(own(tmp_path)).steps(3), Net(owners.address).steps(3)
    if mode is not None:
        served.opt.overlap(served.model, **mode)
    served.opt.synchronize()
    image, native = served.image(), part(owners, owner).engine.native
    real = getattr(native, stage)

    def fails(*arguments, **options):
        if stage == "finish":
            if arguments[:1] == (False,) or options == {"keep": False}:
                return real(*arguments, **options)
            real(False)  # it raises when the step is undone
        raise CSDOSError(5, "broken")

    def step():
        served.step()
        served.opt.wait()

    with mock.patch.object(native, stage, fails), pytest.raises(CSDError, match="broken"):
        step()
    assert all(torch.equal(a, b) for a, b in zip(image, served.image(), strict=True))
    served.opt.zero_grad()
    served.done = 3
    assert_equal(ours.steps(3), served.steps(3))
    served.opt.close()
    assert_equal(ours, resumed(owners.address, 6))


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("mode", [None, {}], ids=str)
def test_a_step_that_is_undone_leaves_a_new_manifest_to_be_written(owners, tmp_path, owner, mode):
    served = Net(owners.address).steps(3)
    if mode is not None:
        served.opt.overlap(served.model, **mode)
    served.opt.synchronize()
    served.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5), requires_grad=False)]})

    def fails(finish, native, keep, ending=None):
        breaks = keep and native is part(owners, owner).engine.native
        finish(native, keep and not breaks, ending)
        if breaks:
            raise CSDOSError(5, "broken")

    def step():
        served.step()
        served.opt.wait()

    with replaced(Native, "finish", fails), pytest.raises(CSDError, match="broken"):
        step()
    served.opt.zero_grad()
    served.done = 3
    served.steps(2).opt.synchronize()
    assert [whole_copies(store) for store in owners.stores] == [[True, True]] * 2
    manifests = [read_contents(store).manifest for store in owners.stores]
    assert all(len(manifest["waiting"]) == 1 for manifest in manifests)


def test_a_full_disk_of_one_owner_stops_new_parameters_until_there_is_room(owners, tmp_path):
    ours, served = Net(own(tmp_path)), Net(owners.address)
    real, failing = StoreFile.allocate, owners.owners[1].store

    def full(self, *arguments):
        if failing in self.path.parents:
            raise CSDOSError(28, f"{self.path}: No space left on device")
        return real(self, *arguments)

    with mock.patch.object(StoreFile, "allocate", full):
        for _ in range(2):
            with pytest.raises(CSDOSError, match="No space left"):
                served.step()
    served.opt.zero_grad()
    assert_equal(ours.steps(2), served.steps(2))
    served.opt.close()


# ---- connections -----------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
def test_a_connection_is_cut_between_steps(owners, tmp_path, owner):
    ours, served = Net(own(tmp_path)), Net(owners.address)
    for _ in range(3):
        ours.step()
        served.step()
        served.opt.synchronize()
        owners.owners[owner].owner.sessions[owner].end("cut")
        synchronize_once_cut(served.opt)
    assert_equal(ours, served)
    served.opt.close()


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("has_kept", [True, False])
def test_a_connection_is_cut_as_a_step_ends(owners, tmp_path, owner, has_kept):
    """The answer to a FINISH is lost: the owner is asked whether the step counts there; else no owner has it."""
    ours, served = Net(own(tmp_path)).steps(2), Net(owners.address).steps(2)
    of = part(owners, owner)

    def cut(finish, requests, *arguments):
        if requests.ownership is not of:
            return finish(requests, *arguments)
        answer = finish(requests, *arguments) if has_kept else None
        owners.owners[owner].owner.sessions[owner].end("cut")
        return answer or ({}, [])

    image = served.image()
    with replaced(OwnerRequests, "_on_finish", cut):
        if has_kept:
            served.step()
        else:
            with pytest.raises(CSDRankError):
                served.step()
    if not has_kept:
        served.opt.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(image, served.image(), strict=True))
        served.step()
    assert_equal(ours.steps(1), served)
    assert_equal(ours.steps(2), served.steps(2))
    served.opt.close()
    assert_equal(ours, resumed(owners.address, 5))


# ---- kills -------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_owners(directory, order):
    for k in range(2):
        (directory / str(k)).mkdir()
    with Owner(directory / "0", timeout=30) as a, Owner(directory / "1", before=Killing(order), timeout=30) as b:
        yield [a, b]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 4 == 0 else pytest.mark.soak) for i, name in enumerate(OWNER)]
)
def test_an_owner_is_killed_and_the_trainer_resumes(tmp_path, name, monkeypatch):
    images, order = expected(), tmp_path / "kill"
    call = random.Random(name).randint(2, 4)
    order.write_text(f"{name} {call * (3 if 'PUSH' in name or 'PARAMS' in name else 1) + 1}")
    with two_owners(tmp_path, order) as owners:
        addresses = [owner.address for owner in owners]
        net = Net(addresses)

        def until_it_raises():
            while True:
                net.step()
                assert_like(net, images)

        with monkeypatch.context() as patch:
            patch.setattr(remote_engine, "CONNECT_SECONDS", 0.5)  # nobody starts the owner again meanwhile
            with pytest.raises(CSDError):
                until_it_raises()
            with contextlib.suppress(CSDError):
                net.opt.close()
        owners[1].process.join(60)  # its connections end before it has
        assert not owners[1].process.is_alive()
        owners[1].start()
        done = net.done
        net = Net(addresses, resume=True)
        net.done = done_of(net) if net.opt.state_dict()["state"] else 0
        assert done - 1 <= net.done <= done + 1
        assert_like(net, images)
        while net.done < done + 4:
            net.step()
            assert_like(net, images)
        net.opt.close()


def kill_trainers(directory, names, seed):
    """Train in one process after another, each killed. Returns the number of kills."""
    images, failure = directory / "images.pt", directory / "failure"
    torch.save(expected(), images)
    chance, kills = random.Random(seed), 0
    with two_owners(directory, directory / "never") as owners:
        addresses = [owner.address for owner in owners]

        def begin(**options):
            net = Net(addresses, **options).steps(1)
            net.opt.synchronize()
            net.opt.close()

        begin()
        for name in names:
            call = chance.randint(1, 6 if "BEGIN" in name or "FINISH" in name else 40)
            trainer = process(train_in_process, addresses, name, call, images, failure)
            trainer.join(PATIENCE)
            assert not failure.exists(), failure.read_text()
            assert trainer.exitcode in (0, -signal.SIGKILL)
            kills += trainer.exitcode != 0
            if trainer.exitcode == 0:
                begin(overwrite=True)
    return kills


def test_a_trainer_resumes_where_a_killed_one_has_left(tmp_path):
    assert kill_trainers(tmp_path, ["in-PUSH", "after-FINISH", "in-an-answer"], 1)


@pytest.mark.soak
def test_trainers_are_killed_200_times(tmp_path):
    assert kill_trainers(tmp_path, [name for _ in range(40) for name in TRAINER], 2) >= 200


# ---- who has what --------------------------------------------------------------------------------


def test_owners_get_states_according_to_their_shares(owners, tmp_path):
    a, b = owners.address
    ours, served = Net(own(tmp_path)).steps(2), Net([a, f"{b}&share=3"]).steps(2)
    assert_equal(ours, served)
    one, other = (counts["params"] for counts in served.opt.stats()["devices"])
    assert 2 < other / one < 4
    served.opt.close()
    with pytest.raises(CSDValueError, match="share is a positive number"):
        Net([a, f"{b}&share=0"])


def test_an_owner_may_be_named_twice(tmp_path):
    with OwnersHere(tmp_path / "owners", 1) as owners:
        ours, served = Net(own(tmp_path)).steps(2), Net(2 * owners.address).steps(2)
        assert_equal(ours, served)
        served.opt.close()


def test_other_owners_than_before_are_refused_and_nothing_is_lost(owners, tmp_path):
    ours, served = Net(own(tmp_path)).steps(2), Net(owners.address).steps(2)
    served.opt.close()
    with pytest.raises(CSDError, match="another number of trainers"):
        Net(owners.address[0], resume=True)
    with pytest.raises(CSDError, match="resume=True"):
        Net(owners.address)
    with pytest.raises(CSDStoreError, match="in the order in which"):
        Net(owners.address[::-1], resume=True)
    again = resumed(owners.address, 2)
    assert_equal(ours.steps(1), again.steps(1))
    with pytest.raises(CSDStoreError, match="states of another model"):
        CSDAdam([torch.zeros(3, requires_grad=True)], devices=owners.address, resume=True)
    assert_equal(ours.steps(1), again.steps(1))  # it was not ended
    again.opt.close()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("n", [2, 3])
def test_stores_are_exported_and_resharded(tmp_path, n, state_dtype):
    options = {"dtype": torch.bfloat16, "state_dtype": state_dtype, "late": True}
    ours = Net(own(tmp_path), **options).steps(3)
    with OwnersHere(tmp_path / "owners", n) as owners:
        served = Net(owners.address, **options).steps(3)
        served.opt.save(tmp_path / "snapshot").result()
        served.opt.close()
    for name, stores in (("a", owners.stores), ("b", tmp_path / "snapshot")):
        export_torch(stores, tmp_path / name)
        exported = torch.load(tmp_path / name)["state"]
        for k, entry in ours.opt.state_dict()["state"].items():
            assert all(torch.equal(value, exported[k][name]) for name, value in entry.items())
    with pytest.raises(CSDStoreError, match="name the stores of all"):
        export_torch(owners.stores[0], tmp_path / "one")
    reshard(owners.stores, [str(tmp_path / "one")], 1)
    again = resumed(str(tmp_path / "one"), 3, **options)
    assert_equal(ours.steps(2), again.steps(2))
    again.opt.close()


# ---- several trainers with more owners ----------------------------------------------------------------


def beside(rank, addresses, wrap, options, overlap):
    os.makedirs(f"own-{rank}", exist_ok=True)
    ours = RankNet(rank, f"own-{rank}", wrap, **options).until(6)
    with RankNet(rank, addresses, wrap, overlap, **options).until(3).opt as opt:
        opt.synchronize()
    served = RankNet(rank, addresses, wrap, overlap, resume=True, **options)
    assert served.opt.committed_step == served.done == 3
    assert_all_equal(ours.image(), served.until(6).image())
    served.opt.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("wrap", "options", "overlap"),
    [
        ("DDP", {}, None),
        ("DDP", {"state_dtype": "8bit"}, {}),
        ("FSDP2", {"max_grad_norm": 0.5}, {"backward": True}),
        ("FSDP2", {}, {"free_gradients": True}),
    ],
    ids=str,
)
def test_two_trainers_with_three_owners(tmp_path, wrap, options, overlap):
    with contextlib.ExitStack() as stack:
        owners = []
        for k in range(3):
            (tmp_path / f"owner-{k}").mkdir()
            owners.append(stack.enter_context(Owner(tmp_path / f"owner-{k}", timeout=60)))
        on_ranks(2, beside, [o.address for o in owners], wrap, options, overlap, directory=tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_three_owners_in_each_mode(tmp_path, mode):
    with OwnersHere(tmp_path / "owners", 3) as owners:
        ours, served = Net(own(tmp_path)), Net(owners.address)
        if (options := MODES[mode]) is not None:
            served.opt.overlap(served.model, **options)
        for _ in range(5):
            ours.step()
            served.step()
            served.opt.synchronize()
        assert_equal(ours, served)
        served.opt.close()
