"""The table of bytes per parameter, as opt.stats() counts them. `make tables` writes it into docs/performance.md.

    python -m bench.tables                        prints it
    python -m bench.tables docs/performance.md    puts it between its two marks in a file

Each row is one step in a named directory with empty buffers. There the kernel's own counters agree with opt.stats()
(tests/step/test_traffic.py).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from csd_optim import CSDAdam

SIDE = 2048  # 4 Mi elements: so many that the padding of tiles and blocks does not show
BEGIN, END = "<!-- begin: make tables -->\n", "<!-- end: make tables -->\n"
CODES: dict[str, Any] = {"state_dtype": "8bit"}
ROWS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp16 or bf16": (torch.bfloat16, {}),
    "fp32": (torch.float32, {}),
    "fp32, `grad_dtype=torch.bfloat16`": (torch.float32, {"grad_dtype": torch.bfloat16}),
    "16-bit, `amsgrad=True`": (torch.bfloat16, {"amsgrad": True}),
    "16-bit, `topk=0.01`": (torch.bfloat16, {"topk": 0.01}),
    "16-bit, `topk=0.01, error_feedback=False`": (torch.bfloat16, {"topk": 0.01, "error_feedback": False}),
    "fp16 or bf16, 8-bit states": (torch.bfloat16, CODES),
    "fp32, 8-bit states": (torch.float32, CODES),
    "16-bit, 8-bit states, `amsgrad=True`": (torch.bfloat16, CODES | {"amsgrad": True}),
    "16-bit, 8-bit states, `topk=0.01`": (torch.bfloat16, CODES | {"topk": 0.01}),
}
COLUMNS = ("push", "pull", "flash_read", "flash_write")


def bytes_per_param(dtype: torch.dtype, **options: Any) -> list[float]:
    """Return the bytes per parameter of the second step, in the order of COLUMNS."""
    p = torch.nn.Parameter(torch.randn(SIDE, SIDE).to(dtype))
    with (
        tempfile.TemporaryDirectory(dir=".") as directory,
        CSDAdam([p], devices=f"file:{directory}?cache=off", **options) as opt,
    ):
        for _ in range(2):
            p.grad = torch.randn(SIDE, SIDE).to(dtype)
            opt.step()
        stats = opt.stats()
    return [stats[f"{column}_bytes"] / p.numel() for column in COLUMNS]


def table() -> str:
    lines = ["| parameters and gradients | pushed | pulled | read from the drive | written |", "|---|---|---|---|---|"]
    for name, (dtype, options) in ROWS.items():
        cells = [f"{n:.2f}".rstrip("0").rstrip(".") for n in bytes_per_param(dtype, **options)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def put(path: str, made: str, begin: str, end: str) -> None:
    """Write `made` between the two marks in a file, and print whether that changes it."""
    file = Path(path)
    before, _, rest = file.read_text().partition(begin)
    old, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{file} has no place for the table: {begin.strip()} and {end.strip()}")
    file.write_text(f"{before}{begin}{made}{end}{after}")
    print(f"{file}: {'as it was' if old == made else 'changed'}")


def main(make: Callable[[], str], begin: str, end: str) -> None:
    """Print the result of `make`, or write it between the marks in the file that the command line names."""
    if len(sys.argv) == 1:
        print(make(), end="")
    else:
        put(sys.argv[1], make(), begin, end)


if __name__ == "__main__":
    main(table, BEGIN, END)
