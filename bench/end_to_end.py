"""Whole trainings, not steps alone: tokens per second with ZeRO-Infinity, with CSDAdam, and with AdamW in memory. From
the project's root:

    python -m bench.end_to_end               20 steps of a Llama of 1.0 B parameters: half an hour, 17 GB of the drive
    python -m bench.end_to_end --quick       a tiny model, to see that it works

Each training runs in a process of its own, one after another, with the same random weights, from a configuration of
Hugging Face's Llama, and the same batches of the Python standard library's source, bytes as tokens:

    adamw                 torch.optim.AdamW(fused=True) on bf16 parameters. Without masters small updates are rounded
                          away, and the loss hardly falls; with them it would take 20 bytes of memory per parameter
    deepspeed-nvme        DeepSpeed's ZeRO-3 with its optimizer states on NVMe (peers.py, which says how to install it:
                          this needs transformers beside it)
    csdadam               fp32 states in a directory on the same drive
    csdadam-overlap       the same with overlap(model, backward=True)
    csdadam-8bit, csdadam-8bit-overlap

A step counts from its beginning to that of the next one, the last until everything has ended. Two steps are not timed.
How much a faster step gains depends on how long forward and backward take, that is on the tokens of a step; the time of
AdamW, whose step is short, shows it.

Nothing is shown if the losses of two trainings with masters differ by more than CLOSE in any step. Losses with overlap
are those without it, to the last bit, unless torch's matrix products have other bits in another process; it says which.

--json prints schema csd_optim.bench.end_to_end/1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import peers
from bench.demo import megabytes, standard_library, table
from bench.step import machine_facts, say, span
from csd_optim.devices import machine

CLOSE = 0.1  # nats per byte
TEXT = 4_000_000  # bytes of source that are read
SPACE = 17  # bytes of the drive per parameter
NAMES = {
    "adamw": "AdamW in memory, without masters",
    "deepspeed-nvme": "DeepSpeed ZeRO-Infinity, NVMe",
    "csdadam": "CSDAdam",
    "csdadam-overlap": "CSDAdam, overlap",
    "csdadam-8bit": "CSDAdam, 8 bits",
    "csdadam-8bit-overlap": "CSDAdam, 8 bits, overlap",
}
PEER = "deepspeed-nvme"


def main() -> None:
    arguments = parse()
    out = sys.stderr if arguments.json else sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else 110)
    layers, width, steps = (2, 256, 7) if arguments.quick else (arguments.layers, 2048, arguments.steps)
    model = {
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
        "max_position_embeddings": arguments.context,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "load": os.getloadavg()[0], "storage": machine.storage(arguments.directory)}
    say("  ".join(f"{name}: {fact}" for name, fact in facts.items()))
    with tempfile.NamedTemporaryFile(dir=arguments.directory, suffix=".pt") as file:
        torch.save(batches(steps, arguments.batch, arguments.context), file)
        file.flush()
        rows: list[dict[str, Any]] = []
        for name in arguments.trainings:
            rows.append(trained(name, model, file.name, arguments))
            same_bits = check([row for row in rows if "skipped" not in row])  # at once: a training takes minutes
    console.print(shown(rows, arguments.batch * arguments.context))
    if not same_bits:
        console.print("Losses with overlap are not those without it, to the last bit.")
    result = {"schema": "csd_optim.bench.end_to_end/1", "machine": facts, "model": model, "rows": rows}
    result |= {"batch": arguments.batch, "context": arguments.context, "same_bits": same_bits}
    if arguments.json:
        print(json.dumps(result))


def batches(steps: int, batch: int, context: int) -> torch.Tensor:
    """Return random windows of source: int64, [steps, batch, context]."""
    text, _, _ = standard_library(TEXT)
    starts = torch.randint(len(text) - context, (steps, batch, 1), generator=torch.Generator().manual_seed(0))
    return text[starts + torch.arange(context)].long()


def trained(name: str, model: dict[str, Any], file: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one training. The peer runs in the interpreter that has it."""
    python = (os.environ.get(peers.PEER_PYTHON) if name == PEER else None) or sys.executable
    given = [name, f"--model={json.dumps(model)}", f"--batches={file}"]
    row = {
        "name": name,
        **peers.call("bench.end_to_end_training", given, arguments.directory, python, arguments.timeout),
    }
    say(f"{NAMES[name]}: " + (row["skipped"] if "skipped" in row else f"{span(row['seconds'], 2)} s a step"))
    return row


def check(rows: list[dict[str, Any]]) -> bool:
    """Raise SystemExit if trainings with masters differ. Return whether overlap has changed no bit of a loss."""
    losses = {row["name"]: row["losses"] for row in rows if row["name"] != "adamw"}
    for step, each in enumerate(zip(*losses.values(), strict=True), 1):
        if any(not abs(a - b) <= CLOSE for a in each for b in each):  # nan is not close to itself
            raise SystemExit(f"in step {step} the losses differ: {dict(zip(losses, each, strict=True))}")
    pairs = [(name, f"{name}-overlap") for name in losses if f"{name}-overlap" in losses]
    return all(losses[blocking] == losses[overlapped] for blocking, overlapped in pairs)


def shown(rows: list[dict[str, Any]], tokens: int) -> Any:
    """Return a table of these trainings, with `tokens` tokens in a step."""
    done = [row for row in rows if "skipped" not in row]
    peer = next((statistics.median(row["seconds"]) for row in done if row["name"] == PEER), None)
    params = f", {done[0]['params'] / 1e9:.2f} B parameters, {tokens} tokens a step" if done else ""
    made = table(
        f"Training{params}", "", "s a step", "tokens/s", "times DeepSpeed", "read", "written", "memory", "loss"
    )
    for row in rows:
        if "skipped" in row:
            made.add_row(NAMES[row["name"]], f"skipped: {row['skipped']}")
            continue
        seconds = statistics.median(row["seconds"])
        made.add_row(
            NAMES[row["name"]],
            span(row["seconds"], 1),
            f"{tokens / seconds:.2f}",
            f"{peer / seconds:.2f}" if peer else "",
            *(megabytes(row[key]) for key in ("bytes_read", "bytes_written", "peak_bytes")),
            f"{row['losses'][-1]:.3f}",
        )
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=NAMES, default=[*NAMES], help="which ones (all)")
    parser.add_argument("--layers", type=int, default=15, help="of the model, 67 M parameters each (15)")
    parser.add_argument("--steps", type=int, default=20, help="two of them are not timed (20)")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step (1)")
    parser.add_argument("--context", type=int, default=32, help="bytes of each (32)")
    parser.add_argument("--directory", type=Path, default=Path("build/end-to-end"), help="on the drive to use")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one training may take (3600)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 7 steps")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    main()
