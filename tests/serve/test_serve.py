"""Optimizer ranks: with the states in other processes, an optimizer behaves as with devices of its own."""

import contextlib
import json
import os
import re
import resource
import shutil
import socket
from pathlib import Path

import pytest
import torch
from support.forked import printed
from support.inside import engine_of
from support.optimizers import PAIRS
from support.owners import Owners, small_buckets
from support.ranks import on_living_ranks
from support.training import Training

import csd_optim
from csd_optim import (
    CSDAdam,
    CSDBusyError,
    CSDError,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDUnavailableError,
    CSDValueError,
)
from csd_optim.serve.blocks import FlatShard
from csd_optim.serve.wire import COUNTER, PROTOCOL, answer_key, connect, is_local_address, request_key
from csd_optim.store.format import read_contents


@pytest.fixture
def owners(tmp_path):
    with Owners(tmp_path) as there:
        yield there


def states_of(opt):
    return {(k, n): t for k, entry in opt.state_dict()["state"].items() for n, t in entry.items()}


def assert_alike(a, b, left_out=()):
    """Compare parameters and states of two trainings bit by bit."""
    for name in a.params:
        if name not in left_out:
            assert torch.equal(a.params[name], b.params[name]), name
    there, here = states_of(a.opt), states_of(b.opt)
    assert there.keys() == here.keys()
    for key, value in there.items():
        assert torch.equal(value, here[key]), key


def local(path, **options):
    path.mkdir(exist_ok=True)
    return Training(str(path), **options)


@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_one_trainer_has_the_bits_of_devices_of_its_own(owners, tmp_path, of):
    ours, served = local(tmp_path / "own", of=of), Training(owners.address, of=of)
    for _ in range(6):  # meanwhile some parameters get their first gradient, and a group joins
        ours.step()
        served.step()
    assert_alike(ours, served)
    served.opt.close()
    # A new trainer with other initial parameters resumes what the owners have in memory ...
    served = Training(owners.address, of=of, resume=True, seed=7, done=6)
    assert (served.done, served.opt.committed_step) == (6, 6)
    ours.step()
    served.step()
    assert_alike(ours, served, left_out=("never",))
    served.opt.close()
    # ... and what is in their store.
    owners.stop()
    owners.start()
    served = Training(owners.address, of=of, resume=True, seed=8, done=6)
    for _ in range(2):
        ours.step()
        served.step()
    assert_alike(ours, served, left_out=("never",))


# ---- several trainers, several owners ------------------------------------------------------


class Model(torch.nn.Module):
    """A model whose gradients are the tensors that it is called with."""

    def __init__(self, params):
        super().__init__()
        self.names, self.params = [*params], torch.nn.ParameterList(params.values())

    def forward(self, derivative):
        named = zip(self.names, self.params, strict=True)
        return sum((p * derivative[name].conj()).real.sum() for name, p in named if name in derivative)


class Replicas:
    """A model that all ranks have. Gradients depend on the step's number only, as if they had been all-reduced.

    `pushes`: gradients come from DistributedDataParallel with the hook csd_optim.push.
    """

    def __init__(self, devices, pushes=False, **options):
        generator = torch.Generator().manual_seed(0)

        def new(*shape, dtype=torch.float32):
            return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.params = {
            "matrix": new(37, 50),
            "half": new(64, 33, dtype=torch.bfloat16),
            "row": new(1, 7),
            "scalar": new(),
            "complex": new(9, dtype=torch.complex64),
            "late": new(41),
        }
        self.opt = CSDAdam(self.params.items(), lr=0.1, devices=devices, tile_size=1024, **options)
        self.done = self.opt.user_state.get("done", 0)
        self.ddp = None
        if pushes:
            # Some parameters have no gradient, and DDP's buckets have another size in the first step than later.
            self.ddp = torch.nn.parallel.DistributedDataParallel(
                Model(self.params), find_unused_parameters=True, bucket_cap_mb=0.005
            )
            self.ddp.register_comm_hook(self.opt, csd_optim.push)

    def backward(self, derivative):
        if self.ddp is not None:
            self.opt.zero_grad()
            return self.ddp(derivative).backward()
        for name, p in self.params.items():
            p.grad = derivative.get(name)

    def step(self, rank=0, overflow=False):
        generator = torch.Generator().manual_seed(self.done)
        derivative = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in self.params.items()}
        if self.done < 2:
            del derivative["late"]
        self.backward(derivative)
        self.opt.param_groups[0]["lr"] = 0.1 * 0.9**self.done
        self.done += 1
        self.opt.user_state = {"done": self.done, "rank": rank, "rng": torch.arange(rank + 3)}
        if overflow:
            self.opt.found_inf, self.opt.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
        self.opt.step()
        if overflow:
            del self.opt.found_inf, self.opt.grad_scale

    def image(self):
        return [p.detach().clone() for p in self.params.values()]


