"""Gradients that leave in backward are those that the step uses; if `.grad` was changed since, the step raises."""

import contextlib
import itertools
import math
import os
import signal
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.exact import Linear
from support.inside import engine_of, steps_of
from support.owners import Owners, UnderDDP, small_buckets
from support.ranks import on_living_ranks
from test_serve import Replicas
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from bench import ranks_model as ranks
from bench.ranks_model import Fleet
from csd_optim import CSDAdam, CSDRankError, CSDRuntimeError, CSDTypeError, CSDValueError, push
from csd_optim.distributed import buckets
from csd_optim.distributed.buckets import IN_FLIGHT
from csd_optim.planning.advice import Request
from csd_optim.planning.model import Host
from csd_optim.rates import Rates
from csd_optim.serve import early
from csd_optim.serve.arrivals import Arrival, Arrivals
from csd_optim.serve.blocks import Block, owned
from csd_optim.serve.wire import BULK, PUSH, Session
from csd_optim.serve.wire import PUSHED as PUSHED_TAG


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    with Owners(tmp_path_factory.mktemp("owners"), small=True) as there:
        yield there


def net(seed=0, dtype=torch.float32, wide=33):
    torch.manual_seed(seed)
    return torch.nn.Sequential(Linear(7, wide), torch.nn.Tanh(), Linear(wide, 5)).to(dtype)


class Reduced(UnderDDP):
    def __init__(self, devices, dtype=torch.float32, wide=33, **options):
        ddp = {"gradient_as_bucket_view": devices.startswith("serve:")}
        super().__init__(net(dtype=dtype, wide=wide), devices, lr=0.05, ddp=ddp, **options)

    def backward(self, rank, i, sync=True, factor=1.0):
        torch.manual_seed(100 * i + rank)
        with contextlib.nullcontext() if sync else self.ddp.no_sync():
            loss = self.ddp(torch.randn(4, 7, dtype=self.model[0].weight.dtype)).square().sum() * factor
            loss.backward()
        return loss


@small_buckets()
def five_steps(rank, devices, dtype, route="slices"):
    """Train five steps, with an abandoned and an accumulated backward among them."""
    training = Reduced(devices.format(rank=rank), dtype)
    for i in range(5):
        if i == 2:  # abandoned
            training.backward(rank, 50)
            training.opt.zero_grad()
        if i == 3:  # accumulated
            training.backward(rank, 51, sync=False)
        training.backward(rank, i)
        training.step()
    training.opt.synchronize()
    if devices.startswith("serve:"):
        assert training.opt.stats()["route"] == route
    training.opt.close()
    return training.image()


# With two trainers an fp32 sum has the same bits whether the terms are halved before or the sum afterwards.
@pytest.mark.parametrize(
    ("dtype", "route"),
    [*((dtype, "slices") for dtype in (torch.float32, torch.bfloat16, torch.float16)), (torch.float32, "star")],
    ids=str,
)
def test_two_trainers_have_the_bits_of_ddp(owners, tmp_path, dtype, route):
    places = f"{tmp_path}/{{rank}}", f"{owners.address}&route={route}"
    ours, served = (on_living_ranks(2, five_steps, devices, dtype, route, directory=tmp_path) for devices in places)
    for image in served:
        assert all(torch.equal(a, b) for a, b in zip(ours[0], image, strict=True))


@small_buckets()
def by_hand(rank, address, size):
    """Check the norm of what has left against sums by hand: in fp32, in rank order, rounded once to 16 bits."""
    training = Reduced(address, torch.bfloat16)
    training.backward(rank, 0)
    own = [p.grad.clone() / size for p in training.model.parameters()]
    left = [engine_of(training.opt).early.sum_of_squares(i) for i in range(len(own))]
    training.opt.close()
    everybody = [None] * size
    torch.distributed.all_gather_object(everybody, (own, left))
    sums = [torch.stack([own[i].float() for own, _ in everybody]) for i in range(len(own))]
    for i, each in enumerate(sums):
        total = each[0].clone()
        for value in each[1:]:
            total += value
        square = sum(left[i] for _, left in everybody)
        assert square == pytest.approx(float(total.bfloat16().float().square().sum()), rel=1e-5)
    return five_steps(rank, address, torch.bfloat16)


