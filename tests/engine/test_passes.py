"""Steps of two passes over a tile (Muon): bits, bytes, order, and undo."""

import itertools
import os
import signal

import numpy as np
import pytest
import torch
from support.forked import process
from support.memory import io_bytes
from support.tables import step_table
from support.two_passes import (
    DECAY,
    LR,
    MOMENTUM,
    SHAPES,
    Model,
    TwoPasses,
    gradients,
    hypers,
    initial,
    order_of_passes,
    orthogonal,
    undone_params,
)

from csd_optim import CSDRuntimeError, CSDStoreError, CSDValueError, bindings
from csd_optim.bindings import (
    AS_PUSHED,
    FROM_PARAM,
    HYPER,
    ISAS,
    NEW,
    PARAM,
    PASS_2,
    PASS_RULES,
    PIECE,
    RULES,
    SAME_ORDER,
    SUPPLIED,
    UNLESS_SET,
    DeviceConfig,
    ExtentConfig,
    Native,
    Push,
)
from csd_optim.store.format import read_contents

pytestmark = pytest.mark.at_hand("drives the engine, by windows and addresses")

AVAILABLE = [name for name, isa in ISAS.items() if isa <= bindings.lib.csd_isa_best()]
PACED = "file:?read=200MB/s&write=100MB/s&latency=0.1ms&link=1GB/s"
DEVICES = {
    "file": ["file:"],
    "no cache": ["file:?cache=off"],
    "one buffer": ["file:?buffers=1"],
    "files": ["file:", "file:?buffers=2", "file:?buffers=3"],
    "ram": ["ram:"],
    "rams": ["ram:", "ram:"],
    "mixed": ["ram:", "file:"],
    "paced": [PACED],
}


@pytest.fixture
def isa(request):
    used = bindings.isa_used()
    bindings.isa_use(request.param)
    yield request.param
    bindings.isa_use(used)


def assert_bits(found, expected):
    __tracebackhide__ = True
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    assert not different, f"tensors {different} of {len(expected)} differ"


# ---- bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", AVAILABLE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.sampled(together=2)
def test_the_bits_are_those_of_numpy(on, dtype, isa):
    with TwoPasses(DEVICES[on], dtype=dtype) as ours:
        model = Model(ours.params)
        for step in range(3):
            grads = ours.step(size=1 + step)
            model.step(grads, ours.constants)
            assert_bits(ours.image(), model.image())


@pytest.mark.parametrize(("nesterov", "scale"), [(False, 1.0), (True, 0.37), (False, -1.0)])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_constants_of_pass_1(nesterov, scale, x_dtype):
    with TwoPasses(["file:"], x_dtype=x_dtype) as ours:
        ours.constants = hypers(SHAPES, nesterov=nesterov, scale=scale)
        model = Model(ours.params, x_dtype)
        for _ in range(2):
            model.step(ours.step(), ours.constants)
        assert_bits(ours.image(), model.image())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", PASS_RULES)
def test_all_instruction_sets_compute_the_same(rule, dtype):
    """With infinities and NaN among the gradients, at odd lengths."""
    n, hyper = 333, hypers([(2, 1)])
    hyper = hyper[hyper["rule"] == PASS_RULES[rule]][:1]
    generator = torch.Generator().manual_seed(5)
    grad, state = (torch.randn(n, generator=generator) for _ in range(2))
    grad[7], grad[100], grad[332] = torch.inf, torch.nan, -torch.inf
    found = []
    for name in AVAILABLE:
        for length in (n, 1, 64, 130):
            states, out = state[:length].clone(), torch.zeros(length, dtype=dtype)
            bindings.update(hyper, name, grad[:length].to(dtype), (states,), out)
            found.append((name, length, states.nan_to_num(1e30), out.float().nan_to_num(1e30)))
    for name, length, states, out in found:
        _, _, expected, expected_out = found[0]
        assert torch.equal(states, expected[:length]), name
        assert torch.equal(out, expected_out[:length]), name


