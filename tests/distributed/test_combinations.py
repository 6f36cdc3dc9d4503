"""What works together on several ranks: the table in docs/distributed.md, of which every cell is a training here.

    PYTHONPATH=.:tests python tests/distributed/test_combinations.py docs/distributed.md    writes it into the page

Oracle of `step()` alone: an optimizer in memory, not sharded, over whole copies of the parameters, which gets the whole
gradients, each the mean of all ranks. Of the other modes: `step()` alone, on the same sharding.
"""

import contextlib
import functools
import re
from pathlib import Path
from textwrap import fill

import pytest
import torch
import torch.distributed as dist
from support.comparing import assert_same
from support.exact import Linear
from support.inside import engine_of, flight_of, together_of
from support.owner_here import OwnerHere
from support.ranks import on_living_ranks
from support.twins import hybrid, sharded
from support.wires import until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from bench.tables import main
from csd_optim import CSDAdam, CSDError, push
from csd_optim.checkpoint.reshard import reshard
from csd_optim.overlap.backward_run import TakenGradient

pytestmark = [pytest.mark.fp32_states("some cells set them"), pytest.mark.here("some cells have owners of their own")]

STEPS = 6
OVERFLOWS = 3  # the step with an overflow, on the last rank, counted from 0
ROWS, COLUMNS = 96, 128  # on 2, 3 and 4 ranks, rows are whole groups of 8-bit states, and large ones whole tiles
MAX_NORM = 5.0  # between the norms of even and of odd steps
PASSES = {"two backwards": 2, "two backwards, `no_sync()`": 2}
BLOCKING, TOPK, CODES, RESHARD = "`step()` alone", "Top-K", "8-bit states", "`csd-optim reshard`"
MODES = {
    BLOCKING: None,
    "`overlap(model)`": {},
    "`backward=True`": {"backward": True},
    "`free_gradients=True`": {"free_gradients": True},
}
FEATURES = [
    "`clip_grad_norm_`",
    "`max_grad_norm`",
    TOPK,
    CODES,
    "two backwards",
    "two backwards, `no_sync()`",
    "`GradScaler`, overflow",
    RESHARD,
]
OPTIONS = {
    "`max_grad_norm`": {"max_grad_norm": MAX_NORM},
    TOPK: {"topk": 0.1},
    CODES: {"state_dtype": "8bit", "tile_size": 4096},
}
BEGIN, END = "<!-- begin: make tables -->\n", "<!-- end: make tables -->\n"

