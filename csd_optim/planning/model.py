"""A model of how long a step takes on given devices: bytes divided by rates, and which transfers overlap.

    traffic()   the bytes that a step moves over every link
    predict()   the seconds of a step, phase by phase, and the bottleneck
    Orthogonalization   Muon's computation between the two passes of its step

All sizes are in bytes, all times in seconds, all rates per second, prefixes are decimal. docs/plan.md explains the
model and its error; the tests compare it with the times that Smart-Infinity's authors have published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..compression.policy import DENSE_FROM
from ..errors import CSDValueError
from ..muon.newton_schulz import flops, workspace_bytes
from ..muon.schedule import IN_MEMORY, LEAST_TILES
from ..rates import Rates
from ..store.layout import MAX_MAPPINGS, TILE_ELEMS, TILES_PER_DEVICE
from ..store.sections import EIGHT_BIT, FP32, SECTIONS, codec_of, elem_bytes

VARIANTS = {
    "base": "ZeRO-Infinity",  # RAID0, updated by the CPU, gradients through flash
    "su_o": "Smart-Infinity",  # as published: gradients through flash, updated by the CSDs
    "su_o_c": "Smart-Infinity, Top-K",
    "csdadam": "CSDAdam",
    "csdadam_topk": "CSDAdam, Top-K",
}
ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
ADAMS = 3  # fp32 sections of Adam's tile, including the master; a step reads and writes all. Other rules have 1 to 4
PUBLISHED_ITEM = 4  # bytes of each gradient and parameter that the published systems send
# Bytes of an entry of a sparse gradient: index and value have 16 bits each, in the published systems 32.
ENTRY, PUBLISHED_ENTRY = 4, 8

# Only two numbers were fitted to published times; both only make the published systems slower.
#
# The share of their link's rate that these systems reach: 6.4 of the 8 GB/s measured on the testbed. From four drives
# on, ZeRO-Infinity moves 28 B per parameter in 4.4 ns, however many drives and parameters there are.
LINK_SHARE = 0.8
# Parameters per second that ZeRO-Infinity updates on the CPU, including all copies around the update, while the drives
# wait: a step takes 1.8 to 2.6 ns per parameter longer than its transfers, on one and on two drives of 3 GB/s.
ZERO_UPDATE = 450e6


@dataclass(frozen=True)
class Host:
    """The rates of resources shared by all devices. `math.inf`: no bound."""

    # Parameters per second that the CPU updates, for devices `on_host` and for "base": see engine_rate.py.
    update: float
    link: float = math.inf  # bytes per second, each way at once, of the uplink that all devices share
    gpu_link: float = math.inf  # bytes per second, each way at once, between GPU and host


NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NS_STEPS = 5  # iterations: the default of torch.optim.Muon


@dataclass(frozen=True)
class Orthogonalization:
    """Newton-Schulz between the two passes of Muon's step: which parameters, in which shapes, and how fast."""

    share: float  # of the parameters that Muon updates, among all
    width: int  # of the model; see matrices()
    rate: float  # floating-point operations per second
    dtype: str = "bf16"  # of the iteration, or "fp32"
    measured: bool = False  # `rate` was measured on this machine's CPU; else it was given

    def matrices(self) -> list[tuple[int, int]]:
        """Return the assumed shapes: four matrices of attention and two of an MLP, as in each block of a GPT."""
        w = self.width
        return [(w, w)] * 4 + [(w, 4 * w)] * 2

    def seconds(self, params: float) -> float:
        """Return the seconds for the matrices of a model with `params` parameters."""
        block = sum(flops(rows, columns, NS_STEPS) for rows, columns in self.matrices())
        return self.share * params * block / sum(n * m for n, m in self.matrices()) / self.rate

    def groups(self, params: float, tile: float) -> float:
        """Return the number of groups in which the matrices are orthogonalized. `tile`: elements of a tile."""
        shapes = self.matrices()
        return max(1.0, self.share * params / max(LEAST_TILES * tile, sum(n * m for n, m in shapes) / len(shapes)))

    def memory_bytes(self, params: float, tile: float) -> float:
        """Return a step's peak memory for this, on the parameters' device: a ring of X, and a workspace."""
        rows, columns = self.matrices()[-1]
        x = min(self.share * params, IN_MEMORY * (LEAST_TILES * tile + rows * columns))
        workspace = workspace_bytes((rows, columns), NS_DTYPES[self.dtype], torch.device("cpu"))
        return 2 * x + workspace + 4 * rows * columns


