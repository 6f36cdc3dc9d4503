"""Tiles of codes on SmartSSDs, through the engine alone: always the same bits as tiles in a file."""

import textwrap

import pytest
from support.cards import emulated_python, needs_xrt

# Four parameters, two of which span two tiles, in a separate engine on a card or in a file.
PRELUDE = """
import os, sys, tempfile
import numpy as np
import torch
from csd_optim import CSDStoreError, CSDValueError, bindings
from csd_optim.bindings import HYPER, PARAM, PIECE, DeviceConfig, ExtentConfig
from csd_optim.devices.xclbin import find_kernels

TILE, TILES, SIZES, PAGE = 8192, 4, [12000, 70, 64, 10000], 4096

def open_card(xclbin=None, seconds=120):
    program = find_kernels(xclbin)
    return bindings.card_open("0", program.path, program.kernels, seconds)

def name(device, tile):
    return f"device {device}"

def address(t):
    return 0 if t is None else t.data_ptr()

class Run:
    def __init__(self, card, dtype=torch.bfloat16, states=3, p2p="auto", sum_elems=PAGE, codec="8bit"):
        self.dtype, self.states, self.steps = dtype, states, 0
        self.file = tempfile.TemporaryFile(dir=".")
        self.file.truncate(2 * 16 * TILE * TILES)
        config = dict(fd=self.file.fileno(), buffers=2, block_bytes=1 << 16)
        device = DeviceConfig("xrt", card=card, p2p=p2p, **config) if card else DeviceConfig("file", **config)
        self.engine = bindings.Native(name)
        self.engine.open([device])
        pieces, at = [], 0
        for p, size in enumerate(SIZES):
            first = 0
            while first < size:
                n = min(size - first, TILE - at % TILE)
                pieces.append((p, at // TILE, first, at % TILE, n))
                first, at = first + n, at + n
            at += -at % 64
        self.pieces = np.array(pieces, PIECE)
        codes = dict(codec=codec, param_dtype=dtype)
        self.engine.extend(ExtentConfig(TILE, TILES, states, [0], self.pieces, sum_elems=sum_elems, **codes))
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
        self.masters = [p.float() for p in self.params]
        self.residuals = [torch.zeros(n, dtype=torch.bfloat16) for n in SIZES]
        self.edits = {(p, 0): m for p, m in enumerate(self.masters)}  # how a card comes to its first masters

    def step(self, keep=True, without=(), topk=()):
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        grads = [torch.randn(n, generator=generator) for n in SIZES]
        grads[1], grads[3] = grads[1].half(), grads[3].to(torch.bfloat16)
        rows = np.zeros(len(SIZES), PARAM)
        for p, row in enumerate(rows):
            row["grad"], row["param"] = address(None if p in without else grads[p]), address(self.params[p])
            row["grad_dtype"] = bindings.DTYPE_CODES[grads[p].dtype]
            row["param_dtype"] = bindings.DTYPE_CODES[self.dtype]
            row["seed"], row["first"] = self.steps, 1000 * p
            if p in topk:
                row["topk"], row["residual"] = 0.1, address(self.residuals[p])
                row["topk_dtype"] = bindings.DTYPE_CODES[torch.bfloat16]
            row["edited"] = [address(self.edits.get((p, s))) for s in range(4)]
        b1, b2, t = 0.9, 0.99, self.steps
        constants = [1 - 1e-3, b1, 1 - b1, b2, 1 - b2, 1e-2 / (1 - b1**t), (1 - b2**t) ** -0.5, 1e-8, 1]
        rule = bindings.RULES["amsgrad" if self.states == 4 else "adamw"]
        tiles = np.arange(TILES, dtype=np.uint32)
        before = [p.clone() for p in self.params]
        self.engine.begin(rows, np.array([(rule, constants)], HYPER), tiles)
        for tile in tiles:
            self.engine.push(int(tile))
        if not keep:
            self.engine.params_ready(tiles, wait=True)
        try:
            self.engine.finish(keep)
        finally:
            if not keep:
                self.steps -= 1
                for p, b in zip(self.params, before):
                    p.copy_(b)
        if keep:
            self.edits = {}

    def edit(self, param, state, values):
        self.edits[param, state] = values

    def decoded(self):
        states = [[torch.empty(n) for _ in range(self.states)] for n in SIZES]
        for param, tile, first, at, n in self.pieces.tolist():
            parts = [s[first : first + n] for s in states[param]]
            self.engine.decode(tile, at, n, parts)
        return [s for each in states for s in each]

    def bits(self):
        return [*self.params, *self.residuals, *self.decoded(), *self.sums()]

    def sums(self):
        self.engine.wait_writes()
        wide = self.dtype == torch.float32
        states, sums = self.engine.tiles(0, TILES, 2, 2 * self.states - 1 - wide)
        assert states["summed"].all()
        return [torch.from_numpy(sums.view(np.int32))]

    def close(self):
        self.engine.close()

def same(a, *others):
    a = a.bits()
    for b in others:
        b = b.bits()
        assert len(a) == len(b)
        for i, (x, y) in enumerate(zip(a, b)):
            assert torch.equal(x, y), i

def refused(error, says, call):
    try:
        call()
    except error as e:
        assert says in str(e), e
        return
    raise SystemExit("not refused")
"""


