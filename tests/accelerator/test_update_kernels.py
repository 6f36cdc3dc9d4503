"""The update kernels give the same bits as the native engine, on the emulated accelerator and on real ones."""

import ctypes
import re

import pytest
import torch
from support import emulated
from support.emulated_kernels import EmulatedProcessor, changed_headers, compiled
from support.on_accelerator import DEVICE, DTYPES
from support.rule_cases import ROWS, SIZES, differing, edge_rows, random_rows

from csd_optim import CSDAdam
from csd_optim.bindings import RULES
from csd_optim.kernels.device_check import EXACT, SOFT, WAYS, kernels_of
from csd_optim.kernels.library import library_of
from csd_optim.kernels.sources import constant
from csd_optim.kernels.update import UpdateRow, launch_update

COUNTED = "constexpr uint32_t kThreads = 256;"
COUNTER = f'{COUNTED}\nstatic uint64_t moved = 0;\nextern "C" uint64_t moved_bytes() {{ return moved; }}\n'
pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule]


def library_on(way):
    """Return the kernels of the accelerator if they can treat subnormal numbers in this way."""
    found = kernels_of(torch.device(DEVICE))
    if found.library is None or (way == EXACT and found.report != EXACT):
        pytest.skip(found.report)
    return found.library


def each(some):
    """Return all rules with the processor's own flush, and with the soft one: all in the tier ci, else `some`."""
    return [
        pytest.param(row, way, id=f"{row.name}-{way}", marks=[pytest.mark.ci] if way == SOFT and k not in some else [])
        for way in (EXACT, SOFT)
        for k, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize(("row", "way"), each(some=(1, 4, 11)))
def test_bits(row, way):
    library, generator = library_on(way), torch.Generator().manual_seed(len(row.name))
    wrong, compared = differing(
        library, WAYS[way], row, [*edge_rows(row, range(2)), *random_rows(row, generator, SIZES)]
    )
    assert (wrong, compared > 50_000) == (0, True)


@pytest.mark.ci
@pytest.mark.parametrize(("row", "way"), each(some=()))
def test_ten_million_values(row, way):
    library, generator, compared = library_on(way), torch.Generator().manual_seed(len(row.name)), 0
    while compared < 10_000_000:
        wrong, more = differing(library, WAYS[way], row, random_rows(row, generator, [100_003, 65_536, 7]))
        compared += more
        assert wrong == 0


def test_few_launches_for_many_parameters():
    """A launch updates up to kRows parameters of one rule, whatever their dtypes."""
    library = kernels_of(torch.device(DEVICE)).library
    if library is None:
        pytest.skip(kernels_of(torch.device(DEVICE)).report)
    params = [torch.ones(i + 1, device=DEVICE, dtype=DTYPES[i % 3], requires_grad=True) for i in range(100)]
    optimizer = CSDAdam([{"params": params[:90]}, {"params": params[90:], "amsgrad": True}], devices="gpu:")
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        before = library.launches
        optimizer.step()
        assert library.launches - before == -(-90 // constant("kRows")) + 1
    assert optimizer.stats()["devices"][0]["kernels"] == {str(params[0].device): kernels_of(params[0].device).report}


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize(
    ("rule", "dtype", "nbytes"),
    [
        ("adamw", torch.bfloat16, 28),
        ("adamw", torch.float32, 28),  # which is its own master
        ("amsgrad", torch.float16, 36),
        ("sgd", torch.bfloat16, 12),
    ],
)
def test_bytes_per_parameter(rule, dtype, nbytes, tmp_path):
    """Gradients and states are read once, states and 16-bit parameters are written once."""
    headers = changed_headers(tmp_path, gpu=(COUNTED, COUNTER))
    text = (headers / "gpu.h").read_text()
    for access in re.findall(r"inline void (?:load|store)\(.*\{\n", text):
        text = text.replace(access, f"{access}  moved += sizeof(T) * (left < n ? left : n);\n")
    (headers / "gpu.h").write_text(text)
    counted = []

    class Processor(EmulatedProcessor):
        def load(self, source, defines):
            library = ctypes.CDLL(str(compiled(source, defines, headers)))
            counted.append((library.moved_bytes, library.moved_bytes()))
            return library.launch

    row = next(row for row in ROWS if row.name == rule)
    states = [torch.zeros(5001, device=DEVICE) for _ in range(row.updated)]
    grad = torch.zeros(5001, dtype=dtype, device=DEVICE)
    param = None if dtype is torch.float32 else torch.zeros_like(grad)
    with emulated.processor(Processor):
        nonfinite = torch.zeros((), dtype=torch.int64, device=DEVICE)
        rows = [UpdateRow(grad, dtype, states, param, [1.0] * 9)]
        launch_update(library_of(grad.device), RULES[rule], rows, nonfinite, ())
        assert nonfinite.item() == 0
    [(moved, before)] = counted
    assert moved() - before == nbytes * 5001
