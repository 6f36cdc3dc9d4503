"""Speculative steps (guesses): tiles pushed early change nothing visible before the release, and then the same bits."""

import itertools
import random
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cards import emulated_python, needs_xrt
from support.codes import Coded
from support.tables import step_table

from csd_optim import CSDRuntimeError, CSDValueError, bindings
from csd_optim.bindings import FROM_PARAM, HYPER, IN_SECTION, SAME_ORDER, TO_AND_FRO, UNLESS_SET, Push
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.open_engine import open_engine
from csd_optim.optim.rules import ADAMW

pytestmark = pytest.mark.at_hand("drives the engine, by windows and addresses")

ADAM = np.array([(bindings.RULES["adamw"], (0.999, 0.9, 0.1, 0.999, 0.001, 0.01, 1.0, 1e-8, 1.0))], HYPER)
NUMELS = (2500, 40, 7000, 1, 3000)
ANY = 1  # a placeholder address, which is never read


class Guessing:
    """An engine over parameters of one dtype, with normal and speculative steps."""

    def __init__(self, devices, dtype=torch.float32, **options):
        self.engine = open_engine(parse_devices(devices), tile_elems=1024, **options)
        self.extent = self.engine.extend(NUMELS, ADAMW.sections[:3])
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.randn(n, generator=generator).to(dtype) for n in NUMELS]
        for i, p in enumerate(self.params):
            self.engine.windows.window(self.extent, i, 0, torch.float32).copy_(p)
        self.engine.committer.describe({"params": [{}] * len(NUMELS), "groups": []})
        self.tiles = np.arange(len(self.engine.tiles), dtype=np.uint32)
        self.holds = {}
        self.master = IN_SECTION

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.engine.stepping:
            self.engine.finish(keep=False)
        self.engine.close()

    def rows(self, grads):
        """Return the step's table. `grads`: by parameter; None: it has no gradient."""
        table = step_table([p if g is None else g for g, p in zip(grads, self.params, strict=True)], self.params)
        table["grad"][[g is None for g in grads]] = 0
        table["master"] = self.master
        return table

    def guess(self, grads, tiles, **options):
        """Begins a speculative step and pushes these tiles early."""
        rows = self.rows(grads)
        rows["grad"][rows["grad"] != 0] = ANY
        self.engine.begin(rows, ADAM, self.tiles, **options)
        for tile in tiles:
            self.push_early(tile, grads)

    def push_early(self, tile, grads):
        hold = torch.full((self.engine.native.hold_bytes(tile),), 90, dtype=torch.uint8)
        addresses = [0 if grads[p] is None else grads[p].data_ptr() for p in self.engine.tiles.pieces_of(tile)["param"]]
        self.engine.native.push(tile, Push(grads=addresses, hold=hold.data_ptr()))
        self.holds[tile] = hold  # only now: if the push is refused, the memory of an earlier push is still in use

    def complete(self, grads, order=()):
        """Releases the speculative step, pushes the other tiles and finishes it."""
        self.engine.release(self.rows(grads), np.array(order, np.uint32))
        for tile in self.tiles.tolist():
            if tile not in self.holds:
                self.engine.native.push(tile)
        assert self.engine.native.params_ready(self.tiles, wait=True)
        self.engine.finish()
        self.holds.clear()

    def give_up(self):
        self.engine.finish(keep=False)
        self.holds.clear()
        assert self.engine.native.undone() == []

    def step(self, grads):
        self.engine.begin(self.rows(grads), ADAM, self.tiles)
        for tile in self.tiles.tolist():
            self.engine.native.push(tile)
        self.engine.finish()

    def image(self):
        self.engine.states.remap()
        window, places = self.engine.windows.window, itertools.product(range(len(NUMELS)), range(3))
        return [t.clone() for t in [*self.params, *(window(self.extent, *at, torch.float32) for at in places)]]

    def slots(self):
        return self.engine.states.slots_of(self.extent)[0]["slot"].tolist()


def same(images, others):
    return all(torch.equal(a, b) for a, b in zip(images, others, strict=True))