# The expected result of each cell, in the order of FEATURES: = is exact; a number refers to a note.
REFUSED, REFUSED_FREE = "1 1 1 1 1 1 1 1", "13 13 13 13 13 13 13 13"
EXPECTED = {
    "DDP": {
        BLOCKING: "= = = = = = = =",
        "`overlap(model)`": "= = =3 = = = = =",
        "`backward=True`": REFUSED,
        "`free_gradients=True`": REFUSED_FREE,
    },
    "DDP, hook `csd_optim.push`": {
        BLOCKING: "2 = = = = = = =",
        "`overlap(model)`": "2 = =3 = = = = =",
        "`backward=True`": "2 =4 =3 = = = =5 =",
        "`free_gradients=True`": REFUSED_FREE,
    },
    "DDP, `sharded=False`": {
        BLOCKING: "= = = = = = = =",
        "`overlap(model)`": "= = =3 = = = = =",
        "`backward=True`": REFUSED,
        "`free_gradients=True`": REFUSED_FREE,
    },
    "FSDP2": {
        BLOCKING: "= = = = = = = =",
        "`overlap(model)`": "= = =3 = = = = =",
        "`backward=True`": "=4 =4 =3 = = = =5 =",
        "`free_gradients=True`": "6 7 8 = 9 = 10 =",
    },
    "HSDP": {
        BLOCKING: "= = = = = = = =",
        "`overlap(model)`": "= = =3 = = = = =",
        "`backward=True`": "=4 =4 =3 = = = =5 =",
        "`free_gradients=True`": "6 7 8 = 9 = 10 =",
    },
    "tensor parallelism": {
        BLOCKING: "= = = = = 12 = 11",
        "`overlap(model)`": "= = =3 = = 12 = 11",
        "`backward=True`": "=4 =4 =3 = = 12 =5 11",
        "`free_gradients=True`": "6 7 8 = 9 12 10 11",
    },
    "FSDP2, `serve://`": {
        BLOCKING: "= = = = = = = =",
        "`overlap(model)`": "= = =3 = = = = =",
        "`backward=True`": "=4 =4 =3 = = = =5 =",
        "`free_gradients=True`": "6 7 8 = 9 = 10 =",
    },
}
NOTES = {  # what a cell's training then says, as a pattern; the sentence in the page
    "1": (
        r"call ddp\.register_comm_hook\(optimizer, csd_optim\.push\) before it",
        "Refused by `overlap()`: without the hook, a parameter's own hooks see its gradient before DDP has reduced it.",
    ),
    "2": (
        r"csd_optim\.push has reduced it in backward.*Clip by the optimizer's max_grad_norm=",
        "Refused by `step()`: `.grad` is this rank's own gradient, not the mean. Use `max_grad_norm=`.",
    ),
    "3": (
        "^exact; blocking$",
        "Nothing is hidden: with residuals, which cannot be taken back, steps complete within `step()`.",
    ),
    "4": (
        "^exact; redone: (gradients|constants)$",
        "A step that is clipped was begun without clipping in backward: it is undone and begins anew in `step()`.",
    ),
    "5": (
        "^exact; redone: constants, overflow$",
        "What backward has begun is undone if a gradient overflows, and once more after the loss scale has changed.",
    ),
    "6": (
        "on a gradient that a step has taken already",
        "Refused by `clip_grad_norm_`: the gradients are used and gone before their norm is known.",
    ),
    "7": (
        "max_grad_norm is set, and the norm of all gradients is known only when backward is over",
        "Refused by `overlap()`, for the same reason.",
    ),
    "8": (
        r"free_gradients=True\) is not possible: gradients are compressed \(topk\)",
        "Refused by `overlap()`: what is not sent now has to be kept, and so the gradient.",
    ),
    "9": (
        "backward has changed parameters already: they and the states cannot be read, as another forward",
        "Refused by the second forward: the first backward has updated parameters. Use one `backward()` of the sum of "
        "the losses or, with FSDP2, see the next column.",
    ),
    "10": (
        "backward has changed parameters already: they and the states cannot be read, as .* or GradScaler does",
        "Refused by `GradScaler.step()`: whether a gradient overflows is known only when parameters have changed.",
    ),
    "11": (
        "as with tensor parallelism. Save it with torch.distributed.checkpoint",
        "Refused by `csd-optim reshard`, which knows rows of parameters, and not columns. Use "
        "`torch.distributed.checkpoint`, or `csd-optim export`.",
    ),
    "12": (
        "has no attribute 'set_requires_gradient_sync'",
        "Tensor parallelism has nothing of the kind: each backward reduces all gradients.",
    ),
    "13": (
        "whose buckets hold all gradients until backward ends",
        "Refused by `overlap()`: DDP's buckets hold all gradients until backward ends.",
    ),
}


# ---- shardings -----------------------------------------------------------------------


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


SHARDINGS = {
    "DDP": (DDP, {}),
    "DDP, hook `csd_optim.push`": (DDP, {}),
    "DDP, `sharded=False`": (DDP, {"sharded": False}),
    "FSDP2": (sharded, {}),
    "HSDP": (hybrid, {}),
    "tensor parallelism": (tensor_parallel, {}),
    "FSDP2, `serve://`": (sharded, {}),
}
RANKS = {sharding: 4 if sharding == "HSDP" else 2 for sharding in SHARDINGS}


def network(sharding):
    torch.manual_seed(0)
    linear = nn.Linear if sharding == "tensor parallelism" else Linear  # DTensors know no function of our own
    return nn.Sequential(linear(COLUMNS, ROWS), nn.Tanh(), linear(ROWS, ROWS))


def whole(t):
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def local(entry):
    return {key: t.to_local() if isinstance(t, DTensor) else t for key, t in entry.items()}


