"""The route star: owners sum the trainers' gradients, and their step equals that of an optimizer given the sum."""

import pytest
import torch
from support.exact import Linear
from support.owners import Owners, small_buckets
from support.ranks import on_living_ranks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from csd_optim import CSDAdam, CSDRankError, CSDRuntimeError, CSDValueError, push
from csd_optim.bindings import topk_count
from csd_optim.compression.selection import feed_back, rounded, select
from csd_optim.params.summed import Summand, total
from csd_optim.serve import star
from csd_optim.serve.blocks import owned, whole
from csd_optim.serve.owner import Owner
from csd_optim.step.spec import GradOptions

TOPK = 0.1


class Trained:
    """Parameters of all kinds, with gradients that are determined by the numbers of step and trainer."""

    def __init__(self, devices, **options):
        generator = torch.Generator().manual_seed(0)

        def new(*shape, dtype=torch.float32):
            return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.params = {
            "matrix": new(97, 50),
            "half": new(64, 66, dtype=torch.bfloat16),
            "turned": torch.nn.Parameter(new(70, 81).detach().t()),
            "row": new(1, 7),
            "scalar": new(),
            "complex": new(9, dtype=torch.complex64),
        }
        self.opt = CSDAdam(self.params.items(), lr=0.1, devices=devices, **{"tile_size": 1024, **options})
        self.done = self.opt.user_state.get("done", 0)

    def gradients(self, trainer):
        generator = torch.Generator().manual_seed(10 * self.done + trainer)
        return {
            name: torch.empty_like(p.detach()).copy_(torch.randn(p.shape, generator=generator))
            for name, p in self.params.items()
        }

    def step(self, grads, scale):
        for name, p in self.params.items():
            p.grad_dtype = None
            p.grad = grads[name]
        self.done += 1
        self.opt.user_state = {"done": self.done}
        self.opt.grad_scale, self.opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
        self.opt.step()
        return self.opt.stats().get("grad_norm")

    def image(self):
        return [p.detach().clone() for p in self.params.values()]


class Fed(Trained):
    """The reference: local devices, given the fp32 sums of what `n` trainers would send."""

    def __init__(self, devices, n, topk=None, **options):
        super().__init__(devices, **options)
        self.n, self.topk, self.residuals = n, topk, {}

    def step(self):
        sums = {}
        for trainer in range(self.n):
            for name, grad in self.gradients(trainer).items():
                sent = self.sent(trainer, name, grad)
                sums[name] = sums[name] + sent if name in sums else sent
        return super().step(sums, 4.0 * self.n)

    def sent(self, trainer, name, grad):
        if not self.topk or grad.dim() < 2 or grad.numel() < 4096:
            return grad if grad.is_complex() else grad.float()
        out = torch.empty_like(grad, dtype=torch.float32)
        flat = grad.as_strided((grad.numel(),), (1,))
        residual = self.residuals.setdefault((trainer, name), torch.zeros(len(flat), dtype=torch.bfloat16))
        sent = largest(flat, residual, self.topk, 0.25, 0, self.done + 1)
        out.as_strided((len(flat),), (1,)).copy_(sent)
        return out


def largest(grad, residual, share, scale, first, step):
    """Return what Top-K sends of a gradient, with zeros elsewhere; the rest goes to `residual`."""
    values = rounded(grad, residual, scale, torch.bfloat16)
    which = select(values, topk_count(share, len(grad)))
    feed_back(grad, residual, scale, values, which, first, step)
    return torch.where(which, values, torch.zeros((), dtype=values.dtype)).float()


@small_buckets()
def train_rank(rank, address, steps, options, resume=False):
    training = Trained(address, resume=resume, **options)
    norms = []
    for i in range(steps):
        if i == 2:  # each trainer fetches all states, and all load what they have fetched
            training.opt.consolidate_state_dict(None)
            training.opt.load_state_dict(training.opt.state_dict())
        norms.append(training.step(training.gradients(rank), 4.0))
    training.opt.synchronize()
    training.opt.close()
    return training.image(), norms, training.done


# Options and numbers of trainers.
CASES = {
    "plain": ({}, (1, 3)),
    "clipped": ({"max_grad_norm": 1.0}, (2,)),
    "topk": ({"topk": TOPK}, (1, 2, 4)),
    "topk-8bit": ({"topk": TOPK, "state_dtype": "8bit", "max_grad_norm": 3.0}, (2,)),
}