def here(rank, root, steps, options):
    """Train on ranks with one directory each, as owners have them."""
    Path(root).mkdir(exist_ok=True)
    training = Replicas(f"{root}/owner-{rank}", **options)
    for i in range(steps):
        training.step(rank, overflow=i == 3 and rank == 1)
    training.opt.synchronize()
    training.opt.close()
    return training.image()


@small_buckets()
def there(rank, address, steps, options, resume=False, pushes=False):
    training = Replicas(address, pushes, resume=resume, **options)
    first, user_state = training.opt.committed_step, training.opt.user_state
    training.opt.load_state_dict(training.opt.state_dict())  # as Accelerate does in prepare()
    for i in range(steps):
        training.step(rank, overflow=i == 3 and rank == 1)
    training.opt.synchronize()
    training.opt.consolidate_state_dict()
    states = training.opt.state_dict()["state"] if rank == 0 else None
    training.opt._forget_consolidated()
    with pytest.raises(CSDRuntimeError, match="consolidate_state_dict"):
        torch.save(training.opt.state_dict(), "states.pt")
    path = Path(f"snapshot-{first}").absolute()
    saving = training.opt.save(path, wait=False)
    if rank == 1:  # a single trainer can wait for the snapshot
        assert saving.result(60) == path
        assert CSDAdam.load(path / "rank-1" / "device-0")["csd_optim"]["step"] == training.opt.committed_step
    stats = training.opt.stats()
    assert stats["route"] == ("slices" if pushes else "kept")
    training.opt.close()
    return training.image(), first, user_state, states, stats["gathered_bytes"]


OPTIONS = {"plain": {}, "clipped": {"max_grad_norm": 1.0, "betas": (0.8, 0.95)}, "8bit": {"state_dtype": "8bit"}}


@pytest.mark.parametrize(("which", "route"), [*((which, "kept") for which in OPTIONS), ("plain", "slices")])
def test_trainers_and_owners_have_the_bits_and_the_stores_of_ranks(tmp_path, which, route):
    options, pushes = OPTIONS[which], route != "kept"
    own = on_living_ranks(2, here, str(tmp_path / "own"), 6, options, directory=tmp_path)
    with Owners(tmp_path, 2, small=True) as owners:
        served = on_living_ranks(2, there, owners.address, 6, options, False, pushes, directory=tmp_path)
        for image, (theirs, *_) in zip(own, served, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(image, theirs, strict=True))
        assert all(gathered for *_, gathered in served)
        owners.stop()
    # Each owner has the same store as the rank of its number: the same states of the same rows in the same tiles.
    for rank in range(2):
        ours, theirs = (CSDAdam.load(tmp_path / which / f"owner-{rank}") for which in ("own", ""))
        assert ours["state"].keys() == theirs["state"].keys()
        for key, entry in ours["state"].items():
            assert all(torch.equal(entry[name], theirs["state"][key][name]) for name in entry), (rank, key)
        assert theirs["csd_optim"]["user_state"]["trainers"][1]["rank"] == 1
        ours, theirs = (read_contents(tmp_path / which / f"owner-{rank}").manifest for which in ("own", ""))
        assert {**ours, "extents": 0} == {**theirs, "extents": 0}
    # So ranks can resume from the owners' stores.
    for rank in range(2):
        shutil.rmtree(tmp_path / "own" / f"owner-{rank}")
        shutil.move(tmp_path / f"owner-{rank}", tmp_path / "own" / f"owner-{rank}")
    resumed = on_living_ranks(2, here, str(tmp_path / "own"), 0, {**options, "resume": True}, directory=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(own[0], resumed[1], strict=True))


