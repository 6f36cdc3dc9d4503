"""The command line. Data on stdout, messages and progress on stderr; `--json` prints one object with a `schema`.

Exit codes: 0 success, 1 failure (one line on stderr says why), 2 wrong usage, 130 interrupted.

Each command imports its modules inside its function, because most of them import torch: so `--help` and `--version`
are fast.
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
from ..devices.units import parse_bytes, parse_rate
from .io import message, print_json, progress, reported
from .receivers import Receiver

app: typer.Typer = typer.Typer(
    help="""Optimizer states on NVMe drives: check, plan, measure, watch, convert.

    \b
    Before a training:  csd-optim doctor /mnt/nvme0
                        csd-optim plan --params 7B /mnt/nvme0
    In its script:      CSDAdam(model.parameters(), devices=["/mnt/nvme0"])
    While it runs:      csd-optim top /mnt/nvme0
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its frames take a third of 80 columns, and some colours vanish on a light background
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
    """Show devices: disks, space, stores, and the CPU's updater.

    Without DEVICE, all SmartSSDs are shown too.
    """
    with reported():
        from ..devices import machine
        from ..devices import smartssd as cards
        from ..devices.spec import parse_device
        from .facts import describe_device, measure_device, specs_of
        from .output import show_devices

        specs = specs_of(names)
        if not names and not settings.devices():
            specs += [parse_device(f"xrt:{card.name}") for card in cards.available_cards()]
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
    """Parse `100e6`, `100M`, `1.3B` into a number of parameters."""
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
        int | None,
        typer.Option(
            parser=count, metavar="N", help="Check that a model of N parameters fits: 7B, 70e9 ...", show_default=False
        ),
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="How that model's states are kept: fp32 or 8bit.")] = "fp32",
    probe: Annotated[
        int, typer.Option(min=0, metavar="S", help="Read and write each drive for S seconds: does it slow down?")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Find what would stop a training or slow it down, and what to do.

    Checks this machine and these drives. A probe of 60 seconds writes up to 30 seconds' worth of data at the
    drive's full rate. Exit code 1: the machine or a device cannot be used as it is.
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
    store: Annotated[
        Path,
        typer.Argument(
            help="A store's file, or the directory that holds it; or a folder of published versions.",
            show_default=False,
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="List every parameter, or every version.")] = False,
    tbw: Annotated[
        str | None,
        typer.Option(help="The drive's endurance rating, for example 600TB: shows how long it will last."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a store holds, or a folder of published versions.

    It is only read, and may be in use.
    """
    with reported():
        from .facts import describe_store
        from .output import show_store
        from .versions import describe_versions, is_folder_of_versions, show_versions

        if is_folder_of_versions(store):
            versions = describe_versions(store)
            return print_json("versions", **versions) if as_json else show_versions(versions, everything)
        described = describe_store(store, parse_bytes(tbw) if tbw else None)
        if as_json:
            print_json("inspect", **described)
        else:
            show_store(described, everything)


@app.command()
def follow(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of versions, as of opt.publish().", show_default=False)
    ],
    to: Annotated[
        Path,
        typer.Option("--to", metavar="PATH", help="The file to make and update, or a folder.", show_default=False),
    ],
    form: Annotated[
        Receiver,
        typer.Option("--as", help="A safetensors file; or, into a folder, patches for vLLM, or what slime reads."),
    ] = Receiver.SAFETENSORS,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --as slime: a checkpoint whose config.json etc. full versions need.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Bring it to the newest version, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.01, metavar="S", help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per new version, on a line.")] = False,
) -> None:
    """Keep a safetensors file at the newest published version.

    It is replaced as a whole, until Ctrl-C. Or write for each new version a file of patches for vLLM, or a directory as
    slime, miles and SGLang read it. Files say which version they have: another process can go on with them.
    """
    with reported(), contextlib.suppress(KeyboardInterrupt):
        from .receivers import follower

        follow_to = follower(form, directory, to, base)
        while True:
            if done := follow_to():
                path, version = done
                if as_json:
                    print_json("follow", file=str(path), version=version.number, step=version.step, run=version.run)
                else:
                    print(f"{path}: version {version.number}, of step {version.step}")
            sys.stdout.flush()
            if once:
                break
            time.sleep(interval)


@app.command()
def top(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Directories of a training's devices, of one rank or of all.", show_default=False
        ),
    ],
    interval: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between two updates.")] = 1.0,
    n: Annotated[
        int | None,
        typer.Option(
            "-n", min=1, help="Number of updates.", show_default="until Ctrl-C; 1 if stdout is not a terminal"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per update, each on a line.")] = False,
) -> None:
    """Watch a training: its steps, drives, wear and bottleneck.

    The training is not disturbed. If it has ended, its last known state is shown.
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
    """Read stores or snapshots, and name what is damaged.

    They are read whole, and every checksum is compared. A store in use cannot be verified: make a snapshot of it
    with save(), and verify the snapshot.
    """
    with reported():
        from ..checkpoint.files import progress_bar
        from ..checkpoint.verify import verify as verify_stores
        from .output import show_verdicts

        found = verify_stores(stores, progress_bar)
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
    out: Annotated[
        Path, typer.Argument(help="The file or directory to create; nothing is overwritten.", show_default=False)
    ],
    form: Annotated[
        str, typer.Option("--format", help="torch: one file for torch.load(). safetensors: a directory of shards.")
    ] = "torch",
    shard_size: Annotated[
        str, typer.Option(help="Largest shard of the safetensors format; a larger tensor has a shard of its own.")
    ] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a store or snapshot as the state dict of torch's optimizer.

    `master` in it are the fp32 parameters. Every tile is checked. Memory for a few tiles is enough, whatever the
    size of the model.
    """
    if form not in ("torch", "safetensors"):
        raise typer.BadParameter(f"{form!r} is not one of torch, safetensors", param_hint="--format")
    with reported():
        from ..checkpoint.export import export_safetensors, export_torch
        from ..checkpoint.files import progress_bar
        from .output import size

        if form == "torch":
            files = export_torch(stores, out, progress_bar)
        else:
            files = export_safetensors(stores, out, parse_bytes(shard_size), progress_bar)
        total = sum(file.stat().st_size for file in files)
        if as_json:
            print_json("export", format=form, files=[str(file) for file in files], bytes=total)
        else:
            print(f"{out}: {len(files)} file{'s' * (len(files) > 1)}, {size(total)}")


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The output of `export`, in either format; a snapshot; or a store, as the directories of all its "
            "devices, separated by commas.",
            show_default=False,
        ),
    ],
    names: Annotated[
        list[str],
        typer.Argument(metavar="DEVICE...", help="Directories of the new store, one per device.", show_default=False),
    ],
    state_dtype: Annotated[
        str | None,
        typer.Option(help="How the new store keeps all states: fp32 or 8bit.", show_default="as they were"),
    ] = None,
    tile_size: Annotated[int | None, typer.Option(min=1, help="Elements per tile.", show_default="automatic")] = None,
    as_json: Json = False,
) -> None:
    """Make a store from an export, a snapshot or another store.

    CSDAdam(..., devices=[...], resume=True) continues from it. Use it to change the number of devices or the
    state_dtype. The source is only read. Memory for a few tiles is enough; to decode the 8-bit states of a store,
    the first new drive needs another 12 B per parameter meanwhile.
    """
    with reported():
        from ..checkpoint.files import progress_bar
        from ..checkpoint.importing import import_store
        from .output import number

        described = import_store(source, names, tile_size, progress_bar, state_dtype)
        if as_json:
            print_json("import", **described)
        else:
            devices = f"{len(names)} device{'s' * (len(names) > 1)}"
            print(
                f"step {described['step']}, {number(described['params'])} parameters on {devices}"
                f"{f', in {state_dtype}' if state_dtype else ''}; continue with resume=True"
            )
            if described.get("clipped"):
                print(
                    f"{described['clipped']} elements of exp_avg were too large for 8 bits: each is now "
                    "15.5 * sqrt(exp_avg_sq), with its sign"
                )


@app.command()
def reshard(
    stores: Annotated[
        list[Path],
        typer.Argument(
            metavar="OLD...",
            help="The directories of all devices of all ranks, or of a process on its own.",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, metavar="M", help="Number of new ranks; 1: a process on its own.")],
    to: Annotated[
        list[str],
        typer.Option(
            metavar="NEW{rank}",
            help="Directory of each new rank; {rank} is filled in. Several devices: several --to, or commas.",
        ),
    ],
    sharding: Annotated[
        str | None,
        typer.Option(
            help="How new ranks divide parameters: none (sharded=False), ddp, fsdp2 (rows), or hsdp:RxS.",
            show_default="rows if the old ones do",
        ),
    ] = None,
    tile_size: Annotated[int | None, typer.Option(min=1, help="Elements per tile.", show_default="automatic")] = None,
    as_json: Json = False,
) -> None:
    """Make the stores of M ranks from those of N.

    resume=True continues from them on another number of processes. For DDP, FSDP2, HSDP and a process on its own.
    The states keep all bits. Old stores are only read, and everything is checked first. If it was stopped, run it
    again.
    """
    with reported():
        from ..checkpoint.files import progress_bar
        from ..checkpoint.reshard import reshard as make_stores
        from .output import number

        described = make_stores(stores, to, ranks, sharding=sharding, tile_elems=tile_size, progress=progress_bar)
        if as_json:
            print_json("reshard", **described)
        else:
            was, now = (f"{n} rank{'s' * (n > 1)}" for n in (described["of_ranks"], ranks))
            print(
                f"step {described['step']}, {number(described['params'])} parameters of {was} on {now}"
                f"{', made before' if described['made_before'] else ''}; continue with resume=True"
            )
            if described["user_states_differ"]:
                print(
                    "user_state differs between the old ranks: a new rank has that of the same rank, or else of rank 0"
                )


@app.command()
def bench(
    names: Devices = None,
    params: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Number of parameters: 100e6, 100M ...")
    ] = "100e6",  # type: ignore[assignment]
    dtype: Annotated[str, typer.Option(help="Type of parameters and gradients: fp16, bf16 or fp32.")] = "bf16",
    steps: Annotated[int, typer.Option(min=5, help="Number of steps to time.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure a step on these devices, and the same transfers alone.

    Uses unnamed scratch files in the devices' directories, 48 bytes per parameter; stores there are not touched.
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
        list[str] | None,
        typer.Argument(
            metavar="DEVICE", help="Devices to plan for; each is measured for a few seconds.", show_default=False
        ),
    ] = None,
    params: Annotated[
        int | None,
        typer.Option(parser=count, metavar="N", help="Number of the model's parameters: 7B ...", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json to count them from, instead of --params.", show_default=False),
    ] = None,
    n_devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, max=1024, help="Number of devices, if none are named.", show_default="1"),
    ] = None,
    drive: Annotated[
        str,
        typer.Option(help="The plain drives: gen3, gen4, gen5, or their rates: read=7GB/s,write=5GB/s[,mixed=6GB/s]."),
    ] = "gen4",
    csd: Annotated[
        str | None,
        typer.Option(
            help="Plan for CSDs: smartssd, or rates as of --drive, also update=240M/s.",
            show_default="plan for plain drives",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Rate of a link that all devices share, each way: 8GB/s.", show_default="each has its own lanes"
        ),
    ] = None,
    gpu_link: Annotated[str, typer.Option(help="Rate of the link between GPU and host, each way.")] = "25GB/s",
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Parameters per second that the CPU updates: 1.4G/s.", show_default="measured on this machine"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of parameters and gradients: fp16, bf16 or fp32.")] = "bf16",
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="CLASS",
            help="The optimizer, and its options that add states: CSDSGD,momentum or CSDAdam,amsgrad.",
        ),
    ] = "CSDAdam",
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE=SHARE",
            help="A part of the parameters with another rule, such as lion=20% or sgd,momentum=0.1; may be repeated.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width of the model, for the shapes of Muon's matrices.",
            show_default="of --config, or usual for --params",
        ),
    ] = None,
    orthogonalize: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Floating-point operations per second of the accelerator that orthogonalizes them: 200T/s.",
            show_default="measured on this CPU",
        ),
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="How CSDAdam's states are kept: fp32 or 8bit.")] = "fp32",
    topk: Annotated[
        float | None, typer.Option(help="Share of the gradients that Top-K sends, such as 0.01.", show_default="all")
    ] = None,
    error_feedback: Annotated[
        bool, typer.Option(help="Keep what Top-K does not send as residuals, 2 B per parameter.")
    ] = True,
    forward: Annotated[float, typer.Option(metavar="S", help="Seconds that the GPU takes for forward, per batch.")] = 0,
    backward: Annotated[
        float, typer.Option(metavar="S", help="Seconds that the GPU takes for backward, per batch.")
    ] = 0,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per step (gradient accumulation).")] = 1,
    tbw: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Endurance rating of each device: 600TB.", show_default=False)
    ] = None,
    prices: Annotated[
        str,
        typer.Option(
            metavar="NAME=$,...",
            help="Prices, of dram and gpu memory per GB, of a drive and its capacity in TB: dram=11,drive=600.",
            show_default=False,
        ),
    ] = "",
    watts: Annotated[
        str,
        typer.Option(
            metavar="NAME=W,...",
            help="Watts, of the cpu, a drive, an idle one, dram per GB, a waiting gpu: cpu=200,drive=9.",
            show_default=False,
        ),
    ] = "",
    place: Annotated[
        bool, typer.Option("--place", help="Show which part of the states 'auto' would place on each device, and why.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(metavar="devices=A..B", help="Predict also for each number of devices from A to B.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the sweep to this PNG file.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Predict time, space, wear and costs of a step on any devices.

    Name your own, to have them measured, or say how many of which kind you think of buying.

    Example: csd-optim plan --params 7B --devices 2 --drive gen4
    """
    if (params is None) == (config is None):
        raise typer.BadParameter("give either --params or --config", param_hint="--params")
    if names and n_devices:
        raise typer.BadParameter("either name devices, to be measured, or give their number", param_hint="--devices")
    if plot and not sweep:
        raise typer.BadParameter("plots a sweep: add --sweep devices=1..16", param_hint="--plot")
    if place and group:
        raise typer.BadParameter("places the states of one rule: leave out --group", param_hint="--place")
    if place and (sweep or n_devices):
        raise typer.BadParameter(
            "needs named devices, which it measures; it takes neither --sweep nor --devices", param_hint="--place"
        )
    with reported():
        from ..engine.placing.engine_rate import engine_rate
        from ..errors import CSDValueError
        from ..planning import advice, costs, model
        from . import benchmark
        from .facts import measured_request, planned_placement
        from .optimizers import described, orthogonalization, with_groups
        from .output import show_placement, show_plan

        planned, sections, hyper = described(optimizer, state_dtype)
        planned, parts = with_groups(planned, (1.0, sections, hyper), group or (), state_dtype)
        smartssd = model.smartssd(state_dtype, planned.sections)
        counted = params or advice.count_params(config or Path())
        width = width or (advice.width_of(config) if config else model.usual_width(counted))
        request = advice.PlanRequest(
            params=counted,
            devices=n_devices or 1,
            on="csd" if csd else "drive",
            drive=advice.parse_rates(drive, model.DRIVES, model.DRIVES["gen4"]),
            csd=advice.parse_rates(csd or "smartssd", {"smartssd": smartssd}, smartssd),
            host=model.Host(
                link=parse_rate(link) if link else math.inf,
                gpu_link=parse_rate(gpu_link),
                update=parse_rate(cpu, "") if cpu else math.inf,  # replaced below by the measured rate
            ),
            dtype=dtype,
            optimizer=planned,
            state_dtype=state_dtype,
            topk=topk,
            error_feedback=error_feedback,
            orthogonalization=orthogonalization(planned, width, orthogonalize),
            forward=forward,
            backward=backward,
            accumulate=accumulate,
            tbw=parse_bytes(tbw) if tbw else None,
            prices=costs.parse_costs(prices, "--prices", {n: p for n, p in costs.PRICES.items() if n != "tbw"}),
            watts=costs.parse_costs(watts, "--watts", costs.WATTS),
        )
        advice.check(request)
        if place:
            if request.orthogonalization:
                raise CSDValueError(
                    "Invalid --place: a placement's times lack the orthogonalization of muon: leave it out"
                )
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
            each = [
                (share, engine_rate(benchmark.DTYPES[dtype], state_dtype, sections, hyper))
                for share, sections, hyper in parts
                if share
            ]
            rate = each[0][1] if len(each) == 1 else 1 / math.fsum(share / rate for share, rate in each)
            request = replace(request, host=replace(request.host, update=rate), cpu_measured=True)
        found = advice.plan(request, counts)
        if plot:
            advice.plot(found, plot)
        if as_json:
            print_json("plan", **found)
        else:
            show_plan(found)


def make_key(path: Path | None) -> None:
    """Make a key file, print its fingerprint, and end the command."""
    if path is None:
        return
    with reported():
        from ..serve.wire.init_key import init_key

        print(init_key(path))
    raise typer.Exit


@app.command()
def serve(
    devices: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICE...", help="Directories for the states, or device strings with a directory, as for CSDAdam."
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address on which trainers connect; without HOST, all addresses of this machine."
        ),
    ],
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=86400, metavar="S", help="Seconds that a trainer may be silent within a step."),
    ] = 600,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key file; without one it listens on loopback only.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=CERT", help="Whom to let in beside its own key, and as what."),
    ] = None,
    allow_save: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="save() may make snapshots below DIR."),
    ] = None,
    max_model: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most bytes of states, for example 500GB."),
    ] = None,
    init_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", is_eager=True, callback=make_key, help="Make a key file, and stop."),
    ] = None,
) -> None:
    """Keep the states here for trainers elsewhere: an optimizer rank.

    Their devices are serve://HOST:PORT. With --key, connections are authenticated and encrypted; make the file with
    --init-key, and copy it to the trainers. SIGTERM or Ctrl-C stops it; started again, it continues when a trainer
    connects with resume=True.
    """
    with reported():
        from .serving import parse_accept
        from .serving import serve as serve_

        most = None if max_model is None else parse_bytes(max_model)
        serve_(devices, listen, timeout, key, [*map(parse_accept, accept or ())], allow_save or (), most)


@app.command(context_settings={"allow_interspersed_args": False})
def emu(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments.", show_default=False)
    ],
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, max=emulation.MAX_DEVICES, help="Number of emulated cards.", show_default="1"),
    ] = None,
    drives: Annotated[
        list[Path] | None,
        typer.Option(
            "--drive",
            metavar="DIR",
            help="Directory that stands for a card's NVMe drive; give it once per card.",
            show_default="temporary",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="S", help="Stop the command after S seconds; the exit code is then 124."),
    ] = None,
) -> None:
    """Run a command with emulated SmartSSDs.

    devices=["xrt:0"] works without a card. Uses the real XRT in its software emulation (apt install libxrt1); the
    FPGA's kernels run on the CPU, so times mean nothing.

    Example: csd-optim emu --devices 2 -- python train.py
    """
    with reported():
        try:
            status = emulation.run(command, devices, drives, timeout)
        except (FileNotFoundError, PermissionError) as e:  # as env(1) and timeout(1) do
            typer.echo(f"error: {message(e)}", err=True)
            status = 127 if isinstance(e, FileNotFoundError) else 126
    raise typer.Exit(status)
