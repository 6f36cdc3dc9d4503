"""Stores with random changes, whose checksums are right."""

import copy
import json
import struct
from dataclasses import replace

from csd_optim.bindings import crc32c
from csd_optim.store.format import PAGE, Superblock

VALUES = (-1, 0, 1, 3, 4095, 1 << 31, 1 << 45, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, 0.5, 1e308, float("nan"))
VALUES += (float("inf"), True, False, None, "", "x", "\ud800", [], {}, [0], ["x"], [[]], {"x": 1}, [1e-300], [1, 1, 1])


class Forged:
    """A store with random changes, whose checksums are right."""

    def __init__(self, data, choose):
        self.choose = choose
        self.block = Superblock.unpack(data[:PAGE], "")
        parts = (self.block.manifest, self.block.table)
        self.manifest, self.table = (data[r.base : r.base + r.size] for r in parts)
        self.data = data
        self.what = choose.choice(
            [self._tree, self._tree, self._tree, self._text, self._entries, self._record, self._head]
        )
        for _ in range(choose.choice([1, 1, 2, 5])):
            self.what()
        self.block = self._place("table", self.table, self._place("manifest", self.manifest, self.block))

    def _place(self, name, data, block):
        region = getattr(block, name)
        if self.what == self._head and data == self.data[region.base : region.base + len(data)]:
            return block  # _head() has forged the place itself
        if len(data) > region.room:  # move it to the end of the file
            base = -(-len(self.data) // PAGE) * PAGE
            room = -(-len(data) // PAGE) * PAGE
            self.data = self.data.ljust(base, b"\0") + bytes(2 * room)
            region = region._replace(base=base, room=room)
        return replace(block, **{name: region._replace(size=len(data), crc=crc32c(data))})

    def _mutated(self, tree):
        """The tree with a random value replaced, removed or duplicated."""
        choose, at, path = self.choose, tree, []
        while isinstance(at, (list, dict)) and len(at) and (not path or choose.random() < 0.8):
            key = choose.choice([*at]) if isinstance(at, dict) else choose.randrange(len(at))
            path.append((at, key))
            at = at[key]
        if path:
            parent, key = path[-1]
            how = choose.random()
            if how < 0.7:
                parent[key] = choose.choice(VALUES)
            elif how < 0.8 and type(at) in (int, float):
                parent[key] = at + choose.choice([-PAGE, -1, 1, 16, PAGE])
            elif how < 0.9 or isinstance(parent, dict):
                del parent[key]
            else:
                parent.insert(key, copy.deepcopy(at))
        return tree

    def _tree(self):
        try:
            self.manifest = json.dumps(self._mutated(json.loads(self.manifest))).encode()
        except ValueError:  # an earlier change has made it invalid JSON
            self._text()

    def _text(self):
        choose, at = self.choose, self.choose.randrange(len(self.manifest) + 1)
        insert = choose.choice(
            [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"NaN", b"-1", b'"\\ud800"', b"\xff", b"1e999", b'"a":1,']
        )
        self.manifest = self.manifest[:at] + insert + self.manifest[at + choose.randrange(20) :]

    def _entries(self):
        at = self.choose.randrange(max(1, len(self.table) // 4)) * 4
        value = self.choose.choice([0, 1, 2, 0xFFFFFFFF, 0x7FF00000, 1 << 31])
        self.table = self.table[:at] + struct.pack("<I", value) + self.table[at + 4 :]
        if self.choose.random() < 0.2:
            self.table = self.table[: self.choose.randrange(len(self.table) + 1)]

    def _record(self):
        at = self.table.find(b'{"groups"')
        if at < 4:
            return self._entries()
        (size,) = struct.unpack_from("<I", self.table, at - 4)
        try:
            record = json.dumps(self._mutated(json.loads(self.table[at : at + size]))).encode()
        except ValueError:
            return self._entries()
        rest = self.table[at + size :]
        if self.choose.random() < 0.2:
            rest = self.choose.choice([b"", b"x", rest[: len(rest) // 2], b"\x80\x04."])
        self.table = self.table[: at - 4] + struct.pack("<I", len(record)) + record + rest

    def _head(self):
        number = self.choose.choice(
            [0, 1, 2, 3, 4, 4095, 4096, 8192, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 45, (1 << 64) - 1]
        )
        name = self.choose.choice(
            ["device", "devices", "sequence", "step", "flags", "version", "round", "manifest", "table"]
        )
        if name in ("manifest", "table"):
            number = getattr(self.block, name)._replace(**{self.choose.choice(["base", "room", "size"]): number})
        elif name in ("device", "devices", "flags", "version"):
            number &= 0xFFFFFFFF
        self.block = replace(self.block, **{name: number})

    def write(self, file):
        with open(file, "wb") as out:
            out.write(self.data)
            for copy_ in range(2):
                for region, data in ((self.block.manifest, self.manifest), (self.block.table, self.table)):
                    if region.offset(copy_) + len(data) <= len(self.data):
                        out.seek(region.offset(copy_))
                        out.write(data)
            for copy_ in range(2):
                out.seek(copy_ * PAGE)
                out.write(self.block.pack())
