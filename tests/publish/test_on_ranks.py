"""Several ranks publish together: each its share, and a version is what all have committed.

The oracle is the model as it is gathered from all ranks after each step: a replica equals it, bit for bit.
"""

import contextlib
import errno
import os
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.optimizers import MUON
from support.owner_here import OwnersHere
from support.published import Model, Published, bf16, chain, gradients, publishes_on, weights_by_step
from support.ranks import KILLED, on_living_ranks, on_ranks
from support.replacing import failing, replaced
from support.wires import until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import csd_optim
from csd_optim import CSDAdam, CSDBusyError, CSDError, CSDValueError
from csd_optim.engine.commit.commit import Commit
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError
from csd_optim.publish.folder import Folder
from csd_optim.replica.versions import directory_of, numbers, read_version
from csd_optim.serve.trainer.remote_native import RemoteNative


def divided(model, kind):
    """Divide a model as FSDP2 or HSDP do, which know neither scalars nor strides. Returns it."""
    if kind == "DDP":
        return model
    if isinstance(model, Model):
        del model.one
        model.transposed = nn.Parameter(model.transposed.detach().contiguous())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if kind == "HSDP" else None
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def training_on(rank, kind="DDP", devices="store-{rank}", dtype=bf16, seed=0, **options):
    Path(f"store-{rank}").mkdir(exist_ok=True)
    return Published("policy", devices, model=divided(Model(dtype, seed), kind), dtype=dtype, **options)


def local(p):
    """This rank's part of a parameter, or all of a replica."""
    p = p.detach()
    return p.to_local() if hasattr(p, "to_local") else p


def follows(rank, kind, options):
    """Steps, what is set from outside, a parameter without a gradient, and full versions."""
    with training_on(rank, kind, publish={"full_every": 6, "keep": 4}, tile_size=4096, **options) as t:
        m = t.model
        t.steps(2)
        changed, sent = t.check()
        assert (sum(changed.values()), sum(sent.values())) == (0, 0)
        t.step()
        changed, sent = t.check()
        if options.get("optimizer") is None and not options.get("topk"):
            for name in t.names():  # just what differs, but for parameters that are not recorded
                if name not in ("transposed", "empty"):
                    assert changed[name] <= sent[name] <= changed[name] * 16 / 15 + 4096, name
        for p, value in (m.odd, 0.25), (m.frozen, 3), (m.embedding, -1), (m.late, 0.5):
            local(p)[1:9] = value
        t.steps(1)
        with torch.no_grad():
            m.odd.mul_(1.5)
        t.steps(1, without=("late", "odd"))
        t.steps(2, without=())
        assert t.pub.version == 8
        versions = chain(Path("policy"))
        assert [v.is_full for v in versions] == [v.number % 6 == 1 for v in versions]
        shares = dist.get_world_size()
        if options.get("sharded") is False:  # of ranks that have the same, one publishes
            shares = {"DDP": 1, "HSDP": 2}[kind]
        assert {len(v.files) for v in versions} == {shares}
        t.pub.close()


FP32, CODES = {"state_dtype": "fp32"}, {"state_dtype": "8bit", "lr": 1e-4}
CASES = [  # what is not here together with DDP or FSDP2 is in SERVED
    (2, "DDP", {**FP32, "devices": "ram:"}),
    (3, "DDP", {**CODES, "dtype": torch.float32}),
    (2, "DDP", {"sharded": False, "max_grad_norm": 0.5}),
    (2, "FSDP2", FP32),
    (2, "FSDP2", {**CODES, "max_grad_norm": 0.5}),
    (2, "FSDP2", {"dtype": torch.float32, "topk": 0.1, "devices": "ram:"}),
    (2, "FSDP2", {"optimizer": MUON.ours, **MUON.kwargs}),
    (4, "HSDP", {**CODES, "devices": "ram:"}),
    (4, "HSDP", {"sharded": False, "max_grad_norm": 0.5}),
]