class CellTraining:
    """A model with this sharding and feature, and its optimizer on a directory or an owner of this rank's own."""

    def __init__(self, rank, sharding, feature, mode, run, **options):
        self.rank, self.sharding, self.feature, self.mode = rank, sharding, feature, mode
        wrap, own = SHARDINGS[sharding]
        self.model = wrap(network(sharding))
        self.owner, devices = None, f"{run}-{rank}"
        Path(devices).mkdir(exist_ok=True)
        if "serve" in sharding:
            self.owner = OwnerHere(devices)
            devices = self.owner.address
        self.options = {"lr": 0.01, "tile_size": 1024, **own, **OPTIONS.get(feature, {})}
        try:
            self.opt = CSDAdam(self.model.parameters(), devices=devices, **self.options, **options)
        except BaseException:
            self.end()
            raise
        if "push" in sharding:
            self.model.register_comm_hook(self.opt, push)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if "GradScaler" in feature else None
        self.params = [*self.model.parameters()]  # reading them from the model would wait
        self.behind = 0  # steps that went on behind the program, or began in backward

    def end(self):
        if self.owner:
            self.owner.stop()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        try:
            with contextlib.suppress(CSDError) if raised[0] else contextlib.nullcontext():
                self.opt.close()
        finally:
            self.end()

    def overlaps(self):
        if (how := MODES[self.mode]) is not None:
            self.opt.overlap(self.model, **how)

    def backward(self, k):
        """All backwards of step `k`; gradients of odd steps are large, those of one step overflow on one rank."""
        passes = PASSES.get(self.feature, 1)
        for i in range(passes):
            seed = 0 if self.sharding == "tensor parallelism" else self.rank
            x = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(1000 * k + 100 * i + seed))
            with self.without_sync() if "no_sync" in self.feature and i < passes - 1 else contextlib.nullcontext():
                loss = self.model(x).square().sum() * (1 if k % 2 else 1e-2)
                if self.scaler:
                    last = dist.get_world_size() - 1
                    loss = self.scaler.scale(loss) * (torch.inf if (k, self.rank) == (OVERFLOWS, last) else 1.0)
                loss.backward()
        if self.feature == "`clip_grad_norm_`":
            clip_grad_norm_(self.params, MAX_NORM)

    @contextlib.contextmanager
    def without_sync(self):
        if isinstance(self.model, DDP):
            with self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)

    def gradients(self):
        """The mean of all ranks' gradients, whole; without loss scale, and clipped if `clip_grad_norm_` has."""
        scale = self.scaler.get_scale() if self.scaler else 1.0
        for p in self.params:
            grad = whole(p.grad)
            if "push" in self.sharding:  # each rank has its own
                of_ranks = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(of_ranks, grad)
                grad = functools.reduce(torch.add, [g * (1 / len(of_ranks)) for g in of_ranks])
            yield grad / scale

    def step(self):
        taken = any(isinstance(p.grad, TakenGradient) for p in self.params)
        if self.scaler:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            self.opt.step()
        if self.mode == "`overlap(model)`":
            self.behind += flight_of(self.opt) is not None
        self.opt.zero_grad()
        if self.mode != BLOCKING:
            self.settle()
            early = self.opt.stats()["overlap"]["early_params"] > 0
            self.behind += taken if self.mode == "`free_gradients=True`" else early

    def settle(self):
        """Wait until the next step may begin in backward: all ranks have the last one, and its commit is over."""
        self.opt.wait()
        until(lambda: together_of(self.opt).has_met and engine_of(self.opt).idle)

    def part(self, t, p):
        """The part of a whole tensor, of the shape of parameter `p`, that this rank updates."""
        if t.dim() and isinstance(p, DTensor):
            t = distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None)
            if self.sharding == "tensor parallelism" and self.feature == CODES:
                return t  # codes are rounded by a hash of their place in the whole
            return t.to_local().chunk(2)[self.rank // 2] if self.sharding == "HSDP" else t.to_local()
        return t.chunk(dist.get_world_size())[self.rank] if t.dim() and self.options.get("sharded", True) else t

    def image(self):
        self.opt.synchronize()
        entries = [{"itself": p, **self.opt.state[p]} for p in self.params]
        return [{key: whole(value) for key, value in entry.items()} for entry in entries]


# ---- cells ---------------------------------------------------------------------------


def after(training, steps):
    training.overlaps()
    for k in steps:
        training.backward(k)
        training.step()
    return training.image()


@functools.cache  # the ranks' processes live on
def blocking(rank, sharding, feature):
    """Train with `step()` alone, beside the oracle, and return the image."""
    with CellTraining(rank, sharding, feature, BLOCKING, "blocking") as training:
        # Top-K selects and rounds within each rank's part.
        part = training.part if feature == TOPK or sharding == "tensor parallelism" else lambda t, p: t
        copies = [nn.Parameter(part(whole(p), p).clone()) for p in training.params]
        options = {**training.options, "sharded": False, "max_grad_norm": None, "topk": None}
        groups = [{"params": [p]} for p in copies]
        for group in groups[::2] if feature == TOPK else []:  # the weights, small as their parts may be
            group["topk"] = training.options["topk"]
        with CSDAdam(groups, devices="ram:", **options) as oracle:
            for k in range(STEPS):
                training.backward(k)
                gradients = [*training.gradients()]
                norm = torch.stack([g.double().norm() for g in gradients]).norm().item()
                training.step()
                assert training.opt.stats()["skipped"] == (not norm < torch.inf)
                assert (not norm < torch.inf) == (training.scaler is not None and k == OVERFLOWS)
                if training.opt.stats()["skipped"]:
                    continue
                if feature == "`max_grad_norm`":
                    found = training.opt.stats()["grad_norm"]
                    assert found == pytest.approx(norm, rel=1e-5)
                    assert (found > MAX_NORM) == k % 2
                    gradients = [g * min(1.0, MAX_NORM / (found + 1e-6)) for g in gradients]
                for copy, p, g in zip(copies, training.params, gradients, strict=True):
                    copy.grad = part(g, p)
                oracle.step()
            image = training.image()
            wanted = [{"itself": p.detach(), **oracle.state[p]} for p in copies]
            pairs = zip(image, training.params, strict=True)
            parts = [{key: part(t, p) for key, t in entry.items()} for entry, p in pairs]
            assert_same([*map(local, parts)], [*map(local, wanted)])
        return image


def outcome(rank, sharding, mode, feature):
    """Return "exact", with what of the mode did not happen, or the text of an error."""
    try:
        with CellTraining(rank, sharding, feature, mode, "this") as training:
            if mode == BLOCKING:
                blocking(rank, sharding, feature)
                return "exact"
            image = after(training, range(STEPS))
            assert_same(image, blocking(rank, sharding, feature))
            redone = training.opt.stats()["overlap"]["redone"]
            if not training.behind:
                return "exact; blocking"
            return f"exact; redone: {', '.join(sorted(redone))}" if redone else "exact"
    except (CSDError, AttributeError) as e:
        return str(e)


def begins(rank, sharding, mode):
    try:
        with CellTraining(rank, sharding, RESHARD, mode, "old") as training:
            return after(training, range(STEPS))
    except CSDError as e:
        return str(e)


def goes_on(rank, sharding, mode, image):
    """Resume on another number of ranks, compare, and train."""
    with CellTraining(rank, sharding, RESHARD, mode, "new", resume=True) as training:
        assert training.opt.committed_step == STEPS
        assert_same(training.image(), image)
        after(training, range(STEPS, STEPS + 3))
        assert training.opt.committed_step == STEPS + 3
        assert training.behind or mode == BLOCKING


def assert_expected(found, sharding, mode, feature):
    note = EXPECTED[sharding][mode].split()[FEATURES.index(feature)]
    assert found.startswith("exact") == note.startswith("=")
    if number := note.strip("="):
        assert re.search(NOTES[number][0], found)
    else:
        assert found == "exact"


@pytest.mark.parametrize("feature", FEATURES[:-1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_cell(sharding, mode, feature, tmp_path):
    for found in on_living_ranks(RANKS[sharding], outcome, sharding, mode, feature, directory=tmp_path):
        assert_expected(found, sharding, mode, feature)


@pytest.mark.parametrize("feature", FEATURES[:-1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharding", [sharding for sharding in SHARDINGS if sharding != "HSDP"])
@pytest.mark.ci
@pytest.mark.sampled(together=1)
def test_cell_on_three_ranks(sharding, mode, feature, tmp_path):
    for found in on_living_ranks(3, outcome, sharding, mode, feature, directory=tmp_path):
        assert_expected(found, sharding, mode, feature)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_reshard(sharding, mode, tmp_path):
    size = RANKS[sharding]
    image, *_ = on_living_ranks(size, begins, sharding, mode, directory=tmp_path)
    if isinstance(image, str):
        return assert_expected(image, sharding, mode, RESHARD)
    try:
        inside = ("/rank-{rank}-of-{size}", "/rank-{rank}-of-3") if "serve" in sharding else ("", "")
        old = [f"old-{rank}" + inside[0].format(rank=rank, size=size) for rank in range(size)]
        for rank in range(3):
            Path(f"new-{rank}").mkdir()
        reshard(old, ["new-{rank}" + inside[1]], 3, sharding="fsdp2" if sharding == "HSDP" else None)
    except CSDError as e:
        return assert_expected(str(e), sharding, mode, RESHARD)
    onto = "FSDP2" if sharding == "HSDP" else sharding  # three ranks are no mesh with replicas
    on_living_ranks(3, goes_on, onto, mode, image, directory=tmp_path)
    return assert_expected("exact", sharding, mode, RESHARD)


# ---- the page ------------------------------------------------------------------------


def table():
    """Return the table and its notes, as Markdown."""
    lines = [f"| | | {' | '.join(FEATURES)} |", "|---" * (2 + len(FEATURES)) + "|"]
    for sharding, modes in EXPECTED.items():
        for mode, notes in modes.items():
            name = sharding if mode == BLOCKING else ""
            cells = [cell.replace("=", "exact ").strip() for cell in notes.split()]
            lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    notes = [f"{number}. {sentence}" for number, (_, sentence) in NOTES.items()]
    return "\n".join([*lines, "", *(fill(note, 120, subsequent_indent="   ") for note in notes), ""])


def test_page():
    page = Path(__file__).parents[2] / "docs/distributed.md"
    assert f"{BEGIN}{table()}{END}" in page.read_text(), "make tables"


if __name__ == "__main__":
    main(table, BEGIN, END)
