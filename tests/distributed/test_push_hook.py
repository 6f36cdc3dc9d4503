"""DDP's hook csd_optim.push: each rank gets its rows of the mean gradients, and steps are those of DDP's own means."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.exact import Linear
from support.inside import engine_of, steps_of, together_of
from support.owners import Owner
from support.ranks import on_living_ranks, on_ranks
from support.replacing import failing
from support.twins import local
from support.wires import until
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRankError, CSDRuntimeError, CSDTypeError, push
from csd_optim.bindings import Native
from csd_optim.distributed import reduce_scatter
from csd_optim.distributed.ranks import Ranks
from csd_optim.distributed.sharding import rows_of

small_rounds = mock.patch.object(reduce_scatter, "ROUND_BYTES", 512)  # so that small models have more than ROUNDS


def net(seed=0, dtype=torch.float32, wide=33):
    torch.manual_seed(seed)
    return torch.nn.Sequential(Linear(7, wide), torch.nn.Tanh(), Linear(wide, 5)).to(dtype)


class Trained:
    """A model under DDP, and data that depend on rank and step. `hooked`: csd_optim.push reduces its gradients."""

    def __init__(self, devices, dtype=torch.float32, hooked=True, cap=None, **options):
        self.model = net(dtype=dtype)
        self.opt = CSDAdam(self.model.parameters(), devices=devices, lr=0.05, tile_size=1024, **options)
        self.hooked = hooked
        self.wrap(cap)

    def wrap(self, cap=None):
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=self.hooked, bucket_cap_mb=cap)
        if self.hooked:
            self.ddp.register_comm_hook(self.opt, push)

    def step(self):
        self.opt.step()
        self.opt.zero_grad()

    def image(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def backward(self, rank, i, sync=True, factor=1.0):
        torch.manual_seed(100 * i + rank)
        with contextlib.nullcontext() if sync else self.ddp.no_sync():
            loss = self.ddp(torch.randn(4, 7, dtype=self.model[0].weight.dtype)).square().sum() * factor
            loss.backward()
        return loss


def assert_same_images(images):
    assert all(torch.equal(a, b) for image in images[1:] for a, b in zip(images[0], image, strict=True))


@small_rounds
def five_steps(rank, devices, dtype, hooked, overlaps=False):
    """Train five steps, with an abandoned and an accumulated backward among them."""
    training = Trained(devices.format(rank=rank), dtype, hooked)
    if overlaps:
        training.opt.overlap(training.ddp)
    for i in range(5):
        if i == 2:  # abandoned
            training.backward(rank, 50)
            training.opt.zero_grad()
        if i == 3:  # accumulated
            training.backward(rank, 51, sync=False)
        training.backward(rank, i)
        training.step()
    training.opt.synchronize()
    training.opt.close()
    return training.image()


# With two ranks an fp32 sum has the same bits whether the terms are halved before or the sum afterwards.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_two_ranks_have_the_bits_of_ddp(tmp_path, dtype):
    images = []
    for hooked in (True, False):
        images += on_living_ranks(2, five_steps, f"{tmp_path}/{hooked}-{{rank}}", dtype, hooked, directory=tmp_path)
    assert_same_images(images)


@small_rounds
@mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 64)
def goes_on_after_an_exception(rank, overlap):
    """Backward raises after reducing some buckets; nothing of their gradients enters the next backward."""
    images = []
    for raises in False, True:
        training = Trained(f"{raises}-{rank}", cap=1e-5)
        if overlap is not None:
            training.opt.overlap(training.ddp, **overlap)
        for i in range(5):
            if raises and i == 3:

                def refuses(grad):
                    raise ArithmeticError

                with training.model[0].weight.register_hook(refuses), pytest.raises(ArithmeticError):
                    training.backward(rank, 50, factor=1e38)
                assert steps_of(training.opt).reduced.under_way
                training.opt.overlap(None)
                training.opt.zero_grad()
                training.ddp = None  # DDP itself cannot go on
                gc.collect()
                training.wrap(1e-5)
                if overlap is not None:
                    training.opt.overlap(training.ddp, **overlap)
            training.backward(rank, i)
            assert all(p.grad.isfinite().all() for p in training.model.parameters())
            training.step()
        images.append(training.image())
        training.opt.close()
    assert_same_images(images)


@pytest.mark.parametrize("overlap", [None, {"backward": True}], ids=str)
def test_after_an_exception_in_backward(overlap, tmp_path):
    on_ranks(2, goes_on_after_an_exception, overlap, directory=tmp_path)


def changes_lr(training, rank, k):
    training.opt.param_groups[0]["lr"] *= 0.9


def goes_backward_again(training, rank, k):
    training.backward(rank, 100 + k)


def adds_up(training, rank, k):
    """In this order, so that only the second backward is reduced, and the guess is right."""
    training.opt.zero_grad()
    training.backward(rank, 200 + k, sync=False)
    training.backward(rank, k)


CHANGES = {  # after backward in every third step, and why the guess is undone then
    "nothing": (None, None),
    "learning rate": (changes_lr, "constants"),
    "another backward": (goes_backward_again, "more backward passes"),
    "cleared": (adds_up, "cleared gradients"),
}


def ready(opt):
    """Wait until a guess may begin: all ranks have the last step, and its commit is over."""
    opt.wait()
    until(lambda: together_of(opt).has_met and engine_of(opt).idle)


@small_rounds
def guesses(rank, change, options):
    change, why = CHANGES[change]
    seen = []
    for overlap in None, {"backward": True}:
        training, early = Trained(f"{overlap}-{rank}", **options), 0
        if overlap:
            training.opt.overlap(training.ddp, **overlap)
        for k in range(6):
            training.backward(rank, k)
            if change and k % 3 == 2:
                change(training, rank, k)
            training.step()
            if overlap:
                ready(training.opt)
                early += training.opt.stats()["overlap"]["early_params"]
        seen.append(training.image() + [local(t) for t in training.opt.state[training.model[0].weight].values()])
        if overlap:
            assert early
            assert {*training.opt.stats()["overlap"]["redone"]} == {*filter(None, [why])}
        training.opt.close()
    assert_same_images(seen)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_steps_begin_in_backward(change, size, tmp_path):
    on_living_ranks(size, guesses, change, {}, directory=tmp_path)


@pytest.mark.parametrize(
    "options", [{"state_dtype": "8bit"}, {"max_grad_norm": 1e9}, {"dtype": torch.bfloat16}], ids=str
)
def test_steps_begin_in_backward_with(options, tmp_path):
    on_living_ranks(2, guesses, "nothing", options, directory=tmp_path)


def test_steps_that_land_later_have_the_same_bits(tmp_path):
    images = []
    for overlaps in (True, False):
        place = f"{tmp_path}/{overlaps}-{{rank}}"
        images += on_living_ranks(3, five_steps, place, torch.float32, True, overlaps, directory=tmp_path)
    assert_same_images(images)


@pytest.mark.ci
@pytest.mark.here("has an owner of its own")
def test_an_owner_gets_the_same_rows(tmp_path):
    with Owner(tmp_path) as owner:
        images = [
            image
            for devices in (owner.address, f"{tmp_path}/{{rank}}")
            for image in on_living_ranks(3, five_steps, devices, torch.bfloat16, True, directory=tmp_path)
        ]
    assert_same_images(images)


class Awkward(torch.nn.Module):
    """Parameters of all shapes and orders, each with a gradient that depends on step and rank; one has none."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def new(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

        shapes = {"rows": (50, 33), "few": (2, 7), "one": (1, 9), "vector": (301,), "scalar": (), "empty": (0, 4)}
        tensors = {name: new(*shape) for name, shape in shapes.items()}
        tensors |= {"turned": new(19, 31).t(), "channels last": new(8, 3, 2, 2).to(memory_format=torch.channels_last)}
        if dtype is torch.float32:
            tensors["complex"] = torch.randn(9, 5, generator=generator, dtype=torch.complex64)
        self.kept = torch.nn.ParameterDict({name: torch.nn.Parameter(t) for name, t in tensors.items()})
        self.unused = torch.nn.Parameter(new(6, 2))

    def gradients(self, rank, i):
        generator = torch.Generator().manual_seed(1000 * i + rank)
        return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in self.kept.values()]

    def forward(self, grads):
        sums = [(p * g).sum() for p, g in zip(self.kept.values(), grads, strict=True)]
        return sum(s.abs() if s.is_complex() else s for s in sums)


