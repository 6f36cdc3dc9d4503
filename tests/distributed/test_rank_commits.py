"""Commits of several ranks: whichever of them dies, and whenever, all resume at the same step, bit for bit."""

import atexit
import contextlib
import errno
import functools
import json
import os
import random
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.losing import LosingDisk
from support import served
from support.inside import engine_of, vote_of
from support.rank_commits import (
    POINTS,
    ShardTraining,
    devices_of,
    die,
    dies_at,
    goes_on,
    train_to,
    train_until_death,
    uninterrupted,
)
from support.ranks import KILLED, on_living_ranks, on_ranks
from support.replacing import class_with, failing, replaced
from support.store_page import region, superblock
from support.stores import whole_copies

import csd_optim.step.prepare
import csd_optim.store.file
from csd_optim import CSDAdam, CSDError, CSDLostError, CSDOSError, CSDStoreError, CSDValueError, CSDWarning
from csd_optim.errors import CSDRankError
from csd_optim.store.file import StoreFile
from csd_optim.store.format import CLEAN, FILE_NAME, read_commits, read_contents

# ---- ranks are killed ------------------------------------------------------------------


# One case of each point: the model of commits (tests/model) has all combinations.
@pytest.mark.parametrize(
    ("point", "victims", "ends"),
    [
        ("within the step", (0,), "killed"),
        ("copy 0 on one device", (1,), "closed"),
        ("after copy 0", (0, 1), "killed"),
        ("before confirm", (0,), "closed"),
        ("before copy 1", (1,), "killed"),
    ],
)
def test_ranks_are_killed(point, victims, ends, tmp_path):
    may_die = (0, 1) if ends == "killed" else victims
    ended = on_ranks(2, train_until_death, point, 3, victims, ends, directory=tmp_path, may_die=may_die)
    assert all(ended[rank] == KILLED for rank in may_die)
    assert goes_on(tmp_path) == POINTS[point]


@pytest.mark.parametrize("point", POINTS)
def test_killed_in_the_first_step(point, tmp_path):
    on_ranks(2, train_until_death, point, 1, (1,), "killed", directory=tmp_path, may_die=(0, 1))
    assert goes_on(tmp_path) == POINTS[point] - 2


def undo_with_another_manifest(rank):
    """Undo a step that has landed here, and failed on rank 1, after a frozen parameter has joined; then die."""
    training = ShardTraining(rank, overlap=True, topk=None).until(3)
    training.opt.synchronize()
    training.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5), requires_grad=False)]})

    def step():
        training.step()
        vote_of(training.opt).wait()
        training.opt.synchronize()

    with failing(class_with("finish"), "finish", int(rank == 1), "unplugged"), pytest.raises(CSDError):
        step()
    training.opt.zero_grad()
    training.done = 3
    training.until(5).opt.synchronize()
    stores = [] if served.assumed() else devices_of(rank)
    assert [whole_copies(Path(store)) for store in stores] == [[True, True]] * len(stores)

    def torn(publish, store, staged, copy):
        if copy == 0:
            os.pwrite(store.fd, staged.table, staged.superblock.table.offset(0))
            die()
        publish(store, staged, copy)

    with replaced(StoreFile, "publish", torn):
        training.step()
        training.opt.synchronize()


def test_killed_after_a_step_with_another_manifest_was_undone(tmp_path):
    on_ranks(2, undo_with_another_manifest, directory=tmp_path, may_die=(0, 1))
    for rank in range(2):
        commits = [read_contents(tmp_path / device) for device in devices_of(rank)]
        assert [(c.superblock.step, len(c.manifest["waiting"])) for c in commits] == [(5, 1)] * 2


