"""Drives the engine and its bindings directly: bad arguments, statistics, undone steps, released resources."""

import contextlib
import dataclasses
import gc
import itertools
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.backends import named_devices, on_cards, reading_all
from support.forked import printed
from support.inside import idle_engine_of
from support.memory import io_bytes
from support.states import tile_bytes
from support.tables import step_table
from support.training import flip

from csd_optim import CSDAdam, CSDRuntimeError, CSDStoreError, CSDValueError, bindings
from csd_optim.bindings import HYPER, PIECE, DeviceConfig, ExtentConfig, Native, Push
from csd_optim.devices.machine import numa_node
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.open_engine import open_engine
from csd_optim.optim.rules import ADAMW
from csd_optim.store.layout import ALIGN, GRAIN, MAX_MAPPINGS, TILE_ELEMS, TILES_PER_DEVICE, max_mappings, plan_extent

pytestmark = pytest.mark.at_hand("drives the engine, by windows and addresses")

ADAM = np.array([(bindings.RULES["adamw"], (1.0, 0.9, 0.1, 0.999, 0.001, 0.1, 1.0, 1e-8, 1.0))], HYPER)
_, BETA1, ONE_MINUS_BETA1, *_ = ADAM["c"][0]
STATES = ADAMW.sections[:3]


class Driven:
    """An engine over fp32 parameters of given sizes, whose steps a test drives by hand."""

    def __init__(self, devices, numels=(2500, 40, 3000), tile_elems=1024):
        self.engine = open_engine(parse_devices(devices), tile_elems=tile_elems)
        self.extent = self.engine.extend(numels, STATES)
        self.params = [torch.arange(n, dtype=torch.float32) / 100 for n in numels]
        self.grads = [torch.linspace(-1, 1, n) for n in numels]
        self.windows = {
            name: [self.engine.windows.window(self.extent, i, s, torch.float32) for i in range(len(numels))]
            for s, name in enumerate(("master", "exp_avg", "exp_avg_sq"))
        }
        for master, p in zip(self.windows["master"], self.params, strict=True):
            master.copy_(p)
        self.engine.committer.describe({"params": [{}] * len(numels), "groups": []})
        self.tiles = np.arange(len(self.engine.tiles), dtype=np.uint32)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.engine.closed:
            with contextlib.suppress(CSDRuntimeError):  # no step is under way
                self.engine.finish(keep=False)
        self.engine.close()

    def table(self):
        return step_table(self.grads, self.params)

    def begin(self, **changed):
        self.engine.begin(**{"params": self.table(), "hypers": ADAM, "tiles": self.tiles, **changed})

    def step(self):
        self.begin()
        for tile in self.tiles.tolist():
            self.engine.native.push(tile)
        self.engine.finish()

    def image(self):
        self.engine.states.remap()
        return [t.clone() for t in [*self.params, *itertools.chain(*self.windows.values())]]

    def slots(self):
        return [slot for e in self.engine.tiles.extents for slot in self.engine.states.slots_of(e)[0]["slot"].tolist()]


@pytest.fixture
def driven(devices):
    with Driven(devices) as it:
        yield it


@pytest.fixture
def file(tmp_path):
    with Driven([str(tmp_path / "csd")]) as it:
        yield it


def same(images, others):
    return all(torch.equal(a, b) for a, b in zip(images, others, strict=True))


# ---- bad arguments: refused before anything is touched ------------------------------------


def native():
    return Native(lambda device, tile: str(device))


@pytest.mark.parametrize(
    "devices",
    [
        [],
        [DeviceConfig("tape")],
        [DeviceConfig("")],
        [DeviceConfig("ram"), DeviceConfig("file", -1, 8, 4096)],
        [DeviceConfig("file", 0, 0, 4096)],
        [DeviceConfig("file", 0, 8, 0)],
        [DeviceConfig("file", 0, 8, 4097)],
    ],
)
def test_engine_that_cannot_be(devices):
    with pytest.raises(CSDValueError, match=r"at least one device|no such back end"):
        native().open(devices)


