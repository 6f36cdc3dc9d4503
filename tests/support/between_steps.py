"""Things that a program may do between two steps. support.twins.assert_twins() runs each with overlap and without."""

import random

import pytest
import torch
from support.twins import checksum
from torch import nn

from csd_optim import CSDRuntimeError


def ten_steps(training):
    for _ in range(6):
        training.step()


def steps_in_closures(training):
    def closure():
        training.opt.zero_grad()
        training.backward()
        return 1.0

    for _ in range(4):
        assert training.opt.step(closure) == 1.0


def clears_to_zeros(training):
    for _ in range(4):
        training.backward()
        training.opt.step()
        training.opt.zero_grad(set_to_none=False)


def never_clears(training):
    for _ in range(4):
        training.backward()
        training.opt.step()


def model_clears(training):
    for k in range(4):
        training.backward()
        training.opt.step()
        training.model.zero_grad(set_to_none=k != 2)


def accumulates(training):
    for _ in range(4):
        for _ in range(3):
            training.backward()
        training.opt.step()
        training.opt.zero_grad()


def accumulates_otherwise_each_time(training):
    for passes in 1, 1, 2, 2, 1, 3:
        for _ in range(passes):
            training.backward()
        training.opt.step()
        training.opt.zero_grad()


def clips(training):
    for most in 1e9, 1e9, 1e-2, 1e-2, 1e9, 1e9:
        training.backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), most)
        training.opt.step()
        training.opt.zero_grad()


def schedules(training):
    scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 2, 0.5)
    for _ in range(6):
        training.backward()
        training.opt.step()
        scheduler.step()
        training.opt.zero_grad()


def changes_constants_after_backward(training):
    for lr in 1e-2, 1e-2, 3e-2, 3e-2, 1e-3:
        training.backward()
        training.opt.param_groups[0]["lr"] = lr
        training.opt.step()
        training.opt.zero_grad()


def skips_steps(training):
    for k in range(6):
        training.backward()
        if k not in (2, 3):
            training.opt.step()
        training.opt.zero_grad()


def evaluates(training):
    for _ in range(4):
        training.step()
        with torch.no_grad():
            training.model(torch.ones(2, training.width).to(training.dtype))


def looks_at_states(training):
    for k in range(6):
        training.backward()
        if k % 2:  # between backward and step: the guess, a step begun in backward, is discarded
            training.opt.state_dict()
        training.opt.step()
        training.opt.zero_grad()
        if k % 3 == 0:
            training.log.append([checksum(t) for entry in training.opt.state.values() for t in entry.values()])


def edits_states(training):
    p = next(training.model.parameters())
    for k in range(6):
        training.step()
        kept = training.opt.state[p]["exp_avg"]
        training.backward()
        if k % 2:
            with torch.no_grad():
                kept.mul_(0.5)  # the tensor that was read before the step
        training.opt.step()
        training.opt.zero_grad()


def writes_parameters(training):
    for k in range(6):
        training.backward()
        if k % 2:
            with torch.no_grad():
                for p in training.model.parameters():
                    p.clamp_(-0.1, 0.1)
        training.opt.step()
        training.opt.zero_grad()
        if k % 3 == 1:
            with torch.no_grad():
                for p in training.model.parameters():
                    p.mul_(0.5)


def writes_past_torch(training):
    for k in range(6):
        training.backward()
        for p in training.model.parameters():
            p.data.mul_(0.5 if k % 2 else 1.0)
        training.opt.step()
        training.opt.zero_grad()


def freezes(training):
    bias = training.model[1].inner.bias
    for k in range(6):
        bias.requires_grad_(k % 3 != 1)
        training.step()


def goes_back_over_the_graph(training):
    for _ in range(3):
        x = torch.ones(2, training.width).to(training.dtype)
        loss = training.model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        training.opt.step()
        training.opt.zero_grad()


def scales_losses(training):
    scaler = torch.amp.GradScaler(training.kind, init_scale=1024.0, growth_interval=1000)
    for k in range(6):
        scale = scaler.scale(torch.ones((), device=training.kind)).item()  # creates the scale, on this device
        training.backward(scale if k != 3 else float("inf"))
        scaler.step(training.opt)
        scaler.update()
        training.opt.zero_grad()


def checkpoints_activations(training):
    def checkpointed(x, use_reentrant):
        run = torch.utils.checkpoint.checkpoint
        return run(
            training.model[2:], run(training.model[:2], x, use_reentrant=use_reentrant), use_reentrant=use_reentrant
        )

    for k in range(6):
        x = torch.ones(2, training.width).to(training.dtype).requires_grad_()
        checkpointed(x, k >= 3).square().sum().backward()
        training.opt.step()
        training.opt.zero_grad()


