"""The command line. Data on stdout, messages and progress on stderr; `--json` prints one object with a `schema`.

Exit codes: 0 done, 1 it failed and one line says why, 2 the command was wrong (130: interrupted).

Each command imports what it takes by itself, most of it with torch: `--help` and `--version` need not wait for that.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from .. import settings
from ..devices import emulation
from ..devices.units import parse_bytes, parse_link, parse_rate
from .io import message, print_json, progress, reported

app: typer.Typer = typer.Typer(
    help="Inspect and measure computational storage devices for CSDAdam, real or emulated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Devices = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DEVICE",
        help="Directories, or device strings such as file:/mnt/nvme0, xrt:0, ram: (default: CSD_OPTIM_DEVICES or .)",
        show_default=False,
    ),
]
Stores = Annotated[
    list[Path],
    typer.Argument(
        metavar="STORE...",
        help="A snapshot's directory, or the directories of all devices of a store.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    app()


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"csd_optim {version('csd_optim')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def devices(
    names: Devices = None,
    check: Annotated[bool, typer.Option("--probe", help="Measure each disk and card for a few seconds.")] = False,
    as_json: Json = False,
) -> None:
    """What is there: devices, the disks behind them, room, stores, the updater; unless some are named, all cards."""
    with reported():
        from ..devices import machine
        from ..devices import smartssd as cards
        from ..devices.spec import parse_device
        from .facts import describe_device, measure_device, specs_of
        from .output import show_devices

        specs = specs_of(names)
        if not names and not settings.devices():
            specs += [parse_device(f"xrt:{card.name}") for card in cards.there_are()]
        known = cards.ask_pyxrt() if any(spec.card for spec in specs) else {}
        found = [describe_device(spec, known) for spec in specs]
        if check:
            measurable = [(s, e) for s, e in zip(specs, found, strict=True) if "storage" in e and "problem" not in e]
            with progress(len(measurable)) as tick:
                for spec, entry in measurable:
                    tick(f"measuring {spec}")
                    entry |= measure_device(spec, entry)
        here, updater = machine.machine(), machine.updater()
        if as_json:
            print_json("devices", machine=here, updater=updater, devices=found)
        else:
            show_devices(here, updater, found)
    if any("problem" in entry for entry in found):
        raise typer.Exit(1)


def count(text: str) -> int:
    """`100e6`, `100M`, `1.3B` → a number of parameters."""
    units = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper())
    try:
        n = int(float(text[:-1]) * unit) if unit else int(float(text))
    except (ValueError, OverflowError):
        n = 0
    if n < 1:
        raise typer.BadParameter(f"{text!r} is no number of parameters; write for example 100e6, 100M or 1.3B")
    return n


@app.command()
def doctor(
    names: Devices = None,
    params: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Of a model: is there room?", show_default=False)
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="Of its states: fp32 or 8bit.")] = "fp32",
    probe: Annotated[
        int, typer.Option(min=0, metavar="S", help="Read and write each drive so many seconds: does it slow down?")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Looks for what would slow training down or stop it, here and on these drives, and says what to do.

    A probe of 60 seconds writes up to 30 s times the drive's rate. Exit code 1: something here cannot be used.
    """
    with reported():
        from ..params.groups import check_state_dtype
        from . import doctor as doctors
        from .facts import specs_of
        from .output import show_findings

        check_state_dtype(state_dtype)
        specs = specs_of(names)
        with progress(doctors.TURNS * len(specs) if probe else 1) as tick:
            found = doctors.examine(specs, params, state_dtype, probe, tick)
        if as_json:
            print_json("doctor", findings={where: [asdict(f) for f in all] for where, all in found.items()})
        else:
            show_findings(found)
    if any(f.status == doctors.BAD for all in found.values() for f in all):
        raise typer.Exit(1)


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="A store's file, or the directory that holds it.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="List every parameter.")] = False,
    tbw: Annotated[
        str | None, typer.Option(help="What the drive is rated to take, for example 600TB: how long will it last?")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a store holds. Reads only, also while it is in use."""
    with reported():
        from .facts import describe_store
        from .output import show_store

        described = describe_store(store, parse_bytes(tbw) if tbw else None)
        if as_json:
            print_json("inspect", **described)
        else:
            show_store(described, everything)


@app.command()
def top(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Of a training's devices, of one rank or all.", show_default=False),
    ],
    interval: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between two looks.")] = 1.0,
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="How often to look (until Ctrl-C; once without a terminal).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line with a JSON object for each look.")] = False,
) -> None:
    """Watches a training: its step, what is committed, what each drive does now, wear, and what a step waits for.

    Only looks: the training takes no notice. Where it has ended, what is known last.
    """
    with reported(), contextlib.suppress(KeyboardInterrupt):
        from rich.live import Live

        from .output import console, show_top
        from .top import Top

        watched, out = Top(directories), console()
        looks = n or (None if as_json or out.is_terminal else 1)
        live = Live(console=out, auto_refresh=False, screen=out.is_terminal and n is None)
        with contextlib.nullcontext() if as_json else live:
            for i in itertools.count(1):
                time.sleep(interval)
                found = watched.look()
                if as_json:
                    print_json("top", time=time.time(), devices=found)
                    sys.stdout.flush()
                else:
                    live.update(show_top(found), refresh=True)
                if i == looks:
                    break


@app.command()
def verify(stores: Stores, as_json: Json = False) -> None:
    """Reads everything in stores and snapshots that has a checksum, and names what is damaged.

    Not while they are in use: make a snapshot then, by save(), and verify that.
    """
    with reported():
        from ..checkpoint.files import bar
        from ..checkpoint.verify import verify as verify_stores
        from .output import show_verdicts

        found = verify_stores(stores, bar)
        ok = not any(verdict.damage for verdict in found)
        if as_json:
            print_json("verify", ok=ok, stores=[asdict(verdict) for verdict in found])
        else:
            show_verdicts(found)
    if not ok:
        raise typer.Exit(1)


@app.command()
def export(
    stores: Stores,
    out: Annotated[Path, typer.Argument(help="What to make; nothing is overwritten.", show_default=False)],
    form: Annotated[
        str, typer.Option("--format", help="torch: one file for torch.load(). safetensors: a directory of shards.")
    ] = "torch",
    shard_size: Annotated[str, typer.Option(help="safetensors: of a shard, at least one tensor each.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Turns a store or snapshot into a state dict of AdamW, with `master`, the fp32 parameters.

    Takes the memory of a few tiles, whatever the size of the model, and checks every tile.
    """
    if form not in ("torch", "safetensors"):
        raise typer.BadParameter(f"{form!r} is not one of torch, safetensors", param_hint="--format")
    with reported():
        from ..checkpoint.export import export_safetensors, export_torch
        from ..checkpoint.files import bar
        from .output import size

        if form == "torch":
            files = export_torch(stores, out, bar)
        else:
            files = export_safetensors(stores, out, parse_bytes(shard_size), bar)
        total = sum(file.stat().st_size for file in files)
        if as_json:
            print_json("export", format=form, files=[str(file) for file in files], bytes=total)
        else:
            print(f"{out}: {len(files)} file{'s' * (len(files) > 1)}, {size(total)}")


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="FILE_OR_DIR", help="What `export` made, in either format.", show_default=False)
    ],
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICE...", help="Directories of the new store, as many as you like.", show_default=False
        ),
    ],
    tile_size: Annotated[int | None, typer.Option(min=1, help="Elements per tile.", show_default="chosen")] = None,
    as_json: Json = False,
) -> None:
    """Makes a store from an export: CSDAdam(..., devices=[...], resume=True) goes on from there.

    To change the number of devices: export, then import.
    """
    with reported():
        from ..checkpoint.export import import_store
        from ..checkpoint.files import bar
        from .output import number

        described = import_store(source, names, tile_size, bar)
        if as_json:
            print_json("import", **described)
        else:
            devices = f"{len(names)} device{'s' * (len(names) > 1)}"
            print(
                f"step {described['step']}, {number(described['params'])} parameters on {devices}; "
                "continue with resume=True"
            )


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="A store's directory, or a snapshot's; of several devices, separated by commas.",
            show_default=False,
        ),
    ],
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICE...", help="Directories of the new store, as many as you like.", show_default=False
        ),
    ],
    state_dtype: Annotated[str, typer.Option(help="Of the new store's states: fp32 or 8bit.", show_default=False)],
    tile_size: Annotated[int | None, typer.Option(min=1, help="Elements per tile.", show_default="chosen")] = None,
    as_json: Json = False,
) -> None:
    """Makes a store with states of another kind, all of them: CSDAdam(..., state_dtype=..., resume=True) goes on there.

    The old one is only read. Takes the memory of a few tiles; 8-bit states take 12 B per parameter on the new drive
    while they are decoded.
    """
    with reported():
        from ..checkpoint.convert import convert_store
        from ..checkpoint.files import bar
        from .output import number

        described = convert_store(source.split(","), names, state_dtype, tile_size, bar)
        if as_json:
            print_json("convert", **described)
        else:
            devices = f"{len(names)} device{'s' * (len(names) > 1)}"
            print(
                f"step {described['step']}, {number(described['params'])} parameters on {devices}, in {state_dtype}; "
                "continue with resume=True"
            )
            if described["clipped"]:
                print(f"{described['clipped']} elements of exp_avg were too large, and are 15.5 times the root")