def test_number_of_threads_changes_no_bit():
    used, images = bindings.threads_used(), []
    try:
        for threads in (1, 2, 5):
            bindings.threads_use(threads)
            with TwoPasses(DEVICES["files"]) as ours:
                for _ in range(3):
                    ours.step(size=2)
                images.append(ours.image())
    finally:
        bindings.threads_use(used)
    for image in images[1:]:
        assert_bits(image, images[0])


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_as_close_to_torch_as_another_order_of_operations_allows(nesterov, adjust):
    """The momentum within 1e-6; parameters within what orthogonalization makes of the last bits of its input."""
    shapes = ((64, 64), (96, 32), (32, 96), (40, 25))
    kwargs = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "nesterov": nesterov, "adjust_lr_fn": adjust}
    params = [p.requires_grad_() for p in initial(shapes)]
    opt = torch.optim.Muon(params, **kwargs)
    with TwoPasses(["file:"], shapes) as ours:
        ours.constants = hypers(shapes, nesterov=nesterov)
        if adjust:
            ours.constants["c"][1:, 1] = [LR * 0.2 * max(shape) ** 0.5 for shape in shapes]
        start = [p.detach().clone() for p in params]
        for _ in range(5):
            for p, grad in zip(params, ours.step(), strict=True):
                p.grad = grad
            opt.step()
        ours.image()
        for p, mine, first, momentum in zip(params, ours.params, start, ours.windows()[len(shapes) :], strict=True):
            expected = opt.state[p]["momentum_buffer"].flatten()
            assert (momentum - expected).norm() <= 1e-6 * expected.norm()
            # Theirs is orthogonalized in bf16, ours in double: 1.1 % of the norm was measured.
            assert (mine - p).norm() <= 0.02 * (first - p).norm()


# ---- bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["file:?cache=off", "file:", "ram:", PACED])
def test_each_half_is_read_and_written_once(device):
    """8.0 + 8.0 bytes per parameter. In fp32 states, buffers keep no halves, so this holds with a cache too."""
    shapes = ((64, 64), (32, 96))
    n = sum(a * b for a, b in shapes)
    with TwoPasses([device], shapes) as ours:
        for _ in range(3):
            ours.step()
            ours.native.wait_writes()
            stats = ours.native.stats(0)
            assert len(ours.engine.tiles) * 1024 == n == stats["updated"]
            assert (stats["read_bytes"], stats["write_bytes"]) == (8.0 * n, 8.0 * n)
            assert (stats["push_bytes"], stats["pull_bytes"]) == ((4 + 2) * n, (2 + 4) * n)
            assert stats["nonfinite"] == 0
        assert stats["total_write_bytes"] == 3 * 8 * n


def test_the_kernel_counts_the_same_bytes(tmp_path):
    shapes = ((512, 512), (1024, 512))
    n = sum(a * b for a, b in shapes)
    with TwoPasses([f"file:{tmp_path}/{d}?cache=off" for d in "ab"], shapes, tile_elems=1 << 15) as ours:
        if not all(store.direct for store in ours.engine.devices.stores):
            pytest.skip("no direct I/O here: the kernel counts what leaves the page cache, some other time")
        ours.step()
        ours.commit()
        before = io_bytes()
        ours.step()
        ours.native.wait_writes()
        read, written = (b - a for a, b in zip(before, io_bytes(), strict=True))
    assert read == pytest.approx(8.0 * n, rel=0.02)
    assert written == pytest.approx(8.0 * n, rel=0.02)


def test_null_device_counts_and_changes_nothing():
    with TwoPasses(["null:?link=1GB/s"]) as ours:
        before = [p.clone() for p in ours.params]
        ours.step()
        assert all(map(torch.equal, ours.params, before))
        stats, n = ours.native.stats(0), sum(p.numel() for p in ours.params)
        assert stats["updated"] == n
        assert (stats["push_bytes"], stats["pull_bytes"]) == (6 * n, 6 * n)


