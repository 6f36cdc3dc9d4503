"""One trainer with several owners, in steps that concern only some owners, and the owners' reports of contents."""

import contextlib
import copy
import os
import random
import signal
import time
from unittest import mock

import msgspec
import pytest
import torch
from support.inside import engine_of
from support.nets import Net, assert_equal, own
from support.owner_here import OwnersHere
from support.replacing import replaced

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRankError, CSDStoreError, CSDStoreExistsError
from csd_optim.checkpoint.consolidate import consolidated_stores
from csd_optim.checkpoint.old_params import old_params
from csd_optim.serve.owner.owner_requests import OwnerRequests
from csd_optim.serve.owner.ownership import Ownership
from csd_optim.serve.trainer.remote_native import RemoteNative
from csd_optim.store.joined import joined


@pytest.fixture
def owners(tmp_path):
    with OwnersHere(tmp_path / "owners") as there:
        yield there


class Twins:
    """The same parameters, 1-D, on directories and on owners."""

    def __init__(self, directory, address, *sizes, **options):
        self.pairs = [[torch.nn.Parameter(torch.linspace(-1, 1, n)) for _ in range(2)] for n in sizes]
        ours, served = zip(*self.pairs, strict=True)
        options = {"tile_size": 1024, "lr": 0.01, **options}
        self.ours = CSDAdam(ours, devices=directory, **options)
        self.served = CSDAdam(served, devices=address, **options)

    def step(self, *updated):
        """Step with gradients of these parameters. If the owners' raises, the other one is not taken."""
        for k, pair in enumerate(self.pairs):
            for p in pair:
                p.grad = torch.full_like(p, k + 1.0) if k in updated else None
        self.served.step()
        self.ours.step()

    def assert_equal(self):
        self.served.synchronize()
        for a, b in self.pairs:
            assert torch.equal(a, b)
            ours, served = self.ours.state.get(a, {}), self.served.state.get(b, {})
            assert ours.keys() == served.keys()
            assert all(torch.equal(value, served[name]) for name, value in ours.items())


def test_steps_without_tiles_of_some_owners(owners, tmp_path):
    twins = Twins(own(tmp_path), owners.address, 1024, 1024, 10)
    chance = random.Random(1)
    for updated in (
        [0],
        [0, 1],
        [1],
        [0],
        [0, 1, 2],
        *(chance.sample(range(3), chance.randint(0, 3)) for _ in range(8)),
    ):
        twins.step(*updated)
    twins.assert_equal()
    for opt in (twins.ours, twins.served):
        saved = copy.deepcopy(opt.state_dict())
        del saved["state"][1]
        opt.load_state_dict(saved)
    for updated in ([0], [0], [0, 1]):
        twins.step(*updated)
    twins.assert_equal()
    twins.served.close()


@pytest.mark.parametrize("owner", [0, 1])
def test_a_connection_is_cut_in_a_step_that_does_not_concern_its_owner(owners, tmp_path, owner):
    twins = Twins(own(tmp_path), owners.address, 100)
    twins.step(0)
    twins.step(0)
    twins.served.synchronize()
    real, cut = RemoteNative.begin, []

    def begin(self, *arguments, **options):
        real(self, *arguments, **options)
        if not cut:
            cut.append(owners.owners[owner].owner.sessions[owner])
            cut[0].end("cut")
            cut[0].ended.wait()

    with mock.patch.object(RemoteNative, "begin", begin):
        for _ in range(3):
            try:
                twins.step(0)
            except CSDRankError:
                assert owner == 0  # the other one finds out later, and has lost nothing
                twins.step(0)
    twins.assert_equal()
    twins.served.close()


def test_a_link_is_lost_between_a_confirmed_step_and_the_next(owners, tmp_path):
    twins = Twins(own(tmp_path), owners.address, 4000)
    twins.step(0)
    cut = []

    def cutting(confirmed, requests, *arguments):
        answer = confirmed(requests, *arguments)
        if not cut:
            cut.append(owners.owners[0].owner.sessions[0])
            cut[0].end("cut")
        return answer

    with replaced(OwnerRequests, "_on_confirmed", cutting):
        for _ in range(3):
            twins.step(0)
    twins.assert_equal()
    twins.served.close()