@pytest.mark.parametrize("case", CASES)
def test_owners_make_the_step_of_the_sum(tmp_path, case):
    options, numbers = CASES[case]
    others = {name: value for name, value in options.items() if name != "topk"}
    with Owners(tmp_path, small=True) as owners:
        for n in numbers:
            fed = Fed(str(tmp_path / f"fed-{n}"), n, options.get("topk"), **others)
            norms = [fed.step() for _ in range(4)]
            served = on_living_ranks(
                n, train_rank, star_of(owners), 4, {**options, "overwrite": True}, directory=tmp_path
            )
            for image, theirs, _ in served:
                assert all(torch.equal(a, b) for a, b in zip(image, fed.image(), strict=True)), n
                assert theirs == norms
        owners.stop()


def star_of(owners):
    return f"{owners.address}&route=star"


def test_two_owners_and_another_number_of_trainers(tmp_path):
    fed = [Fed(str(tmp_path / f"fed-{n}"), n, max_grad_norm=0.5) for n in (2, 1)]
    with Owners(tmp_path, 2, small=True) as owners:
        images, norms = [], []
        for n, resume in ((2, False), (1, True)):
            of_ranks = on_living_ranks(
                n, train_rank, star_of(owners), 2, {"max_grad_norm": 0.5}, resume, directory=tmp_path
            )
            assert all(done == 2 + 2 * resume for _, _, done in of_ranks)
            assert all(of_rank[1] == of_ranks[0][1] for of_rank in of_ranks)
            norms += of_ranks[0][1]
            images.append(of_ranks[-1][0])
        owners.stop()
    expected = [fed[0].step(), fed[0].step()]
    # Owners sum their parts' squares, so the norm may differ in its last bits.
    assert norms[:2] == pytest.approx(expected, rel=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-5) for a, b in zip(images[0], fed[0].image(), strict=True))


@pytest.mark.parametrize("of_group", [False, True])
def test_one_trainer_with_topk_has_the_bits_of_devices_of_its_own(tmp_path, of_group):
    options = {"topk": 0.05, "topk_warmup": 2, "tile_size": 1 << 15}
    if of_group:
        options["topk"] = None
    with Owners(tmp_path) as owners:
        ours, served = Trained(str(tmp_path / "own"), **options), Trained(star_of(owners), **options)
        for training in (ours, served):
            training.opt.param_groups[0] |= {"topk": 0.05} if of_group else {}
        for step in range(8):
            if step == 6:  # Top-K ends: residuals are sent with the dense gradients
                for training in (ours, served):
                    training.opt.topk = None
                    training.opt.param_groups[0] |= {"topk": None} if of_group else {}
            for training in (ours, served):
                training.step(training.gradients(0), 8.0)
            assert all(torch.equal(a, b) for a, b in zip(ours.image(), served.image(), strict=True)), step
        assert served.opt.stats()["push_bytes"] < 5 * sum(p.numel() for p in served.params.values())


def test_each_owner_gets_the_entries_of_its_rows(monkeypatch):
    run, share, scale = 700, 0.1, 0.5
    monkeypatch.setattr(star, "RUN", run)  # so that a parameter has several runs, of which the last is not full
    for shape, turned in (((97, 50), False), ((5, 900), True), ((2, 7), False)):
        like = torch.empty(shape[::-1]).t() if turned else torch.empty(shape)
        for owners in (1, 2, 3):
            selection, residuals = star.Selection(owners), {}
            for step in (1, 2):
                grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
                source = star.Source(3, grad, like.stride(), grad, 0, step)
                entries = selection.select([source], [{"topk": share}], GradOptions(None, None, 0, True), scale)[3]
                selection.end(feeds_back=True)
                first = 0
                for k in range(owners):
                    mine = owned(shape, owners, k)
                    rows = torch.empty_like(mine.of(like, whole(shape))).copy_(mine.of(grad, whole(shape)))
                    flat = rows.as_strided((rows.numel(),), (1,))
                    residual = residuals.setdefault(k, torch.zeros(len(flat), dtype=torch.bfloat16))
                    kept = [
                        largest(flat[i : i + run], residual[i : i + run], share, scale, first + i, step)
                        for i in range(0, len(flat), run)
                    ]
                    if kept:
                        arrived = arrive(entries, k, owners, rows)
                        assert torch.equal(arrived.as_strided((rows.numel(),), (1,)), torch.cat(kept))
                    first += rows.numel()


def arrive(entries, k, owners, rows):
    """Return the dense tensor that owner k decodes from these entries."""
    words = owned(entries.part.shape, owners, k).of(entries.values, entries.part.block).contiguous()
    contributions = star.Contributions()
    contributions.buffer(0, 3, words).copy_(words)
    summand = contributions.summand(0, 3, rows.numel(), entries.dtype, entries.ratio)
    spoilt = Summand(torch.full_like(summand.values, -1), summand.entries, summand.run_words, summand.run_elems)
    with pytest.raises(CSDRankError, match="more entries than there is room for"):
        star.check_entries(spoilt, rows.numel())
    with pytest.raises(CSDRankError, match="is not what was to be sent"):
        contributions.summand(0, 3, rows.numel(), entries.dtype, 0.0)
    return total([summand], torch.empty_like(rows))


