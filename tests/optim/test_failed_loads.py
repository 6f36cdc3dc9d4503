"""A load that raises, wherever it does: everything is as it was, or the whole load counts, also after a crash."""

import contextlib
import copy
import shutil

import pytest
import torch
from support import served
from support.inside import engine_of
from support.ranks import on_living_ranks
from support.replacing import replaced

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRuntimeError, CSDTornError
from csd_optim.bindings import Native
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.engine.engine import Engine
from csd_optim.engine.states import States
from csd_optim.params.param_state import ParamState
from csd_optim.store.file import StoreFile

BROKEN = "the checkpoint cannot be read on"
KEYS = ("master", "exp_avg", "exp_avg_sq", "step")

# Every kind of call within a load that can fail, and whether it fails once it is done.
POINTS = {
    "a parameter is filled": (ParamState, "fill", False),
    "a parameter was filled": (ParamState, "fill", True),
    "parameters join": (Engine, "extend", False),
    "the manifest is described": (DurableCommitter, "describe", True),
    "tiles begin to move": (Native, "begin", False),
    "some tiles were pushed": (Native, "push", True),
    "tiles have moved": (Native, "finish", True),
    "tiles are written": (Native, "wait_writes", False),
    "windows open or close": (Native, "remap", False),
    "windows are open or closed": (Native, "remap", True),
    "states are flushed": (States, "sync", False),
    "a commit is staged": (StoreFile, "stage", False),
    "a copy is published": (StoreFile, "publish", False),
    "a copy was published": (StoreFile, "publish", True),
}


class Loads:
    def __init__(self, devices, dtype=torch.float32, **options):
        generator = torch.Generator().manual_seed(1)
        sizes = (90, 50), (7,), (60, 40)
        self.params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
        self.opt = CSDAdam(self.params, lr=0.1, devices=devices, tile_size=1024, **options)
        self.done = self.opt.user_state.get("done", 0)

    def step(self, n=1):
        for _ in range(n):
            generator = torch.Generator().manual_seed(100 + self.done)
            for p in self.params:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            self.opt.user_state = {"done": self.done + 1}
            self.opt.step()
            self.done += 1
        return self

    def image(self):
        state = self.opt.state
        kept = {
            f"{i} {key}": state[p][key].clone() for i, p in enumerate(self.params) for key in KEYS if key in state[p]
        }
        kept |= {f"parameter {i}": p.detach().clone() for i, p in enumerate(self.params)}
        groups = [{**group, "params": [id(p) for p in group["params"]]} for group in self.opt.param_groups]
        return kept, groups

    def checkpoint(self):
        """Return a state dict with other states, of a later step, and another rate. The masters are the parameters."""
        loaded = copy.deepcopy(self.opt.state_dict())
        for k, entry in loaded["state"].items():
            del entry["master"]
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = torch.full_like(entry[key], 0.25 * (k + 1))
            entry["step"] = torch.tensor(40.0)
        loaded["param_groups"][0]["lr"] = 0.7
        return loaded


def same(a, b):
    kept, groups = a
    others, other_groups = b
    return (
        kept.keys() == others.keys()
        and all(torch.equal(kept[key], others[key]) for key in kept)
        and groups == other_groups
    )


def states_of(image):
    return {key: value for key, value in image[0].items() if not key.startswith("parameter")}


def failing_at(point, number):
    """Let call `number` (from 1) at this point raise. Returns the context, and how many calls there were."""
    owner, name, after = POINTS[point]
    calls = [0]

    def fail(call, *arguments, **options):
        calls[0] += 1
        mine = calls[0] == number
        if mine and not after:
            raise CSDOSError(5, BROKEN)
        result = call(*arguments, **options)
        if mine:
            raise CSDOSError(5, BROKEN)
        return result

    return replaced(owner, name, fail), calls


def resumes_alike(places, image, tmp_path, **options):
    """Assert that a copy of these directories, as a crash now would leave them, is resumed with these states."""
    crashed = tmp_path / "crashed"
    shutil.rmtree(crashed, ignore_errors=True)
    crashed.mkdir()
    copies = [shutil.copytree(place, crashed / place.name) for place in places]
    again = Loads(copies, resume=True, **options)
    assert states_of(again.image()).keys() == states_of(image).keys()
    for key, value in states_of(again.image()).items():
        assert torch.equal(value, states_of(image)[key]), key
    again.step()
    again.opt.close()


OPTIONS = {
    "fp32": {"state_dtype": "fp32"},
    "8 bits": {"state_dtype": "8bit", "dtype": torch.bfloat16},
}
KINDS = ["one directory", "two directories", "scratch", "ram"]


def devices_of(kind, tmp_path):
    """Return device strings, and the directories among them."""
    places = [tmp_path / f"device-{d}" for d in range({"one directory": 1, "two directories": 2}.get(kind, 0))]
    return (places or {"scratch": "file:", "ram": "ram:"}[kind]), places


