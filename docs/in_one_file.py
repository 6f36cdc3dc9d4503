"""The idea of csd_optim in one file: opens a store that CSDAdam made and trains it; CSDAdam goes on from there.

csd_optim keeps AdamW's fp32 states on drives, and promises two things: after any crash, training goes on from a step
that was committed on all drives; and a step has the same bits everywhere. This file keeps both promises with NumPy
alone, in four parts: the format, the commit, the update rule, the undo. What makes csd_optim fast is not in it, nor
8-bit states, other rules or several ranks: it refuses their stores. docs/store-format.md defines each byte of a store,
and tests/store/test_in_one_file.py has this file and CSDAdam continue each other's stores, after kills as well.

    store = Store("/mnt/nvme0", "/mnt/nvme1")  # the directories that CSDAdam had as `devices`
    store.groups[0]["lr"] = 1e-4
    masters = store.update({"weight": gradient})  # fp32 values by name, in the order of the parameter's memory
    store.commit()  # or store.undo()
"""

import copy
import fcntl
import json
import math
import os
import sys
from pathlib import Path

import numpy as np

# ---- 1. The format ----------------------------------------------------------------------------
# The parameters of a model, one after another, are a flat space that is cut into tiles. Each tile is on one device. The
# file of a device is
#
#     superblock 0 | superblock 1 | tiles with two slots each, and twice a manifest and a table, all on whole pages
#
# A slot holds the states of a tile, one section after another: master, exp_avg, exp_avg_sq. There are two, because a
# step reads one and writes the other: the old states are untouched until the commit. The manifest says where each
# parameter is; the table says which slot counts, and what its checksums are. Both have two copies, as superblocks have.

PAGE = 4096
KNOWN = {"chunk_sums", "shares", "tile_numbers"}  # features of a store; a program that meets another must not go on
REGION = np.dtype([("base", "<u8"), ("room", "<u8"), ("size", "<u8"), ("crc", "<u4")])  # copy c: at base + c * room
# fmt: off
SUPERBLOCK = np.dtype([
    ("magic", "S8"), ("version", "<u4"), ("order", "<u4"), ("store_id", "V16"), ("device", "<u4"), ("devices", "<u4"),
    ("sequence", "<u8"), ("step", "<u8"), ("flags", "<u4"), ("manifest", REGION), ("table", REGION), ("round", "<u8"),
    ("zeros", "V3968"), ("crc", "<u4"),
])  # order: 0x01020304 on a machine of this byte order; sequence: counts commits; flags: 1 if closed in order
# fmt: on

# CRC-32C looks up a table once a byte. The loop is the same for bytes, which iterate as numbers, and for an array with
# a chunk in each column: then NumPy computes the checksums of all columns at once.
CRC = np.arange(256, dtype=np.uint32)
for _ in range(8):
    CRC = np.where(CRC & 1, CRC >> 1 ^ 0x82F63B78, CRC >> 1).astype(np.uint32)


def crc32c(data):
    table, crc = CRC.tolist() if isinstance(data, bytes) else CRC, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def sums_of(tile, sum_elems):
    """Return the checksums of a tile: a row for each chunk of `sum_elems` elements, a column for each section."""
    whole = tile.shape[1] // sum_elems * sum_elems
    parts = [tile[:, :whole].reshape(-1, sum_elems), tile[:, whole:]]  # the last chunk may be shorter
    chunks = [np.ascontiguousarray(part).view(np.uint8) for part in parts if part.size]
    sums = [crc32c(rows.T.astype(np.uint32, order="C")).reshape(len(tile), -1) for rows in chunks]
    return np.concatenate(sums, axis=1).T


def require(condition, why):
    if not condition:
        raise ValueError(f"cannot go on with this store: {why}")