def mean_by_hand(grads):
    """Return the mean of all ranks' gradients: each divided, summed in rank order in fp32, rounded once."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, grads)
    means = []
    for terms in zip(*by_rank, strict=True):
        wide = terms[0].dtype if terms[0].is_complex() else torch.float32
        total = torch.zeros(terms[0].shape, dtype=wide)
        for term in terms:
            total += term * (1 / len(terms))
        means.append(total.to(terms[0].dtype))
    return means


@small_rounds
def by_hand(rank, size, dtype, options):
    """Compare rows and steps with what follows from means that are computed by hand."""
    model, other = Awkward(dtype), Awkward(dtype)
    options |= {"lr": 0.05, "tile_size": 1024}
    opt = CSDAdam(model.parameters(), devices=f"hooked-{rank}", **options)
    reference = CSDAdam(other.parameters(), devices=f"by-hand-{rank}", **options)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(opt, push)
    for i in range(3):
        ddp(model.gradients(rank, i)).backward()
        own = [p.grad.clone() for p in model.kept.values()]
        reduced = steps_of(opt).reduced.rows
        for p, q, mean in zip(model.kept.values(), other.kept.values(), mean_by_hand(own), strict=True):
            q.grad = torch.empty_like(q).copy_(mean)
            divided = p.dim() > 0 and p.numel() > 0 and not p.is_complex()
            assert (id(p) in reduced) == divided
            if divided:
                assert torch.equal(reduced[id(p)], mean.narrow(0, *rows_of(len(mean), size, rank)))
            else:  # averaged by DDP's all-reduce, which may add in another order
                torch.testing.assert_close(p.grad, mean)
                q.grad.copy_(p.grad)
        assert id(model.unused) not in reduced
        opt.step()
        reference.step()
        if "max_grad_norm" in options:  # the squares of the norm are summed in another order
            assert opt.stats()["grad_norm"] == pytest.approx(reference.stats()["grad_norm"], rel=1e-5)
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
        else:
            assert_same_images([[*model.parameters()], [*other.parameters()]])
        opt.zero_grad()
    for each in (opt, reference):
        each.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled(together=2)
def test_rows_are_those_of_the_mean(tmp_path, size, dtype):
    assert_same_images(on_living_ranks(size, by_hand, size, dtype, {}, directory=tmp_path))


@pytest.mark.parametrize(
    "options", [{"topk": 0.1, "state_dtype": "8bit", "grad_dtype": torch.bfloat16}, {"max_grad_norm": 0.5}], ids=str
)
def test_options_of_the_step_apply_to_the_rows(tmp_path, options):
    assert_same_images(on_living_ranks(3, by_hand, 3, torch.float32, options, directory=tmp_path))


@small_rounds
def refused(rank):
    """A step is refused if `.grad` is not the gradient that was reduced."""
    training = Trained(f"refused-{rank}")
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

    def accumulate():
        training.backward(rank, 1, sync=False)

    for change in (lambda: torch.nn.utils.clip_grad_norm_(params, 1e9), write_one, exchange_one, make_anew, accumulate):
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
    training.backward(rank, 0)
    if rank == 0:  # a change on one rank makes the step raise on all
        write_one()
    with pytest.raises(CSDRuntimeError if rank == 0 else CSDRankError, match=r"gradient of 0\.0 was changed"):
        training.opt.step()
    training.opt.zero_grad()
    before = training.image()
    training.backward(rank, 0)
    training.step()
    assert not torch.equal(before[0], params[0])
    # Gradients that were made without DDP are used as they are, on all ranks or on none.
    if rank == 1:
        training.backward(rank, 0, sync=False)
    training.opt.zero_grad()
    for p in params:
        p.grad = torch.ones_like(p)
    training.opt.step()
    training.backward(rank, 0)
    if rank == 0:
        training.opt.zero_grad()
        for p in params:
            p.grad = torch.ones_like(p)
    with pytest.raises(CSDError, match=r"different parameters: .*reduced by csd_optim\.push"):
        training.opt.step()
    training.opt.close()


def test_a_gradient_that_is_not_what_was_reduced_is_refused(tmp_path):
    on_living_ranks(2, refused, directory=tmp_path)


@small_rounds
def scaled(rank, devices, clipped, hooked):
    """Train with GradScaler; one rank overflows in one step."""
    options = {"max_grad_norm": 0.3} if clipped else {}
    training = Trained(devices.format(rank=rank), torch.float16, hooked, **options)
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


@pytest.mark.parametrize("clipped", [False, True])
def test_loss_scale_and_clipping(tmp_path, clipped):
    ours, plain = (
        on_living_ranks(2, scaled, f"{tmp_path}/{hooked}-{{rank}}", clipped, hooked, directory=tmp_path)
        for hooked in (True, False)
    )
    for image, said in ours:
        for (skipped, scale, norm), (skipped_there, scale_there, norm_there) in zip(said, plain[0][1], strict=True):
            assert (skipped, scale) == (skipped_there, scale_there)
            assert norm is None or norm == pytest.approx(norm_there, rel=1e-5)
        assert_same_images([image, ours[0][0]])
        for a, b in zip(plain[0][0], image, strict=True):
            if clipped:  # the squares of the norm are summed in another order
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(a, b)
    assert [skipped for skipped, *_ in ours[0][1]] == [False, True, False, False, False]


class Parted(torch.nn.Module):
    """A model that skips a layer."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, without):
        for i, part in enumerate(self.parts):
            x = x if i == without else part(x)
        return x