def usual_width(params: float) -> int:
    """Return the width of a usual transformer with `params` parameters: 12 width² in each of width / 128 blocks."""
    return max(64, 64 * round(math.pow(128 / 12 * params, 1 / 3) / 64))


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds of one iteration: the sum of its phases."""

    variant: str
    devices: int
    forward: float  # on the GPU, for all batches of a step
    backward: float
    gradients: float  # writing gradients to flash after backward, if the variant does so
    step: float
    stages: dict[str, float]  # seconds that the step keeps each resource busy: at once for CSDAdam, else in turn
    bound: str  # the longest stage

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.gradients + self.step


# The kernels of Smart-Infinity: 8.2 GiB/s of 16 B, with Top-K 2.92 GiB/s of 12.08 B per parameter (its figure 14).
PUBLISHED_UPDATE = {"su_o": 550e6, "su_o_c": 259e6}
# Typical rates of plain drives for long transfers, from data sheets.
DRIVES = {
    "gen3": Rates.in_turn(3.0e9, 2.0e9, on_host=True),
    "gen4": Rates.in_turn(6.5e9, 4.0e9, on_host=True),
    "gen5": Rates.in_turn(13e9, 6.5e9, on_host=True),
}
CARD_MEMORY = 15.4e9  # bytes per second of the memory on a SmartSSD


def slot_bytes(state_dtype: str, item_bytes: int, sections: float = ADAMS) -> float:
    """Return the bytes of one parameter's states in a slot.

    `item_bytes`: bytes of the parameter itself. `sections`: including the master, the mean over all parameters; 2 to 4
    for 8-bit states.
    """
    if state_dtype == FP32:
        return 4 * sections

    def bytes_with(n: int) -> float:
        states, dtype = SECTIONS[:n], torch.float32 if item_bytes == 4 else torch.bfloat16
        return elem_bytes(states, codec_of(state_dtype, states), dtype)

    least = min(int(sections), 3)
    return bytes_with(least) + (sections - least) * (bytes_with(least + 1) - bytes_with(least))


def smartssd(state_dtype: str = FP32, sections: float = ADAMS) -> Rates:
    """Return a SmartSSD: published peer-to-peer rates, and the update rate that the card's memory allows.

    States cross the card's memory four times: in from the drive, into the kernel, back, out to the drive. A 16-bit
    gradient crosses it twice, in from the host and into the kernel, and so does the parameter on its way back: together
    8 B. 8-bit states contain the parameter, which saves one crossing: 6 B.
    """
    crossing = 4 * slot_bytes(state_dtype, 2, sections) + (8 if state_dtype == FP32 else 6)
    return Rates.in_turn(2.9e9, 1.6e9, CARD_MEMORY / crossing // 5e6 * 5e6)


SMARTSSD, SMARTSSD_8BIT = smartssd(), smartssd(EIGHT_BIT)  # 275 and 590 million parameters per second


def published_update(variant: str, sections: float = ADAMS) -> float:
    """Return PUBLISHED_UPDATE scaled to `sections`: it was published for Adam, and other kernels are assumed to move as
    many bytes per second.
    """
    return PUBLISHED_UPDATE[variant] * (4 * ADAMS + PUBLISHED_ITEM) / (4 * sections + PUBLISHED_ITEM)


def traffic(
    variant: str,
    params: float,
    *,
    item_bytes: int = 2,
    topk: float | None = None,
    on_host: bool = False,
    state_dtype: str = FP32,
    sections: float = ADAMS,
    orthogonal: float = 0.0,
) -> dict[str, tuple[float, float]]:
    """Return the bytes that a step moves over each link, all devices together, as (towards flash, back).

    Keys: `gpu`, between GPU and host; `link`, between host and devices; `flash`, (written, read).

    `item_bytes`: bytes of a gradient and of a parameter; the published systems always send fp32 to their devices.
    `on_host`: CSDAdam on plain drives. `sections`: of the rule, for every variant. `state_dtype`: of CSDAdam. 8-bit
    states begin with the parameter, which plain drives need not read: a GPU sends it along with the gradient.
    `orthogonal`: the share of the parameters whose matrices the GPU orthogonalizes: in CSDAdam's variants they travel
    to the GPU and back, in bf16. Raises CSDValueError for an unknown variant, or a Top-K variant without a valid
    `topk`.
    """
    if variant not in VARIANTS:
        raise CSDValueError(f"Invalid variant: {variant!r}; there are {', '.join(VARIANTS)}")
    push: float = item_bytes if variant.startswith("csdadam") else PUBLISHED_ITEM
    if variant in ("csdadam_topk", "su_o_c"):
        if topk is None or not 0 < topk <= 1:
            raise CSDValueError(f"Invalid topk: {topk!r}; {variant} sends a share of the gradients, such as 0.01")
        if topk < DENSE_FROM:
            push = topk * (ENTRY if variant == "csdadam_topk" else PUBLISHED_ENTRY)
    per_param: dict[str, tuple[float, float]]
    if variant.startswith("csdadam"):
        x = 2 * orthogonal
        gpu, slot = (push + x, item_bytes + x), slot_bytes(state_dtype, item_bytes, sections)
        known = item_bytes if state_dtype != FP32 and on_host else 0
        flash = (slot, slot - known)
        per_param = {"gpu": (gpu[0] + known, gpu[1]), "link": flash if on_host else gpu, "flash": flash}
    else:  # gradients go through flash
        flash = (4 * sections + push,) * 2
        link = flash if variant == "base" else (push, PUBLISHED_ITEM)
        per_param = {"gpu": (item_bytes, item_bytes), "link": link, "flash": flash}
    return {name: (params * there, params * back) for name, (there, back) in per_param.items()}


def predict(
    variant: str,
    params: float,
    devices: int,
    device: Rates,
    host: Host,
    *,
    item_bytes: int = 2,
    topk: float | None = None,
    state_dtype: str = FP32,
    sections: float = ADAMS,
    orthogonalization: Orthogonalization | None = None,
    forward: float = 0.0,
    backward: float = 0.0,
) -> Prediction:
    """Return the time of an iteration of `variant` with `params` parameters on `devices` equal devices.

    base         read, update and write in turn, or the link if it takes longer than that
    su_o[_c]     every phase in turn: that is how the published times add up, whatever was meant to overlap
    csdadam[..]  everything at once: the slowest stage, plus one tile's time in the others (pipeline fill and drain)

    Matrices are orthogonalized group by group, while CSDAdam's devices take the next group: the shorter of both is
    hidden but for one group's share. In the published systems the two do not overlap.

    `device`: for "base" the plain drive, with a CPU that updates `host.update` parameters per second (ZERO_UPDATE was
    published). `state_dtype`, `sections`: see `traffic`; all update rates are for such states. `forward`, `backward`:
    the GPU's seconds. Raises CSDValueError as `traffic` does.
    """
    moved = traffic(
        variant,
        params,
        item_bytes=item_bytes,
        topk=topk,
        on_host=device.on_host,
        state_dtype=state_dtype,
        sections=sections,
        orthogonal=orthogonalization.share if orthogonalization else 0.0,
    )
    (gpu_down, gpu_up), (down, up), (written, read) = moved["gpu"], moved["link"], moved["flash"]
    gradients, tiles = 0.0, tiles_per_device(params, devices, state_dtype, sections)
    if variant.startswith("csdadam"):
        both = min(read, written)  # at the mixed rate; the rest at the rate of one direction
        alone = (read - both) / device.read + (written - both) / device.write
        stages = {
            "read": read / (devices * device.read),
            "write": written / (devices * device.write),
            "drive": (2 * both / device.mixed + alone) / devices,
            "update": params / (host.update if device.on_host else devices * device.update),
            "link down": down / host.link,
            "link up": up / host.link,
            "gpu link down": gpu_down / host.gpu_link,
            "gpu link up": gpu_up / host.gpu_link,
        }
        step = max(stages.values())
        way = [stages[s] for s in ("gpu link down", "link down", "read", "update", "write", "link up", "gpu link up")]
        step += (sum(way) - max(way)) / tiles
        if orthogonalization:
            stages["orthogonalize"] = found = orthogonalization.seconds(params)
            step = max(step, found) + min(step, found) / orthogonalization.groups(params, params / devices / tiles)
    else:
        link = LINK_SHARE * host.link
        states = 4 * sections * params
        pushed = written - states  # gradients written to flash
        gradients = pushed / min(devices * device.write, link)
        stages = {
            "read": read / (devices * device.read),
            "update": params / (host.update if variant == "base" else devices * device.update),
            "write": states / (devices * device.write),
        }
        in_turn = sum(stages.values())
        if variant == "base":
            crossing = (read + states) / link
            step = max(in_turn, crossing)
            if crossing > in_turn:
                stages["link"] = crossing
        else:
            stages["link up"] = up / link
            step = in_turn + stages["link up"]
        if orthogonalization:
            stages["orthogonalize"] = orthogonalization.seconds(params)
            step += stages["orthogonalize"]
    # max() returns the first of equal stages: "read" and "write" say more than "drive".
    bound = max(stages, key=lambda stage: stages[stage])
    return Prediction(variant, devices, forward, backward, gradients, step, stages, bound)


def tiles_per_device(params: float, devices: int, state_dtype: str = FP32, sections: float = ADAMS) -> int:
    """Return the number of tiles into which layout.plan_extent() divides each device's share."""
    mapped = sections if state_dtype == FP32 else 0
    largest = max(TILE_ELEMS, math.ceil(mapped * params / MAX_MAPPINGS))
    return max(TILES_PER_DEVICE, math.ceil(params / (devices * largest)))