class Table:
    """What a commit says of one device: slot and checksums of each tile, step counts, hyperparameters."""

    def __init__(self, data, manifest):
        self.tiles, at = [], 0
        for e in manifest["extents"]:  # an extent: the parameters that joined the optimizer together
            shape = math.ceil(e["tile_elems"] / e["sum_elems"]), len(e["sections"])
            entry = np.dtype([("slot", "<u4"), ("summed", "<u4"), ("sums", "<u4", shape)])
            self.tiles.append(np.frombuffer(data, entry, e["tiles"], at).copy())
            at += self.tiles[-1].nbytes
        self.steps = np.frombuffer(data, "<f8", len(manifest["params"]), at).copy()  # how often each was updated
        at += self.steps.nbytes + 4
        end = at + int.from_bytes(data[at - 4 : at], "little")
        self.record, self.user_state = json.loads(data[at:end]), data[end:]

    def pack(self):
        record = json.dumps(self.record).encode()
        parts = [tiles.tobytes() for tiles in self.tiles] + [self.steps.tobytes(), len(record).to_bytes(4, "little")]
        return b"".join([*parts, record, self.user_state])


class Device:
    """The file of one device, locked as CSDAdam locks it, and its last commit."""

    def __init__(self, directory):
        self.file = open(Path(directory, "csd_optim.store"), "r+b", buffering=0)  # noqa: SIM115
        self.fd = self.file.fileno()
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A process that was killed leaves data that no flush has covered. Flush them, and read what is on the drive.
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.copies = [self.read_copy(c) for c in range(2)]

    def write(self, data, offset):
        require(os.pwrite(self.fd, data, offset) == len(data), f"{self.file.name} took only a part of a write")

    def read_copy(self, c):
        """Return superblock, manifest and table of a copy, or None if one of the three checksums is wrong."""
        page = os.pread(self.fd, PAGE, c * PAGE)
        if len(page) < PAGE or crc32c(page[:-4]) != int.from_bytes(page[-4:], "little"):
            return None
        block = np.frombuffer(page, SUPERBLOCK)[0]
        require(block["magic"] == b"CSDOPTIM" and block["version"] == 4, "it is not of format 4")
        require(block["order"] == 0x01020304, "it is from a machine of the other byte order")
        regions = block["manifest"].item(), block["table"].item()
        found = [(os.pread(self.fd, size, base + c * room), crc) for base, room, size, crc in regions]
        return (block, *(data for data, _ in found)) if all(crc32c(data) == crc for data, crc in found) else None

    def write_copy(self, c, block, table):
        for region, data in ((block["manifest"].item(), self.packed_manifest), (block["table"].item(), table)):
            self.write(data, region[0] + c * region[1])
        self.write(block.tobytes(), c * PAGE)
        os.fdatasync(self.fd)

    def read_tile(self, e, j):
        """Return the states of this device's tile `j` of extent `e`, a section in each row. Verifies its checksums."""
        extent, (slot, _, sums) = self.manifest["extents"][e], self.table.tiles[e][j]
        size = 4 * extent["tile_elems"] * len(extent["sections"])
        data = os.pread(self.fd, size, extent["file_offset"] + (2 * j + int(slot)) * size)
        tile = np.frombuffer(data, np.float32).reshape(-1, extent["tile_elems"]).copy()
        require((sums_of(tile, extent["sum_elems"]) == sums).all(), f"tile {j} in {self.file.name} is damaged")
        return tile

    def write_tile(self, e, j, tile, table):
        """Write new states into the slot that the last commit does not name, and enter it in `table`."""
        extent, slot = self.manifest["extents"][e], 1 - int(self.table.tiles[e][j]["slot"])
        self.write(tile.tobytes(), extent["file_offset"] + (2 * j + slot) * tile.nbytes)
        table.tiles[e][j] = slot, 1, sums_of(tile, extent["sum_elems"])
        table.record["written_bytes"] += tile.nbytes

    def end(self):
        """Return the byte after everything that the last commit names."""
        extents, regions = self.manifest["extents"], (self.block["manifest"].item(), self.block["table"].item())
        tiles = (e["file_offset"] + 2 * 4 * e["tiles"] * e["tile_elems"] * len(e["sections"]) for e in extents)
        return max(*tiles, *(base + 2 * room for base, room, *_ in regions))