def train_under_fire(rank, seed, victims):
    """Trains until killed: after a random time, or at a random write or flush of a commit."""
    rng = random.Random(100 * seed + rank)
    training = ShardTraining(rank, resume=True)
    begun = training.opt.committed_step, training.done, training.image()
    torch.save(begun, f"begun-{seed}-{rank}")
    dist.barrier()
    if rank in victims and rng.random() < 0.5:
        threading.Timer(rng.uniform(0, 0.2), die).start()
    elif rank in victims:
        left = rng.randrange(1, 60)

        def counted(call, *args):
            nonlocal left
            left -= 1
            if left == 0:
                die()
            return call(*args)

        for name in ("pwrite", "fdatasync"):
            setattr(os, name, functools.partial(counted, getattr(os, name)))
    try:
        training.until(10**6)
    except RuntimeError:
        if rng.random() < 0.5:
            die()
        training.opt.close()


def test_ranks_are_killed_again_and_again(tmp_path):
    size, everybody, rng = 3, (0, 1, 2), random.Random(1)
    on_living_ranks(size, train_to, 1, directory=tmp_path)
    last = 1
    for seed in range(12):
        victims = everybody if rng.random() < 0.3 else (rng.randrange(size),)
        on_ranks(size, train_under_fire, seed, victims, directory=tmp_path, may_die=everybody)
        said = [torch.load(tmp_path / f"begun-{seed}-{rank}") for rank in range(size)]
        for rank, (committed, done, image) in enumerate(said):
            assert committed == done == said[0][0] >= last
            assert image == uninterrupted(rank, done)
        last = said[0][0]
    assert last > 5