@app.command()
def bench(
    names: Devices = None,
    params: Annotated[int, typer.Option(parser=count, metavar="N", help="Parameters: 100e6, 100M ...")] = "100e6",  # type: ignore[assignment]
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: fp16, bf16 or fp32.")] = "bf16",
    steps: Annotated[int, typer.Option(min=5, help="Steps to time.")] = 5,
    as_json: Json = False,
) -> None:
    """Measures a step on these devices beside what they do with nothing to compute.

    Uses nameless scratch files in the devices' directories, 48 bytes per parameter; a store there is not touched.
    """
    with reported():
        from . import benchmark
        from .facts import specs_of
        from .output import show_bench

        if dtype not in benchmark.DTYPES:
            raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(benchmark.DTYPES)}", param_hint="--dtype")
        specs = specs_of(names)
        with progress(benchmark.ticks(specs, steps)) as tick:
            result = benchmark.bench(specs, params, dtype, steps, tick)
        if as_json:
            print_json("bench", **result)
        else:
            show_bench(result)


@app.command()
def plan(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="DEVICE", help="Measured for a few seconds each.", show_default=False)
    ] = None,
    params: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Parameters: 7B, 70e9 ...", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Or a Hugging Face config.json to count them.", show_default=False)
    ] = None,
    n_devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1024, help="How many, where none are named.", show_default="1")
    ] = None,
    drive: Annotated[
        str, typer.Option(help="A plain drive: gen3, gen4, gen5, or rates: read=7GB/s,write=5GB/s[,mixed=6GB/s].")
    ] = "gen4",
    csd: Annotated[
        str | None,
        typer.Option(help="Plan for CSDs: smartssd, or rates, also update=240M/s.", show_default="for plain drives"),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Shared by all devices, each way: 8GB/s.", show_default="each has its own lanes")
    ] = None,
    gpu_link: Annotated[str, typer.Option(help="Between GPU and host, each way.")] = "25GB/s",
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Parameters per second that the CPU updates: 1.4G/s.", show_default="measured on this machine"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: fp16, bf16 or fp32.")] = "bf16",
    optimizer: Annotated[
        str, typer.Option(metavar="CLASS[,OPTION...]", help="Such as CSDSGD,momentum, or CSDAdam,amsgrad.")
    ] = "CSDAdam",
    state_dtype: Annotated[str, typer.Option(help="Of CSDAdam's states: fp32 or 8bit.")] = "fp32",
    topk: Annotated[
        float | None, typer.Option(help="Share of gradients to send, such as 0.01.", show_default="all")
    ] = None,
    error_feedback: Annotated[bool, typer.Option(help="Keep what Top-K does not send: 2 B per parameter.")] = True,
    forward: Annotated[float, typer.Option(metavar="S", help="Seconds of the GPU for one batch.")] = 0,
    backward: Annotated[float, typer.Option(metavar="S", help="The same.")] = 0,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per step.")] = 1,
    tbw: Annotated[
        str | None, typer.Option(help="What a device is rated to take: 600TB.", show_default="7PB for smartssd")
    ] = None,
    trainers: Annotated[
        int | None, typer.Option(min=1, help="With optimizer ranks: how many trainers.", show_default=False)
    ] = None,
    owners: Annotated[int, typer.Option(min=1, help="Optimizer ranks, with these devices each.")] = 1,
    trainer_link: Annotated[str, typer.Option(help="A trainer's network, each way.")] = "100Gb/s",
    owner_link: Annotated[str, typer.Option(help="An owner's network, each way.")] = "100Gb/s",
    route: Annotated[str, typer.Option(help="How gradients get there: kept, slices, star, or auto.")] = "auto",
    place: Annotated[
        bool, typer.Option("--place", help="Which part of the states 'auto' would give each device, and why.")
    ] = False,
    sweep: Annotated[str | None, typer.Option(metavar="devices=A..B", help="The same for each number.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Of the sweep, as PNG.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Predicts steps on devices you have, or think of buying: time, what bounds it, space, wear, what to change.

    Example: csd-optim plan --params 7B --devices 2 --drive gen4 --forward 0.4 --backward 0.8
    """
    if (params is None) == (config is None):
        raise typer.BadParameter("give --params, or --config", param_hint="--params")
    if names and n_devices:
        raise typer.BadParameter("name devices to be measured, or say how many", param_hint="--devices")
    if plot and not sweep:
        raise typer.BadParameter("plots a sweep: add --sweep devices=1..16", param_hint="--plot")
    if place and (sweep or n_devices):
        raise typer.BadParameter("is for devices that are named, and measured", param_hint="--place")
    if trainers and (sweep or place):
        raise typer.BadParameter("has neither --sweep nor --place", param_hint="--trainers")
    if not trainers and (owners, trainer_link, owner_link, route) != (1, "100Gb/s", "100Gb/s", "auto"):
        raise typer.BadParameter("how many are there? Owners, links and a route take them", param_hint="--trainers")
    with reported():
        from ..engine import at_once
        from ..planning import advice, model, ranks
        from . import benchmark
        from .facts import measured_request, planned_placement
        from .optimizers import described
        from .output import show_placement, show_plan
        from .plan_ranks import show_ranks

        planned, sections, hyper = described(optimizer, state_dtype)
        smartssd = model.smartssd(state_dtype, len(sections))
        request = advice.Request(
            params=params or advice.count_params(config or Path()),
            devices=n_devices or 1,
            on="csd" if csd else "drive",
            drive=advice.parse_rates(drive, model.DRIVES, model.DRIVES["gen4"]),
            csd=advice.parse_rates(csd or "smartssd", {"smartssd": smartssd}, smartssd),
            host=model.Host(
                link=parse_rate(link) if link else math.inf,
                gpu_link=parse_rate(gpu_link),
                update=parse_rate(cpu, "") if cpu else math.inf,  # until it is measured
            ),
            dtype=dtype,
            optimizer=planned,
            state_dtype=state_dtype,
            topk=topk,
            error_feedback=error_feedback,
            forward=forward,
            backward=backward,
            accumulate=accumulate,
            tbw=parse_bytes(tbw) if tbw else model.SMARTSSD_TBW if csd == "smartssd" and not names else None,
        )
        advice.check(request)
        if place:
            placed = planned_placement(names, request.params, benchmark.DTYPES[dtype], state_dtype, sections)
            if as_json:
                print_json("placement", params=request.params, dtype=dtype, state_dtype=state_dtype, **placed)
            else:
                show_placement(request.params, placed)
            return
        counts = advice.parse_sweep(sweep) if sweep else ()
        if names:
            request = measured_request(request, names)
        if not cpu:
            rate = at_once.engine_rate(benchmark.DTYPES[dtype], state_dtype, sections, hyper)
            request = replace(request, host=replace(request.host, update=rate), cpu_measured=True)
        if trainers:
            fleet = ranks.Fleet(trainers, owners, parse_link(trainer_link), parse_link(owner_link))
            found = ranks.plan_ranks(request, fleet, route)
            if as_json:
                print_json("plan_ranks", **found)
            else:
                show_ranks(found)
            return
        found = advice.plan(request, counts)
        if plot:
            advice.plot(found, plot)
        if as_json:
            print_json("plan", **found)
        else:
            show_plan(found)


@app.command()
def serve(
    devices: Annotated[
        list[str],
        typer.Argument(metavar="DEVICE...", help="Directories, or device strings with one; as of CSDAdam."),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where trainers come to; without HOST on all addresses.")
    ],
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86400, metavar="S", help="Seconds that a trainer may be silent in a step.")
    ] = 600,
) -> None:
    """Keeps the optimizer's states here for trainers elsewhere, whose devices are serve://HOST:PORT.

    On a private network only: nobody is asked for a password. SIGTERM or Ctrl-C ends it; started again, it goes on when
    a trainer comes that resumes. Several optimizer ranks: torchrun ... -m csd_optim serve /mnt/nvme{rank} --listen ...
    """
    with reported():
        from .serving import serve as serve_

        serve_(devices, listen, timeout)


@app.command(context_settings={"allow_interspersed_args": False})
def emu(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments.", show_default=False)
    ],
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, max=emulation.MAX_DEVICES, help="Emulated cards.", show_default="1"),
    ] = None,
    drives: Annotated[
        list[Path] | None,
        typer.Option(
            "--drive", metavar="DIR", help="Stands for a card's NVMe, once for each card.", show_default="temporary"
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds until it is ended, with status 124.")
    ] = None,
) -> None:
    """Runs a command with emulated SmartSSDs: devices=["xrt:0"] works without a card.

    XRT is the real one, in its software emulation (apt install libxrt1); the FPGA's kernels run on the CPU.

    For trying things out: times mean nothing. Example: csd-optim emu --devices 2 -- python train.py
    """
    with reported():
        try:
            status = emulation.run(command, devices, drives, timeout)
        except (FileNotFoundError, PermissionError) as e:  # as env(1) and timeout(1) do
            typer.echo(f"error: {message(e)}", err=True)
            status = 127 if isinstance(e, FileNotFoundError) else 126
    raise typer.Exit(status)