def script(text, *arguments, **options):
    done = emulated_python(PRELUDE + textwrap.dedent(text), *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_xrt
def test_the_bits_of_a_file():
    """With and without P2P and AMSGrad, for every dtype: dense, sparse and missing gradients, and an undone step."""
    script(
        """
        card = open_card()
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            for states in 3, 4:
                runs = [Run(None, dtype, states), *(Run(card, dtype, states, p2p=p2p) for p2p in ("auto", "0"))]
                for run in runs:
                    run.step()
                same(*runs)
                for run in runs:
                    run.step(without=[1, 2])
                    run.step(topk=[0, 3])
                    run.step(keep=False)
                    run.step(without=[0, 1, 2, 3])
                    run.step(topk=[1])
                same(*runs)
                for run in runs:
                    run.close()
        bindings.card_close(card, "0")
        """
    )


@needs_xrt
def test_edited_states():
    """A step starts from the states that the user wrote, with or without a gradient, and again after an undone step."""
    script(
        """
        card = open_card()
        for dtype in torch.float32, torch.bfloat16:
            runs = [Run(None, dtype, 4), *(Run(card, dtype, 4, p2p=p2p) for p2p in ("auto", "0"))]
            for without in [], [0], [0, 1, 2, 3]:
                for run in runs:
                    run.step()
                    run.edit(0, 1, torch.linspace(-1, 1, SIZES[0]))
                    run.edit(3, 2, torch.linspace(0, 1, SIZES[3]))
                    run.edit(3, 3, torch.linspace(0, 2, SIZES[3]))
                    run.step(keep=False, without=without)
                    run.step(without=without)
                same(*runs)
            for run in runs:
                run.close()
        bindings.card_close(card, "0")
        """
    )


@needs_xrt
def test_damaged_codes():
    """Damage in any section is found, also in a tile into which the host would write edited states."""
    script(
        """
        card = open_card()
        starts = [0, 4, 6, 8, 10, 11, 13]  # pages of the sections in a slot, which has 14 of them
        for edits in False, True:
            for section, start in enumerate(starts):
                run = Run(card, torch.bfloat16, 4)
                run.step()
                run.engine.wait_writes()
                slots, _ = run.engine.tiles(0, TILES, 2, 7)
                at = ((2 + int(slots["slot"][1])) * 14 + start) * PAGE + 3
                byte = os.pread(run.file.fileno(), 1, at)[0]
                os.pwrite(run.file.fileno(), bytes([byte ^ 16]), at)
                if edits:
                    run.edit(0, 1, torch.zeros(SIZES[0]))
                refused(CSDStoreError, f"section {section} of tile 1", run.step)
                run.close()
        bindings.card_close(card, "0")
        """
    )


@pytest.mark.ci
@needs_xrt
@pytest.mark.parametrize(
    ("fault", "error", "says", "seconds"),
    [
        ("params:6", "CSDUnavailableError", "are not those that its kernel wrote", 30),
        ("garble:2", "CSDStoreError", "section 0 of tile", 30),
        ("hang:6", "CSDUnavailableError", "has not come to an end", 5),  # s, enough for the first step
        ("lost:6", "CSDUnavailableError", "dropped off the bus", 30),
    ],
)
def test_a_card_that_fails(fault, error, says, seconds):
    """The card fails in the second step; each step has four tiles."""
    script(
        """
        import csd_optim
        run = Run(open_card(seconds=float(sys.argv[3])))
        run.step()
        refused(getattr(csd_optim, sys.argv[1]), sys.argv[2], run.step)
        run.close()
        """,
        error,
        says,
        str(seconds),
        fault=fault,
    )


@needs_xrt
def test_a_card_without_the_kernel_refuses_codes():
    """It refuses only codes, and checksum chunks that the kernel does not support."""
    script(
        """
        from pathlib import Path
        from csd_optim.devices.xclbin import KERNELS, write_emulated
        card = open_card()
        refused(CSDValueError, "covers a multiple of 4096 elements on device 0", lambda: Run(card, sum_elems=1024))
        bindings.card_close(card, "0")
        older = Path("older.xclbin").resolve()
        only = {"csd_adamw_update": KERNELS["csd_adamw_update"]}
        write_emulated(older, "xilinx_u2_gen3x4_xdma_emulated", 2 << 30, only)
        card = open_card(older)
        refused(CSDValueError, "lacks the kernel for codes, on device 0", lambda: Run(card))
        Run(card, torch.float32, codec="fp32").close()
        """
    )
