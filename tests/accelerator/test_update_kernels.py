"""The update kernels give the same bits as the native engine, on the emulated accelerator and on real ones."""

import pytest
import torch
from support.on_accelerator import DEVICE, DTYPES
from support.rule_cases import ROWS, SIZES, differing, edge_rows, random_rows

from csd_optim import CSDAdam
from csd_optim.kernels.device_check import EXACT, SOFT, WAYS, kernels_of
from csd_optim.kernels.sources import constant

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
