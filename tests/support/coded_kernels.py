"""The FPGA's kernels for codes in C-simulation: tiles of codes, segments, and runs whose every output is checked."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from support.kernels import (
    DTYPES,
    HALVES,
    LANES,
    SEGMENT,
    Memory,
    Part,
    assert_params,
    csim,
    random_hyper,
    reported_sums,
    to_words,
)

from csd_optim import bindings

GROUP, PAGE = 64, 4096  # elements per exponent; elements in a page of one-byte codes
GROUP_WORDS, PAGE_WORDS = GROUP // LANES, PAGE // LANES
CODED_SUMS = np.dtype([("in", "u4", 8), ("out", "u4", 8)])


@dataclass
class KeyedPart(Part):
    key: int = 0


class Tile:
    """A tile of codes with `n_words` words of 16 elements.

    `sections`: (place, slice of bytes in the slot) for each section of this tile; places number all seven sections that
    a tile can have. The padding after exponents belongs to no section.
    """

    PORTS = (0, 1, 1, 2, 2, 2, 2)

    def __init__(self, n_words, dtype, amsgrad):
        self.n_words, self.dtype, self.amsgrad = n_words, dtype, amsgrad
        elems = LANES * n_words
        wide = dtype == torch.float32
        size = [4 if wide else 2, 0 if wide else 1, 1, 1, 1 / GROUP, amsgrad, amsgrad / GROUP]
        self.sections, at = [], 0
        for place, n in enumerate(int(elems * s) for s in size):
            if size[place]:
                self.sections.append((place, slice(at, at + n)))
            at += -(-n // 4096) * 4096
        self.bytes = np.full(at, 0xA5, np.uint8)
        for _, span in self.sections:
            self.bytes[span] = 0

    def copy(self):
        other = Tile(self.n_words, self.dtype, self.amsgrad)
        other.bytes[:] = self.bytes
        return other

    def codes(self, first=0):
        """Return the codes from element `first` on, one tensor per section, as bindings accept them."""
        elems, sections = LANES * self.n_words, []
        for _, span in self.sections:
            section = torch.from_numpy(self.bytes[span])
            sections.append(section[(span.stop - span.start) * first // elems :])
        sections[0] = sections[0].view(self.dtype)
        return sections

    def words_of_port(self, port):
        """Return the sections that go through a port, as slices of 32-bit lanes."""
        return [slice(s.start // 4, s.stop // 4) for place, s in self.sections if self.PORTS[place] == port]

    def sums(self, sum_words):
        chunks = -(-self.n_words // sum_words)
        sums = np.zeros((chunks, 8), np.uint32)
        for c, (place, span) in itertools.product(range(chunks), self.sections):
            size = (span.stop - span.start) * sum_words // max(self.n_words, 1)
            chunk = self.bytes[span.start + c * size : min(span.start + (c + 1) * size, span.stop)]
            sums[c, place] = bindings.crc32c(chunk.tobytes())
        return sums

    def clear_tails(self, parts):
        """Zeroes the elements after the end of each part, within the part's last group: they belong to no parameter."""
        for p in parts:
            last = p.first_word * LANES + p.elems
            for (_, span), code in zip(self.sections, self.codes(), strict=True):
                if (span.stop - span.start) * GROUP != LANES * self.n_words:  # no exponents
                    code[last : -(-last // GROUP) * GROUP] = 0


def bits_of_params(t):
    """Return the bits, with all NaNs made equal."""
    pattern = t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)
    return torch.where(t.isnan(), 0x7FFF, pattern)


def simulate_codes(
    tile,
    parts,
    *,
    kernel="csd_adamw_8bit_update",
    entries=(),
    bad_entries=0,
    in_place=False,
    isa=None,
    sum_words=PAGE_WORDS,
):
    """Runs the kernel on a tile, checks all its outputs, and returns the updated tile."""
    isa = isa or bindings.isas()[-1]
    n_words = tile.n_words
    segments = np.zeros(len(parts), SEGMENT)
    expected, params = tile.copy(), []
    for i, p in enumerate(parts):
        dtypes = bindings.DTYPE_CODES[p.grad.dtype], bindings.DTYPE_CODES[p.param_dtype]
        segments[i] = (p.first_word, p.elems, *dtypes, p.hyper, p.sparse, p.key)
        params.append(torch.empty(p.elems, dtype=p.param_dtype))
        codes = expected.codes(p.first_word * LANES)
        bindings.update_codes(p.hyper, isa, p.grad, codes, params[-1], p.key)

    whole = tile.bytes.view(np.uint32)
    if in_place:
        inputs = outputs = [Memory(len(whole) // LANES, whole)] * 3
        written = [[s for port in range(3) for s in tile.words_of_port(port)]] * 3
    else:  # each port has its own memory, which contains only the port's sections
        inputs, outputs = ([Memory(len(whole) // LANES) for _ in range(3)] for _ in range(2))
        written = [tile.words_of_port(port) for port in range(3)]
        for m, spans in zip(inputs, written, strict=True):
            for span in spans:
                m.words[span] = whole[span]
            m.before = m.all.copy()
    grad_words = np.concatenate([np.empty(0, np.uint32), *(to_words(p.grad) for p in parts if not p.sparse)])
    param_words = sum(len(to_words(p)) for p in params) // LANES
    grad, param = Memory(len(grad_words) // LANES, grad_words), Memory(param_words)
    table, report = Memory(len(parts), segments.view(np.uint32)), Memory(1 + -(-n_words // sum_words))
    buffer = Memory(len(entries) // LANES, entries)
    why = csim(
        kernel,
        [m.address() for m in inputs],
        grad.address(),
        buffer.address(),
        table.address(),
        [m.address() for m in outputs],
        param.address(),
        report.address(),
        n_words,
        len(tile.sections),
        len(parts),
        len(grad_words) // LANES,
        len(entries) // LANES,
        param_words,
        sum_words,
    )
    assert why is None, why

    for m in (grad, table, buffer, *(() if in_place else inputs)):
        m.assert_only_written()
    param.assert_only_written([slice(None)])
    report.assert_only_written([slice(None)])
    for m, spans in zip(outputs, written, strict=True):
        m.assert_only_written(spans)

    after = tile.copy()
    for place, span in tile.sections:
        after.bytes[span] = outputs[tile.PORTS[place]].words.view(np.uint8)[span]
    for place, (got, wanted) in enumerate(zip(after.codes(), expected.codes(), strict=True)):
        same = bits_of_params if place == 0 else torch.Tensor.clone
        assert torch.equal(same(got), same(wanted)), place
    touched = torch.zeros(LANES * n_words, dtype=torch.bool)
    for p in parts:
        touched[p.first_word * LANES :][: -(-p.elems // GROUP) * GROUP] = True
    for got, before in zip(after.codes(), tile.codes(), strict=True):
        kept = ~touched[:: LANES * n_words // len(got)]
        assert torch.equal(*(section.view(torch.uint8).view(len(kept), -1)[kept] for section in (got, before)))

    assert_params(param.words, parts, params, bits_of_params)
    sums = reported_sums(report, parts, param, n_words, bad_entries, CODED_SUMS)
    assert np.array_equal(sums["in"], tile.sums(sum_words))
    assert np.array_equal(sums["out"], after.sums(sum_words))
    return after


def random_tile(rng, n_words, dtype, amsgrad=False, anything=False):
    """Return a tile with codes of a model in training, or with `anything`: random bytes."""
    tile = Tile(n_words, dtype, amsgrad)
    elems = LANES * n_words
    if anything:
        for _, span in tile.sections:
            tile.bytes[span] = rng.integers(0, 256, span.stop - span.start)
        return tile
    master = torch.from_numpy(0.1 * rng.standard_normal(elems).astype(np.float32))
    exp_avg = torch.from_numpy(1e-3 * rng.standard_normal(elems).astype(np.float32))
    square = exp_avg.square() * torch.from_numpy(rng.lognormal(0, 2, elems).astype(np.float32))
    codes = tile.codes()
    if dtype != torch.float32:
        codes[0][:] = master.to(dtype)
    bindings.encode("scalar", [master, exp_avg, square, 2 * square if amsgrad else None], dtype, codes)
    return tile


def random_coded_parts(rng, tile, sparse=False, hypers=random_hyper):
    """Return segments of awkward lengths, with and without gaps between them."""
    parts, at = [], 0
    while True:
        at += GROUP_WORDS * int(rng.choice([0, 0, 1, 5]))
        elems = int(rng.choice([rng.integers(1, 200), rng.integers(1, 3000), GROUP, PAGE]))
        words = -(-elems // GROUP) * GROUP_WORDS
        if at + words > tile.n_words:
            return parts
        grad = torch.from_numpy(rng.standard_normal(elems).astype(np.float32)).to(DTYPES[rng.integers(3)])
        dtype = tile.dtype if tile.dtype == torch.float32 else HALVES[rng.integers(2)]  # a tile may have both
        parts.append(KeyedPart(at, grad, dtype, hypers(rng, tile.amsgrad), key=int(rng.integers(1 << 32))))
        if sparse and rng.random() < 0.6:
            kept = torch.from_numpy(rng.random(elems) < rng.choice([0, 0.05, 0.5, 1]))
            grad = grad.to(HALVES[rng.integers(2)])
            parts[-1].grad, parts[-1].sparse = torch.where(kept, grad, torch.zeros_like(grad)), True
        at += words