@small_buckets()
def test_another_number_of_trainers_goes_on_where_the_last_have_left(tmp_path):
    alone = Replicas(str(tmp_path / "alone"))
    with Owners(tmp_path, 2, small=True) as owners:
        pids = owners.pids
        on_living_ranks(2, there, owners.address, 2, {}, directory=tmp_path)
        for step, n in ((2, 3), (4, 2)):
            of_ranks = on_living_ranks(n, there, owners.address, 2, {}, True, directory=tmp_path)
            for rank, (_, first, user_state, *_) in enumerate(of_ranks):
                assert first == user_state["done"] == step
                assert user_state["rank"] == 0, rank  # there is one per previous trainer, so all get the first one's
        served = Replicas(owners.address, resume=True)
        assert served.done == 6
        served.step()
        states = served.opt.state_dict()["state"]
        assert owners.pids == pids
    for _ in range(7):
        alone.step()
    assert all(torch.equal(a, b) for a, b in zip(alone.image(), served.image(), strict=True))
    for key, entry in alone.opt.state_dict()["state"].items():
        assert all(torch.equal(value, states[key][name]) for name, value in entry.items())


# ---- what is refused -----------------------------------------------------------------------


def test_what_is_no_request_is_refused_and_a_session_goes_on(owners):
    training = Replicas(owners.address)
    training.step()
    pids = owners.pids
    for strange in (b"\x80\x04\x95" + b"pickle" * 1000, b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 20), b"", bytes(64)):
        with socket.create_connection(("127.0.0.1", owners.port)) as port, contextlib.suppress(ConnectionError):
            port.sendall(strange)
    store = connect("127.0.0.1", owners.port, 60)
    for said, why in (
        ("no JSON", "no JSON"),
        ("[]", "no message"),
        ("{}", "protocol None"),
        (json.dumps({"protocol": PROTOCOL - 1}), f"protocol {PROTOCOL - 1} and optimizer ranks {PROTOCOL}: install"),
        (json.dumps({"protocol": PROTOCOL}), "cannot be read"),
        (json.dumps(a_request(optimizer="os.system")), "not know the optimizer 'os.system'"),
        (json.dumps(a_request(trainers=10**9)), "trainers"),
        (json.dumps(a_request(shape=[1 << 40, 1 << 40])), "shape"),
        (json.dumps(a_request(shape=[-1])), "shape"),
        (json.dumps(a_request(shape=[1 << 47] * 10000)), "10000 .* dimensions"),
        (json.dumps(a_request(dtype="_C")), "dtype"),
        (json.dumps(a_request(mode="new")), "resume=True"),
        (json.dumps(a_request(mode="resume")), "parameters there"),
    ):
        number = store.add(COUNTER, 1)
        store.set(request_key(number), said)
        answer = json.loads(store.get(answer_key(number)))
        assert re.search(why, answer["text"]), answer
    training.step()  # the session under way is not affected
    assert training.opt.committed_step >= 1
    assert owners.pids == pids
    # An invalid message within a session ends it, and the next session finds everything unchanged.
    image = training.image()
    for message in ({"op": "step"}, {"op": "exec"}, {"op": "pull", "params": [-1]}, {}, {"op": "save"}):
        with pytest.raises(CSDError):
            engine_of(training.opt).call(message)
        training.opt.close()
        training = Replicas(owners.address, resume=True)
        assert (training.done, owners.pids) == (2, pids), owners.said
        assert all(torch.equal(a, b) for a, b in zip(image, training.image(), strict=True))


HYPER = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}


def a_request(mode="resume", optimizer="CSDAdam", trainers=1, hyper=(), options=(), defaults=(), **param):
    """Return a request for a session with one parameter. `param`: its fields that are not the usual ones."""
    shape = param.get("shape", (3, 3))
    p = {"name": "p", "named": True, "shape": shape, "stride": [1] * len(shape), "dtype": "float32", "trains": True}
    return {
        "protocol": PROTOCOL,
        "optimizer": optimizer,
        "defaults": {"decoupled_weight_decay": True, **dict(defaults)},
        "options": {"state_dtype": "fp32", "tile_size": None, **dict(options)},
        "mode": mode,
        "trainers": trainers,
        "who": "a test",
        "groups": [{"hyper": {**HYPER, **dict(hyper)}, "params": [{**p, **param}]}],
    }