@pytest.mark.parametrize(("size", "kind", "options"), CASES, ids=str)
def test_each_division(size, kind, options, tmp_path):
    on_living_ranks(size, follows, kind, options, directory=tmp_path)


@pytest.fixture
def owners(tmp_path):
    """Two owners: their addresses."""
    with OwnersHere(tmp_path / "owners", timeout=30) as owners:
        yield owners.address


class Few(nn.Module):
    """On two ranks the second one updates nothing, and has rows of what is frozen."""

    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.full((1, 3000), 0.02, dtype=bf16))
        self.frozen = nn.Parameter(torch.zeros(8, dtype=bf16), requires_grad=False)


def has_no_rows(rank, options):
    Path(f"store-{rank}").mkdir()
    with Published("policy", model=Few(), publish={"full_every": 4}, **options) as t:
        t.steps(2)
        t.model.frozen.data[2:7] = 1
        t.steps(3)
        t.model.frozen.data[2:7] = 2
        t.step()
        t.steps(2)


@pytest.mark.parametrize("options", [{"devices": "store-{rank}"}, {"devices": "ram:", **CODES}], ids=str)
def test_a_rank_without_rows(options, tmp_path):
    on_living_ranks(2, has_no_rows, options, directory=tmp_path)


def test_a_trainer_without_rows(owners, tmp_path):
    on_living_ranks(2, has_no_rows, {"devices": owners}, directory=tmp_path)


SERVED = [
    (3, "DDP", CODES),
    (2, "DDP", {"sharded": False, "topk": 0.1, "dtype": torch.float32}),
    (2, "DDP", {"optimizer": MUON.ours, **MUON.kwargs}),
    (2, "FSDP2", {**CODES, "max_grad_norm": 0.5}),
    (4, "HSDP", FP32),
]


@pytest.mark.parametrize(("size", "kind", "options"), SERVED, ids=str)
def test_trainers_with_owners(size, kind, options, owners, tmp_path):
    on_living_ranks(size, follows, kind, {**options, "devices": owners}, directory=tmp_path)


# ---- overlap -----------------------------------------------------------------------------------------