def pieces(*rows):
    return np.array(list(rows), PIECE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tile_elems": 0}, "1024"),
        ({"tile_elems": 1000}, "1024"),
        ({"tile_elems": 1536}, "1024"),
        ({"sum_elems": 1000}, "checksum"),
        ({"sections": 0}, "sections"),
        ({"sections": 5}, "sections"),
        ({"devices": np.array([0, 1], np.uint32)}, "tile 1 names a device"),
        ({"pieces": pieces((0, 2, 0, 0, 8))}, "piece 0"),  # no such tile
        ({"pieces": pieces((0, 0, 0, 1020, 8))}, "piece 0"),  # beyond the tile's end
        ({"pieces": pieces((0, 0, 0, 2**64 - 4, 8))}, "piece 0"),  # beyond the tile's end, by a sum that overflows
        ({"pieces": pieces((0, 0, 0, 8, 2**64 - 4))}, "piece 0"),
        ({"pieces": pieces((0, 1, 0, 0, 8), (1, 0, 0, 0, 8))}, "piece 1"),  # tiles out of order
        ({"pieces": pieces((0, 0, 0, 0, 8), (1, 0, 0, 4, 8))}, "piece 1"),  # overlapping pieces
    ],
)
def test_bad_extent_changes_nothing(changed, message):
    engine = native()
    engine.open([DeviceConfig("ram")])
    good = ExtentConfig(1024, n_tiles=2, sections=3, file_offsets=[0], pieces=pieces((0, 0, 0, 0, 8)))
    with pytest.raises(CSDValueError, match=message):
        engine.extend(dataclasses.replace(good, **changed))
    assert len(engine.extend(good)) == 3
    states, sums = engine.tiles(0, 2, 1, 3)
    assert (len(states), sums.any()) == (2, False)
    with pytest.raises(CSDValueError):
        engine.tiles(0, 3, 1, 3)
    engine.close()


def test_bad_step_is_refused_before_it_begins(driven):
    before = driven.image()
    no_dtype, no_hyper = driven.table(), driven.table()
    no_dtype["grad_dtype"][1] = 3
    no_hyper["hyper"][2] = 1
    for changed, message in [
        ({"params": no_dtype}, "parameter 1"),
        ({"params": no_hyper}, "parameter 2"),
        ({"params": driven.table()[:2]}, "no parameter 2"),
        ({"tiles": np.array([0, len(driven.engine.tiles)], np.uint32)}, f"no tile {len(driven.engine.tiles)}"),
        ({"tiles": np.array([1, 1], np.uint32)}, "tile 1"),
    ]:
        with pytest.raises(CSDValueError, match=message):
            driven.begin(**changed)
        with pytest.raises(CSDRuntimeError, match="no step is under way"):
            driven.engine.finish()
    assert same(driven.image(), before)
    driven.step()


def test_calls_out_of_order(driven):
    for call in (lambda: driven.engine.native.push(0), driven.engine.native.pull, driven.engine.finish):
        with pytest.raises(CSDRuntimeError, match="no step is under way"):
            call()
    driven.step()
    driven.begin(tiles=driven.tiles[1:])
    for call in (driven.begin, driven.engine.states.remap, lambda: driven.engine.extend([5], STATES)):
        with pytest.raises(CSDRuntimeError, match="under way"):
            call()
    with pytest.raises(CSDRuntimeError, match="no tile is left to be pulled"):
        driven.engine.native.pull()
    with pytest.raises(CSDValueError, match="tile 0 is not part"):
        driven.engine.native.push(0)
    with pytest.raises(CSDValueError, match="but not both"):
        driven.engine.native.push(1, Push(images=(driven.grads[0].data_ptr(), 0)))
    with pytest.raises(CSDValueError, match="tile 999"):
        driven.engine.native.push(999)
    driven.engine.native.push(1)
    with pytest.raises(CSDValueError, match="pushed before"):
        driven.engine.native.push(1)
    for tile in driven.tiles[2:].tolist():
        driven.engine.native.push(tile)
    driven.engine.finish()


def test_step_with_a_tile_never_pushed_is_undone(file):
    file.step()
    before, slots = file.image(), file.slots()
    file.begin()
    for tile in file.tiles[:-1].tolist():
        file.engine.native.push(tile)
    with pytest.raises(CSDRuntimeError, match=f"tile {file.tiles[-1]} was never pushed"):
        file.engine.finish()
    assert file.slots() == slots
    assert same(file.image()[3:], before[3:])  # the states; the caller has to restore parameters
    assert {tile for tile, _ in file.engine.native.undone()} <= {*file.tiles[:-1]}