def test_another_model_and_a_store_that_nobody_wants_to_go_on_with_are_refused(owners):
    Replicas(owners.address).opt.close()  # a session without a step leaves no states behind
    training = Replicas(owners.address)
    with pytest.raises(CSDBusyError, match="another optimizer of this process"):
        Replicas(owners.address)
    training.step()
    training.step()
    image = training.image()
    training.opt.close()
    with pytest.raises(CSDStoreExistsError, match="resume=True"):
        Replicas(owners.address)
    other = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(CSDStoreError, match="1 here"):
        CSDAdam([other], devices=owners.address, resume=True)
    for options in ({"decoupled_weight_decay": False}, {"state_dtype": "8bit"}):
        with pytest.raises(CSDStoreError, match=f"{next(iter(options))} of the optimizer"):
            CSDAdam(training.params.values(), devices=owners.address, resume=True, **options)
    owners.stop()  # the same is refused when restarted owners have not opened their store yet
    owners.start()
    with pytest.raises(CSDStoreExistsError):
        Replicas(owners.address)
    with pytest.raises(CSDStoreError, match="another model"):
        CSDAdam([other], devices=owners.address, resume=True)
    training = Replicas(owners.address, resume=True)
    assert training.done == 2
    assert all(torch.equal(a, b) for a, b in zip(image, training.image(), strict=True))
    training.opt.close()
    with CSDAdam([other], devices=owners.address, overwrite=True) as opt:
        assert opt.committed_step == 0


def test_arguments_that_owners_cannot_serve_are_refused(owners, tmp_path):
    p = torch.nn.Parameter(torch.zeros(4, 4))
    for options, why in (
        ({"topk": 0.1}, "topk"),
        ({"devices": [owners.address, str(tmp_path)]}, "only one"),
        ({"devices": "serve://nobody"}, "serve://host:port"),
        ({"devices": f"{owners.address}&p=1"}, "unknown option 'p'"),
        ({"devices": "serve://127.0.0.1:29600?timeout=soon"}, "soon"),
    ):
        with pytest.raises(CSDValueError, match=why):
            CSDAdam([p], **{"devices": owners.address, **options})
    with pytest.raises(CSDValueError, match="topk"):
        CSDAdam([{"params": [p], "topk": 0.1}], devices=owners.address)
    with pytest.raises(CSDRuntimeError, match="instead of NO_SHARD"):
        FlatShard(p, None, [16, 16])
    with pytest.raises(CSDRuntimeError, match="run the model once"):
        CSDAdam([torch.nn.UninitializedParameter()], devices=owners.address)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(CSDUnavailableError, match="csd-optim serve"):
        CSDAdam([p], devices=f"serve://127.0.0.1:{port}?timeout=0.5")
    with CSDAdam([p], devices=owners.address, grad_dtype=torch.bfloat16) as opt:
        with pytest.raises(CSDRuntimeError, match="overlap"):
            opt.overlap(torch.nn.Linear(1, 1))
        with pytest.raises(CSDRuntimeError, match="pickled"):
            opt.__getstate__()
        p.grad = torch.ones(4, 4)
        opt.user_state = {"what": object()}
        with pytest.raises(TypeError, match=r"user_state\['what'\]"):
            opt.step()
        opt.user_state = {"what": torch.zeros(30 << 20, dtype=torch.uint8)}
        with pytest.raises(CSDValueError, match="user_state of all trainers"):
            opt.step()
        opt.user_state = {}
        opt.step()
        with pytest.raises(CSDValueError, match="absolute"):
            opt.save("snapshot")
        with pytest.raises(CSDRuntimeError, match="csd-optim export"):
            torch.save(opt.state[p]["exp_avg"], tmp_path / "state.pt")
        assert opt.state[p]["exp_avg"].to("cpu") is opt.state[p]["exp_avg"]  # Lightning calls it at the end of training


def test_topk_that_is_asked_for_later_is_refused(owners):
    p = torch.nn.Parameter(torch.zeros(4, 4))
    with CSDAdam([p], devices=owners.address, overwrite=True) as opt:
        p.grad = torch.ones(4, 4)
        for later in (opt.param_groups[0].__setitem__, opt.__setattr__):
            later("topk", 0.1)
            with pytest.raises(CSDValueError, match="Invalid topk"):
                opt.step()
            later("topk", None)
        opt.step()


