"""Writes the tables of docs/optimizer-ranks.md from results of bench/studies/optimizer_ranks.py:

    python -m bench.studies.ranks_table RESULT.json KILLS.json docs/optimizer-ranks.md    puts them between their marks

RESULT.json is the output of --json, KILLS.json that of --json --kills.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.tables import put

Row = dict[str, Any]
BEGIN, END = "<!-- begin: bench.studies.optimizer_ranks -->\n", "<!-- end: bench.studies.optimizer_ranks -->\n"
KILLS_BEGIN, KILLS_END = "<!-- begin: bench.studies.ranks_kills -->\n", "<!-- end: bench.studies.ranks_kills -->\n"
NAMES = {
    "adamw": "DDP + AdamW, in memory",
    "zero": "DDP + ZeRO of AdamW, in memory",
    "local": "DDP + CSDAdam, drives in the trainers",
}


def of_ways(result: Row) -> str:
    lines = [
        "| | owner's link | drives | s, measured | predicted | ratio | of the limit | trainer in, MB | owner in, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        s = row["seconds"]
        predicted = [""] * 3
        if row["predicted"]:
            median = statistics.median(s)
            predicted = [f"{n:.2f}" for n in (row["predicted"], median / row["predicted"], row["limit"] / median)]
        cells = [
            NAMES.get(row["way"], f"owners, `{row['way']}`"),
            f"{row['owner_link']:g}x" if "owner_link" in row else "",
            str(row.get("drives", "")),
            f"{statistics.median(s):.2f} ({min(s):.2f} to {max(s):.2f})",
            *predicted,
            *(f"{n / 1e6:.1f}" if (n := row["bytes"][link]) > 1e5 else "" for link in ("trainer in", "owner in")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def of_kills(result: Row) -> str:
    lines = [
        "| | s in all | a step, s | kills | goodput | steps done again | s from a kill to the next step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        name = NAMES.get(row["way"], f"owners, `{row['way']}`")
        name += f", a checkpoint every {row['every']} steps" if "every" in row else ""
        cells = [
            name,
            f"{row['seconds']:.0f}",
            f"{row['step_seconds']:.2f}",
            str(row["kills"]),
            f"{row['goodput']:.0%}",
            str(sum(row["steps_lost"])),
            f"{statistics.median(row['seconds_to_next_step']):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    result, kills = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    put(sys.argv[3], of_ways(result), BEGIN, END)
    put(sys.argv[3], of_kills(kills), KILLS_BEGIN, KILLS_END)


if __name__ == "__main__":
    main()