def test_closed_engine(driven):
    driven.engine.close()
    driven.engine.close()
    for call in (driven.begin, lambda: driven.engine.extend([5], STATES)):
        with pytest.raises(CSDRuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("wrong", ["sse9", "avx-2", ""])
def test_instruction_set_that_does_not_exist(wrong):
    used = bindings.isa_used()
    with pytest.raises(CSDValueError, match=f"'{wrong}'"):
        bindings.isa_use(wrong)
    with pytest.raises(CSDValueError, match="at least one"):
        bindings.threads_use(0)
    assert bindings.isa_used() == used


# ---- steps ------------------------------------------------------------------------------------


def test_step_is_that_of_the_updater_alone(driven):
    expected = []
    for p, g in zip(driven.params, driven.grads, strict=True):
        master, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
        for _ in range(3):
            bindings.update(ADAM[:1], "scalar", g, (master, m, v), None)
        expected.append((master, m, v))
    for _ in range(3):
        driven.step()
    driven.engine.states.remap()
    for i, (master, m, v) in enumerate(expected):
        assert torch.equal(driven.params[i], master)
        assert torch.equal(driven.windows["master"][i], master)
        assert torch.equal(driven.windows["exp_avg"][i], m)
        assert torch.equal(driven.windows["exp_avg_sq"][i], v)


def test_images_give_the_same_step(devices):
    """Gradients and parameters can be passed as images of tiles, pushed in any order."""
    with Driven(devices) as one, Driven([f"{d}x" if "csd" in d else d for d in devices]) as other:
        one.step()
        n = other.extent.tile_elems
        grads, params = torch.zeros(len(other.tiles), n), torch.zeros(len(other.tiles), n)
        for piece in other.extent.pieces.tolist():
            p, tile, first, at, elems = piece
            grads[tile, at : at + elems] = other.grads[p][first : first + elems]
        other.begin()
        for tile in reversed(other.tiles.tolist()):
            other.engine.native.push(tile, Push(images=(grads[tile].data_ptr(), params[tile].data_ptr())))
        assert sorted(other.engine.native.pull() for _ in other.tiles) == other.tiles.tolist()
        other.engine.finish()
        for p, tile, first, at, elems in other.extent.pieces.tolist():
            assert torch.equal(params[tile, at : at + elems], one.params[p][first : first + elems])
        assert same(one.image()[3:], other.image()[3:])


def test_windows_show_each_step_right_after_remap(file):
    """A window keeps its address and shows the tile's current slot, even if writes are still in flight."""
    addresses = [w.data_ptr() for w in file.windows["exp_avg"]]
    expected = [torch.zeros_like(g) for g in file.grads]
    for step in range(1, 8):
        file.step()
        file.engine.states.remap()
        assert file.slots() == [step % 2] * len(file.tiles)
        for i, g in enumerate(file.grads):
            expected[i] = expected[i] * BETA1 + g * ONE_MINUS_BETA1
            assert torch.equal(file.windows["exp_avg"][i], expected[i])
    assert [w.data_ptr() for w in file.windows["exp_avg"]] == addresses


def test_windows_write_the_device(file):
    file.step()
    file.engine.states.remap()
    file.windows["exp_avg"][0].fill_(5.0)
    file.step()
    file.engine.states.remap()
    expected = torch.full((2500,), 5.0) * BETA1 + file.grads[0] * ONE_MINUS_BETA1
    assert torch.equal(file.windows["exp_avg"][0], expected)


@pytest.mark.parametrize("devices", [["file:"], ["ram:"], ["ram:", "file:"]])
def test_a_step_begins_with_states_in_its_table(devices):
    """As with those written to windows: in tiles with and without a gradient, whole and in part."""
    written = {(0, "exp_avg"): torch.rand(2500), (1, "master"): torch.rand(40), (2, "exp_avg_sq"): torch.rand(3000)}
    with Driven(devices) as by_window, Driven(devices) as by_table:
        for driven in (by_window, by_table):
            driven.step()
            driven.image()
            table = driven.table()
            table["grad"][1] = 0
            for (row, name), values in written.items():
                if driven is by_window:
                    driven.windows[name][row].copy_(values)
                else:
                    table["edited"][row, STATES.index(name)] = values.data_ptr()
            driven.begin(params=table)
            for tile in driven.tiles.tolist():
                driven.engine.native.push(tile)
            driven.engine.finish()
        for row, _, first, in_tile, n in by_table.engine.tiles.pieces_of(1).tolist():
            read = [torch.empty(n) for _ in STATES]
            by_table.engine.native.decode(1, in_tile, n, read)
            by_window.image()
            for name, values in zip(STATES, read, strict=True):
                assert torch.equal(values, by_window.windows[name][row][first : first + n])
        assert all(map(torch.equal, by_table.image(), by_window.image()))


@pytest.mark.parametrize("pushed", [0, 2, None])
def test_finish_without_keep_undoes_the_step(file, pushed):
    for _ in range(3):
        file.step()
    before, slots = file.image(), file.slots()
    file.begin()
    for tile in file.tiles[:pushed].tolist():
        file.engine.native.push(tile)
    file.engine.finish(keep=False)
    assert file.slots() == slots
    assert same(file.image()[3:], before[3:])
    assert {tile for tile, _ in file.engine.native.undone()} <= {*file.tiles[:pushed]}
    for p, b in zip(file.params, before, strict=False):
        p.copy_(b)
    file.step()
    after = file.image()
    with Driven(["ram:"]) as other:
        for _ in range(4):
            other.step()
        assert same(other.image(), after)
    assert len(file.engine.native.undone()) == 0


def test_null_device_leaves_parameters_alone():
    p = torch.nn.Parameter(torch.randn(5000))
    before = p.detach().clone()
    with CSDAdam([p], lr=1.0, devices=["null:"]) as opt:
        for _ in range(3):
            p.grad = torch.randn(5000)
            opt.step()
        assert torch.equal(p, before)
        assert opt.stats()["flash_write_bytes"] == 0


def test_engines_in_several_threads(tmp_path):
    def train_one(i):
        with Driven([str(tmp_path / f"csd{i}")]) as it:
            for _ in range(20):
                it.step()
            images[i] = it.image()

    images = {}
    threads = [threading.Thread(target=train_one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 4
    assert all(same(images[0], images[i]) for i in range(4))


# ---- resources: memory, threads, files, mappings -------------------------------------------------


def status(name):
    """Return a number from /proc/self/status; VmRSS and the like are in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("device", ["file:", "ram:"])
def test_many_small_optimizers_cost_little_and_give_it_back(device):
    def make(n):
        params = [torch.nn.Parameter(torch.ones(100)) for _ in range(n)]
        opts = [CSDAdam([p], devices=[device]) for p in params]
        for p, opt in zip(params, opts, strict=True):
            p.grad = torch.ones(100)
            opt.step()
        return opts

    make(3)  # starts the pools' threads, and whatever torch allocates once
    gc.collect()
    threads, files, memory = status("Threads"), open_files(), status("VmRSS")
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    opts = make(200)
    assert status("Threads") <= threads + 2
    del opts
    gc.collect()
    assert open_files() == files
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 50
    assert status("VmRSS") <= memory + 20_000


@pytest.mark.parametrize("device", ["file:", "ram:"])
def test_an_optimizer_made_in_a_forked_child_works(device):
    """Although the child has none of the threads that its parent has started."""
    p = torch.nn.Parameter(torch.ones(5000))
    p.grad = torch.ones(5000)
    with CSDAdam([p], devices=device) as opt:
        opt.step()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                with pytest.raises(RuntimeError, match="forked"):
                    opt.step()
                q = torch.nn.Parameter(torch.ones(5000))
                q.grad = torch.ones(5000)
                with CSDAdam([q], devices=device) as own:
                    own.step()
                    own.stats()
                code = 0 if torch.equal(p, q) else 2
            finally:
                os._exit(code)
        for _ in range(300):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert (done, status) == (pid, 0)


def test_tiles_of_a_huge_model_fit_the_number_of_mappings():
    """Linux allows a process 65530 mappings; every tile needs one to four of them."""
    for sections in (1, 3, 4):
        for n in (7e9, 70e9, 1e12):
            extent = plan_extent([int(n)], 2, sections=ADAMW.sections[:sections])
            assert extent.n_tiles * sections <= MAX_MAPPINGS + 4 * 2
    assert plan_extent([7 * 10**9], 2).tile_elems <= TILE_ELEMS


@pytest.mark.parametrize("numels", [[65_536] * 600, [14 * 10**9] * 5, [10**6] * 3 + [10**11] * 2 + [10**5] * 200])
def test_extents_of_a_process_fit_the_number_of_mappings_together(numels):
    """However many join, large and small: the first extent has its usual tiles, the last have one tile per device."""
    mapped = 0
    for i, n in enumerate(numels):
        extent, alone = plan_extent([n], 8, mapped=mapped), plan_extent([n], 8)
        mapped += extent.n_tiles * 3
        assert extent.tile_elems == alone.tile_elems if i == 0 else extent.tile_elems >= alone.tile_elems
        assert min(extent.tiles_of(d) for d in range(8)) >= 1
    assert mapped <= max_mappings()


def test_parameters_join_one_after_another(tmp_path):
    """200 extents on 8 devices: all have windows, a step updates some of them, and close() leaves no mapping behind."""
    n = 65_536
    gc.collect()
    others = bindings.mappings()  # of states that other tests keep alive
    engine = open_engine(parse_devices([f"file:{tmp_path}?scratch=1"] * 8))
    extents = [engine.extend([n], STATES) for _ in range(200)]
    assert 200 * 8 * 3 <= bindings.mappings() <= max_mappings()
    stepping = extents[::60]
    tiles = np.concatenate([np.arange(e.first_tile, e.first_tile + e.n_tiles, dtype=np.uint32) for e in stepping])
    grad, param = torch.ones(n), torch.zeros(n)
    engine.begin(step_table([grad] * 200, [param] * 200), ADAM, tiles)
    for tile in tiles:
        engine.native.push(int(tile))
    engine.finish()
    engine.states.remap()
    for extent in extents[::30]:
        exp_avg = engine.windows.window(extent, 0, 1, torch.float32)
        assert torch.equal(exp_avg, torch.full((n,), 0.1 if extent.first_tile in tiles else 0.0))
    engine.close()
    del engine, exp_avg
    gc.collect()
    assert bindings.mappings() <= others


@pytest.mark.parametrize(("option", "node"), [("?numa=0", 0), ("?numa=off", None), ("", None)])
def test_buffers_and_update_threads_of_a_node(option, node):
    """`numa=0` uses node 0, which every machine has; by default nothing is pinned on a machine with one node."""
    if node is not None and not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    code = f"""if True:
        import os, re, torch
        from pathlib import Path
        from csd_optim import CSDAdam
        p = torch.nn.Parameter(torch.zeros(1 << 21))
        p.grad = torch.ones_like(p)
        with CSDAdam([p], devices=["file:{option}"], tile_size=1 << 20) as opt:
            opt.step()
            [device] = opt.stats()["devices"]
            print(device["numa_node"])
            # Of the mappings with a policy, the pages.
            found = re.findall(r"^\\S+ prefer[^:]*:0 .*?anon=(\\d+)", Path("/proc/self/numa_maps").read_text(), re.M)
            print(sum(map(int, found)) * os.sysconf("SC_PAGE_SIZE") >= device["buffer_bytes"])
            print(p[0].item())
    """
    said = printed(code).split()
    assert said[:2] == [str(node), str(node is not None)]
    assert float(said[2]) == pytest.approx(-1e-3)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_update_threads_of_a_node_keep_to_its_cpus():
    """A node's pool created while the process may use only one CPU keeps its threads on that CPU."""
    code = """if True:
        import os, time, torch
        from csd_optim import CSDAdam, bindings
        one, *others = sorted(os.sched_getaffinity(0))
        params = [torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(2)]
        anywhere, on_node = (CSDAdam([p], devices=[d]) for p, d in zip(params, ("file:", "file:?numa=0")))
        for p in params:
            p.grad = torch.ones_like(p)
        anywhere.step()  # starts the threads that read, write and update anywhere
        os.sched_setaffinity(0, {one})
        on_node.step()
        os.sched_setaffinity(0, {one, *others})
        before = set(os.listdir("/proc/self/task"))
        bindings.threads_use(4 * (1 + len(others)))
        on_node.step()
        new = set(os.listdir("/proc/self/task")) - before
        deadline = time.monotonic() + 20  # by which each has begun, however busy the machine
        while (found := [os.sched_getaffinity(int(task)) for task in new]) != [{one}] * len(new):
            assert time.monotonic() < deadline, found
        print(len(new))
    """
    said = printed(code)
    assert int(said) > 0


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([0], 0), ([1], 1), ([1, 1], 1), ([0, 1], None), ([-1], None), ([], None)],
    ids=str,
)
def test_node_of_a_drive(tmp_path, nodes, expected):
    """sysfs tells the node of a partition, or of several in a RAID, in the directory of the drive's controller."""
    partitions = []
    for i, node in enumerate(nodes):
        controller = tmp_path / f"devices/pci{i}"
        partitions.append(controller / f"nvme/nvme{i}/nvme{i}n1/nvme{i}n1p1")
        partitions[-1].mkdir(parents=True)
        (partitions[-1].parent / "queue").mkdir()
        (controller / "numa_node").write_text(f"{node}\n")
    blocks = tmp_path / "dev/block"
    blocks.mkdir(parents=True)
    if len(nodes) == 1:
        (blocks / "259:1").symlink_to(partitions[0])
    elif nodes:
        slaves = tmp_path / "devices/virtual/block/md0/slaves"
        slaves.mkdir(parents=True)
        for i, partition in enumerate(partitions):
            (slaves / f"{i}").symlink_to(partition)
        (blocks / "259:1").symlink_to(slaves.parent)
    online = tmp_path / "devices/system/node/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-1\n")
    assert numa_node(os.makedev(259, 1), tmp_path) == expected
    online.write_text("0\n")
    assert numa_node(os.makedev(259, 1), tmp_path) is None  # the machine has only node 0