def random_grads(step, dtype):
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(n, generator=generator).to(dtype) for n in NUMELS]
    return [None if (step + p) % 6 == 0 else g for p, g in enumerate(grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stores", [1, 3])
def test_same_bits_whatever_was_pushed_early(dtype, stores, tmp_path):
    random.seed(stores)
    with (
        Guessing([f"file:{tmp_path}/csd{i}?buffers=3" for i in range(stores)], dtype) as it,
        Guessing(["ram:"], dtype) as twin,
    ):
        for step in range(12):
            grads = random_grads(step, dtype)
            for one in (it, twin):
                one.master = IN_SECTION if step % 3 else FROM_PARAM if dtype == torch.float32 else UNLESS_SET
                if step % 3 == 0:  # set some parameters
                    one.params[2][1000:1100] = step
            before, slots = it.image(), it.slots()
            for right in (False, True):
                wrong = [g if g is None else g + 1 for g in grads]
                early = random.sample(it.tiles.tolist(), random.randint(1, len(it.tiles)))
                it.guess(grads if right else wrong, early, order=step % 2)
                assert it.engine.native.unchanged(it.rows(grads if right else wrong))
                if not right:
                    pushed = {p for t in early for p in it.engine.tiles.pieces_of(t)["param"]}
                    assert it.engine.native.unchanged(it.rows(grads)) == all(grads[p] is None for p in pushed)
                assert same(it.params, before[: len(it.params)])
                assert not any(it.engine.native.params_ready(np.array([t], np.uint32), wait=False) for t in early)
                if not right:
                    it.give_up()
                    assert it.slots() == slots
                    assert same(it.image(), before)
            it.complete(grads, random.sample(it.tiles.tolist(), step))
            twin.step(grads)
            assert same(it.params, twin.params)
        assert same(it.image(), twin.image())


def test_what_changed_is_told(tmp_path):
    """unchanged() notices each changed bit of gradients and parameters, and only in tiles that were pushed early."""
    with Guessing([str(tmp_path / "csd")]) as it:
        grads = random_grads(1, torch.float32)
        it.master = FROM_PARAM
        it.guess(grads, [0, 1])  # the beginning of parameter 0
        rows = it.rows(grads)
        assert it.engine.native.unchanged(rows)
        for tensor in (grads[0], it.params[0]):
            for at, tells in ((0, True), (2047, True), (2048, False)):
                had = tensor[at].clone()
                tensor[at] = -had
                assert it.engine.native.unchanged(rows) is not tells
                tensor[at] = had
                assert it.engine.native.unchanged(rows)
        moved = [g if g is None else g.clone() for g in grads]  # equal values at other addresses
        assert it.engine.native.unchanged(it.rows(moved))
        rows = it.rows(grads)
        rows["grad_dtype"][0] = bindings.DTYPE_CODES[torch.bfloat16]
        assert not it.engine.native.unchanged(rows)
        it.complete(moved)


def test_gradients_written_while_they_are_copied(tmp_path):
    """If the copy equals the final gradients, the step uses them; otherwise unchanged() tells so."""
    with Guessing([str(tmp_path / "csd")]) as it, Guessing(["ram:"]) as twin:
        kept = 0
        for step in range(30):
            grads = [torch.full((n,), 0.0) for n in NUMELS]

            def write(to=grads, last=step):
                for value in range(last % 10):
                    for g in to:
                        g.fill_(value)

            writer = threading.Thread(target=write)
            writer.start()
            it.guess(grads, it.tiles.tolist())
            writer.join()
            if it.engine.native.unchanged(it.rows(grads)):
                kept += 1
                it.complete(grads)
            else:
                it.give_up()
                it.step(grads)
            twin.step(grads)
            assert same(it.params, twin.params)
        assert kept >= 3  # in three of the steps nothing was written
        assert same(it.image(), twin.image())


def test_tiles_that_cannot_be_pushed_early(tmp_path):
    grads = random_grads(1, torch.float32)
    for device in ("ram:", "null:"):
        with Guessing([device]) as it, pytest.raises(CSDValueError, match="could not be undone"):
            it.guess(grads, [0])
    with Guessing([str(tmp_path / "csd")]) as it:
        before = it.image()
        for field, value, message in (
            ("topk", 0.5, "Top-K"),
            ("grad", 0, "a gradient here and none in the step"),
            ("param", 0, "no address"),
        ):
            rows = it.rows(grads)
            rows[field], rows["topk_dtype"] = value, bindings.DTYPE_CODES[torch.bfloat16]
            it.engine.begin(rows, ADAM, it.tiles)
            with pytest.raises(CSDValueError, match=message):
                it.push_early(0, grads)
            it.give_up()
        it.guess(grads, [3, 0])
        with pytest.raises(CSDValueError, match="pushed before"):
            it.push_early(3, grads)
        with pytest.raises(CSDValueError, match="not part"):
            it.engine.native.push(999, Push(grads=[], hold=1))
        with pytest.raises(CSDRuntimeError, match="guess"):
            it.engine.native.push(1)
        with pytest.raises(CSDRuntimeError, match="wait for it only after the release"):
            it.engine.native.params_ready(it.tiles[:1], wait=True)
        with pytest.raises(CSDValueError, match="not the rows"):
            it.engine.release(it.rows(grads)[:-1], it.tiles)
        with pytest.raises(CSDRuntimeError, match="was never pushed"):
            it.engine.finish()
        assert it.engine.native.hold_bytes(0) == 0
        for call in (
            lambda: it.engine.native.unchanged(it.rows(grads)),
            lambda: it.engine.release(it.rows(grads), it.tiles),
        ):
            with pytest.raises(CSDRuntimeError, match="no guess is under way"):
                call()
        assert same(it.image(), before)


def test_bytes_are_counted_as_always(tmp_path):
    with Guessing([str(tmp_path / "a")]) as it, Guessing([str(tmp_path / "b")]) as twin:
        grads = random_grads(1, torch.float32)
        it.guess(grads, it.tiles.tolist()[::2])
        it.complete(grads)
        twin.step(grads)
        counts = []
        for one in (it, twin):
            one.engine.native.wait_writes()
            stats = one.engine.committer.stats()[0]
            counts.append({name: stats[name] for name in stats if name.endswith("bytes") or name == "updated"})
        assert counts[0] == counts[1]
        assert counts[0]["updated"] == sum(g.numel() for g in grads if g is not None)


def test_next_step_finds_more_of_what_it_begins_with(tmp_path):
    """If the engine knows that the next step has the same order, its cache for some tiles keeps the right ones."""
    with Guessing([f"file:{tmp_path}/csd?buffers=2&cache=96KiB"]) as it:
        read = {}
        for order in (TO_AND_FRO, SAME_ORDER):
            counts = []
            for _ in range(12):
                grads = [torch.randn(n) for n in NUMELS]
                it.guess(grads, it.tiles.tolist()[::3], order=order)
                it.complete(grads, it.tiles)
                it.engine.native.wait_writes()
                counts.append(it.engine.committer.stats()[0]["read_bytes"])
            read[order] = sum(counts[2:])
        assert 0 < read[SAME_ORDER] < read[TO_AND_FRO]


def test_codes(tmp_path):
    """8-bit states: the update reads the parameters, so these are compared as well."""
    with Coded([str(tmp_path / "csd")]) as it:
        it.step()
        begin, push = it.engine.begin, it.engine.native.push
        holds, told = {}, []

        def begin_guess(table, hyper, tiles, record):
            """Like `begin`, but pushes every other tile early, twice: the first time with wrong gradients."""
            wrong = torch.ones(max(p.numel() for p in it.params.values()))
            for right in (False, True):
                holds.clear()
                tiles = begin(table, hyper, tiles, record)
                for tile in tiles.tolist()[::2]:
                    params = it.engine.tiles.pieces_of(tile)["param"]
                    holds[tile] = torch.empty(it.engine.native.hold_bytes(tile), dtype=torch.uint8)
                    grads = table["grad"][params].tolist() if right else [wrong.data_ptr()] * len(params)
                    push(tile, Push(grads=grads, hold=holds[tile].data_ptr()))
                told.append(it.engine.native.unchanged(table))
                if not right:
                    it.engine.finish(keep=False)
            it.engine.release(table, tiles[::-1].copy())
            return tiles

        it.engine.begin = begin_guess
        it.engine.native.push = lambda tile: None if tile in holds else push(tile)
        for _ in range(3):
            it.step()
        assert told == [False, True] * 3
        assert len(holds) > 3
        for name, param in it.params.items():
            assert torch.equal(param, it.rounded()[name]), name


CARDS = """
    import sys, numpy as np, torch
    sys.path.insert(0, sys.argv[1])
    from engine.test_guesses import Guessing, random_grads, same
    with Guessing(["xrt:0?nvme=.&scratch=1"], torch.bfloat16) as it, Guessing(["ram:"], torch.bfloat16) as twin:
        for step in range(4):
            grads, before = random_grads(step, torch.bfloat16), [p.clone() for p in it.params]
            for right in (False, True):
                it.guess(grads, it.tiles.tolist()[step % 2 :: 2])
                assert it.engine.native.unchanged(it.rows(grads)) and same(it.params, before)
                if not right:
                    it.give_up()
            it.complete(grads, it.tiles.tolist()[::-1])
            twin.step(grads)
            assert same(it.params, twin.params)
        assert same(it.image(), twin.image())
    print("same")
"""


@needs_xrt
def test_cards():
    done = emulated_python(textwrap.dedent(CARDS), str(Path(__file__).resolve().parent.parent))
    assert done.stdout.endswith("same\n"), done.stdout + done.stderr
