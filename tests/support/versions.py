"""A writer of versions without a training: random tensors, of which random elements change."""

import math

import numpy as np

from csd_optim.publish.encode import DeltaWriter, form_of, write_tensors
from csd_optim.publish.folder import Folder, manifest_of
from csd_optim.replica.blocks import BITMAP, BLOCK, SPARSE, checksum
from csd_optim.replica.versions import Tensor


class Writer:
    """Publishes `values` (name → flat uint16 array) in a folder; `changed` says what differs from the last version."""

    def __init__(self, path, shapes, dtype="BF16"):
        self.path, self.shapes, self.dtype = path, shapes, dtype
        self.random = np.random.default_rng(0)
        self.values = {n: self._some(math.prod(shape)) for n, shape in shapes.items()}
        self.changed = {n: np.zeros(len(v), bool) for n, v in self.values.items()}
        self.folder, self.run, self.base, self.last_full = Folder(path), "run", None, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder.close()

    def _some(self, n):
        return self.random.integers(0, 1 << 16, n, dtype=np.uint16)

    def lists(self):
        return {name: values.tolist() for name, values in self.values.items()}

    def change(self, share):
        for name, values in self.values.items():
            which = self.random.random(len(values)) < share
            values[which] = self._some(int(which.sum()))
            self.changed[name] |= which

    def new_run(self):
        self.run, self.base = self.run + "'", None

    def tensors(self):
        return [Tensor(n, self.dtype, self.shapes[n], checksum(v)) for n, v in self.values.items()]

    def full(self):
        number = self.folder.next_number()
        pending = self.folder.begin(number)
        file = write_tensors(pending / "model.safetensors", self.tensors(), self.values.values())
        self.last_full = number
        return self._name(pending, number, None, file)

    def delta(self):
        number = self.folder.next_number()
        pending = self.folder.begin(number)
        with DeltaWriter(pending / "delta-0.bin", number) as writer:
            for i, (name, values) in enumerate(self.values.items()):
                for at in range(0, len(values), BLOCK):
                    add_changes(writer, i, at, values[at : at + BLOCK], self.changed[name][at : at + BLOCK])
            file = writer.finish([(i, 0, len(values)) for i, values in enumerate(self.values.values())])
        return self._name(pending, number, self.base, file)

    def _name(self, pending, number, base, file):
        self.folder.complete(pending, manifest_of(self.run, number, number, base, self.tensors(), [file]))
        self.base = self.folder.name(pending)
        for changed in self.changed.values():
            changed[:] = False
        return self.base


def add_changes(writer, slice, first, values, changed):
    """Append a block: the values of all its elements (uint16), and which of them have changed (bool)."""
    count, elems = int(changed.sum()), len(values)
    if not count:
        return
    kind = form_of(count, elems)
    if kind == SPARSE:
        at = np.flatnonzero(changed)
        payload = (at.astype(np.uint32) | values[at].astype(np.uint32) << np.uint32(16)).tobytes()
    elif kind == BITMAP:
        bits = np.packbits(changed, bitorder="little").tobytes()
        payload = bits + bytes(-len(bits) % 8) + values[changed].tobytes()
    else:
        payload, count = values.tobytes(), elems
    writer.add(slice, first, elems, kind, count, payload)