@pytest.mark.ci
@pytest.mark.parametrize("disabled", [0, 1])
def test_huge_pages_that_are_refused_are_told(disabled):
    """`stats()` tells whether the kernel gave huge pages, here to a process for which they may be disabled."""
    code = f"""if True:
        import ctypes, torch
        from csd_optim import CSDAdam
        from csd_optim.store import layout
        assert ctypes.CDLL(None).prctl(41, {disabled}, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
        p = torch.nn.Parameter(torch.zeros(1 << 21))
        p.grad = torch.ones_like(p)
        with CSDAdam([p], devices=["file:?buffers=8", "file:?buffers=1&block=4096"], tile_size=1 << 20) as opt:
            opt.step()
            print(*(d["huge_pages"] for d in opt.stats()["devices"]))
        with CSDAdam([p], devices=["file:?buffers=2", "ram:"], tile_size=1024) as opt:
            opt.step()
            print(*(d["huge_pages"] for d in opt.stats()["devices"]))
    """
    refused_before = huge_pages_refused()
    *large, third, fourth = printed(code).split()
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    huge = not disabled and "[never]" not in enabled
    assert {*large} == {str(huge)} or (huge and huge_pages_refused() > refused_before)  # memory is in small pieces
    assert (len(large), third, fourth) == (2, "None", "None")