class Network(nn.Module):
    """Has parameters of its own, which FSDP2 leaves gathered after a forward, and one that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(50, 301), nn.Linear(301, 30)
        self.scale, self.frozen = nn.Parameter(torch.ones(30)), nn.Parameter(torch.zeros(40), requires_grad=False)
        self.to(bf16)

    def forward(self, x):
        return self.second(self.first(x).relu()) * self.scale


class Overlapping:
    """A network that ranks train together, and publish."""

    def __init__(self, rank, kind, mode, devices="store-{rank}", **options):
        Path(f"store-{rank}").mkdir(exist_ok=True)
        self.rank, self.inner = rank, divided(Network(), kind)
        self.model = DDP(self.inner) if kind == "DDP" else self.inner
        params = [*self.model.parameters()]
        with torch.no_grad():
            self.model(torch.zeros(1, 50).bfloat16())  # after which FSDP2 leaves some parameters gathered
        options = {"lr": 1e-4, "tile_size": 4096, **options}
        self.t = Published("policy", devices, model=self.inner, wrapped=self.model, params=params, **options)
        if kind == "DDP" and mode and mode.get("backward"):
            self.model.register_comm_hook(self.t.opt, csd_optim.push)
        if mode is not None:
            self.t.opt.overlap(self.model, **mode)

    def backward(self):
        generator = torch.Generator().manual_seed(100 * self.t.done + self.rank)
        self.t.opt.zero_grad()
        self.model(torch.randn(8, 50, generator=generator).bfloat16()).square().sum().backward()

    def step(self):
        self.backward()
        self.t.opt.step()
        self.t.done += 1

    def checked(self):
        self.t.opt.wait()
        self.t.check()


def overlaps(rank, kind, mode, options):
    o = Overlapping(rank, kind, mode, **options)
    with o.t:
        assert o.t.names() == [*o.t.copy]  # a wrapper adds nothing to the names
        for i in range(7):
            if i == 4 and not mode.get("free_gradients"):
                o.t.opt.param_groups[0]["lr"] = 3e-4  # a wrong guess
            o.step()
            if i % 3 != 1:  # else the next one follows at once
                o.checked()
        assert o.t.pub.version == 8


MODES = [
    (2, "DDP", {}, {}),
    (3, "DDP", {"backward": True}, CODES),
    (2, "FSDP2", {"backward": True}, FP32),
    (2, "FSDP2", {"free_gradients": True}, CODES),
    (4, "HSDP", {"backward": True}, FP32),
]


@pytest.mark.parametrize(("size", "kind", "mode", "options"), MODES, ids=str)
def test_overlap(size, kind, mode, options, tmp_path):
    """Steps that go on behind the program, that begin in backward, or on a guess that is sometimes wrong."""
    on_living_ranks(size, overlaps, kind, mode, options, directory=tmp_path)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("DDP", {"backward": True}, FP32),
        ("FSDP2", {"backward": True}, CODES),
        ("FSDP2", {"free_gradients": True}, FP32),
    ],
    ids=str,
)
def test_overlap_with_owners(kind, mode, options, owners, tmp_path):
    on_living_ranks(2, overlaps, kind, mode, {**options, "devices": owners}, directory=tmp_path)


# ---- what fails --------------------------------------------------------------------------------------


def fails(rank, kind, mode, options):
    """A step fails on one rank, and is undone on all: it makes no version, and the next ones miss nothing."""
    o = Overlapping(rank, kind, mode, **options)

    def take():
        o.step()
        o.t.opt.synchronize()  # with overlap, the ranks learn of it here

    with o.t as t:
        o.step()
        o.checked()
        for _ in range(2):
            version, done = t.pub.version, t.done
            local(o.inner.frozen)[:5] += 1
            with failing(Engine, "finish", int(rank == 1), "unplugged"), pytest.raises(CSDError, match="unplugged"):
                take()
            t.done = done
            assert numbers(Path("policy"))[-1] == version
            o.step()
            o.checked()
            assert t.pub.version == version + 1
        o.step()
        o.checked()


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("DDP", None, FP32),
        ("DDP", {}, {**CODES, "devices": "file:"}),
        ("FSDP2", {"backward": True}, CODES),
    ],
    ids=str,
)
def test_a_step_that_fails_on_one_rank(kind, mode, options, tmp_path):
    on_living_ranks(2, fails, kind, mode, options, directory=tmp_path)


@pytest.mark.parametrize(("kind", "mode"), [("DDP", None), ("FSDP2", {"backward": True})], ids=str)
def test_a_step_that_fails_at_one_owner(kind, mode, owners, tmp_path):
    on_living_ranks(2, fails, kind, mode, {**CODES, "devices": owners}, directory=tmp_path)


class Uneven(nn.Module):
    """Two parameters, of which the second rank has only rows of the first one."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.full((2, 3000), 0.02, dtype=bf16))
        self.first = nn.Parameter(torch.full((1, 3000), 0.02, dtype=bf16))


def fails_without_tiles(rank):
    Path(f"store-{rank}").mkdir()
    with Published("policy", "store-{rank}", model=Uneven(), publish={"every": 2}, lr=1e-3) as t:
        t.step()
        with failing(Engine, "finish", int(rank == 0), "unplugged"), pytest.raises(CSDError, match="unplugged"):
            t.step(without=("both",))
        t.done -= 1
        t.step(without=("both",))
        changed, sent = t.check()
        assert 0 < changed["both"] <= sent["both"]


def test_an_undone_step_without_tiles_on_one_rank(tmp_path):
    """That rank's records of the step before it stay, as the next version needs them."""
    on_living_ranks(2, fails_without_tiles, directory=tmp_path)


@contextlib.contextmanager
def full_disk(rank, victim, place):
    """On one rank, files of a version cannot be written, or those whose path contains `place`."""
    real = os.pwrite

    def refused(fd, data, at):
        if rank == victim and place in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    os.pwrite = refused
    try:
        yield
    finally:
        os.pwrite = real


