"""The training that is stopped and resumed. Everything about it follows from its seed."""

import copy
import functools
import hashlib
import math
import random
import warnings

import torch
from support import emulated, served
from support.optimizers import ADAMW, CODED, FULL, MIXED, MUON, MUON_IN_8_BITS
from torch.nn.functional import dropout, embedding

import csd_optim.engine.open_devices
from csd_optim import CSDStoreError, CSDWarning

csd_optim.engine.open_devices.SUM_ELEMS = 1024  # so that a tile has several checksums

STEPS = 12
# Not "ram:", which keeps less of 8-bit states when a parameter is set from outside.
WITHOUT_A_STORE = "file:"
LATE = 3  # the step in which a parameter gets its first gradient
LOAD = 4  # after this step a state dict is loaded
REPLACED = (4, 5, 9)  # before these steps that parameter is replaced by another one, which gets its states
JOIN = 6  # before this step a parameter group is added
WRITE = 7  # before this step parameters are set from outside
JOINED = 8  # the step in which that group gets its first gradient
TOPK = {2: 0.1, 7: None, 9: 0.02}  # from these steps on the first group sends this share of its gradients
HALVE = 10  # in this step gradients are halved after backward, so that a step begun in backward is undone
# The state_dtype of the first parameters, and of the added group: one of these, by the seed.
STATE_DTYPES = [("fp32", "fp32"), ("8bit", "8bit"), ("8bit", "fp32"), ("fp32", "8bit")]
# How a step overlaps, by the seed: not at all, with the next forward, also with backward, or it runs in backward. In
# the last two cases all gradients are sent, because steps with Top-K do not begin in backward.
FORWARD, BACKWARD, FREE = {}, {"backward": True}, {"free_gradients": True}
OVERLAP = [None, FORWARD, BACKWARD, FREE]
# With an accelerator (see use_accelerator): its room, chosen each time the optimizer is opened; None: no `gpu:`.
ROOMS = ["1GB", "1GB", "100kB", "60kB", None]
# The optimizer, by the seed: every other one is CSDAdam.
OPTIMIZERS = [ADAMW] * len(FULL) + FULL + [MIXED, MUON, *CODED, MUON_IN_8_BITS]
SAMPLES, BATCH = 56, 8
LAST = 2 * STEPS

_accelerator = False


def use_accelerator():
    """From now on, train with `gpu:` beside the directories, on the emulated accelerator, as far as `gpu:` allows."""
    global _accelerator
    emulated.load()
    _accelerator = True


class Violation(Exception):
    """A promise was broken."""


class Model(torch.nn.Module):
    """A few layers. `params`: its parameters, by name."""

    def __init__(self, params):
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self, rows, number):
        """Return the model's outputs (batch, 33), from the layers that are trained in step `number`."""
        hidden = dropout(embedding(rows, self.embed), 0.2)
        hidden = torch.relu(hidden @ self.first.float()) * self.scale.float()
        hidden = torch.tanh(hidden @ self.second)
        hidden = hidden @ self.late if number >= LATE else hidden[:, :40]
        return hidden @ self.joined.float() if number >= JOINED else hidden[:, :33]


