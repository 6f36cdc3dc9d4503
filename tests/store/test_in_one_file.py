"""docs/in_one_file.py and CSDAdam continue each other's stores with the same bits, whatever is killed in between."""

import ast
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.floats import small_grads
from support.forked import process
from support.images import images_of
from support.killed import ended
from support.replacing import replaced

from csd_optim import CSDSGD, CSDAdam

FILE = Path(__file__).parents[2] / "docs" / "in_one_file.py"
SPEC = importlib.util.spec_from_file_location("in_one_file", FILE)
ONE_FILE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ONE_FILE)
Store = ONE_FILE.Store

pytestmark = [
    pytest.mark.at_hand("looks at the files of a store"),
    pytest.mark.fp32_states("8-bit states are refused, which a test asks for"),
]
SECTIONS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
TILE = 1024  # the smallest there is, as checksums take NumPy long
OTHERS = {"weight_decay": 0.3, "betas": (0.5, 0.9), "amsgrad": True, "maximize": True}


class OneRun:
    """A model on some devices, which CSDAdam or the file trains by gradients that depend only on the step."""

    def __init__(self, directory, *, shares=(1.0, 1.0)):
        torch.manual_seed(0)
        Path(directory).mkdir(exist_ok=True)
        named = {
            "weight": torch.randn(40, 30),
            "half": torch.randn(500).bfloat16(),
            "columns": torch.randn(30, 20).t(),
            "late": torch.randn(700).half(),
        }
        self.params = {name: torch.nn.Parameter(p) for name, p in named.items()}
        self.places = [Path(directory, f"csd{i}") for i in range(len(shares))]
        self.devices = [f"file:{p}?share={s}" for p, s in zip(self.places, shares, strict=True)]

    def optimizer(self, **options):
        named = [*self.params.items()]
        groups = [{"params": named[:2]}, {"params": named[2:], **OTHERS}]
        return CSDAdam(groups, devices=self.devices, lr=1e-2, tile_size=TILE, **options)

    def gradients(self, step):
        """Return fp32 gradients, flat in the order of the parameters' memory. `late` has one in every other step."""
        torch.manual_seed(step)
        names = [name for name in self.params if name != "late" or step % 2]
        grads = {name: small_grads(self.params[name].numel(), self.params[name].dtype) for name in names}
        return {name: g.float().numpy() for name, g in grads.items()}

    def by_optimizer(self, opt, steps):
        for step in steps:
            grads = self.gradients(step)
            for name, p in self.params.items():
                p.grad = None
                if name in grads:
                    p.grad = torch.empty_like(p)
                    in_memory_order(p.grad).copy_(torch.from_numpy(grads[name]))
            opt.step()

    def by_file(self, store, steps):
        for step in steps:
            store.update(self.gradients(step))
            store.commit()

    def image(self, opt):
        """Return the bits of all states by parameter, and how often each was updated."""
        found = {}
        for name, p in self.params.items():
            states = [in_memory_order(opt.state[p][key]).numpy() for key in SECTIONS if key in opt.state[p]]
            found[name] = np.stack(states).tobytes(), float(opt.state[p]["step"])
        return found


def in_memory_order(t):
    """Return a flat view of a tensor, in the order of its memory."""
    return t.detach().as_strided((t.numel(),), (1,))


def image_of(store):
    """Return what OneRun.image() does, of an open store."""
    sections = [len(e["sections"]) for e in store.devices[0].manifest["extents"]]
    found = {p["name"]: np.zeros((sections[p["extent"]], p["numel"]), np.float32) for p in store.params}
    for device, e, j, elements in store.tiles():
        tile = device.read_tile(e, j)
        for p in store.params:
            begin, end = max(p["start"], elements.start), min(p["start"] + p["numel"], elements.stop)
            if p["extent"] == e and begin < end:
                found[p["name"]][:, begin - p["start"] : end - p["start"]] = tile[:, begin - elements.start :][
                    :, : end - begin
                ]
    steps = store.devices[0].table.steps
    return {p["name"]: (found[p["name"]].tobytes(), float(n)) for p, n in zip(store.params, steps, strict=True)}


def begun(directory, **options):
    """Return a OneRun whose store has two steps, by CSDAdam."""
    training = OneRun(directory, **options)
    with training.optimizer() as opt:
        training.by_optimizer(opt, range(2))
    return training


def copied(training, directory):
    """Put copies of the training's stores into a directory, and return their directories."""
    return [Path(shutil.copytree(place, directory / place.name)) for place in training.places]