def test_a_small_matrix_of_muon_joins(owners, tmp_path):
    """Some owner has no second pass in that step."""

    def parameters_after(devices):
        torch.manual_seed(2)
        matrix, vector = torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Parameter(torch.ones(8192))
        groups = [{"params": [matrix], "rule": "muon"}, {"params": [vector]}]
        opt, late = CSDAdam(groups, devices=devices, tile_size=1024, lr=0.01), torch.nn.Parameter(torch.randn(16, 16))
        for step in range(4):
            if step == 2:
                opt.add_param_group({"params": [late], "rule": "muon"})
            matrix.grad = torch.randn_like(matrix) if step < 2 else None
            vector.grad, late.grad = torch.randn_like(vector), torch.randn_like(late)
            opt.step()
        opt.synchronize()
        opt.close()
        return matrix, vector, late

    assert all(map(torch.equal, parameters_after(own(tmp_path)), parameters_after(owners.address)))


class Sometimes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = torch.nn.ParameterList(torch.ones(n) for n in (700, 100, 3000))

    def forward(self, with_all):
        a, b, c = self.sizes
        return (2 * a).sum() + (3 * c).sum() + ((4 * b).sum() if with_all else 0)


@pytest.mark.parametrize("mode", [{"free_gradients": True}, {"backward": True}], ids=str)
def test_a_parameter_without_a_gradient_shares_its_tile(owners, tmp_path, mode):
    models = [Sometimes(), Sometimes()]
    for model, devices in zip(models, (own(tmp_path), owners.address), strict=True):
        with CSDAdam(model.parameters(), devices=devices, tile_size=1024, lr=0.01) as opt:
            opt.overlap(model, **mode)
            for with_all in (1, 1, 0, 0, 1):
                model(with_all).backward()
                opt.step()
                opt.synchronize()
                opt.zero_grad()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.parametrize("how", ["close", "save"])
def test_what_is_written_to_states_is_with_all_owners_or_with_none(owners, tmp_path, how):
    (p,) = params = [torch.nn.Parameter(torch.ones(2048))]
    opt = CSDAdam(params, devices=owners.address, tile_size=1024)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    opt.synchronize()
    opt.state[p]["exp_avg"].fill_(7)

    def cut(end, requests, *arguments):
        if requests.ownership.trainer == 1:
            owners.owners[1].owner.sessions[1].end("cut")
            raise CSDRankError("cut")
        return end(requests, *arguments)

    both = replaced(OwnerRequests, "_on_written", cut), replaced(OwnerRequests, "_on_loaded", cut)
    with both[0], both[1], pytest.raises(CSDError):
        opt.close() if how == "close" else opt.save(tmp_path / "snapshot").result()
    with contextlib.suppress(CSDError):
        opt.close()
    opt = CSDAdam(params, devices=owners.address, tile_size=1024, resume=True)
    assert opt.committed_step == 2
    assert len(opt.state[p]["exp_avg"].unique()) == 1
    opt.state[p]["exp_avg"].fill_(7)
    opt.close()
    opt = CSDAdam(params, devices=owners.address, tile_size=1024, resume=True)
    assert (opt.state[p]["exp_avg"] == 7).all()
    opt.close()


def test_ctrl_c_waits_for_owners_that_answer(owners):
    (p,) = params = [torch.nn.Parameter(torch.ones(5000))]
    opt = CSDAdam(params, devices=owners.address, tile_size=1024)
    p.grad = torch.ones_like(p)
    opt.step()

    def slow(finish, requests, *arguments):
        if requests.ownership.trainer == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return finish(requests, *arguments)

    with replaced(OwnerRequests, "_on_finish", slow), pytest.raises(KeyboardInterrupt):
        opt.step()
    assert opt.state[p]["step"] == 2
    begun = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - begun < 0.2  # nothing spins
    opt.close()


# ---- what owners have, and say -----------------------------------------------------------------------------------


def test_an_owner_that_lies_about_its_tiles_is_refused(owners):
    with Net(owners.address).steps(1).opt as opt:
        opt.synchronize()
    real = Ownership.welcome

    def lies(self):
        fields, arrays = real(self)
        if self.trainer == 1:
            extents = [msgspec.structs.replace(about, tile_elems=1 << 20) for about in fields.extents]
            fields = msgspec.structs.replace(fields, extents=extents)
        return fields, arrays

    with mock.patch.object(Ownership, "welcome", lies), pytest.raises(CSDRankError, match="is not that of the whole"):
        Net(owners.address, resume=True)


def test_new_states_are_not_made_beside_others(owners, tmp_path):
    ours, served = Net(own(tmp_path)).steps(2), Net(owners.address).steps(2)
    served.opt.close()
    with pytest.raises(CSDStoreExistsError, match="in the order in which"):
        Net(owners.address[::-1])
    again = Net(owners.address, resume=True)
    again.done = 2
    assert_equal(ours.steps(1), again.steps(1))
    again.opt.close()


