"""Cases for the kernel that updates 8-bit codes: whether it makes of them what the native engine makes."""

import numpy as np
import torch

from csd_optim import bindings
from csd_optim.bindings import GRAD_SCALE, HYPER, RULE_ROWS, RULES
from csd_optim.engine.accelerator_codes import CodesLayout, checks_of
from csd_optim.kernels.codes import CODES_DEFINES, CodesRow, launch_codes
from csd_optim.kernels.update import in_launches
from csd_optim.store.sections import CHECKS, SECTIONS

from .floats import awkward, same_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = {row.name: row for row in RULE_ROWS if RULES.get(row.name) in CODES_DEFINES}
# Rules, and how many states there are: AdamW may have max_exp_avg_sq without updating it.
CASES = [(row.name, n) for row in ROWS.values() for n in {row.updated, row.most} if row.codec == "8bit" or n == 2]
SIZES = [1, 63, 64, 65, 1000, 4095, 4097, 8193]  # about the 64 elements of a group and the 4096 of a block


def constants(generator, scale):
    c = torch.rand(9, generator=generator).tolist()
    c[GRAD_SCALE] = scale
    return c


def cut(t, shift, device):
    """Return a copy of `t` on the device, in the midst of a larger tensor: misaligned unless `shift` is 0 or 4."""
    return torch.full((len(t) + 8,), 7.0, dtype=t.dtype, device=device)[shift : shift + len(t)].copy_(t)


def states_of(name, n_states):
    return SECTIONS[:n_states] if ROWS[name].codec == "8bit" else ("master", "sum")


class Pair:
    """Codes on the device, and the same for the native updater: all its sections, on the CPU."""

    def __init__(self, name, n_states, n, dtype, generator, device, *, alone, shift):
        self.layout = CodesLayout(n, states_of(name, n_states), ROWS[name].codec, dtype, alone)
        whole = CodesLayout(n, self.layout.states, self.layout.codec, dtype, False).on(torch.device("cpu"))
        param = torch.randn(n, generator=generator).to(dtype)
        param[3::50] = torch.tensor([torch.inf, torch.nan, 0.0, -0.0]).repeat(n)[: len(param[3::50])].to(dtype)
        whole.start(param)
        self.codes = list(whole.sections.values())
        self.codes[0] = self.codes[0].view(dtype)
        states = [awkward(n, generator, positive=k > 1 or self.layout.codec == "root") for k in range(1, n_states)]
        bindings.encode("scalar", [None, *states], dtype, self.codes, self.layout.codec)
        if dtype is not torch.float32:  # any master that rounds to the parameter
            drawn = torch.randint(-127, 128, (n,), generator=generator, dtype=torch.int8)
            self.codes[1][:n] = torch.where(param.isfinite() & (param != 0), drawn, 0).view(torch.uint8)
        there = self.layout.on(torch.device("cpu"))
        for section, to in zip(whole.sections, whole.sections.values(), strict=True):
            if section in there.sections:
                there.sections[section].copy_(to)
        if CHECKS in there.sections:
            there.sections[CHECKS].numpy().view(np.uint32)[:] = checks_of(self.codes[0])
        self.there = self.layout.on(device)
        self.there.memory.copy_(there.memory)
        self.param = cut(self.codes[0][:n], shift, device)  # whose nan the encoder has chosen

    def set_outside(self, generator):
        """Set some elements of the parameter, of one group and of many."""
        n = self.layout.numel
        where = torch.rand(n, generator=generator) < (0.5 if n < 1000 else 0.002)
        values = torch.randn(n, generator=generator).to(self.layout.param_dtype)
        before, param = self.param.cpu(), torch.where(where, values, self.param.cpu())
        self.param.copy_(param)
        self.codes[0][:n] = param
        if self.layout.param_dtype is torch.float32:
            return
        differ = before.view(torch.int16) != param.view(torch.int16)
        if self.layout.alone:  # all elements of their groups lose what is beyond 16 bits
            padded = torch.zeros(len(self.codes[1]), dtype=torch.bool)
            padded[:n] = differ
            differ = padded.view(-1, 64).any(1, keepdim=True).expand(-1, 64).reshape(-1)[:n]
        self.codes[1][:n][differ] = 0

    def differences(self, expected):
        """Return the names of sections that differ from the native updater's. `expected`: the updated parameter."""
        param, sections = self.param.cpu(), {name: section.cpu() for name, section in self.there.sections.items()}
        found = [] if same_bits(param, expected) else ["param"]
        if CHECKS in sections:
            padded = torch.zeros_like(self.codes[0])
            padded[: len(param)] = param
            if not np.array_equal(sections.pop(CHECKS).numpy().view(np.uint32), checks_of(padded)):
                found.append(CHECKS)
        codes = self.codes[1:] if self.layout.alone else self.codes
        for (name, ours), theirs in zip(sections.items(), codes, strict=True):
            if name in ("master", "parameter"):
                same = same_bits(ours.view(theirs.dtype), theirs)
            else:
                same = torch.equal(ours, theirs)
            found += [] if same else [name]
        return found


def differing(library, defines, case, sizes=SIZES, n_steps=4):
    """Take steps of one rule on parameters of these sizes, in all dtypes.

    Returns what the kernel makes otherwise than the native engine, and how many elements of codes were compared.
    """
    (name, n_states), device = case, library.device
    generator, compared = torch.Generator().manual_seed(1), 0
    pairs = [
        Pair(name, n_states, n, dtype, generator, device, alone=bool((i + d) % 2), shift=i % 3)
        for i, n in enumerate(sizes)
        for d, dtype in enumerate(DTYPES)
    ]
    count, nonfinite, different = torch.zeros((), dtype=torch.int64, device=device), 0, []
    for step in range(n_steps):
        rows, expected = [], []
        for i, pair in enumerate(pairs):
            if step:
                pair.set_outside(generator)
            n, dtype = pair.layout.numel, pair.layout.param_dtype
            grad_dtype, link_dtype = DTYPES[(i + step) % 3], DTYPES[(i // 3 + step) % 3]
            c, key = constants(generator, [1.0, 1024.0, 1 - 2.0**-24][i % 3]), 0x9E3779B9 * step + i & 0xFFFFFFFF
            if i % 4 == 1:
                c[2] = c[5] = c[7] = 0.0  # without eps, whatever its index, 0 / 0 occurs
            grad = (awkward if step % 2 else torch.randn)(n, generator=generator).to(grad_dtype)
            rows.append(CodesRow(cut(grad, i % 2, device), link_dtype, pair.param, pair.there.sections, c, key))
            param = torch.zeros(n, dtype=dtype)
            hyper = np.array([(RULES[name], c)], HYPER)
            grad = grad.to(link_dtype)
            bindings.update_codes(hyper, "scalar", grad, pair.codes, param, key)
            nonfinite += int((~grad.isfinite()).sum())
            expected.append(param)
        for some in in_launches(rows, "kCodesRows"):
            launch_codes(library, RULES[name], some, count, defines)
        for pair, param in zip(pairs, expected, strict=True):
            compared += sum(section.numel() for section in pair.there.sections.values())
            found = pair.differences(param)
            different += [(step, pair.layout.numel, pair.layout.param_dtype, pair.layout.alone, what) for what in found]
    return different + ["nonfinite"] * (int(count) != nonfinite), compared