def test_it_is_short_and_needs_numpy_alone():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    needed = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            needed |= {name.name for name in node.names} if isinstance(node, ast.Import) else {node.module}
    assert needed - {"numpy"} <= {*sys.stdlib_module_names}
    parts = [line.strip("# -") for line in text.splitlines() if line.startswith("# ---- ")]
    assert parts == ["1. The format", "2. The commit", "3. The update rule", "4. The undo"]


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (1.0, 0.3, 2.5)], ids=str)
def test_they_continue_each_other(shares, tmp_path):
    """Steps by CSDAdam, the file, CSDAdam and the file have the bits of as many by CSDAdam alone, in every state."""
    training = begun(tmp_path / "both", shares=shares)
    alone = OneRun(tmp_path / "alone", shares=shares)
    with alone.optimizer() as opt:
        alone.by_optimizer(opt, range(8))
        expected = alone.image(opt)
    store = Store(*training.places)
    assert store.step == 2
    training.by_file(store, range(2, 4))
    store.close()
    with training.optimizer(resume=True) as opt:
        assert opt.committed_step == 4
        training.by_optimizer(opt, range(4, 6))
    store = Store(*reversed(training.places))
    training.by_file(store, range(6, 8))
    found = image_of(store)
    store.close()
    assert found == expected
    with training.optimizer(resume=True) as opt:
        assert opt.committed_step == 8
        assert training.image(opt) == expected
        for name, p in training.params.items():
            assert torch.equal(p, alone.params[name])


