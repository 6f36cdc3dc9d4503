"""Each synchronisation of the accelerator's path has a test that fails without it.

`make soak` runs the tests on copies of the package from each of which one is missing. By hand:

    python -m pytest --tier soak --accelerator tests/accelerator/test_mutants.py
"""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from support.backends import TESTS

pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule, pytest.mark.usefixtures("emulated_only")]

PACKAGE = TESTS.parent / "csd_optim"
SCHEDULES = "late,side first,main first,random=1,random=2"


@dataclass
class Mutant:
    file: str  # below csd_optim/
    old: str  # occurs exactly once
    new: str
    tests: str = "dense or topk or lifetimes"  # the tests that must notice it: pytest -k


def in_staging(old, new="pass", tests="dense or topk or lifetimes"):
    return Mutant("step/staging.py", old, new, tests)


def in_sparse(old, new, tests="topk or lifetimes"):
    return Mutant("step/sparse.py", old, new, tests)


def in_selection(old, new):
    return Mutant("compression/kernel_selection.py", old, new, "topk or lifetimes")


def in_dense(old, new):
    return Mutant("compression/dense.py", old, new, CODES)


def in_flight(old, new="pass", tests="accelerator_overlap"):
    return Mutant("overlap/flight.py", old, new, tests)


def in_guesses(old, new="pass", tests="overlap and guess"):
    return Mutant("overlap/early_images.py", old, new, tests)


def in_comparisons(old, new="pass"):
    return in_staging(old, new, "overlap and guess")


def in_undo(old, new, tests):
    return Mutant("step/undo.py", old, new, tests)


def in_steps(old, new, tests):
    return Mutant("step/live.py", old, new, tests)


def in_travel(old, new, tests):
    return Mutant("step/travel.py", old, new, tests)


def in_updates(old, new, tests="gpu"):
    return Mutant("step/accelerator_updates.py", old, new, tests)


def in_supplied(old, new, tests=None):
    return Mutant("step/supplied_states.py", old, new, tests or DURABLE)


def in_lent(old, new="pass"):
    return Mutant("overlap/lent.py", old, new, FREE)


def in_commits(old, new, tests="store_has"):
    return Mutant("engine/commit/residuals.py", old, new, tests)


EVENTS = "slot.under_way = [record_event(stream) for stream in used.values()]"
FREE = "free_gradients"
DURABLE = "gpu_durable and not histories"
CODES = "gpu_codes"
NAMED = "gpu_overlap and named"
COPYING = "self._travelling.append((tile, slot))"
ON_STREAM, SAME = "with on(self._parts[0].stream):\n            ", "if True:\n            "
HOST = "_ in copies):\n            "
JOIN = "self.join()"
ELSE = "except BaseException:\n            raise\n        else:\n            "
READY = "ready_events={d: record_event(torch.accelerator.current_stream(d)) for d in accelerators}"