def test_a_limit_is_for_what_an_owner_has(tmp_path):
    sizes = 24 * 4 * 1024  # of the tiles that each of four owners gets, in two slots
    with OwnersHere(tmp_path / "owners", 4, max_model=sizes) as owners:
        for n, fails in ((16, False), (17, True)):
            p = torch.nn.Parameter(torch.ones(n * 1024))
            opt = CSDAdam([p], devices=owners.address, tile_size=1024, overwrite=True)
            p.grad = torch.ones_like(p)
            if fails:
                with pytest.raises(CSDRankError, match="larger --max-model"):
                    opt.step()
            else:
                opt.step()
            opt.close()


def test_an_owner_may_take_longer_to_resume_than_another_waits(tmp_path):
    """The answer of the fast one is larger than the buffers of sockets."""
    p = torch.nn.Parameter(torch.ones(2048))
    with OwnersHere(tmp_path / "owners", timeout=1) as owners:
        with CSDAdam([p], devices=owners.address, tile_size=1024) as opt:
            opt.user_state["large"] = torch.zeros(4_000_000)
            p.grad = torch.ones_like(p)
            opt.step()
        real = Ownership.open

        def opened(self, *arguments, **options):
            real(self, *arguments, **options)
            if self.trainer == 0:
                time.sleep(2)

        with mock.patch.object(Ownership, "open", opened):
            opt = CSDAdam([p], devices=owners.address, tile_size=1024, resume=True)
        assert opt.committed_step == 1
        opt.close()


def test_a_commit_that_is_tried_again_has_the_record_of_its_step(tmp_path):
    p = torch.nn.Parameter(torch.ones(2048))
    opt = CSDAdam([p], devices=own(tmp_path), lr=0.1)

    def step(lr):
        opt.param_groups[0]["lr"], opt.user_state["lr"] = lr, lr
        p.grad = torch.ones_like(p)
        opt.step()

    step(0.1)
    committer = engine_of(opt).committer
    committer.wait()
    wait = committer.background.wait
    failures = iter([CSDOSError(28, "No space left on device")])

    def full():
        for failure in failures:
            raise failure
        wait()

    real = type(committer).commit

    def commit(self, *arguments, **options):
        with mock.patch.object(committer.background, "wait", full):
            real(self, *arguments, **options)

    with mock.patch.object(type(committer), "commit", commit), pytest.raises(CSDOSError, match="No space"):
        step(0.2)
    opt.close()
    opt = CSDAdam([p], devices=own(tmp_path), lr=0.1, resume=True)
    assert (opt.committed_step, opt.param_groups[0]["lr"], opt.user_state) == (2, 0.2, {"lr": 0.2})
    opt.close()


# ---- stores that nobody can be sure of ------------------------------------------------------------------------------

VALUES = (None, True, -1, 0, 1, 2, 7, 1 << 40, 1 << 70, 0.5, "", "8bit", [], {}, [1], [[]], ["master"])


def mutated(chance, tree):
    """Replace, remove or add something anywhere in a tree of JSON."""
    at = tree
    while True:
        key = chance.choice([*at]) if isinstance(at, dict) else chance.randrange(len(at))
        if isinstance(at[key], (dict, list)) and at[key] and chance.random() < 0.8:
            at = at[key]
        elif chance.random() < 0.8:
            at[key] = chance.choice(VALUES)
            return
        elif isinstance(at, dict):
            del at[key]
            return
        else:
            at.insert(key, copy.deepcopy(at[key]))
            return


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_stores_with_changed_manifests_are_refused_or_read(tmp_path, seed):
    with OwnersHere(tmp_path / "owners") as owners:
        Net(owners.address, late=True).steps(3).opt.close()
    found = []
    join = mock.patch("csd_optim.checkpoint.consolidate.joined", lambda ranks: found.extend(ranks) or joined(ranks))
    with join, consolidated_stores(owners.stores) as source:
        whole = [p.entry for p in old_params(source)]
    chance, refused = random.Random(seed), 0
    for _ in range(300):
        ranks = copy.deepcopy(found)
        for _ in range(chance.choice([1, 1, 2])):
            mutated(chance, chance.choice(ranks)[0].manifest["divided"])
        try:
            stores = joined(ranks)
        except CSDStoreError:
            refused += 1
        else:
            assert [p["numel"] for p in stores[0][0].manifest["params"]] == [p["numel"] for p in whole]
    assert refused > 100