def huge_pages_refused():
    """How often the kernel has had no huge page for a process that it would have given one."""
    return int(re.search(r"thp_fault_fallback (\d+)", Path("/proc/vmstat").read_text())[1])


def test_constructing_starts_no_threads():
    code = (
        "import os, torch, csd_optim; n = len(os.listdir('/proc/self/task'));"
        "o = csd_optim.CSDAdam([torch.zeros(5, requires_grad=True)], devices=['file:']);"
        "print(len(os.listdir('/proc/self/task')) - n)"
    )
    assert printed(code) == "0\n"


def test_buffers_do_not_grow_with_the_model():
    def buffer_bytes(n, buffers):
        p = torch.nn.Parameter(torch.zeros(n))
        p.grad = torch.zeros(n)
        with CSDAdam([p], devices=[f"file:?buffers={buffers}"], tile_size=4096) as opt:
            opt.step()
            return opt.stats()["buffer_bytes"]

    each = tile_bytes(4096)[1]
    assert [buffer_bytes(n, 4) for n in (1, 4096, 100_000, 500_000)] == [4 * each] * 4
    assert buffer_bytes(500_000, 9) == 9 * each


@pytest.mark.parametrize(("dtype", "link"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_stats_are_exact(tmp_path, dtype, link, amsgrad):
    n, tile = 1_000_000, 1 << 16
    to_read, to_write = tile_bytes(tile, dtype, 3 + amsgrad)
    p, idle = torch.nn.Parameter(torch.zeros(n, dtype=dtype)), torch.nn.Parameter(torch.zeros(5))
    with CSDAdam(
        [p, idle], devices=[f"file:{tmp_path}/{d}?cache=off" for d in "ab"], tile_size=tile, amsgrad=amsgrad
    ) as opt:
        p.grad = torch.ones(n, dtype=dtype)
        for _ in range(2):
            opt.step()
        opt.stats()
        if not all(d["direct_io"] for d in opt.stats()["devices"]):
            pytest.skip("no direct I/O here: the kernel counts what leaves the page cache, some other time")
        before = io_bytes()
        opt.step()
        stats = opt.stats()
        read, written = (b - a for a, b in zip(before, io_bytes(), strict=True))
    tiles = -(-n // tile)
    assert stats["push_bytes"] == stats["pull_bytes"] == link * n
    assert (stats["flash_read_bytes"], stats["flash_write_bytes"]) == (to_read * tiles, to_write * tiles)
    assert stats["params"] == n
    assert read == pytest.approx(stats["flash_read_bytes"], rel=0.02)
    assert written == pytest.approx(stats["flash_write_bytes"], rel=0.02)
    for key in ("push_bytes", "pull_bytes", "flash_read_bytes", "flash_write_bytes", "params", "buffer_bytes"):
        assert sum(d[key] for d in stats["devices"]) == stats[key]
    assert [d["flash_read_bytes"] for d in stats["devices"]] == [to_read * len(range(d, tiles, 2)) for d in (0, 1)]
    assert 0 < stats["seconds"]["update"] <= stats["seconds"]["step"] + 1
    assert all(stats["seconds"][kind] > 0 for kind in ("read", "write"))


def test_stats_count_only_tiles_with_a_gradient():
    p, q = (torch.nn.Parameter(torch.zeros(8192)) for _ in range(2))
    each, _ = tile_bytes(4096)
    with CSDAdam([p, q], devices=["file:?cache=off"], tile_size=4096) as opt:
        p.grad = q.grad = torch.ones(8192)
        for _ in range(2):  # the first step reads nothing, as the tiles have no state yet
            opt.step()
        assert opt.stats()["flash_read_bytes"] == 4 * each
        q.grad = None
        opt.step()
        assert opt.stats()["flash_read_bytes"] == 2 * each
        assert opt.stats()["push_bytes"] == 8192 * 4


# ---- tiles that stay in their buffers --------------------------------------------------------------

BUFFERS = 3
KEPT_TILE = 4096  # elements
KEPT = {"off": 0, "0": BUFFERS, "2 tiles": BUFFERS + 2, "1GB": 10}  # by `cache`: how many of ten tiles stay in memory


def tiles_read(opt):
    return opt.stats()["flash_read_bytes"] / tile_bytes(KEPT_TILE)[0]


def assert_read(opt, cache):
    least = 10 - KEPT[cache]
    if least in (0, 10):
        assert tiles_read(opt) == least
    else:  # tiles may overtake each other, so the cached ones need not be exactly the first of the next step
        assert least <= tiles_read(opt) < 10


def cached(place, cache, sizes=(20_000, 20_000), **options):
    params = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    cache = f"{5 * tile_bytes(KEPT_TILE)[1] // 2}B" if cache == "2 tiles" else cache
    device = f"file:{place}?buffers={BUFFERS}&cache={cache}"
    return params, CSDAdam(params, devices=device, tile_size=KEPT_TILE, **options)


def give_grads(params, with_grad=None):
    for i, p in enumerate(params):
        p.grad = torch.randn_like(p) if with_grad is None or i in with_grad else None


@pytest.mark.parametrize("cache", KEPT)
def test_a_step_does_not_read_what_buffers_have(tmp_path, cache):
    params, opt = cached(tmp_path, cache)
    _, each = tile_bytes(KEPT_TILE)
    with opt:
        for step in range(5):
            give_grads(params)
            opt.step()
            if step == 0:  # nothing to read; masters are written as well, so that the step can be undone
                assert tiles_read(opt) == 0
                assert opt.stats()["flash_write_bytes"] == 10 * (each + 4 * KEPT_TILE)
                continue
            assert_read(opt, cache)
            assert opt.stats()["flash_write_bytes"] == 10 * each
        assert opt.stats()["buffer_bytes"] == max(BUFFERS, KEPT[cache]) * each
        opt.state[params[0]]["exp_avg"].sum()  # reading alone changes nothing
        give_grads(params)
        opt.step()
        assert_read(opt, cache)


def test_no_more_memory_than_tiles(tmp_path):
    params, opt = cached(tmp_path, "1GB")
    with opt:
        for tiles in (10, 15):
            give_grads(params)
            opt.step()
            assert opt.stats()["buffer_bytes"] == tiles * tile_bytes(KEPT_TILE)[1]
            params.append(torch.nn.Parameter(torch.randn(20_000)))
            opt.add_param_group({"params": params[-1:]})


@pytest.mark.fp32_states("only fp32 states are mapped")
def test_what_may_have_been_written_through_a_window_is_read_again():
    """Writes to a scratch store's windows go to the file unnoticed, so tiles that were shown are read again."""
    params, opt = cached("", "1GB")
    others, oracle = cached("", "off")
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    with opt, oracle:
        for step in range(6):
            give_grads(params)
            for p, q in zip(params, others, strict=True):
                q.grad = p.grad.clone()
            opt.step()
            oracle.step()
            assert tiles_read(opt) == (10 if step == 4 else 0)
            if step == 3:
                for optimizer, (p, _) in ((opt, params), (oracle, others)):
                    optimizer.state[p]["exp_avg"].numpy()[:3] = 1.5
        for p, q in zip(params, others, strict=True):
            assert all(torch.equal(opt.state[p][key], oracle.state[q][key]) for key in opt.state[p])


@pytest.mark.parametrize("buffers", [1, 2, 3, 8])
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16], ids=["direct", "by image"])
def test_steps_over_changing_tiles(tmp_path, buffers, grad_dtype):
    """Whatever buffers keep from earlier steps, every step completes, and with the same bits."""
    choose = random.Random(1)
    results = []
    takes_part = [[i for i in range(4) if choose.random() < 0.6] for _ in range(30)]
    for cache in ("off", "0", "50KiB"):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(4000)) for _ in range(4)]
        device = f"file:{tmp_path}/{cache}?buffers={buffers}&cache={cache}"
        with CSDAdam(params, devices=device, tile_size=1024, grad_dtype=grad_dtype) as opt:
            for with_grad in takes_part:
                give_grads(params, with_grad)
                opt.step()
            results.append([t.clone() for p in params for t in (p.detach(), *opt.state[p].values())])
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_what_was_read_for_an_undone_step_is_read_again(tmp_path):
    with Driven([f"file:{tmp_path}?buffers=4&cache=1GB"]) as it:
        it.step()
        it.step()
        before, slots = it.image(), it.slots()
        it.begin()
        for tile in it.tiles[:3].tolist():
            it.engine.native.push(tile)
        it.engine.finish(keep=False)
        assert it.slots() == slots
        assert same(it.image()[3:], before[3:])
        for p, was in zip(it.params, before, strict=False):
            p.copy_(was)
        it.step()
        assert it.engine.committer.stats()[0]["read_bytes"] == len(it.engine.tiles) * 1024 * 12
        twice = it.image()
    with Driven(["ram:"]) as other:
        for _ in range(3):
            other.step()
        assert same(other.image(), twice)