@small_rounds
def left_out(rank):
    """One rank overflows; all ranks see it, whichever parameters are unused."""
    torch.manual_seed(0)
    model = Parted()
    opt = CSDAdam(model.parameters(), lr=0.05)
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


def test_all_ranks_hear_of_an_overflow_beside_unused_parameters(tmp_path):
    on_living_ranks(2, left_out, directory=tmp_path)


@small_rounds
def uneven(rank, devices, hooked):
    """Train under Join; ranks run out of data, the last one first."""
    training = Trained(devices.format(rank=rank), hooked=hooked)
    with Join([training.ddp, training.opt]):
        for i in range(5 - rank):
            training.backward(rank, i)
            own = [p.grad.clone() for p in training.model.parameters()]
            training.opt.step()
            assert not hooked or all(map(torch.equal, own, [p.grad for p in training.model.parameters()]))
            training.opt.zero_grad()
    training.opt.synchronize()
    training.opt.close()
    return training.image()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_are_out_of_data(tmp_path, size):
    ours, plain = (
        on_living_ranks(size, uneven, f"{tmp_path}/{hooked}-{{rank}}", hooked, directory=tmp_path)
        for hooked in (True, False)
    )
    assert_same_images(ours)
    for a, b in zip(ours[0], plain[0], strict=True):
        assert torch.equal(a, b) if size == 2 else torch.allclose(a, b, rtol=1e-3, atol=1e-4)