def is_full(pub):
    return read_version(Path("policy") / directory_of(pub.version)).is_full


def has_no_room(rank, victim, mode, options, every):
    """Training goes on, and all ranks make a full version together as soon as that works."""
    o = Overlapping(rank, "FSDP2", mode, publish={"every": every}, **options)
    with o.t as t:
        for _ in range(2 * every):
            o.step()
        t.check()
        version = t.pub.version
        how = pytest.warns(csd_optim.CSDWarning, match="No space left") if rank == victim else contextlib.nullcontext()
        with full_disk(rank, victim, ".pending"), how:
            for _ in range(2 * every):
                o.step()
            for _ in range(2):
                t.pub.wait()
                assert (t.pub.version, t.pub.error) == (version, f"rank {victim}: No space left on device")
        for _ in range(every):
            o.step()
        t.check()
        assert is_full(t.pub)
        for _ in range(every):
            o.step()
        t.check()
        assert not is_full(t.pub)
        assert not [*Path("policy").glob(".v*")]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("mode", "options", "every"), [(None, {**CODES, "devices": "ram:"}, 1), ({}, FP32, 2)], ids=str
)
def test_a_full_disk_of_one_rank(victim, mode, options, every, tmp_path):
    on_living_ranks(2, has_no_room, victim, mode, options, every, directory=tmp_path)


@pytest.mark.parametrize(("mode", "victim", "every"), [(None, 0, 1), (None, 1, 1), ({}, 1, 2)], ids=str)
def test_a_full_disk_of_one_trainer(mode, victim, every, owners, tmp_path):
    on_living_ranks(2, has_no_room, victim, mode, {**CODES, "devices": owners}, every, directory=tmp_path)


def cannot_name(rank, mode, options):
    """Rank 0 cannot name a complete version: the other ranks learn of the failure, and the next version is full."""
    o = Overlapping(rank, "DDP", mode, **options)
    with o.t as t:
        o.step()
        o.checked()
        version = t.pub.version
        how = pytest.warns(csd_optim.CSDWarning, match="unplugged") if rank == 0 else contextlib.nullcontext()
        with failing(Folder, "name", int(rank == 0), "unplugged"), how:
            o.step()
            t.pub.wait()
        assert (t.pub.version, t.pub.error) == (version, "rank 0: unplugged")
        for _ in range(2):  # all learn of it in wait(), or in the first of these steps, which then makes no version
            o.step()
            t.pub.wait()
        o.checked()
        last = chain(Path("policy"))[-2:]
        assert any(v.is_full and v.number > version for v in last)


@pytest.mark.parametrize(("mode", "options"), [(None, FP32), ({}, {**CODES, "devices": "ram:"})], ids=str)
def test_a_version_that_cannot_be_named(mode, options, tmp_path):
    on_living_ranks(2, cannot_name, mode, options, directory=tmp_path)


def test_a_version_of_trainers_that_cannot_be_named(owners, tmp_path):
    on_living_ranks(2, cannot_name, {}, {"devices": owners}, directory=tmp_path)


def cannot_name_meanwhile(rank):
    """All ranks learn in step() that the last version has no name, when the next step has begun in backward."""
    o = Overlapping(rank, "DDP", {"backward": True}, **FP32)
    with o.t as t:
        for _ in range(3):
            o.step()
        o.checked()
        version = t.pub.version
        how = pytest.warns(csd_optim.CSDWarning, match="unplugged") if rank == 0 else contextlib.nullcontext()
        with failing(Folder, "name", int(rank == 0), "unplugged"), how:
            o.step()
            until(lambda: t.opt.committed_step == t.done and (rank or t.pub.error))
        o.backward()
        t.opt.step()
        t.done += 1
        t.pub.wait()
        assert (t.pub.version, t.pub.error) == (version, "rank 0: unplugged")
        o.step()
        o.checked()
        assert (t.pub.version, is_full(t.pub)) == (version + 3, True)
        o.step()
        o.checked()
        assert not is_full(t.pub)