def grows(training):
    training.step()
    training.step()
    new = nn.Parameter(torch.ones(3000, dtype=training.dtype))
    training.model.register_parameter("new", new)
    training.opt.add_param_group({"params": [new]})
    for _ in range(4):
        training.backward()
        new.square().sum().backward()
        training.opt.step()
        training.opt.zero_grad()


def takes_turns(training):
    """End overlap and begin it again."""
    how = training.overlap
    for k in range(8):
        training.step()
        if how is not None and k % 2:
            training.opt.overlap(None if k % 4 == 1 else training.model, **(how if k % 4 == 3 else {}))


SCRIPTS = [
    *(clears_to_zeros, never_clears, model_clears, accumulates, accumulates_otherwise_each_time, clips, schedules),
    *(changes_constants_after_backward, skips_steps, steps_in_closures, evaluates, looks_at_states, edits_states),
    *(writes_parameters, writes_past_torch, freezes, goes_back_over_the_graph, scales_losses),
    *(checkpoints_activations, takes_turns),
]


class History:
    """A random history of actions. It follows from the seed, so that it is the same for both twins."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, training):
        self.choose, self.training = random.Random(self.seed), training
        scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 3, 0.7)
        for _ in range(self.choose.randint(5, 9)):
            for _ in range(self.choose.choice([1, 1, 1, 2, 3])):
                training.backward()
                self.maybe(0.1, self.look, self.write_parameters, self.edit_state)
            if self.choose.random() < 0.1:
                training.opt.zero_grad()
                continue
            self.maybe(
                0.2, self.clip, self.change_lr, self.write_parameters, self.scale_gradients, self.look, self.wait
            )
            training.opt.step()
            self.maybe(0.2, self.look, self.evaluate, self.write_parameters, self.load, self.wait)
            scheduler.step()
            self.clear()
            self.maybe(0.2, self.evaluate, self.edit_state, self.look)

    def maybe(self, chance, *actions):
        for action in actions:
            if self.choose.random() < chance:
                action()

    def clear(self):
        how = self.choose.choice(["opt", "opt", "model", "zeros"])
        if how == "model":
            self.training.model.zero_grad()
        else:
            self.training.opt.zero_grad(set_to_none=how == "opt")

    def parameter(self):
        return self.choose.choice(list(self.training.model.parameters()))

    def clip(self):
        nn.utils.clip_grad_norm_(self.training.model.parameters(), self.choose.choice([1e-2, 1.0, 1e9]))

    def change_lr(self):
        self.choose.choice(self.training.opt.param_groups)["lr"] *= self.choose.choice([0.5, 1.0, 2.0])

    def write_parameters(self):
        p = self.parameter()
        with torch.no_grad():
            (p if self.choose.random() < 0.5 else p.data).mul_(0.75)

    def scale_gradients(self):
        p = self.parameter()
        if p.grad is not None:
            p.grad.mul_(self.choose.choice([1.0, 0.5]))

    def edit_state(self):
        if state := self.training.opt.state.get(self.parameter()):
            state["exp_avg"].mul_(0.5)

    def look(self):
        state = self.training.opt.state
        self.training.log.append([checksum(t) for entry in state.values() for t in entry.values()])

    def evaluate(self):
        with torch.no_grad():
            self.training.model(torch.ones(2, self.training.width).to(self.training.dtype))

    def load(self):
        self.training.opt.load_state_dict(self.training.opt.state_dict())

    def wait(self):
        self.training.opt.wait()


def gives_steps_up(training):
    """With free_gradients=True: discard what backward has done on an accelerator, though the memory of its gradients
    may be reused already. The next entry of the log shows whether the parameters are restored.
    """
    for k in range(6):
        training.step()
        if training.overlap is None:
            training.log.append([p.detach().clone() for p in training.model.parameters()])
            continue
        before, losses, steps = len(training.log), len(training.losses), training.steps
        if k % 2:
            fails = training.model[1].inner.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                training.backward()
            fails.remove()
        else:
            training.backward()
            with pytest.raises(CSDRuntimeError, match="has changed parameters already"):
                training.model.state_dict()
            training.opt.zero_grad()
        torch.accelerator.synchronize()  # no queued kernel may still change parameters
        del training.log[before:], training.losses[losses:]
        training.steps = steps
        training.log.append([p.detach().clone() for p in training.model.parameters()])
