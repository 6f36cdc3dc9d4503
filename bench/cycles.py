"""A model of the FPGA's kernels, from the structure of their stages: cycles, memory traffic, Mparam/s and area.

    python -m bench.cycles                         prints the tables
    python -m bench.cycles hls_kernels/README.md   puts them between their two marks in a file

A stage takes its initiation interval (II) for each iteration. Stages run at the same time, so the slowest counts, plus
the time to fill the pipelines once. The card's single bank of DDR4 serves whole bursts, one after another. A burst
costs its transfer at the full rate, a new row, and a turnaround if a write follows a read or a read follows a write;
refreshes take their share of all time. Latencies are those of the standard (JESD79-4, DDR4-2400); none was fitted. How
far the model can be trusted is seen where it is applied to published figures of the same card: CHECKS, printed with
the tables.

No stage was synthesized: it is assumed that each reaches the II that its directive asks for, and each clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from bench.tables import main
from csd_optim.store.layout import SUM_ELEMS

LANES, WORD = 16, 64  # fp32 values in a word, bytes of one
BLOCK = 1 << 16  # elements that a block of sparse entries covers
BURST = 64 * WORD  # bytes: 4 KiB, the longest burst of AXI
TILE = 1 << 20  # elements, as the optimizer lays them out
SUM_WORDS = SUM_ELEMS // LANES

PAGE = 4096  # elements of a page, in a section of one byte per element: one burst
LOOP = 100  # cycles until a loop over memory gets its first word; an estimate

# The II of each loop in hls_kernels/stages.h and codes.h, by its label; a test compares them with the sources.
II = {
    "READ": 1,
    "READ_SECTION": 2,
    "STORE": 2,
    "SUMS": 2,
    "UPDATE": 2,
    "ENTRIES": 1,
    "REST": 1,
    "SPARSE": 1,
    "DENSE": 1,
    "READ_PAGE": 2,
    "STORE_PAGE": 2,
    "CODED_SUMS": 2,
    "UPDATE_CODES": 2,
    "ENCODE": 2,
}
FILL = 500  # cycles to fill and drain: the first word through all stages, the last write's response; an estimate

PCIE = 3.4e9  # bytes per second each way, as others measured

# DDR4-2400, 64 bits, 8 Gbit: bytes per second, seconds.
PEAK = 19.2e9
ROW = 27.5e-9  # precharge and activate (tRP + tRCD): other bursts have closed a burst's row
READ_TO_WRITE, WRITE_TO_READ = 7e-9, 20e-9  # (CL - CWL + 4 clocks); CWL + 4 clocks + tWTR
REFRESH = 350e-9 / 7.8e-6  # tRFC of tREFI
CYCLE = 46e-9  # tRC: row to row in a bank
ACCESS = 14e-9  # CL


@dataclass(frozen=True)
class Run:
    """One run of the kernel over a tile. `share`: the share of gradients that Top-K sends, None if all are sent."""

    elems: int = TILE
    grad_bytes: int = 2
    param_bytes: int = 2
    share: float | None = None
    sections: int = 3
    sum_words: int = SUM_WORDS

    @property
    def words(self) -> int:
        return ceil(self.elems / LANES)

    @property
    def entries(self) -> int:
        return 0 if self.share is None else ceil(self.share * self.elems)

    @property
    def entry_words(self) -> int:
        blocks = ceil(self.elems / BLOCK)
        return 0 if self.share is None else ceil(4 * self.entries / WORD) + blocks  # a count per block, and padding

    @property
    def chunks(self) -> int:
        return ceil(self.words / self.sum_words)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes read from memory by the run, and the bytes written."""
        grad = self.elems * self.grad_bytes if self.share is None else WORD * self.entry_words
        state = self.sections * 4 * self.elems
        return state + grad, state + self.elems * self.param_bytes + WORD * (1 + self.chunks)

    def stages(self) -> dict[str, int]:
        """Return the cycles of each stage."""
        grad_words = ceil(self.elems * self.grad_bytes / WORD)
        sparse = self.share is not None
        return {
            "read_section": II["READ_SECTION"] * self.words,
            "read_words": II["READ"] * (self.entry_words if sparse else grad_words),
            "check_entries": II["ENTRIES"] * self.entries,
            "scatter": II["SPARSE"] * (self.entries + grad_words) if sparse else II["DENSE"] * grad_words,
            "update": II["UPDATE"] * self.words,
            "write_section": II["STORE"] * self.words,
            "write_params": II["STORE"] * ceil(self.elems * self.param_bytes / WORD),
            "write_report": II["SUMS"] * self.chunks,
        }