# ---- layout ----------------------------------------------------------------------------------------


SIZES = [1, 15, 16, 17, GRAIN - 1, GRAIN, GRAIN + 1, 3 * GRAIN + 5]


@pytest.mark.parametrize("n_devices", [1, 2, 3, 7])
@pytest.mark.parametrize("tile_elems", [None, 1, GRAIN, 2 * GRAIN])
def test_every_element_is_in_exactly_one_piece(n_devices, tile_elems):
    for numels in [[], [0], *([n] for n in SIZES), *itertools.permutations(SIZES, 3), [0, 5, 0, 0, 9], SIZES * 9]:
        e = plan_extent(numels, n_devices, tile_elems=tile_elems, first_param=7, first_tile=3)
        assert e.tile_elems % GRAIN == 0
        assert e.tile_elems > 0
        assert all(start % ALIGN == 0 for start in e.starts)
        assert e.n_tiles * e.tile_elems >= sum(numels)
        counts = [e.tiles_of(d) for d in range(n_devices)]
        assert sum(counts) == e.n_tiles
        assert max(counts) - min(counts) <= 1

        order = [(p["tile"], p["tile_first"]) for p in e.pieces]
        assert order == sorted(order)
        covered = np.zeros(e.n_tiles * e.tile_elems, np.uint8)
        seen = dict.fromkeys(range(len(numels)), 0)
        for param, tile, first, at, n in e.pieces.tolist():
            param -= 7
            assert n > 0
            assert at + n <= e.tile_elems
            assert first == seen[param], "pieces of a parameter follow one another"
            assert tile * e.tile_elems + at == e.starts[param] + first
            seen[param] += n
            covered[tile * e.tile_elems + at :][:n] += 1
        assert list(seen.values()) == list(numels)
        assert covered.max(initial=0) <= 1
        assert covered.sum() == sum(numels)