def test_nonfinite_gradients_are_counted_in_pass_1():
    """That is early enough to undo the step; afterwards the whole matrix is NaN."""
    with TwoPasses(["file:"]) as ours:
        grads = gradients(SHAPES, 0)
        before = ours.image()
        grads[0][3, 4], grads[5][1, 1] = torch.nan, torch.inf
        tiles = ours.begin(grads, size=len(SHAPES))
        ours.first_passes(tiles)
        ours.native.params_ready(tiles[tiles < PASS_2], wait=True)
        assert ours.native.stats(0)["nonfinite"] == 2
        ours.engine.finish(keep=False)
        assert_bits(ours.image(), before)
        ours.step(grads=grads)
        assert ours.native.stats(0)["nonfinite"] == 2
        assert ours.params[0].isnan().all()
        assert not ours.params[1].isnan().any()


# ---- checksums, stores, and what begins a step ------------------------------------------------


def assert_checksums(ours):
    """Assert that the checksums of all tiles are those of their current slots."""
    ours.native.wait_writes()
    extent = ours.extent
    each = extent.sum_elems or extent.tile_elems
    states, sums = ours.native.tiles(0, len(ours.engine.tiles), extent.chunks, 2)
    assert states["summed"].all()
    for tile in range(len(ours.engine.tiles)):
        halves = torch.empty(2, extent.tile_elems)
        ours.native.read(tile, 2, extent.tile_elems, halves.data_ptr())
        for (s, half), chunk in itertools.product(enumerate(halves), range(extent.chunks)):
            covered = half[chunk * each : (chunk + 1) * each].numpy().tobytes()
            assert sums[tile, chunk, s] == bindings.crc32c(covered)


@pytest.mark.parametrize("tile_elems", [1024, 4096])
def test_a_store_is_resumed_with_verified_halves(tile_elems, tmp_path):
    model = Model(initial(SHAPES))
    devices = [str(tmp_path / "a"), str(tmp_path / "b")]
    for mode in ("new", "resume", "resume"):
        with TwoPasses(devices, tile_elems=tile_elems, mode=mode) as ours:
            if mode == "resume":
                for p, param in zip(ours.params, model.params, strict=True):
                    p.copy_(param)
                ours.done = ours.engine.states.step
            for _ in range(2):
                model.step(ours.step(), ours.constants)
                ours.commit()
                assert_checksums(ours)
            assert_bits(ours.image(), model.image())
    assert read_contents(tmp_path / "a").superblock.step == 6


def test_damage_in_one_half_is_found_by_its_pass(tmp_path):
    with TwoPasses([str(tmp_path)], ((64, 64),)) as ours:
        ours.step()
        ours.commit()
        contents = read_contents(tmp_path)
        for s, word in enumerate(("section 0", "section 1")):
            path = next(path for path in tmp_path.iterdir() if path.stat().st_size >= 2 * 2 * 4 * 4096)
            place = next(offset for _, tile, offset in contents.slots() if tile == 1) + 4096 * s + 40
            with open(path, "r+b") as file:
                file.seek(place)
                before = file.read(1)
                file.seek(place)
                file.write(bytes([before[0] ^ 1]))
            with pytest.raises(CSDStoreError, match=word):
                ours.step()
            ours.give_up()
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(before)
        ours.step()


def test_a_step_begins_with_what_was_written_to_windows(tmp_path):
    """Durable: in private windows. Otherwise through open ones, to the device. Also without a gradient."""
    for devices in ([str(tmp_path)], ["file:"], ["ram:"]):
        with TwoPasses(devices) as ours:
            model = Model(ours.params)
            for _ in range(2):
                model.step(ours.step(), ours.constants)
                if len(devices[0]) > 5:
                    ours.commit()
            ours.engine.states.remap()
            masters, momenta = ours.windows()[: len(SHAPES)], ours.windows()[len(SHAPES) :]
            masters[0].mul_(2)
            momenta[5].add_(0.5)
            momenta[2].fill_(0.25)  # it has no gradient; the tile has a neighbour's
            model.masters[0] *= 2
            model.momenta[5] += np.float32(0.5)
            model.momenta[2][:] = 0.25
            grads = gradients(SHAPES, 7)
            grads[2] = None
            model.step(ours.step(grads=grads), ours.constants)
            for p, param, grad in zip(ours.params, model.params, grads, strict=True):
                assert grad is None or torch.equal(p, param)
            assert_bits(ours.image()[len(SHAPES) :], model.image()[len(SHAPES) :])