@dataclass(frozen=True)
class CodedRun(Run):
    """A run of the kernel for 8-bit states. A port that serves several sections waits anew for each page of each."""

    @property
    def pages(self) -> int:
        return ceil(self.elems / PAGE)

    def bytes(self) -> tuple[int, int]:
        read, written = Run.bytes(replace(self, sections=0))  # all but the states
        peak = self.sections - 3
        state = self.elems * (self.param_bytes + (self.param_bytes == 2) + 2 + peak) + (1 + peak) * WORD * self.pages
        return state + read, state + written

    def stages(self) -> dict[str, int]:
        section = ceil(self.elems * self.param_bytes / WORD)
        page = PAGE // WORD * II["READ_PAGE"] + LOOP
        ratios = self.pages * page * (1 + (self.param_bytes == 2))
        roots = self.pages * (page + LOOP) * (self.sections - 2)
        alike = super().stages()
        return {
            "read_param_section": II["READ_SECTION"] * section,
            "read_ratios": ratios,
            "read_roots": roots,
            "update_codes": II["UPDATE_CODES"] * self.words,
            "encode": II["ENCODE"] * self.words,
            "write_param_section": II["STORE"] * section,
            "write_ratios": ratios,
            "write_roots": roots,
            "write_coded_report": II["CODED_SUMS"] * self.chunks,
            **{name: alike[name] for name in ("read_words", "check_entries", "scatter", "write_params")},
        }


def memory_seconds(read: float, written: float, burst: float = BURST, *, alternating: bool = True) -> float:
    """Return the seconds that the memory needs for `read` and `written` bytes, in bursts of `burst` bytes.

    `alternating`: reads and writes take turns as long as there are both; otherwise all writes follow all reads.
    """
    bursts = (read + written) / burst
    turns = 2 * min(read, written) / burst if alternating else 0
    busy = (read + written) / PEAK + bursts * ROW + turns * (READ_TO_WRITE + WRITE_TO_READ) / 2
    return busy / (1 - REFRESH)


def seconds(run: Run, hertz: float, others: float = 0) -> tuple[float, str]:
    """Return the seconds of a run and what bounds it: "memory" or a stage.

    `others`: bytes that transfers of other tiles move through the same memory meanwhile, half of them in, half out.
    """
    read, written = run.bytes()
    cycles = run.stages()
    slowest = max(cycles, key=lambda stage: (cycles[stage], stage == "update"))
    times = {"memory": memory_seconds(read + others / 2, written + others / 2), slowest: cycles[slowest] / hertz}
    bound = max(times, key=lambda name: times[name])
    return times[bound] + FILL / hertz, bound


# ---- what others have published -------------------------------------------------------


def read_and_write_at_once() -> float:
    """Return the bytes per second of AMD's `mem-bw`, which reads and writes at the same time."""
    return 1 / memory_seconds(0.5, 0.5)


SMART_HERTZ = 300e6  # the platform's own clock: its Makefile names none


def smart_infinity(share: float | None = None, sections: int = 3, grad_bytes: int = 4) -> float:
    """Return the parameters per second of Smart-Infinity's kernels.

    Its Adam runs eight loops in sequence over 65 536 parameters: fp32 states, fp32 gradients and fp16 parameters (30
    B). With fewer `sections`: its SGD and AdaGrad, which read an fp16 gradient. With Top-K (`share`), a dense gradient
    is cleared in memory and written one element at a time; each is a read and a write of 64 bytes in another row (ECC).
    """
    n, loops, state = 65536, 2 * sections + 2, 4 * sections
    moved = memory_seconds((grad_bytes + state) * n, (state + 2) * n, alternating=False)
    total = max(moved, (grad_bytes + 2 * state + 2) * n / WORD / SMART_HERTZ) + loops * LOOP / SMART_HERTZ
    if share is not None:
        element = ROW + ACCESS + READ_TO_WRITE + WRITE_TO_READ + 2 * WORD / PEAK
        total += memory_seconds(8 * share * n, 4 * n, alternating=False) + share * n * max(element, CYCLE)
    return n / total


CHECKS = (  # what is checked, the published figure, the model's
    ("`mem-bw` of a SmartSSD, GB/s", 15.417, lambda: read_and_write_at_once() / 1e9),
    ("Smart-Infinity's Adam, Mparam/s (8.2 GiB/s of 16 B)", 8.2 * 2**30 / 16 / 1e6, lambda: smart_infinity() / 1e6),
    (
        "its Top-K Adam, 1 % of the entries, Mparam/s (2.92 GiB/s of 12.08 B)",
        2.92 * 2**30 / 12.08 / 1e6,
        lambda: smart_infinity(0.01) / 1e6,
    ),
)
UNPUBLISHED = ("Smart-Infinity's SGD and AdaGrad, Mparam/s", lambda: smart_infinity(sections=2, grad_bytes=2) / 1e6)


# ---- tables ---------------------------------------------------------------------------

BEGIN, END = "<!-- begin: python -m bench.cycles -->\n", "<!-- end: python -m bench.cycles -->\n"
COLUMNS = {"fp16, bf16": Run(), "fp32": Run(grad_bytes=4, param_bytes=4), "Top-K 1 %, 16-bit": Run(share=0.01)}
CODED_COLUMNS = {
    "codes, fp16, bf16": CodedRun(),
    "codes, fp32": CodedRun(grad_bytes=4, param_bytes=4),
    "codes, 16-bit, `amsgrad`": CodedRun(sections=4),
}
RULE_COLUMNS = {  # by the number of sections in a rule's tiles; gradients and parameters have 16 bits
    "1: SGD": Run(sections=1),
    "2: SGD with momentum, Adagrad, Lion, RMSprop": Run(sections=2),
    "3: RMSprop with `centered` or momentum": Run(sections=3),
    "4: RMSprop with both, `amsgrad`": Run(sections=4),
    "2, Top-K 1 %": Run(share=0.01, sections=2),
}
CLOCKS = (200e6, 250e6, 300e6)


