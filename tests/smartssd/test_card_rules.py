"""A SmartSSD supports the optimizers whose kernels are in its xclbin. On the real XRT, in software emulation."""

import pytest
from support.cards import needs_xrt, script

# Writes xclbins with some of our kernels, and returns an optimizer's bits after some steps.
TOOLS = """
from pathlib import Path
from csd_optim import CSDLion, CSDSGD, CSDValueError
from csd_optim.devices.xclbin import KERNELS, write_emulated

here = Path(sys.argv[1])

def xclbin(*rules):
    path = here / f"{'_'.join(rules)}.xclbin"
    kernels = {name: KERNELS[name] for name in (f"csd_{rule}_update" for rule in rules)}
    write_emulated(path, "xilinx_u2_gen3x4_xdma_emulated", 2 << 30, kernels)
    return f"xrt:0?scratch=1&nvme={here}&xclbin={path}"

def trained(cls, device, groups=lambda net: net.parameters(), **options):
    net = model()
    with cls(groups(net), lr=1e-2, devices=[device], **options) as opt:
        train(net, opt, range(3))
        return [p.detach().clone() for p in net.parameters()] + [
            value.clone() for p in net.parameters() for value in opt.state[p].values()]

def refused(error, says, call):
    try:
        call()
    except error as e:
        assert all(text in str(e) for text in says), e
        return
    raise SystemExit("not refused")
"""


@needs_xrt
def test_the_rules_of_an_xclbin(tmp_path):
    """Optimizers with kernels in the xclbin work, whatever the kernels' number of ports; others are refused early."""
    script(
        TOOLS
        + """
device = xclbin("lion", "sgd", "rmsprop")
for cls, options in (CSDLion, {}), (CSDSGD, {}), (CSDSGD, {"momentum": 0.9, "nesterov": True}):
    same(trained(cls, device, **options), trained(cls, "file:", **options))
store = device.replace("scratch=1", "").replace(f"nvme={here}", f"nvme={here}/csd")
says = "has no kernel csd_adamw_update; it has csd_lion_update", "make -C hls_kernels RULE=adamw "
refused(CSDUnavailableError, says, lambda: CSDAdam(model().parameters(), devices=[store]))
assert not (here / "csd").exists()
says = ["csd_adamw_8bit_update", "RULE=adamw_8bit "]
refused(CSDUnavailableError, says, lambda: trained(CSDAdam, xclbin("adamw"), state_dtype="8bit"))
""",
        tmp_path,
    )


@needs_xrt
def test_adam_and_the_groups_that_decay_as_adamw(tmp_path):
    """Parameters of both may share a tile, which needs Adam's kernel; AdamW's would reject it."""
    script(
        TOOLS
        + """
def groups(net):
    first, *others = net.parameters()
    return [{"params": [first], "decoupled_weight_decay": True}, {"params": others}]

options = {"decoupled_weight_decay": False, "weight_decay": 0.1}
expected = trained(CSDAdam, "file:", groups, **options)
same(trained(CSDAdam, xclbin("adamw", "adam"), groups, **options), expected)
same(trained(CSDAdam, xclbin("adam"), groups, **options), expected)
refused(CSDUnavailableError, ["csd_adamw_update"], lambda: trained(CSDAdam, xclbin("adam")))

codes = options | {"state_dtype": "8bit"}
same(trained(CSDAdam, xclbin("adam_8bit"), groups, **codes), trained(CSDAdam, "file:", groups, **codes))
some = lambda net: [{"params": list(net.parameters()), "state_dtype": "8bit"}]
says = ["has no kernel csd_adam_8bit_update; it has csd_adam_update, csd_adamw_8bit_update"]
refused(CSDUnavailableError, says, lambda: trained(CSDAdam, xclbin("adam", "adamw_8bit"), some, **options))
some = lambda net: [{"params": list(net.parameters()), "state_dtype": "fp32"}]
says = ["has no kernel csd_adam_update; it has csd_adam_8bit_update"]
refused(CSDUnavailableError, says, lambda: trained(CSDAdam, xclbin("adam_8bit"), some, **codes))
""",
        tmp_path,
    )


@pytest.mark.ci
@needs_xrt
def test_a_kernel_of_any_rule_is_measured(tmp_path):
    script(
        TOOLS
        + """
from csd_optim.cli.measure import LEAST_CARD_BYTES, card_rates
from csd_optim.devices.spec import parse_devices
for rule in "sgd", "adamw_8bit":
    [spec] = parse_devices(xclbin(rule))
    assert card_rates(spec, 4 * LEAST_CARD_BYTES)["kernel"] > 0
""",
        tmp_path,
    )


@needs_xrt
def test_a_rule_per_group(tmp_path):
    """The card needs a kernel for each group; one that is added later is refused before anything changes."""
    script(
        TOOLS
        + """
def groups(net, rule="lion"):
    first, *others = net.parameters()
    return [{"params": [first]}, {"params": others, "rule": rule}]

device = xclbin("adamw", "lion")
same(trained(CSDAdam, device, groups), trained(CSDAdam, "file:", groups))
store = device.replace("scratch=1", "").replace(f"nvme={here}", f"nvme={here}/csd")
says = "has no kernel csd_sgd_update; it has csd_adamw_update", "make -C hls_kernels RULE=sgd "
refused(CSDUnavailableError, says, lambda: CSDAdam(groups(model(), "sgd"), devices=[store]))
assert not (here / "csd").exists()

net = model()
with CSDAdam(groups(net), devices=[device]) as opt:
    train(net, opt, range(1))
    new = torch.nn.Parameter(torch.zeros(3))
    refused(CSDUnavailableError, says, lambda: opt.add_param_group({"params": [new], "rule": "sgd"}))
    assert len(opt.param_groups) == 2
    train(net, opt, range(1, 2))
codes = {"state_dtype": "8bit"}
refused(CSDUnavailableError, ["csd_adamw_8bit_update"], lambda: CSDAdam(
    [{"params": [*model().parameters()], **codes}], devices=[device]))
""",
        tmp_path,
    )