def train_replicas(rank, step, overlap, point=None):
    """Trains with sharded updates. Returns committed step and parameters at the beginning, and those at the end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "there is no store")
        training = ShardTraining(rank, own=0, topk=None, sharded=True, resume=True, overlap=overlap)
    with dies_at(point, 3) if point and rank == 1 else contextlib.nullcontext():
        first = training.opt.committed_step, [p.detach().clone() for p in training.params]
        try:
            training.until(step)
        except CSDRankError:
            die()
        training.opt.close()
        return *first, [p.detach() for p in training.params]


@pytest.mark.parametrize(
    ("point", "overlap"),
    [
        ("within the step", True),
        ("copy 0 on one device", False),
        ("after copy 0", True),
        ("before confirm", False),
        ("before copy 1", True),
    ],
)
def test_ranks_that_share_the_updates_are_killed(point, overlap, tmp_path):
    on_ranks(2, train_replicas, 6, overlap, point, directory=tmp_path, may_die=(0, 1))
    said = on_living_ranks(2, train_replicas, 5, overlap, directory=tmp_path)
    alone = ShardTraining(0, ["ram:"], topk=None).until(POINTS[point])
    begun = [p.detach().clone() for p in alone.params]
    end = alone.until(5).params
    for committed, first, last in said:
        assert committed == POINTS[point]
        assert all(map(torch.equal, first, begun))
        assert all(map(torch.equal, last, end))


# ---- a rank's disk is full -------------------------------------------------------------


def train_on_a_full_disk(rank, copy):
    training = ShardTraining(rank).until(2)
    training.opt.synchronize()
    said = []
    full = rank == 1

    def publish(original, store, staged, which):
        if full and which == copy:
            raise CSDOSError(errno.ENOSPC, f"{store.path}: the disk is full")
        original(store, staged, which)

    with replaced(StoreFile, "publish", publish):
        for _ in range(3):
            before = training.image() if said else None
            try:
                training.step()
            except CSDError as e:
                said.append((type(e), str(e)))
                assert before is None or training.image() == before
        full = False
        training.until(6)
    training.opt.synchronize()
    assert training.opt.committed_step == 6
    training.opt.close()
    return training.image() == uninterrupted(rank, 6), said


@pytest.mark.at_hand("reads states of a closed optimizer, which are mapped")
@pytest.mark.fp32_states("only fp32 states are mapped")
def test_no_rank_goes_on_when_one_cannot_commit(tmp_path):
    (right_0, said_0), (right_1, said_1) = on_living_ranks(2, train_on_a_full_disk, 0, directory=tmp_path)
    assert right_0
    assert right_1
    # Step 3 was taken, but cannot be committed: both attempts at step 4 are refused.
    assert [kind for kind, _ in said_1] == [CSDOSError] * 2
    assert [kind for kind, _ in said_0] == [CSDRankError] * 2
    assert all("step 3 cannot be committed yet" in text for _, text in (*said_0, *said_1))
    assert all("rank 1: " in text for _, text in said_0)
    assert goes_on(tmp_path) == 6


def train_until_a_step_is_lost(rank):
    with LosingDisk(f"run/rank-{rank}") as disk:
        training = ShardTraining(rank).until(2)
        training.opt.synchronize()
        if rank == 1:
            disk.nth = disk.flushes
        training.step()
        said = []
        for call in (training.step, training.opt.synchronize):
            try:
                call()
            except CSDError as e:
                said.append((type(e), str(e)))
        committed = training.opt.committed_step
        with contextlib.suppress(CSDLostError):
            training.opt.close()
    return committed, said


def test_a_step_that_one_rank_has_lost(tmp_path):
    for rank in range(2):
        (tmp_path / f"run/rank-{rank}").mkdir(parents=True)
    (step_0, said_0), (step_1, said_1) = on_ranks(2, train_until_a_step_is_lost, directory=tmp_path)
    assert step_0 == step_1 == 2
    assert [kind for kind, _ in said_1] == [CSDLostError] * 2
    assert [kind for kind, _ in said_0] == [CSDRankError] * 2
    assert all("step 3 is lost" in text and "at step 2" in text for _, text in (*said_0, *said_1))
    assert goes_on(tmp_path) == 2


def train_on_while_copy_1_fails(rank):
    training = ShardTraining(rank).until(2)
    training.opt.synchronize()
    failing = rank == 1

    def publish(original, store, staged, copy):
        if failing and copy == 1:
            raise CSDOSError(errno.EIO, f"{store.path}: Input/output error")
        original(store, staged, copy)

    with replaced(StoreFile, "publish", publish):
        training.step()
        said = None
        try:
            training.opt.synchronize()
        except CSDError as e:
            said = str(e)
        committed = training.opt.committed_step
        failing = False
        training.opt.synchronize()
    with training.opt:
        return said, committed, training.until(4).image() == uninterrupted(rank, 4)


def test_copy_1_fails_on_a_rank(tmp_path):
    for said, committed, right in on_living_ranks(2, train_on_while_copy_1_fails, directory=tmp_path):
        assert "step 3 cannot be committed yet" in said
        assert committed == 3  # copy 0 is on all ranks
        assert right


# ---- how training ends -----------------------------------------------------------------


def end(rank, how):
    training = ShardTraining(rank).until(3)
    opt = training.opt
    if how == "destroyed":
        dist.destroy_process_group()
        opt.close()
        opt.close()
    elif how == "synchronized":
        opt.synchronize()
        assert opt.committed_step == 3
        opt.close()
    elif how == "dropped":
        dist.destroy_process_group()
    elif how == "exit":
        dist.destroy_process_group()
        atexit._run_exitfuncs()
        assert engine_of(opt).closed


@pytest.mark.parametrize("how", ["destroyed", "synchronized", "dropped", "exit"])
def test_training_ends(how, tmp_path):
    on_ranks(2, end, how, directory=tmp_path)
    for file in tmp_path.rglob(FILE_NAME):
        with file.open("rb") as f:
            commits = read_commits(f.fileno(), str(file))
        assert [c.superblock.step for c in commits] == [3] if how == "synchronized" else [3, 2]
        assert commits[0].superblock.flags == (CLEAN if how == "synchronized" else 0)
    assert len(list(tmp_path.rglob(FILE_NAME))) == 4
    assert goes_on(tmp_path) == 3


def edit_and_end(rank, synchronized):
    training = ShardTraining(rank).until(3)
    if synchronized:
        training.opt.synchronize()
    if rank == 0:
        training.opt.state[training.params[0]]["exp_avg"].fill_(0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training.opt.close()
    return [str(w.message) for w in said if w.category is CSDWarning]


def look(rank):
    with ShardTraining(rank, resume=True).opt as opt:
        return opt.committed_step, bool((opt.state[opt.param_groups[0]["params"][0]]["exp_avg"] == 0.5).all())


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_state_is_edited_after_the_last_step(synchronized, tmp_path):
    said = on_living_ranks(2, edit_and_end, synchronized, directory=tmp_path)
    assert said[1] == []
    if synchronized:
        assert said[0] == []
    else:
        (text,) = said[0]
        assert "after step 3 is lost" in text
        assert "synchronize()" in text
    assert on_living_ranks(2, look, directory=tmp_path) == [(3, synchronized), (3, False)]


# ---- what ranks do differently -----------------------------------------------------------


def edit_and_die(rank, at_once):
    """Rank 0 edits states before step 4, with a separate commit if `at_once`; then all ranks die within step 5."""
    training = ShardTraining(rank).until(3)
    if rank == 0:
        training.opt.state[training.params[0]]["exp_avg_sq"].fill_(0.25)
        with torch.no_grad():
            training.params[0].fill_(2)
    if at_once:
        csd_optim.step.prepare.EDIT_BYTES = 0
    training.step()
    torch.save(training.image(), f"image-{rank}")
    with dies_at("within the step", 5):
        training.step()


@pytest.mark.parametrize("at_once", [False, True])
def test_one_rank_edits(at_once, tmp_path):
    on_ranks(2, edit_and_die, at_once, directory=tmp_path, may_die=(0, 1))
    said = on_living_ranks(2, train_to, 4, directory=tmp_path)
    for rank, (committed, _, image, _) in enumerate(said):
        assert committed == 4
        assert image == torch.load(tmp_path / f"image-{rank}")
    assert said[1][2] == uninterrupted(1, 4)
    sequences = [
        read_contents(tmp_path / devices_of(rank)[0]).superblock.sequence for rank in range(2)
    ]  # with at_once rank 0 has made one more commit
    assert sequences[0] - sequences[1] == at_once


def idle(rank):
    """Rank 1 has no gradient in any step."""
    training = ShardTraining(rank)
    if rank == 0:
        training.until(3)
    for _ in range(3 * rank):
        training.opt.step()
    assert training.opt.committed_step == 2
    training.opt.synchronize()
    training.opt.close()
    return rank == 0 or not training.opt.state


def look_at_idle(rank):
    training = ShardTraining(rank, resume=True)
    with training.opt as opt:
        first = opt.committed_step, training.image()
        training.step()
        opt.synchronize()
        return *first, opt.committed_step


def test_a_rank_has_nothing_to_do(tmp_path):
    assert on_living_ranks(2, idle, directory=tmp_path) == [True, True]
    said = on_living_ranks(2, look_at_idle, directory=tmp_path)
    assert [(step, last) for step, _, last in said] == [(3, 4)] * 2
    assert said[0][1] == uninterrupted(0, 3)


# ---- load_state_dict ---------------------------------------------------------------------


def loads_after_resume(rank):
    """Since resume only rank 1 has written to its parameter."""
    p, state = torch.nn.Parameter(torch.ones(8, 3)), {"exp_avg": torch.ones(8, 3), "exp_avg_sq": torch.ones(8, 3)}
    p.grad = torch.ones(8, 3)
    with CSDAdam([p], devices=f"replica-{rank}") as opt:
        opt.step()
        opt.synchronize()
        groups = opt.state_dict()["param_groups"]
    q = torch.nn.Parameter(torch.zeros(8, 3))
    with CSDAdam([q], devices=f"replica-{rank}", resume=True) as opt:
        assert torch.equal(p, q)
        if rank == 1:
            with torch.no_grad():
                q.mul_(1)
        opt.load_state_dict({"state": {0: {"step": torch.tensor(5.0), **state}}, "param_groups": groups})
        assert torch.equal(p, q)
        q.grad = torch.ones(8, 3)
        opt.step()
        assert opt.state[q]["step"] == 6
        assert torch.equal(q, q[0, 0].expand_as(q))


def test_ranks_load_after_resume(tmp_path):
    on_living_ranks(2, loads_after_resume, directory=tmp_path)


def resumes_without_data(rank):
    """Rank 1's parameter has no data yet."""
    p = torch.nn.Parameter(torch.ones(8, 3))
    p.grad = torch.ones(8, 3)
    with CSDAdam([p], devices=f"replica-{rank}") as opt:
        opt.step()
        opt.synchronize()
    q = torch.nn.Parameter(torch.zeros(8, 3, device="meta" if rank else "cpu"))
    with CSDAdam([q], devices=f"replica-{rank}", resume=True) as opt:
        q = opt.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(8, 3))
        opt.restore()
        assert torch.equal(p, q)