def table() -> str:
    lines = [*budget(COLUMNS), "", *budget(CODED_COLUMNS), "", *budget(RULE_COLUMNS), "", *areas(), ""]
    lines += ["| the model and published figures | published | model | error |", "|---|---|---|---|"]
    for what, published, model in CHECKS:
        made = model()
        lines.append(f"| {what} | {published:.1f} | {made:.1f} | {100 * (made / published - 1):+.0f} % |")
    what, model = UNPUBLISHED
    lines.append(f"| {what} | no figure | {model():.1f} | |")
    return "\n".join(lines) + "\n"


def budget(columns: Mapping[str, Run]) -> list[str]:
    """Return the lines of a table of cycles, memory traffic and rates."""

    def row(name: str, cell) -> str:
        return f"| {name} | " + " | ".join(cell(run) for run in columns.values()) + " |"

    def rate(time: float, run: Run) -> str:
        return f"{run.elems / time / 1e6:.0f}"

    def per_param(run: Run, index: int) -> str:
        return f"{run.bytes()[index] / run.elems:.2f}".rstrip("0").rstrip(".")

    def alone(hertz: float, run: Run) -> str:
        time, bound = seconds(run, hertz)
        return f"{rate(time, run)} ({bound}), {time * hertz / 1e3:.0f} k cycles"

    head = ["", *columns]
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        row("bytes per parameter that the kernel reads, writes", lambda r: f"{per_param(r, 0)}, {per_param(r, 1)}"),
        row("the stages alone at 200 MHz, Mparam/s", lambda r: rate((max(r.stages().values()) + FILL) / CLOCKS[0], r)),
        *(row(f"**the kernel at {hertz / 1e6:.0f} MHz**", lambda r, hertz=hertz: alone(hertz, r)) for hertz in CLOCKS),
        row(
            "at 200 MHz, transfers of other tiles meanwhile",
            lambda r: rate(seconds(r, CLOCKS[0], sum(r.bytes()))[0], r),
        ),
        row("PCIe into the card, states and gradients", lambda r: rate(r.bytes()[0] / PCIE, r)),
        row("PCIe out of it, states and parameters", lambda r: rate(r.bytes()[1] / PCIE, r)),
    ]


# ---- area -----------------------------------------------------------------------------

KERNELS = Path(__file__).resolve().parent.parent / "hls_kernels"
DSP = {"fmul": 3, "fadd": 2, "fsub": 2}  # DSPs of an operator (PG060); divisions and roots use LUTs
DSPS, BLOCKS, MASTERS = 1344, 984, 15  # DSPs that can be placed, the device's BRAM36, AXI masters of a bank (UG1393)


@dataclass(frozen=True)
class Area:
    """What a kernel takes, as far as it is known before synthesis."""

    rule: str
    dsp: int
    dividers: int
    roots: int
    blocks: int  # BRAM36
    checksums: int
    masters: int


def area_of(rule: str) -> Area:
    """Return the area of the kernel for fp32 states, from what its source asks for.

    Block RAMs: 8 for each direction of an AXI port (512 words), 8 for segments, 8 for each FIFO of 64 words.
    """
    source = (KERNELS / f"csd_{rule}_update.cpp").read_text()
    ports = int(re.findall(r"CSD_SECTIONS (\d)", source)[0])
    operators = {name: int(n) for name, n in re.findall(r"CSD_LIMIT\((\w+), (\d+)\)", source)}
    return Area(
        rule,
        dsp=sum(DSP.get(name, 0) * n for name, n in operators.items()),
        dividers=operators.get("fdiv", 0),
        roots=operators.get("fsqrt", 0),
        blocks=8 * (2 * ports + 3) + 8 + 8 * (2 * ports + 4),
        checksums=2 * ports + 1,
        masters=ports + 3,
    )


def areas() -> list[str]:
    """Return the lines of a table with the kernel of every rule."""
    lines = [
        f"| kernel for fp32 states | DSP, of {DSPS} | dividers, square roots | BRAM36, of {BLOCKS} | checksums "
        f"| AXI masters, of {MASTERS} |",
        "|---|---|---|---|---|---|",
    ]
    for rule in ("adamw", "adam", "sgd", "adagrad", "rmsprop", "lion"):
        a = area_of(rule)
        lines.append(
            f"| `{rule}` | {a.dsp} ({100 * a.dsp / DSPS:.0f} %) | {a.dividers}, {a.roots} "
            f"| {a.blocks} ({100 * a.blocks / BLOCKS:.0f} %) | {a.checksums} | {a.masters} |"
        )
    return lines


if __name__ == "__main__":
    main(table, BEGIN, END)