def test_gradients_are_not_read_as_entries():
    contributions = star.Contributions()
    for dtype in (torch.float32, torch.bfloat16):  # gradients pushed after entries have arrived
        contributions.buffer(0, 3, torch.empty(64, 64, dtype=dtype, device="meta"))
        with pytest.raises(CSDRankError, match="is not what was to be sent"):
            contributions.summand(0, 3, 64 * 64, torch.bfloat16, 1.0)
    with pytest.raises(CSDRankError, match="is not what was to be sent"):
        contributions.summand(1, 3, 64 * 64, torch.bfloat16, 0.0)


def test_a_session_that_is_over_leaves_no_gradients():
    owner = Owner({}, [], None)
    buffers = owner._contributions
    like = torch.empty(5, device="meta")
    buffer = buffers.buffer(0, 3, like)
    assert buffers.buffer(0, 3, like) is buffer
    owner.end_session()
    assert buffers.buffer(0, 3, like) is not buffer


def hooked(rank, address):
    """Train under DDP, whose hook leaves to step() the gradients from which Top-K selects."""
    torch.manual_seed(0)
    model, alone = Linear(70, 80), Linear(70, 80)
    opt = CSDAdam(model.parameters(), lr=0.1, devices=address)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(opt, push)
    ddp(torch.ones(4, 70)).sum().backward()
    opt.step()
    model.zero_grad()  # unlike opt.zero_grad(), it does not tell the optimizer
    alone.load_state_dict(model.state_dict())
    opt.topk = TOPK
    for i in range(2):
        batch = torch.randn(4, 70, generator=torch.Generator().manual_seed(10 * i + rank))
        for net in (ddp, alone):
            net(batch).square().sum().backward()
        for p, own in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.grad, own.grad)
        opt.step()
        assert opt.stats()["push_bytes"] < 4 * (0.2 * 70 * 80 + 80)
        model.zero_grad()
        alone.zero_grad()
        alone.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(ddp(torch.full((4, 70), 1e38 if rank else 1.0)).square().sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert opt.stats()["skipped"]
    assert scaler.get_scale() == 4.0
    opt.close()
    return [p.detach() for p in model.parameters()]


def test_ddp_leaves_gradients_to_topk(tmp_path):
    with Owners(tmp_path) as owners:
        images = on_living_ranks(2, hooked, star_of(owners), directory=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(*images, strict=True))


def differing(rank, address):
    """Trainers that send in different ways are refused, because owners know only what trainer 0 says."""
    p = torch.nn.Parameter(torch.ones(80, 70))
    opt = CSDAdam([p], devices=address)
    p.grad, opt.found_inf, opt.grad_scale = torch.ones_like(p), torch.tensor(0.0), torch.tensor(4.0 + rank)
    for differs in ({}, {"grad_dtype": torch.bfloat16}, {"topk": TOPK}):
        vars(opt).update(differs if rank else {})
        with pytest.raises(CSDRankError, match="in different ways"):
            opt.step()
        opt.grad_dtype, opt.topk, opt.grad_scale = None, None, torch.tensor(4.0)
        assert torch.equal(p, torch.ones_like(p))
    opt.step()
    assert not torch.equal(p, torch.ones_like(p))
    opt.max_grad_norm = 0.0  # not checked when set later, as with devices
    opt.step()
    assert opt.stats()["grad_norm"] > 0
    opt.close()


def test_trainers_that_do_not_send_alike_are_refused(tmp_path):
    with Owners(tmp_path) as owners:
        on_living_ranks(2, differing, star_of(owners), directory=tmp_path)


def divided(rank, address):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    p = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    with pytest.raises(CSDRuntimeError, match="divided among the trainers"):
        CSDAdam([p], devices=address)


def test_what_cannot_be_summed_is_refused(tmp_path):
    with Owners(tmp_path) as owners:
        p = torch.nn.Parameter(torch.zeros(4, 4))
        with pytest.raises(CSDValueError, match="unknown route 'ring', the routes are kept"):
            CSDAdam([p], devices=f"{owners.address}&route=ring")
        for options in ({"topk": 0.1}, {"params": [{"params": [p], "topk": 0.1}]}):
            with pytest.raises(CSDValueError, match=r"only with \?route=star"):
                CSDAdam(**{"params": [p], **options}, devices=owners.address)
        with CSDAdam([p], devices=star_of(owners)) as opt, pytest.raises(CSDRuntimeError, match="Join"):
            Join([opt])
        on_living_ranks(2, divided, star_of(owners), directory=tmp_path)