@small_rounds
def beside_others(rank):
    """A model with two optimizers, one without the hook; and sharded=False, where each rank needs all rows."""
    images = []
    for hooked, options in ((False, {}), (True, {}), (True, {"sharded": False})):
        model = net()
        other = torch.optim.SGD(model[2].parameters(), lr=0.1)
        opt = CSDAdam(model[0].parameters(), lr=0.1, devices="ram:", **options)
        ddp = DistributedDataParallel(model)
        if hooked:
            ddp.register_comm_hook(opt, push)
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            ddp(torch.randn(4, 7)).square().sum().backward()
            assert len(steps_of(opt).reduced.rows) == (2 if hooked and not options else 0)
            opt.step()
            other.step()
            model.zero_grad()
        opt.close()
        images.append([p.detach().clone() for p in model.parameters()])
    with pytest.raises(CSDTypeError, match="register_comm_hook"):
        push(other, None)
    assert_same_images(images)


def test_the_hook_beside_what_is_not_divided(tmp_path):
    on_living_ranks(2, beside_others, directory=tmp_path)


@small_rounds
def tried_again(rank):
    """A step that failed, or is repeated, uses the same rows; a later backward does not write to them."""
    training, plain = Trained(f"hooked-{rank}"), Trained(f"plain-{rank}", hooked=False)
    for i in range(3):
        training.backward(rank, i)
        plain.backward(rank, i)
        if i == 1:
            with (
                failing(Native, "push", 1, "broken") if rank == 1 else contextlib.nullcontext(),
                pytest.raises(CSDOSError if rank == 1 else CSDRankError, match="broken"),
            ):
                training.opt.step()
        for _ in range(i):  # steps repeated with the same gradients
            training.opt.step()
            plain.opt.step()
        training.step()
        plain.step()
    assert_same_images([training.image(), plain.image()])
    training.backward(rank, 3)
    rows = [*steps_of(training.opt).reduced.rows.values()]
    kept = [t.clone() for t in rows]
    training.opt.zero_grad()
    training.backward(rank, 4)
    assert all(map(torch.equal, rows, kept))
    assert sum(t.untyped_storage().nbytes() for t in rows) == sum(t.nbytes for t in rows)
    training.opt.close()
    plain.opt.close()


def test_a_step_that_failed_is_tried_again_with_the_same_rows(tmp_path):
    on_living_ranks(2, tried_again, directory=tmp_path)


@small_rounds
def counted(rank, size):
    """Count the bytes of gradients that leave this rank in backward."""
    model = torch.nn.Sequential(*(Linear(48, 48, bias=False) for _ in range(4)))
    opt = CSDAdam(model.parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(opt, push)
    all_to_all, sent, waiting = Ranks.all_to_all, [], []

    def counting(ranks, out, out_sizes, own, own_sizes):
        if own.dtype is torch.uint8:
            sent.append(sum(own_sizes) - own_sizes[ranks.rank])
            waiting.append(steps_of(opt).reduced.under_way)
        return all_to_all(ranks, out, out_sizes, own, own_sizes)

    with mock.patch.object(Ranks, "all_to_all", counting), mock.patch.object(Ranks, "all_reduce") as all_reduce:
        ddp(torch.ones(2, 48)).sum().backward()
    all_reduce.assert_not_called()
    assert max(waiting) < reduce_scatter.ROUNDS < len(sent)
    opt.close()
    return sum(sent) / sum(p.nbytes for p in model.parameters())


def test_a_rank_sends_each_other_rank_its_rows_and_no_more(tmp_path):
    """DDP's all-reduce sends 2 (N - 1) / N of all bytes."""
    assert on_living_ranks(3, counted, 3, directory=tmp_path) == [pytest.approx(2 / 3)] * 3