def test_three_trainers_have_the_same_bits_every_time(owners, tmp_path):
    once = on_living_ranks(3, by_hand, owners.address, 3, directory=tmp_path)
    again = on_living_ranks(3, five_steps, owners.address, torch.bfloat16, directory=tmp_path)
    for image in [*once, *again]:
        assert all(torch.equal(a, b) for a, b in zip(once[0], image, strict=True))


@small_buckets()
def refused(rank, address):
    """A step is refused if `.grad` is not the gradient that has left."""
    training = Reduced(address)
    params = [*training.model.parameters()]

    def write_one():
        with torch.no_grad():
            params[0].grad.add_(1)

    def exchange_one():
        params[0].grad = params[0].grad.clone()

    def make_anew():
        """Put another tensor at the same address, as a backward without DDP may do after model.zero_grad()."""
        there, version = params[0].grad, params[0].grad._version
        params[0].grad = torch.from_numpy(there.numpy())
        torch.autograd.graph.increment_version([params[0].grad] * version)
        assert (params[0].grad.data_ptr(), params[0].grad._version) == (there.data_ptr(), version)

    for change in (lambda: torch.nn.utils.clip_grad_norm_(params, 1e9), write_one, exchange_one, make_anew):
        training.backward(rank, 0)
        change()
        with pytest.raises(CSDRuntimeError, match="max_grad_norm"):
            training.opt.step()
        training.opt.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(training.backward(rank, 0)).detach()
    scaler.unscale_(training.opt)
    with pytest.raises(CSDRuntimeError, match="max_grad_norm"):
        scaler.step(training.opt)
    del training.opt.grad_scale, training.opt.found_inf  # GradScaler leaves them behind when step() raises
    training.opt.zero_grad()
    if rank == 0:  # a change on one trainer makes the step raise on all
        training.backward(rank, 0)
        write_one()
    else:
        training.backward(rank, 0)
    with pytest.raises(RuntimeError, match="was changed"):
        training.opt.step()
    training.opt.zero_grad()
    before = training.image()
    training.backward(rank, 0)
    training.step()
    assert training.opt.stats()["route"] == "slices"
    assert not torch.equal(before[0], params[0])
    # Gradients that were made without DDP leave in the step.
    for p in params:
        p.grad = torch.ones_like(p)
    training.step()
    assert training.opt.stats()["route"] == "kept"
    training.opt.close()


def test_a_gradient_that_is_not_what_has_left_is_refused(owners, tmp_path):
    on_living_ranks(2, refused, owners.address, directory=tmp_path)