MUTANTS = {
    "gradients are not waited for": in_staging("stream.wait_stream(torch.accelerator.current_stream(device))"),
    "tiles are pushed before they arrive": in_staging(
        "self._travelling and self._travelling[0][1].arrived()", "self._travelling"
    ),
    "no event after copies to the host": in_staging(f"if used:\n            {EVENTS}"),
    "no event after copies back": in_staging("= [*events.values()]", "= []"),
    "a stream fills what is still emptied": in_staging("stream.wait_event(event)"),
    "the host fills what is still emptied": in_staging(HOST + "slot.wait()", HOST + "pass"),
    "copies to the host on the current stream": in_staging(
        "_copy(to, source_, stream)", "to.copy_(source_, non_blocking=stream is not None)"
    ),
    "copies back on the current stream": in_staging(
        "_copy(to, image, stream)",
        "to.copy_(image, non_blocking=stream is not None)",
    ),
    "nobody joins": in_staging("torch.accelerator.current_stream(device).wait_stream(stream)"),
    "nobody joins after a failure": in_staging("finally:\n            " + JOIN, ELSE + JOIN, "fails"),
    "nobody joins after what is owed": in_staging(
        "self.forget()\n            _join({device", "self.forget()\n            ({device"
    ),
    "shares leave before they are there": in_staging("self._ring.join_back()", tests="shares"),
    "one stream for both ways": in_staging(
        "torch.Stream(device), torch.Stream(device)", "(torch.Stream(device),) * 2", "counters"
    ),
    "selection on the current stream": in_selection(ON_STREAM + "entries", SAME + "entries"),
    "overlap: selection on the host on the current stream": Mutant(
        "compression/selection.py",
        "with on(self.stream):\n            residual",
        "with on(None):\n            residual",
        "what_topk_owes",
    ),
    "feedback on the current stream": in_selection(ON_STREAM + "    self", SAME + "    self"),
    "tables are gone at the feedback": in_selection("self._kept = there, sent", "self._kept = ()"),
    "entries outlive their step": in_sparse("self._selected.clear()", "pass", "fails"),
    "tile by tile": in_sparse("nbytes > BATCH_BYTES", "True", "counters"),
    "addresses of the device go to the engine": Mutant("step/images.py", "s.is_far or", "False or", "match_adamw"),
    "buffers are not pinned": Mutant(
        "step/resources.py", "pinned = any(is_on_accelerator", "pinned = 0 and any(is_on_accelerator", "counters"
    ),
    "a commit does not wait for what is owed": Mutant(
        "engine/commit/commits.py", READY, "ready_events={}", "store_has"
    ),
    "a commit waits for all streams": in_commits(
        "stream.wait_event(ready)", "torch.accelerator.synchronize()", "counters"
    ),
    "what is owed is written before it arrives": in_commits("wait_for(copied)", "pass"),
    "what is owed arrives in a buffer in use": in_commits("range(2 if from_accelerator else 1)", "range(1)"),
    "overlap: copies are not waited for": in_flight("wait_for(event)"),
    "overlap: the current stream waits for copies, and no other": in_flight(
        "wait_for(event)", "torch.accelerator.current_stream(event.device).wait_event(event)", "other_streams"
    ),
    "overlap: copies that have not begun are not waited for": in_travel(
        "self._changed.wait_for(lambda: self.ended.is_set() or missing.isdisjoint(self._not_pulled))",
        "pass",
        "accelerator_overlap",
    ),
    "overlap: gradients go with the first of their tiles": in_flight(
        "if self._travel.arrived(self._pieces.tiles_of([row]), wait=False)", "if True"
    ),
    "overlap: changed gradients are not noticed": in_flight("if grad._version != version]", "if False]", "changed"),
    "overlap: a capture waits": in_flight("if is_captured(event.device)", "if False", "capture"),
    "overlap: a captured forward is waited for": Mutant(
        "overlap/guards/module.py", "and is_captured(self.params[0].device)", "and False", "captured"
    ),
    "overlap: it has landed before its copies": in_staging(
        "wait_for(record_event(torch.accelerator.current_stream(device)))", tests="accelerator_overlap"
    ),
    "overlap: it has landed before what is owed": in_staging(
        "finally:\n                self.wait_for_copies()", "finally:\n                pass", "topk_owes or dropped"
    ),
    "overlap: without streams a step is not undone": in_flight(
        "self.live.undo()  # the ring", "pass  # if", "without_streams"
    ),
    "a guess: gradients are copied before they are made": in_comparisons("to_host[event.device].wait_event(event)"),
    "a guess: no event when a gradient is made": Mutant(
        "overlap/early.py", "if fired == expected and is_on_accelerator(p)", "if False", "overlap and guess"
    ),
    "a guess: tiles are pushed before they arrive": in_guesses("slot.wait()"),
    "a guess: what was given up is pushed": in_guesses("if self._active", "if True"),
    "a guess: it is not known what was given up": in_guesses("self._active = False"),
    "a guess: dropped ones go on": Mutant("overlap/early.py", "guess.stop()", "pass", "overlap and guess"),
    "a guess: compared before gradients are what they are": in_guesses(
        "ring.begin(spec.sources, self._travel.supplied)  # the ring", "pass  # its"
    ),
    "a guess: compared before all is copied": in_guesses("self.wait()\n        ring", "ring"),
    "a guess: compared before gradients are in order": Mutant(
        "overlap/early_images.py", "spec.sources.get(row) or", "", "overlap and strided"
    ),
    "a guess: begins while another one's gradients arrive": Mutant(
        "overlap/early.py",
        "if not all(future.done() for future in self._hold_futures)",
        "if False",
        "overlap and guess",
    ),
    "a guess: compared on the current stream": in_comparisons("with on(to_host[current.device])", "with on(None)"),
    "a guess: the answer is read before it is there": in_comparisons("wait_for(record_event(to_host[device]))"),
    "a guess: parameters of codes are not compared": in_guesses("if source.param_is_read:", "if False:"),
    "a guess: all gradients are right": in_guesses("return ring.equal(", "return True or ring.equal("),
    "free: gradients are copied before they are made": in_lent("self._travel.ring.wait_for_current(grad.device)"),
    "free: gradients go when their copies begin": in_staging(
        COPYING, f"{COPYING}\n            [s.release() for s in self._sources[tile].values() if self._on_used]", FREE
    ),
    "free: nobody joins in step()": in_lent("pass\n        self.join()", "pass"),
    "free: what is undone comes back later": Mutant(
        "overlap/in_backward.py", "lent.join()  # copies", "pass  # what", FREE
    ),
    "free: gradients that may be under way are not counted": in_lent("self._bytes += self._in_use[tile]"),
    "overlap: on streams of the program": in_staging(
        "entered.enter_context(on(self._separate_streams[device]))", tests="counters"
    ),
    "overlap: torch counts the copies": in_staging(
        "source.param.data[first", "source.param[first", "accelerator_overlap"
    ),
    "overlap: what is strided goes back before it is there": Mutant(
        "overlap/overlap.py",
        "[*self._unguarded, *self._to_copy_back], self",
        "[*self._unguarded], self",
        "overlap and layouts",
    ),
    "gpu: on a stream of its own": in_updates(
        "yield from self._update([*self._updates.values()])",
        "with torch.Stream(self._devices[0]):\n"
        "            [None for _ in self._update([*self._updates.values()])]\n        yield",
    ),
    "gpu: states are not put back": in_updates("now.copy_(kept)", "pass", "gpu and fails"),
    "gpu: states of before are those of after": in_updates("now.clone()) for", "now) for", "gpu and fails"),
    "gpu: what is left is not queued": in_travel(
        "self.accelerated.queue_next)\n        self.accelerated.queue_all()",
        "self.accelerated.queue_next)",
        "gpu and bits",
    ),
    "gpu: shares leave before they are updated": in_travel(
        "if not self.images or self.shares_updates:", "if not self.images:", "shares"
    ),
    "gpu: somebody waits": in_updates(
        "if timed:\n                wait_for(first)", "wait_for(first)", "gpu and nothing"
    ),
    "gpu: overlap: undone before it is done": in_updates("self.wait()", "pass", "gpu_overlap and fails"),
    "gpu: overlap: told before it is undone": in_undo(
        "accelerated.wait()  # so that", "pass  # whoever", "gpu_overlap and fails"
    ),
    "gpu: overlap: gradients are held": in_flight(
        "items() if row not in self._accelerated", "items()", "gpu_overlap and nobody"
    ),
    "gpu: overlap: what all ranks undo stays": in_undo(
        "self._landed = False\n        accelerated.undo()", "self._landed = False", "fsdp2"
    ),
    "gpu: overlap: what ranks may undo is given up": in_steps(
        "if not self.votes_later:  # else keep", "if True:  # else it keeps", "fsdp2"
    ),
    "gpu: free: on a stream of its own": in_updates(
        "for _ in self._update([u]):\n                pass",
        "with torch.Stream(grad.device):\n                [None for _ in self._update([u])]",
        "gpu_overlap and free",
    ),
    "gpu: states leave before they are updated": in_supplied(
        "stream.wait_event(self.accelerated.event(row))", "self.accelerated.event(row)"
    ),
    "gpu: overlap: states leave before they are updated": in_supplied(
        "stream.wait_event(self.accelerated.event(row))", "self.accelerated.event(row)", NAMED
    ),
    "gpu: overlap: states of a step that was undone stay": in_updates(
        "state.accelerator_copy.is_known = False", "pass", f"fails and {NAMED}"
    ),
    "gpu: states leave on the current stream": in_supplied("with on(stream)", "with on(None)"),
    "gpu: states of a step that was undone stay": in_updates(
        "state.accelerator_copy.is_known = False", "pass", DURABLE
    ),
    "gpu: states that somebody wrote to stay": Mutant(
        "engine/truth.py", "self.forget_copies([*changed, *versions])", "self.forget_copies([*versions])", DURABLE
    ),
    "gpu: codes that somebody wrote to stay": Mutant(
        "engine/truth.py", "self.forget_copies([*changed, *versions])", "self.forget_copies(changed)", DURABLE
    ),
    "gpu: codes of what the program has set": in_supplied("and s.index not in set_outside", ""),
    "gpu: codes: parameters are not put back": in_updates("u.source.param.clone() if", "u.source.param if", CODES),
    "gpu: codes: edits do not outlive an undo": in_updates("(state.index, self.edits)", "(state.index, {})", CODES),
    "gpu: codes: old states are shown": in_updates("param_state.decoded.drop([param_state.index])", "pass", CODES),
    "gpu: codes: edits are lost": in_updates("u.states[0].copy_(codes.memory)", "pass", CODES),
    "gpu: codes: an edited master has the old parameter": in_updates("u.source.param.data.copy_(param)", "pass", CODES),
    "gpu: codes: no corrections are dropped": Mutant(
        "engine/accelerator_codes.py", "[torch.from_numpy(stale)] = 0", "[:0] = 0", CODES
    ),
    "gpu: codes: another key": Mutant("step/resources.py", "% (1 << 32)  # key_of", "% (1 << 31)  # key_of", CODES),
    "gpu: Top-K: the residual stays": in_dense("selection.feed_back()", "pass"),
    "gpu: Top-K: nothing is sent": in_dense("selection.spread(to)", "to.zero_()"),
    "gpu: Top-K: all parts at once": in_dense("if batch and nbytes + more > BATCH_BYTES", "if False"),
    "gpu: Top-K: no residual": in_dense("None if residual is None else residual[here]", "None"),
    "gpu: Top-K: every part is the first": in_dense("else residual[here], first, 0)", "else residual[here], 0, 0)"),
    "gpu: states are read into a buffer in use": Mutant(
        "engine/accelerator_copies.py", "wait_for(events.pop())", "events.pop()", DURABLE
    ),
    "gpu: states fill what is still emptied": in_staging("used[device].wait_event(event)", tests=DURABLE),
    "waiting takes a core": Mutant("accelerator.py", "time.sleep(POLL_SECONDS)", "pass", "counters"),
    "captured steps go on": Mutant("accelerator.py", 'getattr(stream, "is_capturing", bool)()', "False", "refusals"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_one(name):
    """The line that a mutant changes occurs exactly once."""
    mutant = MUTANTS[name]
    assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.soak
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, tmp_path):
    mutant = MUTANTS[name]
    for part in (PACKAGE, TESTS):
        shutil.copytree(part, tmp_path / part.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    for folder in ("build", "native"):
        (tmp_path / folder).symlink_to(TESTS.parent / folder)
    path = tmp_path / "csd_optim" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "tests/accelerator", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options = [f"--accelerator={SCHEDULES}", "-k", f"({mutant.tests}) and not mutant"]
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (1, -signal.SIGSEGV), done.stdout[-2000:]
    if done.returncode == 1:  # a test failed; other statuses are errors of the mutant itself
        assert "FAILED" in done.stdout
        assert "SyntaxError" not in done.stdout
        assert "NameError" not in done.stdout