def test_a_version_that_cannot_be_named_while_a_step_is_under_way(tmp_path):
    on_living_ranks(2, cannot_name_meanwhile, directory=tmp_path)


# ---- ranks are killed --------------------------------------------------------------------------------


STEPS = 4


def expected_weights(rank, state_dtype):
    """Codes depend on how their parameters are divided."""
    return weights_by_step(2 * STEPS - 1, state_dtype=state_dtype, tile_size=4096)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies(rank, victim, point, n, state_dtype, devices="store-{rank}"):
    """Publishes until the victim is killed at its n-th call of a kind; then the other ranks end in some way."""
    Path(f"store-{rank}").mkdir()
    model = Model()
    opt = CSDAdam(model.parameters(), devices=devices, lr=1e-4, tile_size=4096, state_dtype=state_dtype)
    with contextlib.ExitStack() as stack:
        if rank == victim:
            left = n

            def counting(call, *args, **kwargs):
                nonlocal left
                left -= 1
                if not left:
                    die()
                return call(*args, **kwargs)

            owner, names = POINTS[point]
            for name in names:
                stack.enter_context(replaced(owner, name, counting))
        try:
            pub = opt.publish("policy", model=model, keep=1, full_every=3)
            for step in range(1, STEPS + 1):
                gradients(model, step)
                opt.step()
            pub.wait()
        except RuntimeError:  # from torch or CSDRankError: other ranks are gone
            opt.close()
            return "lost another"
        opt.close()
    return "ended"


POINTS = {
    "files": (os, ("open", "pwrite", "fsync", "rename", "mkdir", "unlink", "replace")),
    "commits": (Commit, ("prepare", "complete")),
    "requests": (RemoteNative, ("begin", "_keep")),
}


def goes_on(rank, size, state_dtype, expected, devices="store-{rank}"):
    """All resume at the same step; no version is ahead of it, or of other weights than those of its step."""
    model = Model(seed=1)
    options = {"lr": 1e-4, "tile_size": 4096, "state_dtype": state_dtype}
    with CSDAdam(model.parameters(), devices=devices, resume=True, **options) as opt:
        return publishes_on(opt, Path("policy"), model, expected, meet=dist.barrier)


KILLS = [(2, 0, "commits", "fp32"), (2, 1, "commits", "8bit"), (2, 0, "files", "fp32"), (3, 2, "files", "8bit")]


@pytest.mark.ci
@pytest.mark.parametrize(("size", "victim", "point", "state_dtype"), KILLS, ids=str)
def test_a_rank_that_is_killed(size, victim, point, state_dtype, tmp_path):
    """Killed at random calls: no other rank hangs, and the resumed ranks go on with the chain."""
    expected = on_living_ranks(size, expected_weights, state_dtype, directory=tmp_path)[0]
    last = 2 * STEPS if point == "commits" else 110  # calls that a rank makes, or fewer
    choose = random.Random(f"{size} {victim} {point}")
    seen = []
    for n in sorted(choose.sample(range(1, last), 4)):
        directory = tmp_path / str(n)
        directory.mkdir()
        said = on_ranks(size, dies, victim, point, n, state_dtype, directory=directory, may_die=(victim,))
        seen.append(said[victim])
        on_living_ranks(size, goes_on, size, state_dtype, expected, directory=directory)
    assert KILLED in seen


@pytest.mark.ci
@pytest.mark.parametrize(("victim", "point"), [(0, "files"), (1, "files"), (1, "requests")], ids=str)
def test_a_trainer_that_is_killed(victim, point, tmp_path):
    """The same for trainers whose states are with two owners."""
    expected = on_living_ranks(2, expected_weights, "fp32", directory=tmp_path)[0]
    choose = random.Random(f"{victim} {point}")
    seen = []
    for n in sorted(choose.sample(range(1, 2 * STEPS if point == "requests" else 60), 3)):
        directory = tmp_path / str(n)
        directory.mkdir()
        with OwnersHere(directory / "owners", timeout=30) as owners:
            killed = dies, victim, point, n, "fp32", owners.address
            seen.append(on_ranks(2, *killed, directory=directory, may_die=(victim,))[victim])
            on_living_ranks(2, goes_on, 2, "fp32", expected, owners.address, directory=directory)
    assert KILLED in seen