@pytest.mark.at_hand("replaces what devices in this process do")
@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("new", [False, True], ids=["trained", "new"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_load_that_fails_changes_nothing(point, kind, options, new, tmp_path):
    devices, places = devices_of(kind, tmp_path)
    options = OPTIONS[options]
    source = Loads("ram:", **options).step(2)
    loaded = source.checkpoint()
    number, wholes = 1, 0
    while True:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        training, twin = Loads(devices, **options), Loads("ram:", **options)
        if not new:
            training.step(3)
            twin.step(3)
            training.opt.synchronize()
        before = training.image()
        failing, calls = failing_at(point, number)
        with failing, contextlib.suppress(CSDError):
            training.opt.load_state_dict(loaded)
        if calls[0] < number:  # it has not failed
            training.opt.close()
            break
        whole = not same(training.image(), before) and engine_of(training.opt).states.half_loaded == set()
        if engine_of(training.opt).states.half_loaded:
            assert kind == "ram"
            with pytest.raises(CSDTornError, match="a load failed"):
                training.step()
            training.opt.load_state_dict(loaded)
            whole = True
        if whole:  # the load counts, and only its commit has to be tried again
            wholes += 1
            twin.opt.load_state_dict(loaded)
        now = training.image()
        if not whole:
            assert same(now, before)
        for key, value in states_of(twin.image()).items():
            assert torch.equal(value, states_of(now)[key]), (key, number, whole)
        if places and not new:
            resumes_alike(places, now, tmp_path, **options)
        done = training.done
        training.step(2)
        twin.step(2)
        assert states_of(training.image()).keys() == states_of(twin.image()).keys()
        for key, value in states_of(twin.image()).items():
            assert torch.equal(value, states_of(training.image())[key]), key
        assert training.done == done + 2
        training.opt.close()
        if places:
            again = Loads(devices, resume=True, **options)
            for key, value in states_of(twin.image()).items():
                assert torch.equal(value, states_of(again.image())[key]), key
            again.opt.close()
        number += 1
    assert number > 1 or calls[0] == 0
    if point not in ("a copy is published", "a copy was published"):
        assert not wholes or kind == "ram"


@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("then", ["step", "save", "close", "load", "crash"])
def test_the_body_of_loading_raises(then, kind, options, looked_at, tmp_path):
    devices, places = devices_of(kind, tmp_path)
    if kind == "one directory" and then == "save" and served.assumed():
        pytest.skip("save() on an owner's machine")
    training = Loads(devices, **OPTIONS[options]).step(3)
    opt, p = training.opt, training.params[0]
    opt.synchronize()
    if looked_at:  # reading `state` after a step shows it in windows
        assert opt.state
    before = Loads("ram:", **OPTIONS[options]).step(3)
    image = before.image()
    rate = opt.param_groups[0]["lr"]

    def body():
        opt.state[p]["exp_avg"].fill_(0.5)
        opt.state[p]["step"].fill_(17)
        opt.param_groups[0]["lr"] = 3.0
        raise KeyError(BROKEN)

    with pytest.raises(KeyError, match=BROKEN), opt.loading():
        body()
    assert opt.param_groups[0]["lr"] == rate
    if engine_of(opt).states.half_loaded:
        assert kind == "ram"
        with pytest.raises(CSDTornError, match="Load them again"):
            training.step()
        opt.load_state_dict(before.opt.state_dict())
    assert states_of(training.image()).keys() == states_of(image).keys()
    assert all(torch.equal(value, states_of(image)[key]) for key, value in states_of(training.image()).items())
    if not places:
        return
    if then == "crash":
        if not served.assumed():
            resumes_alike(places, image, tmp_path, **OPTIONS[options])
    elif then == "save":
        opt.save(tmp_path / "saved")
        resumes_alike([tmp_path / f"saved/device-{d}" for d in range(len(places))], image, tmp_path, **OPTIONS[options])
    elif then == "load":
        with opt.loading():
            opt.state[p]["exp_avg"].zero_()
        assert not training.image()[0]["0 exp_avg"].any()
        opt.close()
        return
    elif then == "step":
        training.step()
        before.step()
        image = before.image()
    opt.close()
    again = Loads(devices, resume=True, **OPTIONS[options])
    assert all(torch.equal(value, states_of(image)[key]) for key, value in states_of(again.image()).items())
    again.opt.close()


@pytest.mark.parametrize("looked_at", [True, False])
def test_looking_at_states_within_loading_changes_nothing(looked_at, tmp_path):
    """The first use of `state` after a step remaps windows, which must not close those that loading() has opened."""
    images = []
    for run in range(2):
        training = Loads([tmp_path / f"run-{run}"]).step(2)
        opt, p = training.opt, training.params[0]
        if looked_at == bool(run):
            assert opt.state
        with opt.loading():
            opt.state[p]["exp_avg"].fill_(0.5)
            opt.state[p]["exp_avg_sq"].fill_(0.25)
        images.append(training.image()[0])
        opt.close()
    assert all(torch.equal(value, images[1][key]) for key, value in images[0].items())


def test_what_was_edited_before_a_load_that_fails_is_kept(devices):
    training = Loads(devices).step(2)
    opt, p = training.opt, training.params[0]
    opt.state[p]["exp_avg"].mul_(3)
    edited = opt.state[p]["exp_avg"].clone()
    with pytest.raises(KeyError), opt.loading():
        raise KeyError(BROKEN)
    if engine_of(opt).states.half_loaded:
        return
    assert torch.equal(opt.state[p]["exp_avg"], edited)
    with torch.no_grad():
        training.params[1].add_(1)  # written from outside, before a load that fails

    def body():
        opt.state[p]["exp_avg"].zero_()
        raise KeyError(BROKEN)

    with pytest.raises(KeyError), opt.loading():
        body()
    assert torch.equal(opt.state[p]["exp_avg"], edited)
    twin = Loads(devices="ram:").step(2)
    twin.opt.state[twin.params[0]]["exp_avg"].copy_(edited)
    with torch.no_grad():
        twin.params[1].add_(1)
    twin.step()
    training.step()
    for a, b in zip(training.params, twin.params, strict=True):
        assert torch.equal(a, b)
    opt.close()


@pytest.mark.at_hand("replaces what devices in this process do")
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("then", ["edit", "edit in loading", "step"])
def test_nothing_that_a_withdrawn_commit_names_is_overwritten(then, interrupted, tmp_path):
    """The commit of a load is on the disk, its flush says it failed, and the commit that is to replace it fails, too.

    `interrupted`: that one does not even begin.
    """
    place = tmp_path / "run"
    training = Loads([place], state_dtype="fp32").step(2)
    opt, p = training.opt, training.params[0]
    opt.synchronize()

    def publish(publish, store, staged, copy):
        crashes.append(shutil.copytree(place, tmp_path / f"crash-{len(crashes)}"))
        publish(store, staged, copy)

    def fails(publish, store, staged, copy):
        if not fails.once:
            publish(store, staged, copy)
        fails.once = True
        raise CSDOSError(5, BROKEN)

    def commit(commit, committer, *arguments, **options):
        if interrupted and fails.once:
            raise CSDOSError(4, BROKEN)
        commit(committer, *arguments, **options)

    fails.once, crashes = False, []
    with (
        replaced(StoreFile, "publish", fails),
        replaced(DurableCommitter, "commit", commit),
        pytest.raises(CSDOSError),
    ):
        opt.load_state_dict(training.checkpoint())
    with replaced(StoreFile, "publish", publish):
        if then == "edit":
            opt.state[p]["exp_avg"].mul_(2)
            opt.save(tmp_path / "saved")
        elif then == "edit in loading":
            with opt.loading():
                opt.state[p]["exp_avg"].mul_(2)
        else:
            training.step()
        opt.close()
    assert len(crashes) > 2
    for crash in crashes:
        Loads([crash], state_dtype="fp32", resume=True).step().opt.close()


def test_no_step_and_no_other_load_within_loading(devices):
    training = Loads(devices).step(2)
    state_dict = copy.deepcopy(training.opt.state_dict())
    before = training.image()
    for act in (training.step, lambda: training.opt.load_state_dict(state_dict)):
        with pytest.raises(CSDRuntimeError, match=r"not possible within loading\(\)"), training.opt.loading():
            act()
        if engine_of(training.opt).states.half_loaded:
            training.opt.load_state_dict(state_dict)
        training.done = 2
    assert all(torch.equal(value, before[0][key]) for key, value in training.image()[0].items())
    training.step()
    training.opt.close()


def loads_on_ranks(rank, at, durable):
    """Rank 1 fails; both go back. Returns the step and whether the states are those before, now and after a step."""
    devices = [f"run-{rank}"] if durable else "file:"
    training, twin = Loads(devices, sharded=False).step(3), Loads("ram:", sharded=False).step(3)
    training.opt.synchronize()
    before = training.image()
    loaded = training.checkpoint()
    failing, calls = failing_at(at, 1) if rank == 1 else (contextlib.nullcontext(), [1])
    with failing, contextlib.suppress(CSDError):
        training.opt.load_state_dict(loaded)
    assert calls[0]
    went_back = same(training.image(), before)
    training.opt.synchronize()
    for _ in range(2):
        training.step()
        twin.step()
    training.opt.synchronize()
    alike = all(torch.equal(a, b) for a, b in zip(training.params, twin.params, strict=True))
    committed = training.opt.committed_step
    training.opt.close()
    again = Loads(devices, sharded=False, resume=True) if durable else training
    same_states = states_of(again.image()) if durable else states_of(twin.image())
    resumed = all(torch.equal(value, same_states[key]) for key, value in states_of(twin.image()).items())
    again.opt.close()
    return went_back, alike, committed, resumed


@pytest.mark.at_hand("replaces what devices in this process do")
@pytest.mark.parametrize(
    "at", ["a parameter is filled", "tiles have moved", "a copy is published", "a copy was published"]
)
def test_a_load_that_fails_on_one_rank_is_undone_on_all(at, tmp_path):
    for went_back, alike, committed, resumed in on_living_ranks(2, loads_on_ranks, at, True, directory=tmp_path):
        assert (went_back, alike, committed, resumed) == (True, True, 5, True)