# ---- 2. The commit ----------------------------------------------------------------------------
# A commit makes a step durable on all devices, or on none:
#
#     on every device:                   flush the new slots; write copy 0 of manifest, table and superblock; flush
#     when all have done that, on each:  write copy 1; flush
#
# So at any moment there is a sequence that is whole on all devices: the new one in copy 0, or the old one in copy 1. A
# flush precedes whatever relies on it, since drives write in any order.


def commit(devices, tables, step):
    blocks, packed = [device.block.copy() for device in devices], [table.pack() for table in tables]
    for device, block, data in zip(devices, blocks, packed, strict=True):
        base, room, *_ = block["table"].item()
        if len(data) > room:  # the table has outgrown its two spaces: take others
            base, room = (-(-n // PAGE) * PAGE for n in (device.end(), len(data)))
        block["table"] = base, room, len(data), crc32c(data)
        block["sequence"], block["step"], block["flags"] = int(block["sequence"]) + 1, step, 0
        block["crc"] = crc32c(block.tobytes()[:-4])
    for c in range(2):
        for device, block, table, data in zip(devices, blocks, tables, packed, strict=True):
            os.fdatasync(device.fd)
            device.write_copy(c, block, data)
            device.block, device.table = block, table


def recover(devices):
    """Find the last commit that is whole on all devices, bring both copies to it, and forget what came later."""
    commits = [{int(found[0]["sequence"]): found for found in device.copies if found} for device in devices]
    require(common := set.intersection(*map(set, commits)), "no commit is whole on all devices")
    last = [found[max(common)] for found in commits]
    here = sorted((int(b["device"]), int(b["devices"]), b["store_id"].tobytes()) for b, _, _ in last)
    expected = [(i, len(here), here[0][2]) for i in range(len(here))]
    require(here == expected, "these are not the devices of one store, or not all of them")
    for device, (device.block, device.packed_manifest, table) in zip(devices, last, strict=True):
        device.manifest = json.loads(device.packed_manifest)
        unknown = {*device.manifest["features"]} - KNOWN
        require(not unknown and "rank" not in device.manifest, f"it has {unknown or 'ranks'}")
        device.table = Table(table, device.manifest)
    for device, (block, _, table) in zip(devices, last, strict=True):
        for c, found in enumerate(device.copies):
            if not found or found[0]["sequence"] != block["sequence"]:
                device.write_copy(c, block, table)
        os.ftruncate(device.fd, device.end())


# ---- 3. The update rule -----------------------------------------------------------------------
# AdamW in fp32. For the same bits everywhere, each operation is rounded to nearest by itself, and subnormal numbers
# are zero, as on an FPGA. NumPy keeps subnormals. So compute in float64 and round again: of fp32 numbers float64 has
# exact products, and so many bits of sums, quotients and roots that rounding twice changes nothing. What is subnormal
# is decided after rounding to 24 bits: a little less than the smallest normal number still becomes that number.

SMALLEST, ROUNDS_TO_SMALLEST = 2.0**-126, 2.0**-126 - 2.0**-151


def fp32(exact):
    return np.where(np.abs(exact) < ROUNDS_TO_SMALLEST, np.copysign(0, exact), exact).astype(np.float32).astype(float)


def operand(x):
    """Return a number from elsewhere as an operand: rounded to fp32, and zero instead of a subnormal number."""
    x = np.float32(x).astype(float)
    return np.where(np.abs(x) < SMALLEST, np.copysign(0, x), x)


@np.errstate(all="ignore")
def adamw(states, gradient, group, t, grad_scale):
    """Update the states: rows master, exp_avg, exp_avg_sq, with amsgrad max_exp_avg_sq. `t`: 1 in the first step."""
    lr, eps, weight_decay, (beta1, beta2) = float(group["lr"]), group["eps"], group["weight_decay"], group["betas"]
    decay, b1, one_minus_b1, b2, one_minus_b2, step_size, inv_sqrt_bias2, eps = map(operand, (  # in double
        1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**t), 1 / (1 - beta2**t) ** 0.5, eps
    ))  # fmt: skip
    master, m, v = operand(states[:3])
    g = fp32(operand(gradient) * operand(-grad_scale if group["maximize"] else grad_scale))
    master = fp32(master * decay)
    m = fp32(fp32(m * b1) + fp32(g * one_minus_b1))
    v = largest = fp32(fp32(v * b2) + fp32(fp32(one_minus_b2 * g) * g))
    if group["amsgrad"]:
        states[3] = largest = np.maximum(v, operand(states[3]))
    denominator = fp32(fp32(fp32(np.sqrt(largest)) * inv_sqrt_bias2) + eps)
    states[:3] = fp32(master - fp32(fp32(step_size * m) / denominator)), m, v


# ---- 4. The undo ------------------------------------------------------------------------------
# A step fills slots that no commit names, and enters them in new tables. To undo it, drop these: nothing has to be
# restored. That serves a gradient that is not finite, a drive that fails in the midst of a step, and a process that is
# killed, whose step is undone by whoever opens the store next.


class Store:
    def __init__(self, *directories):
        self.devices = [Device(directory) for directory in directories]
        recover(self.devices)
        for device, e, j, _ in self.tiles():
            device.read_tile(e, j)  # verifies its checksums
        self.params, self.step = self.devices[0].manifest["params"], int(self.devices[0].block["step"])
        self.groups = copy.deepcopy(self.devices[0].table.record["groups"])
        self.new = None  # the tables of a step that is neither committed nor undone

    def tiles(self):
        """Yield for each tile its device, its extent and number there, and the range of the extent's elements in it."""
        for device in self.devices:
            for e, extent in enumerate(device.manifest["extents"]):
                for j, number in enumerate(extent["tile_numbers"]):
                    yield device, e, j, range(number * extent["tile_elems"], (number + 1) * extent["tile_elems"])

    def update(self, gradients, grad_scale=1.0):
        """Write the states after one more step into the other slots, and return the new masters, by name."""
        require(self.devices and self.new is None, "commit or undo the step, or after an error open the store again")
        masters, rows = {}, {p["name"]: row for row, p in enumerate(self.params) if p["group"] >= 0}
        for name, gradient in gradients.items():
            masters[name] = np.empty(self.params[rows[name]]["numel"], np.float32)
            require(np.shape(gradient) == masters[name].shape, f"the gradient of {name} has another shape")
        tables = [copy.deepcopy(device.table) for device in self.devices]
        for table in tables:
            table.steps[[rows[name] for name in gradients]] += 1
            table.record["groups"] = copy.deepcopy(self.groups)
        for device, e, j, elements in self.tiles():
            tile, table = None, tables[self.devices.index(device)]
            for name, gradient in gradients.items():
                p, t = self.params[rows[name]], float(table.steps[rows[name]])
                begin, end = max(p["start"], elements.start), min(p["start"] + p["numel"], elements.stop)
                if p["extent"] == e and begin < end:
                    tile = device.read_tile(e, j) if tile is None else tile
                    here, there = (slice(begin - at, end - at) for at in (elements.start, p["start"]))
                    adamw(tile[:, here], gradient[there], self.groups[p["group"]], t, grad_scale)
                    masters[name][there] = tile[0, here]
            if tile is not None:
                device.write_tile(e, j, tile, table)
        self.new = tables
        return masters

    def undo(self):
        self.new = None

    def commit(self):
        devices, self.devices = self.devices, []  # after an error nobody knows what is on the drives
        tables, self.step, self.new = self.new or [d.table for d in devices], self.step + bool(self.new), None
        commit(devices, tables, self.step)
        self.devices = devices

    def close(self):
        for device in self.devices:
            device.file.close()


if __name__ == "__main__":
    store = Store(*sys.argv[1:])
    print(f"step {store.step} on {len(store.devices)} devices; all checksums are right")
    print(*(f"  {p['name']}: {p['numel']} elements of {p['dtype']}" for p in store.params), sep="\n")