# ---- other ranks go on -------------------------------------------------------------------------------


def begins(rank, kind):
    with training_on(rank, kind) as t:
        t.steps(3)
        t.opt.synchronize()


def other_ranks(rank, size, kind):
    Path(f"new-{rank}").mkdir()
    model = divided(Model(seed=9), kind)
    options = {"resume": True, "resume_from": [f"store-{k}" for k in range(2)], "tile_size": 2048, "lr": 1e-5}
    with Published("policy", f"new-{rank}", model=model, done=3, **options) as t:
        t.steps(2)
    versions = chain(Path("policy"))
    assert [v.is_full for v in versions] == [True] + [False] * 5
    assert [len(v.files) for v in versions] == [2] * 4 + [size] * 2
    assert len({v.run for v in versions}) == 1


def test_other_ranks_go_on_with_the_chain(tmp_path):
    on_living_ranks(2, begins, "FSDP2", directory=tmp_path)
    on_living_ranks(3, other_ranks, 3, "FSDP2", directory=tmp_path)


# ---- what is refused ---------------------------------------------------------------------------------


def refused(rank):
    """All ranks raise, whichever of them cannot publish, and then they can publish all the same."""
    model = nn.Linear(6, 4, dtype=bf16)

    def raised(text, error=CSDValueError, path="policy", of=model, opt=None, **arguments):
        with pytest.raises(CSDError) as e:
            (opt or ours).publish(path, model=of, **arguments)
        assert text in str(e.value)
        assert isinstance(e.value, error)

    with CSDAdam(model.parameters(), devices="ram:") as ours:
        raised("do not publish alike", every=1 + rank)
        raised("at least 1", CSDValueError if rank else CSDRankError, every=1 - rank)
        raised("different models", of=nn.ParameterDict({f"w{rank}": model.weight}))
        raised("rank 1 does not see", CSDValueError if rank else CSDRankError, path=f"policy-{rank}/of/one")
        columns = distribute_tensor(torch.zeros(4, 6, dtype=bf16), init_device_mesh("cpu", (2,)), [Shard(1)])
        raised("otherwise than by rows", of=nn.ParameterDict({"w": nn.Parameter(columns)}))
        pub = ours.publish("policy", model=model)
        with CSDAdam(model.parameters(), devices="ram:") as other:
            raised("somebody else publishes", CSDRankError if rank else CSDBusyError, opt=other)
        pub.close()
    different = nn.Linear(6, 4, dtype=bf16)
    nn.init.constant_(different.weight, rank)
    with CSDAdam(different.parameters(), devices="ram:", sharded=False) as opt:
        raised("different values", of=different, opt=opt)


def test_what_is_refused(tmp_path):
    on_living_ranks(2, refused, directory=tmp_path)


def waits_while_a_guess_could_begin(rank):
    """A step within step(), without durable states: its version waits for a vote, and no step begins before that."""
    Path(f"scratch-{rank}").mkdir()
    o = Overlapping(rank, "DDP", {"backward": True}, devices="file:scratch-{rank}?scratch=1", **FP32)
    with o.t as t:
        for _ in range(3):
            o.step()
        o.checked()
        version = t.pub.version
        o.backward()
        with torch.no_grad():
            for p in o.inner.parameters():
                p.mul_(1)  # a write from outside: this step cannot go on after step()
        t.opt.step()
        t.done += 1
        o.backward()
        t.pub.wait()
        assert (t.pub.version, t.pub.step, t.pub.error) == (version + 1, t.done, "")
    return True


def test_a_version_that_waits_for_a_vote_while_backward_runs(tmp_path):
    on_ranks(2, waits_while_a_guess_could_begin, directory=tmp_path)