def test_the_rule_has_the_bits_of_the_engine(tmp_path):
    """States, gradients and constants from all of fp32: subnormal, infinite, nan, and products around the smallest."""
    generator = np.random.default_rng(0)
    n = 1 << 15
    bits = generator.integers(0, 1 << 32, (3, n), np.uint32)
    # Near each other and near the smallest normal number, where it matters how a result is rounded before it is zero.
    bits[:, n // 2 :] = bits[:, n // 2 :] & 0x807FFFFF | generator.integers(0, 72, (3, n // 2), np.uint32) << 23
    bits[2] &= 0x7FFFFFFF
    grads = generator.integers(0, 1 << 32, n, np.uint32)
    grads[n // 4 :] = grads[n // 4 :] & 0x807FFFFF | generator.integers(40, 72, n - n // 4, np.uint32) << 23
    states, grads = bits.view(np.float32), grads.view(np.float32)
    p = torch.nn.Parameter(torch.from_numpy(states[0].copy()))
    with CSDAdam([("p", p)], devices=tmp_path / "csd", lr=0.3, eps=1e-30, tile_size=n) as opt:
        p.grad = torch.zeros_like(p)
        opt.step()
        for key, values in zip(SECTIONS, states, strict=False):
            opt.state[p][key].copy_(torch.from_numpy(values))
        with torch.no_grad():
            p.copy_(torch.from_numpy(states[0]))
        p.grad = torch.from_numpy(grads)
        opt.step()
        expected = [opt.state[p][key].numpy().copy() for key in SECTIONS[:3]]
        group = {**opt.param_groups[0]}
    found = states.copy()
    ONE_FILE.adamw(found, grads, group, 2.0, 1.0)
    for ours, right in zip(found, expected, strict=True):
        assert np.array_equal(np.isnan(ours), np.isnan(right))
        assert np.array_equal(ours.view(np.uint32)[~np.isnan(ours)], right.view(np.uint32)[~np.isnan(right)])
    exponents = found.view(np.uint32) >> 23 & 0xFF
    assert ((exponents > 0) | (found.view(np.uint32) & 0x7FFFFF == 0)).all()  # no subnormal number
    assert all((exponents[k] == 1).any() for k in range(3))  # but some just above


def test_undo(tmp_path):
    training = begun(tmp_path)
    with training.optimizer(resume=True) as opt:
        before = training.image(opt)
    store = Store(*training.places)
    store.update(training.gradients(7))
    with pytest.raises(ValueError, match="commit or undo"):
        store.update(training.gradients(7))
    store.undo()
    assert image_of(store) == before
    store.update(training.gradients(7))  # neither committed nor undone by name
    store.close()
    with training.optimizer(resume=True) as opt:
        assert (opt.committed_step, training.image(opt)) == (2, before)


def test_a_table_that_outgrows_its_place(tmp_path):
    training = begun(tmp_path)
    store = Store(*training.places)
    places = [device.block["table"].item()[:2] for device in store.devices]
    store.groups[0]["note"] = "x" * 9000
    training.by_file(store, range(2, 4))
    assert all(device.block["table"].item()[0] > base for device, (base, _) in zip(store.devices, places, strict=True))
    expected = image_of(store)
    store.close()
    with training.optimizer(resume=True) as opt:
        assert (opt.committed_step, training.image(opt)) == (4, expected)


# ---- kills and power losses -------------------------------------------------------------------

STEPS = 2  # by the file, after those of begun()
WRITES = 3 + 4 + 12 * STEPS  # tiles of each step, and three parts of two copies on two devices


class Kill:
    """os.pwrite that kills the process in the midst of one of its calls, counted from 1."""

    def __init__(self, call, share):
        self.left, self.share = call, share

    def __call__(self, pwrite, fd, data, offset):
        self.left -= 1
        if self.left == 0:
            pwrite(fd, data[: int(self.share * len(data))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(fd, data, offset)


def trains(directory, call, share):
    """Continue up to STEPS steps by the file, and be killed in the given write."""
    training = OneRun(directory)
    with replaced(os, "pwrite", Kill(call, share)):
        store = Store(*training.places)
        training.by_file(store, range(store.step, 2 + STEPS))
    os._exit(0)


def expected_images(training, directory):
    """Return the image after each step that the file is to make, as CSDAdam makes it."""
    places = copied(training, directory)
    same, images = OneRun(places[0].parent), []
    with same.optimizer(resume=True) as opt:
        images.append(same.image(opt))
        for step in range(2, 2 + STEPS):
            same.by_optimizer(opt, [step])
            images.append(same.image(opt))
    return images


def resume_both(training, directory, expected):
    """Resume what a crash has left by the file and by CSDAdam, each to the end. Return the step that was found."""
    places = copied(training, directory / "other")
    store = Store(*training.places)
    found = store.step
    assert image_of(store) == expected[found - 2]
    training.by_file(store, range(found, 2 + STEPS))
    assert image_of(store) == expected[-1]
    store.close()
    other = OneRun(places[0].parent)
    with other.optimizer(resume=True) as opt:
        assert (opt.committed_step, other.image(opt)) == (found, expected[found - 2])
        other.by_optimizer(opt, range(found, 2 + STEPS))
        assert other.image(opt) == expected[-1]
    shutil.rmtree(directory / "other")
    return found


def test_kills(tmp_path):
    """After kill -9 in any write, also in those of a recovery, both resume at a committed step with the right bits."""
    training = begun(tmp_path / "begun")
    expected = expected_images(training, tmp_path / "expected")
    chance, kills, found = random.Random(0), 0, set()
    for n, call in enumerate((*chance.sample(range(1, WRITES + 1), 6), WRITES, WRITES + 1)):
        place = tmp_path / f"kill-{n}"
        copied(training, place)
        assert ended(process(trains, place, call, chance.random())) == (call <= WRITES)
        if n % 2:
            kills += ended(process(trains, place, chance.randrange(1, 5), chance.random()))
        found.add(resume_both(OneRun(place), tmp_path, expected))
    assert kills >= 2
    assert found == {2, 3, 4}


class Disk:
    """What may be on the drives after a power loss: all that was flushed, and of later writes all, none, or a part.

    Takes images before each flush, when most is missing; kills are within writes.
    """

    def __init__(self, places):
        self.files = {os.path.realpath(place / "csd_optim.store"): place.name for place in places}
        self.flushed = {name: Path(path).read_bytes() for path, name in self.files.items()}
        self.pending = {name: [] for name in self.flushed}
        self.images, self.chance = [], random.Random(0)

    def name(self, fd):
        return self.files[os.readlink(f"/proc/self/fd/{fd}")]

    def pwrite(self, pwrite, fd, data, offset):
        self.pending[self.name(fd)].append((data, offset))
        return pwrite(fd, data, offset)

    def fdatasync(self, fdatasync, fd):
        name = self.name(fd)
        if self.pending[name]:
            self.images += [self.image(), self.image()]
        fdatasync(fd)
        self.flushed[name] = Path(f"/proc/self/fd/{fd}").read_bytes()
        self.pending[name].clear()

    def image(self):
        image = {name: bytearray(content) for name, content in self.flushed.items()}
        for name, writes in self.pending.items():
            for data, offset in writes:
                share = self.chance.choices((1.0, 0.0, 0.5), (6, 3, 1))[0]  # of its sectors
                for i in range(0, len(data), 512):
                    if self.chance.random() < share:
                        sector = data[i : i + 512]
                        image[name][offset + i : offset + i + len(sector)] = sector
        return image


@pytest.mark.ci
def test_power_losses(tmp_path):
    training = begun(tmp_path / "begun")
    expected = expected_images(training, tmp_path / "expected")
    copied(training, tmp_path / "run")
    on_disk = OneRun(tmp_path / "run")
    disk = Disk(on_disk.places)
    with replaced(os, "pwrite", disk.pwrite), replaced(os, "fdatasync", disk.fdatasync):
        store = Store(*on_disk.places)
        on_disk.by_file(store, range(2, 2 + STEPS))
        store.close()
    found = []
    for n, image in enumerate(disk.images):
        for name, content in image.items():
            (tmp_path / f"loss-{n}" / name).mkdir(parents=True)
            (tmp_path / f"loss-{n}" / name / "csd_optim.store").write_bytes(content)
        found.append(resume_both(OneRun(tmp_path / f"loss-{n}"), tmp_path, expected))
        shutil.rmtree(tmp_path / f"loss-{n}")
    assert found == sorted(found)
    assert {*found} == {2, 3, 4}


@pytest.mark.ci
def test_it_resumes_what_a_killed_optimizer_leaves(tmp_path):
    """An image of the stores before each call that CSDAdam's commits make."""
    training = begun(tmp_path)
    found, images = [], {}

    def two_steps():
        with training.optimizer(resume=True) as opt:
            for step in range(2, 4):
                images[step] = training.image(opt)
                training.by_optimizer(opt, [step])
                opt.synchronize()
            images[4] = training.image(opt)

    for left in images_of(tmp_path, "csd*", two_steps)[::2]:
        store = Store(*(left / place.name for place in training.places))
        assert image_of(store) == images[store.step]
        found.append(store.step)
        store.close()
    assert found == sorted(found)
    assert {*found} == {2, 3, 4}


# ---- what it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options", "what"),
    [(CSDAdam, {"state_dtype": "8bit"}, "codec"), (CSDAdam, {"topk": 0.01}, "residuals"), (CSDSGD, {}, "rule")],
)
def test_stores_that_need_more(optimizer, options, what, tmp_path):
    p = torch.nn.Parameter(torch.randn(100, 100))
    with optimizer([("p", p)], lr=0.1, devices=tmp_path / "csd", **options) as opt:
        p.grad = torch.randn_like(p)
        opt.step()
    before = (tmp_path / "csd/csd_optim.store").read_bytes()
    with pytest.raises(ValueError, match=f"cannot go on with this store: it has .*{what}"):
        Store(tmp_path / "csd")
    assert (tmp_path / "csd/csd_optim.store").read_bytes() == before


def test_damage(tmp_path):
    """A damaged copy is mended from the other one; a damaged tile or a missing device is refused."""
    training = begun(tmp_path)
    path = training.places[0] / "csd_optim.store"
    good = path.read_bytes()
    store = Store(*training.places)
    manifest, table = (store.devices[0].block[region].item()[0] for region in ("manifest", "table"))
    extent, slot = store.devices[0].manifest["extents"][0], int(store.devices[0].table.tiles[0]["slot"][0])
    store.close()
    for at in (100, 4096 + 100, manifest + 5, table + 5):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        Store(*training.places).close()
        assert path.read_bytes() == good
    at = extent["file_offset"] + slot * 12 * TILE + 7
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(ValueError, match=r"tile 0 in .* is damaged"):
        Store(*training.places)
    path.write_bytes(good)
    for wrong in (training.places[:1], [training.places[0], training.places[0]]):
        with pytest.raises((ValueError, BlockingIOError)):
            Store(*wrong)
    with training.optimizer(resume=True), pytest.raises(BlockingIOError):
        Store(*training.places)


def test_it_shows_a_store(tmp_path):
    training = begun(tmp_path)
    before = [(place / "csd_optim.store").read_bytes() for place in training.places]
    done = subprocess.run([sys.executable, FILE, *training.places], check=True, capture_output=True, text=True)
    first, *lines = done.stdout.splitlines()
    assert first == "step 2 on 2 devices; all checksums are right"
    assert lines == [f"  {n}: {p.numel()} elements of {str(p.dtype)[6:]}" for n, p in training.params.items()]
    assert before == [(place / "csd_optim.store").read_bytes() for place in training.places]