@pytest.mark.parametrize("on", ["file", "files", "mixed"])
def test_edited_states_in_the_table(on):
    """Each pass takes its edited states from its own row of the table."""
    with TwoPasses(DEVICES[on]) as ours:
        model = Model(ours.params)
        model.step(ours.step(), ours.constants)
        master, momentum = torch.rand(SHAPES[0]), torch.rand(SHAPES[3])
        grads = gradients(SHAPES, 1)
        table = ours.table(grads)
        table["edited"][0, 0], table["edited"][3, 1] = master.data_ptr(), momentum.data_ptr()
        model.masters[0][:], model.momenta[3][:] = master.numpy(), momentum.numpy()
        model.step(ours.step(grads=grads, params=table), ours.constants)
        assert_bits(ours.image(), model.image())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master", [FROM_PARAM, UNLESS_SET])
def test_masters_from_parameters(master, dtype):
    if (master, dtype) == (UNLESS_SET, torch.float32):
        dtype = torch.float16
    if master == FROM_PARAM:
        dtype = torch.float32
    with TwoPasses(["file:", "ram:"], dtype=dtype) as ours:
        model = Model(ours.params)
        for _ in range(2):
            model.step(ours.step(), ours.constants)
            # What happens to be the rounded master keeps the master's other bits (UNLESS_SET).
            kept = model.params[3]
            ours.params[3].copy_(torch.rand(SHAPES[3]))
            written = (ours.params[3] != kept).numpy() | (master == FROM_PARAM)
            model.masters[3][written] = ours.params[3].float().numpy()[written]
            grads = gradients(SHAPES, ours.done, dtype)
            table = ours.table(grads)
            table["master"][len(SHAPES) :] = master
            model.step(ours.step(grads=grads, params=table), ours.constants)
        assert_bits(ours.image(), model.image())


@pytest.mark.parametrize("keep_first", [False, True])
@pytest.mark.parametrize("on", ["file", "files", "mixed", "ram", "one buffer"])
def test_new_tiles_begin_with_their_parameters(on, keep_first):
    """Nothing is read; the momentum begins as zeros. An undone step leaves it to the next one."""
    with TwoPasses(DEVICES[on], filled=False) as ours:
        model, n = Model(ours.params), len(SHAPES)
        grads = gradients(SHAPES, 0)
        table = ours.table(grads)
        table["master"][n:] = NEW
        if not keep_first:
            tiles = ours.begin(grads, params=table)
            ours.first_passes(tiles)
            ours.orthogonalize(range(3))
            ours.second_passes([range(3), range(3, n)], 0)
            ours.engine.finish(keep=False)
            for p, param in zip(ours.params, model.params, strict=True):
                p.copy_(param)
        model.step(ours.step(grads=grads, params=table), ours.constants)
        ours.native.wait_writes()
        assert sum(ours.native.stats(d)["read_bytes"] for d in range(len(DEVICES[on]))) == 0
        assert_bits(ours.image(), model.image())
        assert_checksums(ours)
        for _ in range(2):
            model.step(ours.step(), ours.constants)
        assert_bits(ours.image(), model.image())


# ---- other tiles in the same step ------------------------------------------------------------


