"""A device is checked at its first use: kernels run as they are, with the soft flush, or not at all."""

import errno

import pytest
import torch
from support import emulated
from support.emulated_kernels import EmulatedProcessor, changed_headers, compiled
from support.on_accelerator import DEVICE

from csd_optim import CSDAdam, CSDLion, CSDUnavailableError, CSDValueError
from csd_optim.kernels.device_check import EXACT, SOFT, WAYS, kernels_of
from csd_optim.kernels.library import library_of

pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule]
OTHERWISE = "the device rounds otherwise than the CPU"
FLUSHED = "magnitude_of(result) <= kSmallest && magnitude_of(scaled) < 0x1p-62f"
TIMES = "flushed(a * b, a * 0x1p64f * b)"
# What a processor may do of its own: how soft.h has to be changed to do the same.
HARDWARE = {
    "as x86 flushes": ((FLUSHED, FLUSHED), EXACT),
    "after rounding to a subnormal number": ((FLUSHED, "magnitude_of(result) < kSmallest"), SOFT),
    "before rounding": (
        (TIMES, f"(double)a * b < 0x1p-126 && (double)a * b > -0x1p-126 ? zero_like(a * b) : {TIMES}"),
        SOFT,
    ),
    "not at all": ((FLUSHED, "false"), SOFT),
}


def adam(devices="gpu:"):
    params = [torch.ones(1000, device=DEVICE, requires_grad=True)]
    params[0].grad = torch.linspace(-1, 1, 1000).to(DEVICE)
    optimizer = CSDAdam(params, devices=devices)
    optimizer.step()
    return params[0].detach().cpu(), optimizer.stats()["devices"][0]["kernels"]


def on_the_cpu():
    param = torch.ones(1000, requires_grad=True)
    param.grad = torch.linspace(-1, 1, 1000)
    CSDAdam([param], devices="ram:").step()
    return param.detach()


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("flushes", HARDWARE)
def test_processors_that_flush_in_their_own_way(flushes, tmp_path, caplog):
    change, report = HARDWARE[flushes]
    headers = changed_headers(tmp_path, soft=change)

    class Processor(EmulatedProcessor):
        def load(self, source, defines):
            own = "CSD_SOFT" not in defines  # the processor's own way, for which the changed soft.h stands
            return self.loaded(compiled(source, (*defines, *WAYS[SOFT]), headers) if own else compiled(source, defines))

    with emulated.processor(Processor), caplog.at_level("INFO", "csd_optim"):
        assert kernels_of(torch.device(DEVICE, 0)).defines == WAYS[report]
        param, kernels = adam()
    assert kernels == {f"{DEVICE}:0": report}
    assert f"kernels on {DEVICE}:0: {report}" in caplog.messages
    assert torch.equal(param, on_the_cpu())


def truncates(self, source, defines):
    return self.loaded(compiled(source, defines, self.headers))


def cannot_compile(self, source, defines):
    raise CSDUnavailableError(errno.ENOEXEC, f"{source} cannot be compiled: no such thing")


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize(
    ("load", "why"), [(truncates, OTHERWISE), (cannot_compile, "update.h cannot be compiled: no such thing")]
)
def test_where_kernels_cannot_be_used(load, why, tmp_path, caplog):
    """`gpu:` alone refuses the parameters; devices beside it update them. The log says why."""
    change = ("f32_to_bf16(from[j])", "(uint16_t)(float_bits(from[j]) >> 16)")
    attributes = {"load": load, "headers": changed_headers(tmp_path, values=change)}
    with emulated.processor(type("Processor", (EmulatedProcessor,), attributes)), caplog.at_level("INFO", "csd_optim"):
        assert kernels_of(torch.device(DEVICE, 0)).library is None
        with pytest.raises(CSDValueError, match=f"{DEVICE}:0 has no kernels, because {why}"):
            adam()
        param, _ = adam(["gpu:", "ram:"])
    assert f"kernels on {DEVICE}:0: {why}" in caplog.messages
    assert torch.equal(param, on_the_cpu())


@pytest.mark.usefixtures("emulated_only")
def test_a_rule_that_cannot_be_compiled():
    """A step raises before it changes anything."""
    param = torch.ones(1000, device=DEVICE, requires_grad=True)
    param.grad = torch.ones_like(param)

    class Processor(EmulatedProcessor):
        def load(self, source, defines):
            return (
                cannot_compile(self, source, defines) if "CSD_RULE=Lion" in defines else super().load(source, defines)
            )

    with emulated.processor(Processor):
        optimizer = CSDLion([param], devices="gpu:")
        for _ in range(2):
            with pytest.raises(CSDUnavailableError, match="cannot be compiled: no such thing"):
                optimizer.step()
    assert torch.equal(param.detach().cpu(), torch.ones(1000))
    optimizer.step()
    assert not torch.equal(param.detach().cpu(), torch.ones(1000))


@pytest.mark.usefixtures("emulated_only")
def test_a_device_is_checked_once():
    with emulated.processor(EmulatedProcessor):
        library = library_of(torch.device(DEVICE, 0))
        assert library.launches == 0
        assert kernels_of(torch.device(DEVICE, 0)).library is library
        assert library.launches == 1
        adam()
        assert library.launches == 2


def test_kinds_of_accelerators_without_kernels():
    found = kernels_of(torch.device("xpu", 0))
    assert found == (None, (), "there are none for accelerators of type xpu")


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("default", ["device", "dtype"])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"topk": 0.1}], ids=str)
def test_what_the_program_has_as_defaults(default, options):
    """The check is the same whatever the device and the dtype of tensors are by default."""
    param = torch.ones(300, 1000, device=DEVICE, requires_grad=True)
    param.grad = torch.linspace(-1, 1, 300_000).view(300, 1000).to(DEVICE)
    with emulated.processor(EmulatedProcessor):
        torch.set_default_device(DEVICE) if default == "device" else torch.set_default_dtype(torch.float64)
        try:
            optimizer = CSDAdam([param], devices="gpu:", **options)
            optimizer.step()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    assert optimizer.stats()["devices"][0]["kernels"] == {f"{DEVICE}:0": EXACT}


@pytest.mark.usefixtures("emulated_only")
def test_codes_are_checked_as_well(tmp_path):
    """A device is refused for 8-bit states if its kernel makes other codes."""
    change = ("own = max_of(own, from_lane_xor(own, mask))", "own = own")
    headers = changed_headers(tmp_path, codes=change)

    class Processor(EmulatedProcessor):
        def load(self, source, defines):
            return self.loaded(compiled(source, defines, headers))

    param = torch.ones(1000, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    param.grad = torch.ones_like(param)
    with emulated.processor(Processor):
        assert kernels_of(torch.device(DEVICE, 0)).report == EXACT
        with pytest.raises(CSDValueError, match="because the kernel makes others than the CPU"):
            CSDAdam([param], devices="gpu:", state_dtype="8bit").step()