@pytest.mark.parametrize("n", [1, 10**6, 3 * 10**8])
@pytest.mark.parametrize("n_devices", [1, 3])
def test_chosen_tiles_keep_every_device_busy(n, n_devices):
    e = plan_extent([n], n_devices)
    counts = [e.tiles_of(d) for d in range(n_devices)]
    if n > GRAIN * n_devices * TILES_PER_DEVICE:
        assert min(counts) >= TILES_PER_DEVICE - 1
        assert e.n_tiles * e.tile_elems < 1.1 * n + GRAIN * n_devices * TILES_PER_DEVICE
    assert e.tile_elems <= max(1 << 20, GRAIN)


# ---- checksums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # these two values are from RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_known_values(data, crc):
    assert bindings.crc32c(data) == crc
    for cut in range(len(data) + 1):
        assert bindings.crc32c(data[cut:], bindings.crc32c(data[:cut])) == crc
    assert bindings.crc32c(memoryview(b"x" + data)[1:]) == crc  # unaligned


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, os.cpu_count()),
        ({"LOCAL_WORLD_SIZE": "2"}, max(1, os.cpu_count() // 2)),
        ({"LOCAL_WORLD_SIZE": "999"}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "CSD_OPTIM_THREADS": "5"}, 5),
    ],
)
def test_update_threads(environment, threads):
    if len(os.sched_getaffinity(0)) != os.cpu_count():
        pytest.skip("this process may not use all CPUs")
    others = {k: v for k, v in os.environ.items() if k not in ("LOCAL_WORLD_SIZE", "CSD_OPTIM_THREADS")}
    # The module reads the environment when it is loaded, so the child loads it a second time.
    code = "import importlib; from csd_optim import bindings; print(importlib.reload(bindings).threads_used())"
    assert int(printed(code, environment=others | environment)) == threads


@pytest.mark.cards
@pytest.mark.parametrize("section", range(3))
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_damage_in_the_middle_of_a_tile_changes_no_parameter(tmp_path, section):
    """A tile is verified chunk by chunk: when damage is found, parameters of earlier chunks are already written."""
    devices = reading_all(named_devices(tmp_path, 1))

    def begun(devices):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(40, 100).bfloat16().t())
        return p, CSDAdam([p], devices=devices, tile_size=4096)

    def step(p, opt):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        opt.step()

    p, opt = begun(devices)
    step(p, opt)
    opt.synchronize()
    before = p.detach().clone()
    flip(devices[0], section, 2500)  # in the third chunk
    with pytest.raises(CSDStoreError, match="is not what was written there"):
        step(p, opt)
    assert [elems for _, elems in idle_engine_of(opt).native.undone()] == ([] if on_cards() else [2048])
    assert torch.equal(p, before)
    flip(devices[0], section, 2500)
    step(p, opt)
    opt.close()
    same, memory = begun("ram:")
    for _ in range(2):
        step(same, memory)
    assert torch.equal(p, same)
