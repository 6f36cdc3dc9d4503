"""Writers of versions without a training: random tensors, of which random elements change."""

import math

import numpy as np

from csd_optim.distributed.sharding import rows_of
from csd_optim.publish.encode import DeltaWriter, form_of, write_tensors
from csd_optim.publish.folder import CHANGED, WHOLE, Folder, VersionShare, with_checksums
from csd_optim.publish.writer import rows_in
from csd_optim.replica.blocks import BITMAP, BLOCK, SPARSE, checksum
from csd_optim.replica.versions import Tensor


class Writer:
    """Publishes `values` (name → flat uint16 array) in a folder; `changed` says what differs from the last version.

    `ranks`: they divide each tensor by rows.
    """

    def __init__(self, path, shapes, dtype="BF16", ranks=1):
        self.path, self.shapes, self.dtype = path, shapes, dtype
        self.random = np.random.default_rng(0)
        self.values = {n: self._some(math.prod(shape)) for n, shape in shapes.items()}
        self.changed = {n: np.zeros(len(v), bool) for n, v in self.values.items()}
        self.folders = [Folder(path, rank, ranks) for rank in range(ranks)]
        self.folder, self.run, self.base, self.last_full = self.folders[0], "run", None, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for folder in self.folders:
            folder.close()

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
        return with_checksums(
            [Tensor(n, self.dtype, shape, 0) for n, shape in self.shapes.items()],
            [(i, checksum(values)) for i, values in enumerate(self.values.values())],
        )

    def slices(self, rank):
        """The elements of a rank: index of the tensor, first element, elements."""
        ranks, found = len(self.folders), []
        for i, shape in enumerate(self.shapes.values()):
            if ranks == 1:
                found.append((i, 0, math.prod(shape)))
            elif shape and math.prod(shape):
                first, rows = rows_of(shape[0], ranks, rank)
                found += [(i, first * math.prod(shape[1:]), rows * math.prod(shape[1:]))] if rows else []
            elif rank == 0:
                found.append((i, 0, math.prod(shape)))
        return found

    def full(self):
        def write(folder, pending, slices, values):
            tensors = [rows_in(self.tensors()[i], n) for i, _, n in slices]
            return write_tensors(pending / folder.file_of(WHOLE), tensors, values, slices if self.folders[1:] else ())

        self.last_full = self.folder.next_number()
        return self._write(None, write)

    def delta(self):
        def write(folder, pending, slices, values):
            with DeltaWriter(pending / folder.file_of(CHANGED), self.folder.next_number()) as writer:
                for k, (i, first, n) in enumerate(slices):
                    changed = [*self.changed.values()][i][first : first + n]
                    for at in range(0, n, BLOCK):
                        add_changes(writer, k, at, values[k][at : at + BLOCK], changed[at : at + BLOCK])
                return writer.finish(slices)

        return self._write(self.base, write)

    def _write(self, base, write):
        number, all_values = self.folder.next_number(), [*self.values.values()]
        for rank, folder in enumerate(self.folders):
            slices = self.slices(rank)
            values = [all_values[i][first : first + n] for i, first, n in slices]
            sums = [(i, checksum(v, first)) for (i, first, _), v in zip(slices, values, strict=True)]
            files = [write(folder, folder.begin(number), slices, values)] if slices else []
            of = self.run, number, number, base and base.number, rank, len(self.folders)
            folder.add(VersionShare(*of, "model", sums, files))
        shares = self.folder.shares(number)
        assert with_checksums(self.tensors(), [part for s in shares for part in s.checksums]) == self.tensors()
        self.base = self.folder.name(shares, base, self.tensors())
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