@pytest.mark.parametrize("hosts", [("[::1]",), ("127.0.0.1", "192.0.2.1")], ids=("v6", "of-another-machine"))
def test_addresses_that_owners_listen_at(tmp_path, hosts):
    # Owners on several machines get the same command line with the first one's address. 192.0.2.1 stands for an address
    # that the second machine does not have.
    if not is_local_address(hosts[0].strip("[]")):
        pytest.skip("this machine has no IPv6")
    with Owners(tmp_path, len(hosts), hosts=hosts) as owners:
        training = Replicas(owners.address)
        training.step()
        training.opt.synchronize()
        assert training.opt.committed_step == 1
        owners.stop()


def test_a_step_that_owners_could_not_make_leaves_nothing(owners):
    training = Replicas(owners.address)
    for _ in range(2):
        training.step()
    training.opt.synchronize()
    image = training.image()
    (pid,) = owners.pids
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # as if the disk were full
    with torch.no_grad():
        training.params["matrix"].mul_(2)
    with pytest.raises(CSDOSError):
        training.step()
    with pytest.raises(CSDOSError):
        training.opt.save(owners.directory / "snapshot", wait=False).result(60)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    training.opt.close()
    training = Replicas(owners.address, resume=True)
    assert (training.opt.committed_step, training.done) == (2, 2)
    assert all(torch.equal(a, b) for a, b in zip(image, training.image(), strict=True))
    assert owners.pids == [pid]


def test_a_model_that_is_converted_later_is_refused(owners):
    training = Replicas(owners.address)
    training.step()
    matrix = training.params["matrix"]
    before = matrix.data
    matrix.data = before.bfloat16()
    done = training.done
    with pytest.raises(CSDStoreError, match="convert the model before"):
        training.step()
    with pytest.raises(CSDStoreError, match="convert the model before"):
        training.opt.state_dict()
    matrix.grad = None
    matrix.data = before
    training.done = done
    training.step()
    training.opt.synchronize()
    assert training.opt.committed_step == 2


# ---- the rest of an optimizer ------------------------------------------------------------------


def test_parameters_set_and_state_dicts_loaded_are_the_owners(owners, tmp_path):
    ours, served = Replicas(str(tmp_path / "own")), Replicas(owners.address)
    for training in (ours, served):
        training.step()
        with torch.no_grad():
            training.params["matrix"].mul_(0.5)
            training.params["late"].fill_(2.0)  # owners do not have this parameter yet
        training.step()
    assert_alike(ours, served)
    state = {**ours.opt.state_dict()}
    state["state"] = {k: {n: t + 1 for n, t in entry.items()} for k, entry in state["state"].items()}
    for training in (ours, served):
        training.opt.load_state_dict(state)
        assert training.opt.committed_step == 3
        training.step()
        before = training.opt.state_dict()["state"]
        with training.opt.loading():  # torch.distributed.checkpoint loads into tensors in place, too
            for entry in before.values():
                entry["exp_avg"].mul_(0.5)
        training.step()
    assert_alike(ours, served)
    path = tmp_path / "snapshot"
    assert served.opt.save(path).result() == path
    assert CSDAdam.load(path)["csd_optim"]["step"] == 5
    served.opt.close()
    served = Replicas(owners.address, resume=True)
    for p in served.params.values():
        p.data.zero_()
    served.opt.restore()
    assert_alike(ours, served)


def test_the_environment_alone_is_enough(owners, monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_DEVICES", owners.address)
    model = torch.nn.Linear(5, 3)
    with CSDAdam(model.parameters(), lr=0.1) as opt:
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            opt.step()
            opt.zero_grad()
        assert str(opt).endswith(f"on [{owners.address}]")
        opt.synchronize()
        assert opt.committed_step == 3


def lazily(rank):
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # torch reads it only once per process


LAZILY = """
import sys, torch
from csd_optim import CSDAdam
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
opt = CSDAdam([p], devices=sys.argv[1])
opt.step()
opt.close()
"""


def test_connections_that_are_made_when_they_are_used(tmp_path):
    with Owners(tmp_path, before=lazily) as owners:
        printed(LAZILY, owners.address, environment={**os.environ, "TORCH_GLOO_LAZY_INIT": "1"})
        owners.stop()