class StoppedTraining:
    """A small model, its optimizer, and their progress.

    `event` counts what is committed: 2 * s is step s, 2 * LOAD + 1 the state dict after that step, 0 nothing yet.
    """

    def __init__(self, seed, devices):
        self.seed = seed
        self.of = OPTIMIZERS[seed // (len(STATE_DTYPES) * len(OVERLAP)) % len(OPTIMIZERS)]
        self.state_dtypes = STATE_DTYPES[seed % len(STATE_DTYPES) if self.of.has_codes else 0]
        self.overlap = OVERLAP[seed // len(STATE_DTYPES) % len(OVERLAP)]
        if self.of in (MUON, MUON_IN_8_BITS) and self.overlap is FREE:  # which needs all gradients of a matrix
            self.overlap = None
        # With optimizer ranks, residuals are in no store.
        self.topk = TOPK if self.overlap in (None, FORWARD) and not served.assumed() else {}
        self.resumes = devices != WITHOUT_A_STORE
        self.place, self.with_room = "cpu", ""
        if _accelerator:
            self.state_dtypes, self.overlap, self.topk = ("fp32", "fp32"), None, {}
            if self.resumes:
                # The room is different each time; the reference run has no `gpu:`.
                room = random.choice(ROOMS)
                self.place = "emu" if room or random.random() < 0.5 else "cpu"
                devices = [f"gpu:?room={room}", *devices] if room else devices
                self.with_room = f" with gpu:?room={room}" if room else f" on {self.place}"
        self.generator = torch.Generator().manual_seed(seed)
        self.params = {
            "embed": self._param(SAMPLES, 24),
            "first": self._param(24, 48, dtype=torch.bfloat16),
            "scale": self._param(48, dtype=torch.float16),
            "second": self._param(48, 64),
            "late": self._param(64, 40),
            "joined": self._param(40, 33, dtype=torch.bfloat16),
        }
        self.model = Model(self.params)
        self.targets = torch.randn(SAMPLES, 33, generator=self.generator)
        torch.manual_seed(seed)
        self.position, self.order = SAMPLES, torch.arange(SAMPLES)
        self.opt = self._open(devices)
        self.event = self.opt.user_state["event"] if self.opt.user_state else 0
        if self.overlap is FREE:  # then every parameter that requires a gradient has states, even without one
            for name, first in (("late", LATE), ("joined", JOINED)):
                self.params[name].requires_grad_(self.steps + 1 >= first)
        self._begin_overlap()
        # The state that was found, before anything changes it.
        self.found = self.image() if self.event else {}
        if self.event:
            state = self.opt.user_state
            self.position, self.order = state["position"], state["order"].clone()
            torch.set_rng_state(state["rng"])
        self._schedule()

    def _param(self, *shape, dtype=torch.float32):
        value = torch.randn(shape, generator=self.generator) / math.sqrt(shape[0])
        return torch.nn.Parameter(value.to(self.place, dtype))

    @property
    def steps(self):
        return self.event // 2

    def _groups(self):
        first = [p for name, p in self.params.items() if name != "joined"]
        return [{"params": first, "lr": 0.02, "weight_decay": 0.1, "state_dtype": self.state_dtypes[0]}]

    def _joining(self):
        options = {"lr": 0.01, "initial_lr": 0.01, **self.of.other, "state_dtype": self.state_dtypes[1]}
        if "rule" in options:
            options["state_dtype"] = "fp32"
        options["topk"] = 0.1 if self.topk else None
        return {"params": [self.params["joined"]], **options}

    def _open(self, devices):
        make = functools.partial(self.of.ours, devices=devices, tile_size=2048, **self.of.kwargs)
        if not self.resumes:
            return make(self._groups())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                opt = make(self._groups(), resume=True)
            except CSDStoreError as e:
                if "only the store has" not in str(e):
                    raise
                opt = make([*self._groups(), self._joining()], resume=True)
        said = any(issubclass(w.category, CSDWarning) and "a new one is begun" in str(w.message) for w in caught)
        if said == bool(opt.user_state):
            raise Violation(f"user_state is {opt.user_state}, but a warning that a new store is begun: {said}")
        return opt

    def _begin_overlap(self):
        if self.resumes and self.overlap is not None:  # the reference run, in memory, has no overlap
            self.opt.overlap(self.model, **self.overlap)

    def _schedule(self):
        # The scheduler's last_epoch counts from 0, and its constructor makes a step.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "optimizer.step() before lr_scheduler.step()": an earlier process did
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.opt, lambda t: 1 / (1 + 0.1 * t), last_epoch=self.steps - 1
            )

    def next_event(self):
        """Train until the next event, and return its number."""
        if self.event == 2 * LOAD:
            self._load()
        else:
            self._step(self.steps + 1)
        return self.event

    def _step(self, number):
        params, opt = self.params, self.opt
        if number in REPLACED:
            self._replace("late")
        if number == JOIN:
            opt.add_param_group(self._joining())
            self._schedule()
            self._begin_overlap()  # of all parameters
        if self.overlap is FREE and number in (LATE, JOINED):
            self.params["late" if number == LATE else "joined"].requires_grad_()
            self._begin_overlap()
        if number in self.topk:
            opt.param_groups[0]["topk"] = self.topk[number]
        if number == WRITE:
            with torch.no_grad():
                params["embed"].mul_(0.9)
                params["first"][3:5] = 0.25
        if self.position + BATCH > SAMPLES:
            self.position, self.order = 0, torch.randperm(SAMPLES)
        rows = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        loss = (self.model(rows.to(self.place), number) - self.targets[rows].to(self.place)).square().mean()
        opt.zero_grad()
        if self.overlap is BACKWARD and number % 3:
            opt.synchronize()  # only then a step begins in backward
        loss.backward()
        if number == HALVE and self.overlap is not FREE:
            for p in params.values():
                p.grad.mul_(0.5)
        self.event = 2 * number
        opt.user_state = self._user_state()
        opt.step()
        self._image = self.image()  # with the hyperparameters that the step used
        self.scheduler.step()

    def _replace(self, name):
        """Let another parameter have the place of this one in its group and in the model, and a copy of its states."""
        old = self.params[name]
        new = self.params[name] = torch.nn.Parameter(old.detach().clone())
        entry = self.opt.state.pop(old)
        self.opt.state[new] = {key: value.clone() for key, value in entry.items()}
        for group in self.opt.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        setattr(self.model, name, new)
        self._begin_overlap()

    def _load(self):
        held = copy.deepcopy(self.opt.state_dict())
        for entry in held["state"].values():
            for name in (*self.of.rule.sections[1:2], "momentum_buffer"):
                if name in entry:
                    entry[name] *= 0.5
        self.event += 1
        self.opt.user_state = self._user_state()
        self.opt.load_state_dict(held)
        self._image = self.image()

    def _user_state(self):
        state = {"event": self.event, "position": self.position, "order": self.order}
        return {**state, "rng": torch.get_rng_state()}

    def image(self):
        """Return what must be restored: a checksum of every tensor's bits, and every number."""
        self.opt.wait()
        image = {}
        for name, p in self.params.items():
            image[name] = _sum(p)
            for key, value in self.opt.state.get(p, {}).items():
                image[f"{key} of {name}"] = _sum(value)
        for k, group in enumerate(self.opt.param_groups):
            names = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
            image[f"group {k}"] = repr([group.get(name) for name in names])
        for key, value in self.opt.user_state.items():
            image[f"user_state[{key!r}]"] = _sum(value) if isinstance(value, torch.Tensor) else repr(value)
        return image

    def check(self, reference, at_least):
        """Check that the state found is that of a committed event, not older than event `at_least`."""
        if self.event < at_least:
            raise Violation(f"resumed {named(self.event)}, but {named(at_least)} was durable")
        if self.event and self.opt.committed_step != self.steps:
            raise Violation(f"resumed {named(self.event)}, but committed_step is {self.opt.committed_step}")
        _compare(self.found, reference.get(self.event, {}), f"resumed {named(self.event)}{self.with_room}")

    def check_next(self, reference):
        """Check that the training continues as if it had never stopped."""
        if self.event < LAST:
            image = self.next_image()
            what = f"resumed{self.with_room}, and trained on to {named(self.event)}"
            _compare(image, reference[self.event], what)

    def next_image(self):
        self.next_event()
        return self._image


def _sum(t):
    return hashlib.blake2b(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), digest_size=12).hexdigest()


def _compare(found, expected, what):
    different = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
    if different:
        raise Violation(f"{what}: {', '.join(different)} differ from the run that was never stopped")


def named(event):
    if event == 0:
        return "nothing"
    return f"the state dict after step {event // 2}" if event % 2 else f"step {event // 2}"


def reference(seed):
    """Return the images of a run that is never stopped, event by event."""
    training, images = StoppedTraining(seed, WITHOUT_A_STORE), {}
    while training.event < LAST:
        image = training.next_image()
        images[training.event] = image
    training.opt.close()
    return images