def test_a_rank_resumes_without_data(tmp_path):
    on_living_ranks(2, resumes_without_data, directory=tmp_path)


def load_and_die(rank, step, victim, point):
    """Loads another state than that of `step`, and dies during the load."""
    training = ShardTraining(rank).until(step)
    state = training.opt.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = torch.ones_like(entry["exp_avg"])

    def killed(publish, store, staged, copy):
        if rank == victim and copy == (point == "copy 1"):
            die()
        publish(store, staged, copy)

    training.opt.synchronize()
    with replaced(StoreFile, "publish", killed):
        try:
            training.opt.load_state_dict(state)
        except RuntimeError:
            die()
        if point == "copy 1":
            die()


def look_at_loaded(rank, step):
    training = ShardTraining(rank, resume=True)
    with training.opt as opt:
        ones = [bool((entry["exp_avg"] == 1).all()) for entry in opt.state.values()]
        assert opt.committed_step == step
        assert all(ones) or training.image() == uninterrupted(rank, step)
        return all(ones)


@pytest.mark.parametrize("point", ["copy 0", "copy 1"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_killed_while_loading(victim, point, tmp_path):
    on_ranks(2, load_and_die, 3, victim, point, directory=tmp_path, may_die=(0, 1))
    assert on_living_ranks(2, look_at_loaded, 3, directory=tmp_path) == [point == "copy 1"] * 2


def load_older(rank):
    training = ShardTraining(rank).until(2)
    torch.save((training.opt.state_dict(), [p.detach() for p in training.params]), f"step-2-{rank}")
    training.until(4)
    state, params = torch.load(f"step-2-{rank}")
    with torch.no_grad():
        for p, value in zip(training.params, params, strict=True):
            p.copy_(value)
    training.opt.load_state_dict(state)
    assert training.opt.committed_step == 2
    training.done = 2
    return training.until(5).image() == uninterrupted(rank, 5)


def test_an_older_checkpoint_is_loaded(tmp_path):
    assert on_ranks(2, load_older, directory=tmp_path) == [True, True]


# ---- stores that do not belong together ----------------------------------------------------


def refused(rank, options=None, own=None, rebuild=None):
    """The error of resume, or None. `own`: by rank, the rank whose stores it takes."""
    devices = devices_of(rank if own is None else own[rank])
    try:
        with ShardTraining(rank, devices, resume=True, **(options or {})).opt:
            return None
    except CSDError as e:
        return type(e), str(e)


def bytes_of(directory):
    return {file: file.read_bytes() for file in directory.rglob(FILE_NAME)}


@pytest.fixture
def made(tmp_path):
    """A directory with the stores of two ranks after three steps."""
    on_living_ranks(2, train_to, 3, directory=tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks(size, made):
    before = bytes_of(made)
    for kind, text in on_living_ranks(size, refused, directory=made):
        assert kind is CSDStoreError
        assert "rank 0 of 2" in text
        assert "these are 3 ranks" in text if size == 3 else "this is a process on its own" in text
        assert "torch.distributed.checkpoint" in text
        assert "csd-optim reshard" in text
    assert bytes_of(made) == before
    assert goes_on(made) == 3


def test_a_store_of_one_process_is_resumed_on_two(tmp_path):
    on_living_ranks(1, train_to, 3, directory=tmp_path)
    for kind, text in on_living_ranks(2, refused, directory=tmp_path):
        assert kind is CSDStoreError
        assert "a process on its own, and these are 2 ranks" in text


def test_ranks_exchange_their_directories(made):
    before = bytes_of(made)
    for kind, text in on_living_ranks(2, refused, None, (1, 0), directory=made):
        assert kind is CSDStoreError
        assert "rank 0: " in text
        assert "is the store of rank 1" in text
    assert bytes_of(made) == before


def test_a_device_of_another_rank(made):
    shutil.rmtree(made / devices_of(0)[1])
    shutil.copytree(made / devices_of(1)[1], made / devices_of(0)[1])
    said = on_living_ranks(2, refused, directory=made)
    assert said[0][0] is CSDStoreError
    assert "is rank 1's" in said[0][1]
    assert said[1][0] is CSDRankError
    assert "is rank 1's" in said[1][1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_store_of_a_rank_is_missing(rank, made):
    shutil.rmtree(made / f"run/rank-{rank}")
    before = bytes_of(made)
    for kind, text in on_living_ranks(2, refused, directory=made):
        assert kind is CSDStoreError
        assert f"no store on rank {rank}" in text
    assert bytes_of(made) == before


def test_the_store_of_another_run(made):
    (made / "run").rename(made / "first")
    on_living_ranks(2, train_to, 3, directory=made)
    shutil.rmtree(made / "run/rank-1")
    (made / "first/rank-1").rename(made / "run/rank-1")
    for kind, text in on_living_ranks(2, refused, directory=made):
        assert kind is CSDStoreError
        assert "of another run" in text
        assert "rank 1: " in text


def test_no_step_in_common(made):
    shutil.copytree(made / "run/rank-1", made / "older")
    assert goes_on(made, step=6) == 3
    shutil.rmtree(made / "run/rank-1")
    (made / "older").rename(made / "run/rank-1")
    for kind, text in on_living_ranks(2, refused, directory=made):
        assert kind is CSDStoreError
        assert "no step in common (rank 0: [6, 5], rank 1: [3, 2])" in text


def test_a_damaged_tile_stops_all_ranks(made):
    contents = read_contents(made / devices_of(1)[0])
    _, _, at = next(contents.slots())
    with Path(contents.path).open("r+b") as f:
        f.seek(at)
        f.write(b"\xff")
    before = bytes_of(made)
    said = on_living_ranks(2, refused, directory=made)
    assert said[0][0] is CSDRankError
    assert "rank 1: CSDStoreError" in said[0][1]
    assert said[1][0] is CSDStoreError
    assert "tile 0" in said[1][1]
    assert bytes_of(made) == before


def unlike(rank):
    with pytest.raises(CSDValueError, match="all ranks resume or none"):
        ShardTraining(rank, resume=rank == 0)
    with pytest.raises(CSDValueError, match="on all ranks or on none"):
        ShardTraining(rank, ["ram:"] if rank else None)
    if rank == 0:
        Path("exists").write_text("")
    dist.barrier()
    with pytest.raises(CSDOSError if rank == 0 else CSDRankError, match="is a file"):
        ShardTraining(rank, ["exists" if rank == 0 else "other"])
    with ShardTraining(rank).opt:  # the failed attempts have left nothing open
        return True


def test_ranks_want_different_things(tmp_path):
    assert on_living_ranks(2, unlike, directory=tmp_path) == [True, True]


# ---- snapshots, and commands on one store ------------------------------------------------------


def save(rank):
    training = ShardTraining(rank).until(3)
    here = Path.cwd()
    path = training.opt.save(here / "snapshot").result()
    later = training.opt.save(here / "later", wait=False)
    training.until(5)
    if rank == 1:
        (Path("taken") / "rank-1").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(CSDError, match="taken/rank-1 exists"):
        training.opt.save(here / "taken")
    with training.opt:
        later.result()
        return str(path.relative_to(here)), training.until(6).image() == uninterrupted(rank, 6)


def test_a_snapshot_of_all_ranks(run, tmp_path):
    assert on_living_ranks(2, save, directory=tmp_path) == [(f"snapshot/rank-{rank}", True) for rank in range(2)]
    for name in ("snapshot", "later"):
        (tmp_path / "run").rename(tmp_path / f"before-{name}")
        shutil.copytree(tmp_path / name, tmp_path / "run")
        assert goes_on(tmp_path) == 3
    # A snapshot counts as another run than the one that it was made from, at whatever step.
    shutil.rmtree(tmp_path / "run/rank-1")
    (tmp_path / "before-snapshot/rank-1").rename(tmp_path / "run/rank-1")
    assert all("of another run" in text for _, text in on_living_ranks(2, refused, directory=tmp_path))
    # The store of one rank can be read without the others.
    store = tmp_path / "snapshot/rank-1"
    loaded = CSDAdam.load(store)
    masters = [entry["master"] for entry in loaded["state"].values()]
    assert masters[0].numpy().tobytes() == uninterrupted(1, 3)[3]
    del loaded, masters
    code, out, _ = run("inspect", store / "device-0", "--json")
    held = json.loads(out)
    assert (code, held["rank"], held["world_size"], held["step"]) == (0, 1, 2, 3)
    code, out, _ = run("inspect", store / "device-0")
    assert code == 0
    assert "rank 1 of 2" in out
    code, out, err = run("verify", *(tmp_path / f"snapshot/rank-{r}/device-{d}" for r in range(2) for d in range(2)))
    assert code == 0, out + err
    code, _, err = run("export", store, tmp_path / "exported.pt")
    assert code == 0, err


def test_a_store_that_waits_for_confirmation_is_whole(run, made):
    code, out, _ = run("verify", *(made / device for device in devices_of(1)))
    assert code == 0
    assert out.count("ok, step 3") == 2
    loaded = CSDAdam.load([made / device for device in devices_of(1)])
    assert loaded["csd_optim"]["step"] == 3


def test_what_ranks_stores_say_of_ranks(made):
    """Stores of ranks have what docs/store-format.md says about ranks."""
    ids = set()
    for rank in range(2):
        for d, device in enumerate(devices_of(rank)):
            data = (made / device / FILE_NAME).read_bytes()
            blocks = [superblock(data, copy) for copy in range(2)]
            assert [(b["round"], b["step"], b["device"], b["devices"]) for b in blocks] == [(3, 3, d, 2), (2, 2, d, 2)]
            for copy, block in enumerate(blocks):
                manifest = json.loads(region(data, block["manifest"], copy))
                assert (manifest["rank"], manifest["world_size"]) == (rank, 2)
                ids.add(block["id"])
    assert len(ids) == 1


def one_step(rank):
    ShardTraining(rank).step().opt.close()


def test_after_a_single_step(run, tmp_path):
    on_living_ranks(2, one_step, directory=tmp_path)
    code, out, _ = run("verify", *(tmp_path / device for device in devices_of(0)))
    assert code == 0, out
    assert goes_on(tmp_path) == 1


def shares_a_directory(rank):
    e = None
    try:
        CSDAdam([torch.nn.Parameter(torch.ones(3))], devices="csd")
    except Exception as raised:
        e = raised
    return str(e)


def test_two_ranks_cannot_share_a_directory(tmp_path):
    for said in on_living_ranks(2, shares_a_directory, directory=tmp_path):
        assert "for each rank its own, as in '/mnt/nvme{local_rank}'" in said