@small_buckets()
def scaled(rank, devices, clipped):
    """Train with GradScaler; one rank overflows in one step."""
    options = {"max_grad_norm": 0.3} if clipped else {}
    training = Reduced(devices.format(rank=rank), torch.float16, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    said = []
    for i in range(5):
        overflows = i == 1 and rank == 1
        training.backward(rank, i, factor=scaler.get_scale() * (1e9 if overflows else 1.0))
        scaler.scale(torch.zeros(()))
        scaler.step(training.opt)
        scaler.update()
        training.opt.zero_grad()
        said.append((training.opt.stats()["skipped"], scaler.get_scale(), steps_of(training.opt).grad_norm))
    training.opt.close()
    return training.image(), said


@pytest.mark.parametrize(("clipped", "route"), [(False, "slices"), (True, "slices"), (True, "star")])
def test_loss_scale_and_clipping(owners, tmp_path, clipped, route):
    places = f"{tmp_path}/{{rank}}", f"{owners.address}&route={route}"
    ours, served = (on_living_ranks(2, scaled, devices, clipped, directory=tmp_path) for devices in places)
    for image, said in served:
        for (skipped, scale, norm), (skipped_here, scale_here, norm_here) in zip(ours[0][1], said, strict=True):
            assert (skipped, scale) == (skipped_here, scale_here)
            assert norm is None or norm == pytest.approx(norm_here, rel=1e-5 if route == "slices" else 1e-3)
        for a, b, there in zip(ours[0][0], image, served[0][0], strict=True):
            assert torch.equal(b, there)
            if clipped:  # the squares of the norm are summed in another order
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(a, b)
    assert [skipped for skipped, *_ in ours[0][1]] == [False, True, False, False, False]


class Parted(torch.nn.Module):
    """A model that leaves one of its layers out."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, without):
        for i, part in enumerate(self.parts):
            x = x if i == without else part(x)
        return x


@small_buckets()
def left_out(rank, address):
    """One trainer overflows; all trainers see it, whichever parameters are unused."""
    torch.manual_seed(0)
    model = Parted()
    opt = CSDAdam(model.parameters(), lr=0.05, devices=address, overwrite=True)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(opt, push)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for without in range(3):
        scaler.scale(ddp(torch.ones(2, 4), without).sum() * (torch.inf if rank == 0 else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert (scaler.get_scale(), opt.stats()["skipped"]) == (64.0 / 2 ** (without + 1), True)
    opt.close()


def test_all_trainers_hear_of_an_overflow_beside_unused_parameters(owners, tmp_path):
    on_living_ranks(2, left_out, owners.address, directory=tmp_path)


@small_buckets()
def uneven(rank, devices):
    """Train under Join; rank 1 runs out of data."""
    training = Reduced(devices.format(rank=rank))
    with Join([training.ddp, training.opt]):
        for i in range(4 - 2 * rank):
            training.backward(rank, i)
            training.step()
    training.opt.synchronize()
    training.opt.close()
    return training.image()


def test_trainers_that_are_out_of_data(owners, tmp_path):
    places = f"{tmp_path}/{{rank}}", owners.address
    ours, served = (on_living_ranks(2, uneven, devices, directory=tmp_path) for devices in places)
    for image in served:
        assert all(torch.equal(a, b) for a, b in zip(ours[0], image, strict=True))


@small_buckets()
def beside_others(rank, address):
    """The hook with local devices, with the route kept, and for a model with several optimizers."""
    images = []
    for devices in ("ram:", f"{address}&route=kept", f"{address}&route=auto"):
        served = devices.startswith("serve:")
        model, ddp = net(), None
        mine = [*model[0].parameters()]
        other = torch.optim.SGD(model[2].parameters(), lr=0.1)
        opt = CSDAdam(mine, lr=0.1, devices=devices, **({"overwrite": True} if served else {}))
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(opt, push)
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            ddp(torch.randn(4, 7)).square().sum().backward()
            opt.step()
            other.step()
            model.zero_grad()
        assert not served or opt.stats()["route"] == ("slices" if "auto" in devices else "kept")
        opt.close()
        images.append([p.detach().clone() for p in model.parameters()])
    with pytest.raises(CSDTypeError, match="register_comm_hook"):
        push(other, None)
    with pytest.raises(CSDValueError, match="unknown route 'scenic'"):
        CSDAdam(mine, devices=f"{address}&route=scenic")
    return images


def test_the_hook_beside_what_it_does_not_push(owners, tmp_path):
    for images in on_living_ranks(2, beside_others, owners.address, directory=tmp_path):
        for image in images[1:]:
            assert all(torch.equal(a, b) for a, b in zip(images[0], image, strict=True))


@contextlib.contextmanager
def the_first_follows(training):
    """Gradients pushed in backward arrive when the owner has some, but not all, of those sent in the step."""
    send, goes, follow = Session.send, threading.Event(), []

    def sending(session, tensor, rank, tag=BULK):
        if tag == PUSHED_TAG:
            goes.wait()
        elif tag == BULK:
            follow.append(rank)
            if len(follow) == 2 * IN_FLIGHT + 1:  # at least IN_FLIGHT have arrived: the first is in place
                goes.set()
                engine_of(training.opt).early.flush()
        return send(session, tensor, rank, tag)

    with mock.patch.object(Session, "send", sending):
        yield
    assert goes.is_set()


@mock.patch.object(buckets, "MIN_BUCKET_BYTES", 512)
def dropped(rank, address):
    """Gradients of an abandoned backward are still leaving when a step sends gradients of the same parameters."""
    training, undisturbed = Reduced(address, wide=128), Reduced("ram:", wide=128)
    for t in (training, undisturbed):
        t.backward(rank, 0)
        t.step()
    with the_first_follows(training):
        training.backward(rank, 1)
        training.opt.zero_grad()
        for t in (training, undisturbed):
            for p in t.model.parameters():
                p.grad = torch.full_like(p, 0.01)
            t.step()
    training.backward(rank, 2)
    undisturbed.backward(rank, 2)
    training.step()
    undisturbed.step()
    assert all(torch.equal(a, b) for a, b in zip(training.image(), undisturbed.image(), strict=True))
    training.opt.close()


@pytest.mark.parametrize("route", ["slices", "star"])
def test_what_was_dropped_does_not_take_the_place_of_what_follows(owners, tmp_path, route):
    on_living_ranks(1, dropped, f"{owners.address}&route={route}", directory=tmp_path)


@small_buckets()
def keeping(rank, address):
    """No gradient reaches the owners until a second backward has begun and has waited for a while."""
    training = Reduced(address, wide=128)
    send, begin_reduce_scatter = Session.send, early.begin_reduce_scatter
    second, again, goes = threading.Event(), threading.Event(), threading.Event()
    waited, kept = [], []

    def sending(session, tensor, to, tag=BULK):
        if tag == PUSHED_TAG and not goes.is_set():
            second.wait()
            waited.append(not again.wait(0.2))
            goes.set()
        return send(session, tensor, to, tag)

    def reducing(strips, ranks):
        if second.is_set():
            again.set()
        pushes = begin_reduce_scatter(strips, ranks)

        def noting():
            made = pushes()
            kept.extend(push.values.untyped_storage().nbytes() for push in made)
            return made

        return noting

    with mock.patch.object(Session, "send", sending), mock.patch.object(early, "begin_reduce_scatter", reducing):
        training.backward(rank, 0)
        assert not goes.is_set()  # the first backward has not waited for owners
        share = sum(owned(p.shape, 2, rank).numel * 4 for p in training.model.parameters())
        assert sum(kept) == share
        second.set()
        training.backward(rank, 1)
        training.step()
    assert waited == [True]
    assert training.opt.stats()["route"] == "slices"
    training.opt.close()


def test_a_trainer_keeps_no_more_than_its_share_for_owners(owners, tmp_path):
    on_living_ranks(2, keeping, owners.address, directory=tmp_path)


@small_buckets()
def ending(rank, address, owner):
    """Gradients of a backward are still leaving when the optimizer is closed, as at exit."""
    training = Reduced(address)
    training.backward(rank, 0)
    training.step()
    os.kill(owner, signal.SIGSTOP)
    try:
        training.backward(rank, 1)
        with mock.patch.object(Session, "send_message"):  # the stopped owner would not receive the message "close"
            training.opt._finalizer()
        assert not [thread for thread in threading.enumerate() if thread.name == "csd_optim push"]
    finally:
        os.kill(owner, signal.SIGCONT)


@pytest.mark.parametrize("route", ["slices", "star"])
def test_no_thread_waits_for_owners_when_the_interpreter_ends(owners, tmp_path, route):
    """A thread that is still in gloo when the interpreter shuts down aborts the process."""
    on_living_ranks(1, ending, f"{owners.address}&route={route}", *owners.pids, directory=tmp_path)


def test_nobody_waits_for_what_is_pushed_when_the_session_is_over():
    """flush() and reduce_and_push() raise after stop(): a step or backward may call them after a session has failed."""
    pusher = early._Pusher(mock.Mock(Session), summed_by_owners=False)
    pusher.stop()
    pusher.join(10.0)
    strip = early.Strip(0, (4,), torch.float32, torch.ones(4), 0, 4)
    for late in (pusher.flush, lambda: pusher.reduce_and_push(1, [strip], None)):
        with pytest.raises(CSDRankError, match="the session is over"):
            late()


PUSHED = {
    "op": "step",
    "scale": 1.0,
    "params": [0],
    "dtypes": ["float32"],
    "written": [],
    "pushed": [1],
    "backwards": 1,
}


@pytest.mark.parametrize(
    ("pushed", "header", "why"),
    [
        (None, {}, "were never pushed"),
        (None, {"pushed": ["1"]}, "backwards that do not fit"),
        (None, {"backwards": "1"}, "backwards '1'"),
        ({"backward": 1}, {}, "cannot be read"),
        ({"backward": 1, "parts": [[0, 30, 8, "float32"]]}, {}, "rows 30 to 38"),
        ({"backward": 1, "parts": [[9, 0, 1, "float32"]]}, {}, "cannot be read"),
        ({"backward": 1, "parts": [[0, 0, 1, "Tensor"]]}, {}, "no dtype"),
        ({"backward": 1, "parts": [[0, 0, 1, "float32"]] * 2}, {}, "twice"),
    ],
)
@small_buckets()
def test_what_is_no_push_ends_the_session_and_not_the_owner(owners, pushed, header, why):
    training = Replicas(owners.address, overwrite=True)
    training.step()
    image, pids = training.image(), owners.pids
    engine, session = engine_of(training.opt), engine_of(training.opt)._session
    if pushed:
        engine.call({"op": "listen"})
        session.send_message(pushed, session.owner(0), tag=PUSH)
    with pytest.raises(CSDRankError, match=f"{why}|Connection closed"):  # on a busy machine before the reason comes
        engine.call({**PUSHED, "hyper": None, "user_states": None, **header})
    training = Replicas(owners.address, resume=True)
    assert (training.done, owners.pids) == (1, pids)
    assert all(torch.equal(a, b) for a, b in zip(image, training.image(), strict=True))
    training.opt.close()


def test_an_owner_waits_for_all_of_just_that_backward():
    ends = threading.Event()

    def disconnected(*_, **__):
        ends.wait()
        raise CSDRankError("nobody is there")

    session = SimpleNamespace(trainers=2, timeout=0.02, receive_message=disconnected)
    owner = SimpleNamespace(changed=threading.Condition(), check_current=lambda _: None, flow=None)
    arrivals = Arrivals(owner, session)
    arrivals.listen()
    with owner.changed:
        for trainer, (backward, elements) in itertools.product(range(2), ((1, 9), (2, 6), (2, 4))):
            arrivals.record(trainer, Arrival(3, backward, Block((0,), (elements,)), torch.float32))
    arrivals.wait({3: 2}, [{3: 10}, {3: 10}])
    arrivals.wait({3: 2, 4: 2}, [{3: 10, 4: 0}, {3: 10}])
    for pushed, expected in (
        ({3: 1}, [{3: 10}, {3: 10}]),  # an abandoned backward, overwritten by the next
        ({3: 3}, [{3: 10}, {3: 10}]),
        ({3: 2}, [{3: 10}, {3: 11}]),
        ({4: 2}, [{4: 1}, {4: 0}]),
    ):
        with pytest.raises(CSDRankError, match="has not come"):
            arrivals.wait(pushed, expected)
    session.timeout = 60.0
    ends.set()  # the trainers disconnect: it no longer waits for what they have not sent
    with pytest.raises(CSDRankError, match="nobody is there"):
        arrivals.wait({3: 3}, [{3: 10}, {3: 10}])
    arrivals.wait({3: 2}, [{3: 10}, {3: 10}])
    for thread in threading.enumerate():
        if thread.name == "csd_optim arrivals":
            thread.join()
    kept = weakref.ref(arrivals)
    del arrivals
    assert kept() is None  # no reference cycle keeps it, and the session's connections, until garbage collection


@small_buckets()
def tried_again(rank, address, route):
    """A step that failed is repeated: the owners still have the gradients that left in backward."""
    training, undisturbed = Reduced(address), Reduced("ram:")
    for i in range(3):
        training.backward(rank, i)
        undisturbed.backward(rank, i)
        if i == 1:
            training.opt.user_state = {"what": object()}
            with pytest.raises(TypeError):
                training.opt.step()
            training.opt.user_state = {}
        for _ in range(i):  # steps repeated with the same gradients
            training.opt.step()
            undisturbed.opt.step()
        training.step()
        undisturbed.step()
        assert training.opt.stats()["route"] == route
    assert all(torch.equal(a, b) for a, b in zip(training.image(), undisturbed.image(), strict=True))
    with mock.patch("csd_optim.serve.early.send_buckets", side_effect=ValueError("nobody thought of that")):
        training.backward(rank, 3)
        with pytest.raises(CSDRankError, match="nobody thought of that"):
            training.opt.step()
    training.opt.close()


@pytest.mark.parametrize("route", ["slices", "star"])
def test_a_step_that_failed_is_tried_again_with_what_owners_have(owners, tmp_path, route):
    on_living_ranks(2, tried_again, f"{owners.address}&route={route}", route, directory=tmp_path)


def test_the_hook_is_planned_to_take_no_more_time_than_none():
    for trainers, owners, times, backward, drive in itertools.product(
        (1, 2, 4, 64), (1, 8), (0.25, 1, 4, 64), (0.0, 3.0), (2e9, 1e12)
    ):
        of_drive = Rates(drive, drive, drive, on_host=True)
        request = Request(params=10**9, devices=4, host=Host(update=math.inf), drive=of_drive, backward=backward)
        fleet = Fleet(trainers, owners, 1e9, times * 1e9)
        slices, kept = (ranks.iteration(route, request, fleet) for route in ("slices", "kept"))
        assert slices <= kept * (1 + 1e-9), fleet