def test_tiles_with_one_pass_take_part(tmp_path):
    """AdamW's tiles, and tiles that were written and have no gradient, beside those with two passes."""
    adam = (RULES["adamw"], (1.0, 0.9, 0.1, 0.999, 0.001, 0.1, 1.0, 1e-8, 1.0))
    with TwoPasses([str(tmp_path / "a"), str(tmp_path / "b")]) as ours:
        n = len(SHAPES)
        extent = ours.engine.extend([2500, 40], ("master", "exp_avg", "exp_avg_sq"))
        ours.engine.committer.describe(ours.manifest())
        others, other_grads = [torch.ones(2500), torch.ones(40)], [torch.full((2500,), 0.5), torch.full((40,), -0.5)]
        with ours.engine.writing([n, n + 1]):
            for i in range(2):
                ours.engine.windows.window(extent, i, 0, torch.float32).copy_(others[i])
        expected = [(p.clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in others]
        model = Model(ours.params)
        for step in range(3):
            grads = gradients(SHAPES, step)
            if step == 1:  # the last two matrices have no gradient; what is written to them must be stored
                grads[4] = grads[5] = None
                ours.windows()[5].add_(1)
                model.masters[5] += np.float32(1)
            rows = ours.table(grads)
            table = np.zeros(2 * (n + 2), PARAM)
            table[:n], table[n + 2 : 2 * n + 2] = rows[:n], rows[n:]
            table[n : n + 2] = step_table(other_grads, others)
            table["hyper"][n : n + 2] = n + 1
            groups = ours.groups(grads, 2)
            second = order_of_passes([ours.tiles_of(group) for group in groups])
            tiles = np.concatenate([second[:3], ours.tiles_of([n, n + 1]), second[3:]])
            constants = np.concatenate([ours.constants, np.array([adam], HYPER)])
            tiles = ours.engine.begin(table, constants, tiles)
            ours.first_passes(tiles)
            with ours.in_time():
                for g, group in enumerate(groups):
                    ours.orthogonalize(group)
                    ours.second_passes(groups, g)
                ours.engine.finish()
            model.step(grads, ours.constants)
            ours.commit()
            for states, g in zip(expected, other_grads, strict=True):
                bindings.update(constants[-1:], "scalar", g, states, None)
        for i, (states, p) in enumerate(zip(expected, others, strict=True)):
            assert torch.equal(p, states[0])
            for s, state in enumerate(states):
                assert torch.equal(ours.engine.windows.window(extent, i, s, torch.float32), state)
        image, expected_image = ours.image(), model.image()
        assert_bits(image[:5] + image[6:], expected_image[:5] + expected_image[6:])


# ---- order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [SAME_ORDER, AS_PUSHED])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_few_buffers_are_enough(buffers, order):
    shapes = SHAPES * 3
    with TwoPasses([f"file:?buffers={buffers}", "ram:"], shapes) as ours:
        model = Model(ours.params)
        for step in range(4):
            model.step(ours.step(size=1 + step, order=order), ours.constants)
        assert_bits(ours.image(), model.image())


@pytest.mark.parametrize("buffers", [2, 5])
def test_tiles_that_need_no_reading_overtake_nothing_that_waits(buffers, tmp_path):
    """Half of the tiles begin with what was written to their windows; second passes must not take their buffers."""
    shapes = ((32, 32),) * 16
    with TwoPasses([f"file:{tmp_path}?buffers={buffers}"], shapes) as ours:
        model = Model(ours.params)
        for step in range(4):
            ours.engine.states.remap()
            for i in range(0, 16, 1 + step % 2):
                ours.windows()[16 + i].add_(0.5)
                model.momenta[i] += np.float32(0.5)
            grads = ours.step(size=3)
            ours.commit()
            model.step(grads, ours.constants)
        assert_bits(ours.image(), model.image())


@pytest.mark.parametrize("on", ["file", "files", "mixed"])
def test_images_give_the_same_step(on):
    """Pass 1 with an image whose "parameters" are X, pass 2 with one whose "gradients" are O."""
    with TwoPasses(DEVICES[on]) as ours:
        model, n = Model(ours.params), len(ours.engine.tiles)
        grads = gradients(SHAPES, 0)
        tiles = ours.begin(grads, size=len(SHAPES))
        pieces = ours.extent.pieces.tolist()
        images = torch.zeros(4, n, 1024)

        def filled(image, tensors):
            for p, tile, first, at, elems in pieces:
                values = tensors[p].flatten()[first : first + elems]
                image[tile].view(values.dtype)[at * 4 // values.element_size() :][:elems] = values

        def emptied(image, tensors):
            for p, tile, first, at, elems in pieces:
                to = tensors[p].flatten()[first : first + elems]
                to.copy_(image[tile].view(to.dtype)[at * 4 // to.element_size() :][:elems])

        filled(images[0], grads)
        for tile in range(n):
            ours.native.push(tile, Push(images=(images[0, tile].data_ptr(), images[1, tile].data_ptr())))
        assert sorted(ours.native.pull() for _ in range(n)) == [*range(n)]
        emptied(images[1], ours.x)
        for o, x in zip(ours.o, ours.x, strict=True):
            o.copy_(orthogonal(x))
        filled(images[2], ours.o)
        for tile in range(n):
            ours.native.push(tile | PASS_2, Push(images=(images[2, tile].data_ptr(), images[3, tile].data_ptr())))
        assert sorted(ours.native.pull() for _ in range(n)) == [tile | PASS_2 for tile in range(n)]
        emptied(images[3], ours.params)
        ours.engine.finish()
        model.step(grads, ours.constants)
        assert_bits(ours.image(), model.image())
        assert len(tiles) == 2 * n


# ---- undo --------------------------------------------------------------------------------------

UNDOABLE = ["file", "no cache", "one buffer", "files", "ram", "mixed", "paced"]


@pytest.mark.parametrize("until", ["begun", "first", "all of pass 1", "middle of pass 2", "all"])
@pytest.mark.parametrize("on", UNDOABLE)
@pytest.mark.sampled(together=2)
def test_an_undone_step_gives_back_all_bits(on, until):
    """Whatever was complete, also if only the orthogonalization failed; and the next step is taken from there."""
    with TwoPasses(DEVICES[on]) as ours:
        model = Model(ours.params)
        for _ in range(2):
            model.step(ours.step(), ours.constants)
        before, slots = ours.image(), ours.slots()
        grads = gradients(SHAPES, 9)
        groups = ours.groups(grads)
        # All of pass 1 can be waited for only if no second pass is listed before its end, and takes a buffer.
        tiles = ours.begin(grads, size=len(SHAPES) if until == "all of pass 1" else 1)
        if until != "begun":
            first = tiles[tiles < PASS_2]
            for tile in first[: 3 if until == "first" else None].tolist():
                ours.native.push(tile)
            if until == "all of pass 1":
                ours.native.params_ready(first, wait=True)
        updated = {"middle of pass 2": 3, "all": len(groups)}.get(until, 0)
        with ours.in_time():
            for g, group in enumerate(groups[:updated]):
                ours.orthogonalize(group)
                ours.second_passes(groups, g)
            if updated:
                ours.native.params_ready(ours.tiles_of(groups[0])[:2] | np.uint32(PASS_2), wait=True)
        ours.engine.finish(keep=False)
        assert ours.slots() == slots
        undone = undone_params(ours, before)
        assert undone <= {*ours.tiles_of(range(6)).tolist()}
        assert bool(undone) == bool(updated)
        assert_bits(ours.image(), before)
        model.step(ours.step(), ours.constants)
        assert_bits(ours.image(), model.image())


def test_a_finished_step_can_be_taken_back(tmp_path):
    with TwoPasses([str(tmp_path / "a"), str(tmp_path / "b")]) as ours:
        for _ in range(2):
            ours.step()
            ours.commit()
        before, slots = ours.image(), ours.slots()
        ours.step()
        ours.engine.undo_last(np.arange(len(SHAPES)))
        assert ours.slots() == slots
        assert undone_params(ours, before) == {*range(len(ours.engine.tiles))}
        assert_bits(ours.image(), before)


def test_a_second_pass_that_is_missing_undoes_the_step():
    with TwoPasses(["file:"]) as ours:
        ours.step()
        before = ours.image()
        tiles = ours.begin(gradients(SHAPES, 1), size=len(SHAPES))
        ours.first_passes(tiles)
        ours.native.params_ready(tiles[tiles < PASS_2], wait=True)
        with pytest.raises(CSDRuntimeError, match=r"pass 2 of tile \d+ was never pushed"):
            ours.engine.finish()
        assert ours.native.undone() == []
        assert_bits(ours.image(), before)


# ---- what is refused, before anything is changed ---------------------------------------------------


def refused(ours, message, **changed):
    grads = gradients(SHAPES, 0)
    with pytest.raises(CSDValueError, match=message):
        ours.begin(grads, **changed)
    with pytest.raises(CSDRuntimeError, match="no step is under way"):
        ours.engine.finish()


def test_lists_of_passes_that_cannot_be():
    with TwoPasses(["file:"]) as ours:
        before, n = ours.image(), len(ours.engine.tiles)
        good = order_of_passes([np.arange(n, dtype=np.uint32)]).tolist()
        for tiles, message in [
            ([PASS_2, *good[1:]], "tile 0 is listed for pass 2, and not for pass 1 before"),
            ([PASS_2], "tile 0 is listed for pass 2"),
            ([*good, PASS_2], "tile 0 is named twice"),
            ([*good, 0], "tile 0 is named twice"),
            ([*good, n | PASS_2], f"no tile {n}"),
            (good[:n], "parameter 0 has update rule 64 in the only pass over tile 0: all its parameters"),
        ]:
            refused(ours, message, tiles=np.array(tiles, np.uint32))
        ours.begin(gradients(SHAPES, 0))
        with pytest.raises(CSDValueError, match="pass 2 of tile 999 is not part"):
            ours.native.push(999 | PASS_2)
        with pytest.raises(CSDValueError, match="pass 2 of tile 0 is not part of this step, or was not pushed"):
            ours.native.params_ready(np.array([PASS_2], np.uint32), wait=False)
        ours.engine.finish(keep=False)
        assert_bits(ours.image(), before)


def test_rows_that_cannot_be():
    with TwoPasses(["file:"]) as ours:
        n, before = len(SHAPES), ours.image()

        def changed(row, **fields):
            table = ours.table(gradients(SHAPES, 0))
            for name, value in fields.items():
                table[name][row] = value
            return table

        for table, message in [
            (changed(n + 1, grad=0), "parameter 1 has a gradient in one pass only"),
            (changed(1, grad=0), "parameter 1 has a gradient in one pass only"),
            (changed(1, master=FROM_PARAM), "parameter 1 has a master in pass 1"),
            (changed(n + 1, master=SUPPLIED), "states of parameter 1 cannot be given"),
            (changed(1, topk=0.5, topk_dtype=2), "parameter 1 takes two passes, which cannot be sparse"),
            (changed(1, hyper=1), "parameter 1 has update rule 65 in pass 1 over tile 4"),
            (changed(n + 1, hyper=0), "parameter 1 has update rule 64 in pass 2 over tile 4"),
        ]:
            refused(ours, message, params=table)
        with pytest.raises(CSDValueError, match="each parameter has two rows: 11 is odd"):
            ours.native.begin(changed(0)[:-1], ours.constants, np.array([0, PASS_2], np.uint32))
        # A rule with one pass beside one with two, in the same tile:
        constants = ours.constants.copy()
        constants["rule"][2] = RULES["lion"]
        refused(ours, "parameter 1 has update rule 13 in pass 2", hypers=constants)
        assert_bits(ours.image(), before)


def test_no_pass_is_pushed_early():
    with TwoPasses(["file:"]) as ours:
        tiles = ours.begin(gradients(SHAPES, 0))
        assert {ours.native.hold_bytes(tile) for tile in tiles.tolist()} == {0}
        memory = torch.zeros(4096)
        with pytest.raises(CSDValueError, match="cannot be pushed early"):
            ours.native.push(0, Push(grads=[0] * len(ours.engine.tiles.pieces_of(0)), hold=memory.data_ptr()))


def test_states_in_place_and_in_one_slot_are_refused(tmp_path):
    """If a step failed between its passes, these states would stay half updated."""
    with TwoPasses(["ram:"], two_passes=False) as ours:
        assert ours.engine.devices.resident
        refused(ours, r"two passes over tile 0 need a second slot, as its states are updated in place, on device 0")
    engine = Native(lambda device, tile: f"device {device}")
    with open(tmp_path / "tiles", "w+b") as file:
        file.truncate(1 << 20)
        engine.open([DeviceConfig("file", file.fileno(), 3, 4096)])
        pieces = np.array([(0, 0, 0, 0, 1024)], PIECE)
        engine.extend(ExtentConfig(1024, 1, 2, [0], pieces, slots=1))
        grad, x, o, p = (torch.zeros(32, 32) for _ in range(4))
        table = np.concatenate([step_table([grad], [x]), step_table([o], [p])])
        table["hyper"][1] = 1
        tiles = np.array([0, PASS_2], np.uint32)
        with pytest.raises(CSDValueError, match="two passes over tile 0 need a second slot, as it could not be undone"):
            engine.begin(table, hypers([(32, 32)]), tiles)
        pieces["param"] = 1
        engine.extend(ExtentConfig(4096, 1, 3, [65536], pieces, codec="8bit", param_dtype=torch.bfloat16))
        table = np.concatenate([step_table([grad] * 2, [x] * 2), step_table([o] * 2, [p] * 2)])
        with pytest.raises(
            CSDValueError, match="two passes over tile 1 need fp32 states, or codes of a rule with passes"
        ):
            engine.begin(table, hypers([(32, 32)]), tiles + np.uint32(1))
        engine.close()


def test_parameters_without_a_gradient_after_all():
    """Dropped in both passes."""
    with TwoPasses(["file:"]) as ours:
        model = Model(ours.params)
        grads = gradients(SHAPES, 0)
        groups = ours.groups(grads)
        tiles = ours.begin(grads)
        ours.native.drop_grads([2, 4])
        grads[2] = grads[4] = None
        with ours.in_time():
            ours.first_passes(tiles)
            for g, group in enumerate(groups):
                ours.orthogonalize(group)
                ours.second_passes(groups, g)
            ours.engine.finish()
        model.step(grads, ours.constants)
        assert_bits(ours.image(), model.image())


# ---- a process that is killed ------------------------------------------------------------------------


def killed_between_passes(directory, updated):
    """Commit two steps; then complete pass 1 of a third one, and pass 2 of some matrices, and be killed."""
    ours = TwoPasses([f"{directory}/a", f"{directory}/b"])
    for _ in range(2):
        ours.step()
        ours.commit()
    grads = gradients(SHAPES, 9)
    groups = ours.groups(grads)
    tiles = ours.begin(grads, size=len(SHAPES))
    ours.first_passes(tiles)
    for g, group in enumerate(groups[:updated]):
        ours.orthogonalize(group)
        ours.second_passes(groups, g)
    ours.native.params_ready(tiles[tiles < PASS_2], wait=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("updated", [0, 3, len(SHAPES)])
def test_a_kill_between_passes_leaves_the_committed_step(updated, tmp_path):
    child = process(killed_between_passes, tmp_path, updated)
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    model = Model(initial(SHAPES))
    for step in range(2):
        model.step(gradients(SHAPES, step), hypers(SHAPES))
    with TwoPasses([str(tmp_path / "a"), str(tmp_path / "b")], mode="resume") as ours:
        assert ours.engine.states.step == 2
        for p, param in zip(ours.params, model.params, strict=True):
            p.copy_(param)
        assert_bits(ours.image(), model.image())
        ours.done = 2
        model.step(ours.step(), ours.constants)
        assert_bits(ours.image(), model.image())
