"""SIGKILL at random moments of a run, and before, in and after every call by which it changes a file."""

import random
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from .processes import KILL_EFFECTS, Child, Shared, in_child, kill_at
from .training import LAST, StoppedTraining, Violation, named, reference


def resume_and_train(shared, seed, devices, expected, *, until=LAST, again=0, close=True):
    """Resume the run and check its state; train to event `until`, close, reopen and train `again` events more.

    After every event the child notes in `shared` the last event that the optimizer has called durable.
    """
    numbers = shared.numbers
    choose = random.Random(time.monotonic_ns())
    for last in (until, until + again) if again else (until,):
        numbers[Shared.PHASE] = Shared.CONSTRUCTING
        training = StoppedTraining(seed, devices)
        training.check(expected, numbers[Shared.DURABLE])
        numbers[Shared.EVENT], numbers[Shared.PHASE] = training.event, Shared.TRAINING
        while training.event < last:
            training.check_next(expected)
            durable = _durable(training)
            wait = choose.random() < 0.3
            while wait and durable < training.event:
                time.sleep(0)
                durable = _durable(training)
            numbers[Shared.DURABLE] = max(numbers[Shared.DURABLE], durable)
            numbers[Shared.EVENT] = training.event
        numbers[Shared.PHASE] = Shared.CLOSING
        if close:
            training.opt.close()
            numbers[Shared.DURABLE] = training.event


def _durable(training):
    """Return the last event that must survive: a step once committed_step says so, a state dict once it is loaded."""
    return training.event if training.event % 2 else 2 * training.opt.committed_step


def devices_in(directory, n):
    return [str(Path(directory) / f"csd{d}") for d in range(n)]


def _ended_well(child, shared, what):
    """Return whether a child was killed. Raises Violation if it ended by itself with an error."""
    if child.code not in (0, -signal.SIGKILL):
        raise Violation(f"{what}: exit code {child.code}\n{shared.said()}")
    return child.code != 0


class RandomKills:
    """Runs with one seed after another, each killed and resumed until it completes."""

    def __init__(self, seed, directory, keep):
        self.choose = random.Random(seed)
        self.directory = directory
        self.keep = keep
        self.shared = Shared()
        self.where = dict.fromkeys(["constructing", "training", "closing"], 0)
        self.runs = 0

    def run(self, kills, tick):
        while kills > 0:
            kills -= self._one_run(kills, tick)
            self.runs += 1

    def _one_run(self, kills, tick):
        """Run once, killing it again and again. Returns the number of kills."""
        choose, shared = self.choose, self.shared
        seed, n = choose.randrange(1 << 30), choose.randint(1, 3)
        expected = in_child(reference, seed)
        shared.numbers[:] = 0
        killed = 0
        with TemporaryDirectory(dir=self.directory) as store:
            devices = devices_in(store, n)
            what = f"random kills, run {self.runs} (training seed {seed}, {n} devices)"
            try:
                while killed < kills:
                    if not self._kill(what, seed, devices, expected):
                        break
                    killed += 1
                    tick(1)
                    # Sometimes a process that is not killed checks the state before the next one resumes.
                    if choose.random() < 0.5:
                        self._look(f"{what}, after kill {killed}", seed, devices, expected)
                self._look(f"{what}, at the end", seed, devices, expected)
            except Violation:
                self.keep(store)
                raise
        return killed

    def _kill(self, what, seed, devices, expected):
        """Resume the run and kill it at a random moment. Returns False if it completed before."""
        choose, shared = self.choose, self.shared
        shared.numbers[Shared.PHASE] = 0
        shared.numbers[Shared.EVENT] = 0
        phase = choose.choices([Shared.CONSTRUCTING, Shared.TRAINING, Shared.CLOSING], [3, 8, 2])[0]
        further = choose.randint(0, 6)  # events before the kill
        pause = {Shared.CONSTRUCTING: 0.015, Shared.TRAINING: 0.006, Shared.CLOSING: 0.004}[phase] * choose.random()
        begun = None
        until = LAST if phase != Shared.CLOSING else min(LAST, int(shared.numbers[Shared.DURABLE]) + 2 * further)
        with Child(shared, lambda: resume_and_train(shared, seed, devices, expected, until=until)) as child:
            while not child.ended():
                now, at = int(shared.numbers[Shared.PHASE]), int(shared.numbers[Shared.EVENT])
                if begun is None and now >= Shared.TRAINING:
                    begun = at
                if now > phase or (now == phase and (phase != Shared.TRAINING or at >= begun + 2 * further)):
                    time.sleep(pause)
                    now = int(shared.numbers[Shared.PHASE])
                    child.kill()
                    break
                time.sleep(0.0001)
        if _ended_well(child, shared, what):
            self.where[["constructing", "constructing", "training", "closing"][now]] += 1
            return True
        return until < LAST and self._kill(what, seed, devices, expected)

    def _look(self, what, seed, devices, expected):
        shared = self.shared
        until = int(shared.numbers[Shared.DURABLE])
        close = self.choose.random() < 0.5
        with Child(
            shared, lambda: resume_and_train(shared, seed, devices, expected, until=until, close=close)
        ) as child:
            child.wait()
        if _ended_well(child, shared, what):
            raise Violation(f"{what}: somebody else killed it")


class KillsAtCalls:
    """A run on two devices, closed and resumed, that is killed at each call by which it changes a file."""

    UNTIL, AGAIN = 6, 4  # events: three steps, then the fourth and the state dict after it, and a fifth

    def __init__(self, seed, directory, keep):
        self.choose = random.Random(seed)
        self.seed = seed
        self.directory = directory
        self.keep = keep
        self.expected = in_child(reference, seed)

    def calls(self):
        """How many there are. Their order is not always the same: devices are written at the same time."""
        with TemporaryDirectory(dir=self.directory) as store, kill_at(1 << 60, 3, store) as rule:
            self._child(Shared(), store, "a run that is not killed")
            return int(rule["seen"])

    def _child(self, shared, store, what, until=UNTIL, again=AGAIN):
        devices = devices_in(store, 2)
        with Child(
            shared, lambda: resume_and_train(shared, self.seed, devices, self.expected, until=until, again=again)
        ) as child:
            child.wait()
        return _ended_well(child, shared, what)

    def at(self, call, effect):
        """Kill a run at this call, and often the process that resumes it, too. The next must find everything."""
        shared = Shared()
        what = f"kill {effect} call {call} (training seed {self.seed}, 2 devices)"
        with TemporaryDirectory(dir=self.directory) as store:
            try:
                with kill_at(call, KILL_EFFECTS[effect], store):
                    killed = self._child(shared, store, what)
                if self.choose.random() < 0.5:
                    second, how = self.choose.randrange(10), self.choose.choice([*KILL_EFFECTS])
                    what += f", then {how} call {second} of the process that resumes it"
                    with kill_at(second, KILL_EFFECTS[how], store):
                        self._child(shared, store, what)
                until = max(2, int(shared.numbers[Shared.DURABLE])) + 1
                self._child(shared, store, f"{what}, after {named(until - 1)}", until=until, again=1)
            except Violation:
                self.keep(store)
                raise
        return killed
