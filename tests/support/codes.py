"""Stores with 8-bit states (codes), made by the engine alone, and their expected content, by the updater on arrays."""

import numpy as np
import torch

from csd_optim import bindings
from csd_optim.bindings import DTYPE_CODES, HYPER, NEW, PARAM, RULES
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.open_engine import open_engine
from csd_optim.store.format import Record
from csd_optim.store.sections import SECTIONS

TILE = 4096
GROUP = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
# Names, and shapes whose last groups and tiles are only partly full. Each dtype has its own extent.
SHAPES = {
    torch.bfloat16: {"weight": (90, 110), "bias": (70,), "scalar": ()},
    torch.float16: {"half": (5000,), "rest": (63,)},
    torch.float32: {"whole": (65, 64), "phase": (33, 31)},
}
PLAIN = None  # instead of a dtype: fp32 states
ALL = {**SHAPES, PLAIN: {"plain": (70, 90)}}


class Coded:
    """Parameters and an engine with the codes of their states; `step()` makes a step of all of them.

    `rank`: of two ranks, each of which has half of the rows.
    """

    def __init__(self, devices, dtypes=tuple(SHAPES), *, amsgrad=False, resume=False, rank=None):
        mode = "resume" if resume else "new"
        self.engine = open_engine(parse_devices(devices), mode=mode, tile_elems=TILE)
        self.seed = 100 * (1 + (rank or 0))
        self.states = SECTIONS if amsgrad else SECTIONS[:3]
        constants = (0.999, 0.9, 0.1, 0.999, 0.001, 0.01, 1, 1e-8, 1)
        self.hyper = np.array([(RULES["amsgrad" if amsgrad else "adamw"], constants)], HYPER)
        self.record = Record([{**GROUP, "amsgrad": amsgrad}], [{**GROUP, "amsgrad": amsgrad}], seconds=1.0)
        generator = torch.Generator().manual_seed(1)
        self.params, self.codes, about = {}, {}, []
        for e, dtype in enumerate(dtypes):
            complex_ = {name: name == "phase" for name in ALL[dtype]}
            numels = [int(np.prod(shape)) * (1 + complex_[name]) for name, shape in ALL[dtype].items()]
            if resume:
                extent = self.engine.tiles.extents[e]
            else:
                codec = {} if dtype is PLAIN else {"codec": "8bit", "param_dtype": dtype}
                extent = self.engine.extend(numels, self.states, **codec)
            for (name, shape), numel, start in zip(ALL[dtype].items(), numels, extent.starts, strict=True):
                self.params[name] = torch.randn(numel, generator=generator).to(dtype or torch.float32)
                self.codes[name] = self._blank(self.params[name], dtype)
                stride = list(torch.empty(shape, device="meta").stride())
                kind = "complex64" if complex_[name] else str(self.params[name].dtype).removeprefix("torch.")
                place = {"group": 0, "position": len(about), "extent": e, "start": start, "numel": numel}
                if rank is not None:
                    place["of"] = {"shape": [2 * shape[0], *shape[1:]], "first": [rank * shape[0], 0]}
                about.append({"name": name, "shape": [*shape], "stride": stride, "dtype": kind, **place})
        if resume:
            self.engine.committer.check_recovered()
            self.engine.committer.discard_newer()
        else:
            self.engine.committer.describe({"params": about, "waiting": []})
        if rank is not None:  # one of two ranks, as if they committed together
            self.engine.committer.store_id = b"of two in codes."
            self.engine.committer.manifests._rank_fields = {"rank": rank, "world_size": 2}

    def _blank(self, param, dtype):
        """Return a parameter's states in one array before the first step: its master is the parameter."""
        if dtype is PLAIN:
            return [param.clone(), *(torch.zeros(param.numel()) for _ in self.states[1:])]
        padded, wide = -(-param.numel() // 64) * 64, param.dtype == torch.float32
        codes = [torch.zeros(padded, dtype=param.dtype)]
        codes[0][: param.numel()] = param
        codes += [torch.zeros(padded, dtype=torch.uint8) for _ in range(3 - wide)] + [torch.zeros(padded // 64).byte()]
        if len(self.states) > 3:
            codes += [torch.zeros(padded, dtype=torch.uint8), torch.zeros(padded // 64, dtype=torch.uint8)]
        return codes

    def grads(self, step):
        generator = torch.Generator().manual_seed(self.seed + step)
        return {name: torch.randn(p.numel(), generator=generator).to(p.dtype) for name, p in self.params.items()}

    def step(self, *, commit=True):
        engine, step = self.engine, self.engine.states.step + 1
        grads, table = self.grads(step), np.zeros(len(self.params), PARAM)
        for row, (name, p) in enumerate(self.params.items()):
            code = DTYPE_CODES[p.dtype]
            table[row]["grad"], table[row]["param"] = grads[name].data_ptr(), p.data_ptr()
            table[row]["grad_dtype"] = table[row]["param_dtype"] = code
            table[row]["master"] = NEW if step == 1 else bindings.IN_SECTION
            table[row]["seed"], table[row]["first"] = step, 1000 * row
        tiles = engine.in_step_order(np.arange(len(engine.tiles), dtype=np.uint32))
        for tile in engine.begin(table, self.hyper, tiles, self.record).tolist():
            engine.native.push(tile)
        engine.finish()
        for steps in engine.states.steps:
            steps[:] = step
        if commit:
            engine.committer.commit(self.record)
        self.update_codes(step)

    def update_codes(self, step):
        for row, (name, grad) in enumerate(self.grads(step).items()):
            key = (step * 0x9E3779B9 + 1000 * row) % (1 << 32)
            codes, out = self.codes[name], torch.empty_like(grad)
            if name in ALL[PLAIN]:
                bindings.update(self.hyper, "scalar", grad, codes, out)
            else:
                bindings.update_codes(self.hyper, "scalar", grad, codes, out, key)

    def decoded(self):
        """Return the states in fp32, by parameter and state."""
        found = {}
        for name, p in self.params.items():
            if name in ALL[PLAIN]:
                found |= {(name, state): values for state, values in zip(self.states, self.codes[name], strict=True)}
                continue
            states = [torch.empty(p.numel()) for _ in self.states]
            bindings.decode("scalar", self.codes[name], p.dtype, states + [None] * (4 - len(states)))
            found |= {(name, state): values for state, values in zip(self.states, states, strict=True)}
        return found

    def rounded(self):
        """Return what each parameter must be: its rounded master."""
        return {name: self.codes[name][0][: p.numel()] for name, p in self.params.items()}

    def close(self):
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def made(devices, dtypes=tuple(SHAPES), *, steps=2, **options):
    """Make a store with `steps` steps and close it. Returns the Coded that made it."""
    with Coded(devices, dtypes, **options) as coded:
        for _ in range(steps):
            coded.step()
    return coded
