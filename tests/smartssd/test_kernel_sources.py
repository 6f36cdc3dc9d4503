"""The sources of the FPGA's kernels: code and directives that Vitis accepts, and the targets of a build for a card."""

import functools
import itertools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.kernels import DRIVEN, KERNELS, LANES, NATIVE, ROOT, WARNINGS, compile_and_run

from csd_optim.devices import xclbin

TOPS = sorted(path.stem for path in KERNELS.glob("*.cpp"))
TEXT_OF_TOPS = [(KERNELS / name).read_text() for name in ("update.h", "coded_update.h")]  # fp32 states; codes


@functools.cache
def preprocessed(top):
    """Return a kernel after preprocessing, with our included headers and its pragmas."""
    includes = [f"-I{d}" for d in (*NATIVE, KERNELS, KERNELS / "vitis_check")]
    command = ["g++", "-std=gnu++14", "-E", "-P", *includes, KERNELS / f"{top}.cpp"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# ---- The sources as Vitis reads them -----------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_compiles_as_vitis_would(compiler, tmp_path):
    """As C++14 with GNU extensions, with the declarations of Vitis; each stage is called after those it reads from."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    as_vitis = ["-std=gnu++14", "-faligned-new"]
    compile_and_run(compiler, tmp_path, KERNELS / "vitis_check", *as_vitis, "-DSEQUENTIAL")
    others = [KERNELS / f"{top}.cpp" for top in TOPS if top not in DRIVEN]
    includes = [f"-I{d}" for d in (*NATIVE, KERNELS, KERNELS / "vitis_check")]
    subprocess.run([compiler, "-fsyntax-only", *as_vitis, *includes, *WARNINGS, *others], check=True)


DIRECTIVES = [  # from UG1399; a compiler ignores unknown directives, so misspelled ones would go unnoticed
    r"INTERFACE m_axi port = \w+ bundle = gmem\d max_(\w+)_burst_length = \d+ num_(read|write)_outstanding = \d+",
    r"INTERFACE (s_axilite|ap_ctrl_chain) port = \w+ bundle = control",
    r"DATAFLOW",
    r"PIPELINE II = \d( style = (stp|flp|frp))?",
    r"UNROLL",
    r"INLINE( off)?",
    r"LOOP_TRIPCOUNT min = \d+ max = \d+",
    r"ALLOCATION operation instances = \w+ limit = \d+",
]


def test_directives_are_ones_that_there_are():
    for top in TOPS:
        directives = re.findall(r"^\s*#pragma HLS (.*)$", preprocessed(top), re.M)
        assert len(directives) > 50
        for directive in directives:
            assert any(re.fullmatch(d, directive) for d in DIRECTIVES), directive
    for path in KERNELS.glob("*.h"):
        for directive in re.findall(r"^\s*#pragma (.*)$", path.read_text(), re.M):
            assert directive == "once" or directive.startswith("HLS "), directive


def test_each_stage_stays_a_module_of_its_own():
    """Without INLINE off, Vitis inlines small functions, which are then no processes of the dataflow."""
    coded = {"store", "store_ratios", "store_roots", "read_section", "write_section"}
    for top in TOPS:
        inner, n = (coded, 18) if "_8bit_" in top else ({"store"}, 9)
        names = set(re.findall(r"CSD_STAGE\((\w+)", TEXT_OF_TOPS["_8bit_" in top])) | inner
        assert len(names) == n
        for name in names:
            told = rf"^(inline|static) \w+ {name}\([^)]*\) {{\n#pragma HLS INLINE off$"
            assert re.search(told, preprocessed(top), re.M), name


LANES_OF = {  # stage → the function that it applies to a lane
    "update": """
extern "C" void lane(float (*e)[4], const csd_hyper *h, const uint16_t *grad, uint16_t *param) {
  Rule(*h).update(*e, f16_to_f32(*grad));
  *param = f32_to_f16((*e)[0]);
}
""",
    "update_codes": """
extern "C" void lane(const csd_hyper *h, const uint16_t *grad, const uint32_t *code, float *out) {
  const float u = decode_root(code[0], code[1]), p = decode_root(code[2], code[3]);
  const float master = code[4] ? decode_master(code[5], signed_8(code[6]), code[7]) : bits_float(code[5]);
  float e[4] = {master, decode_exp_avg(signed_8(code[8]), u, code[0]), u * u, p * p};
  Rule(*h).update(e, f16_to_f32(*grad));
  out[0] = e[0], out[1] = e[1], out[2] = sqrtf(e[2]), out[3] = sqrtf(e[3]);
}
""",
    "encode": """
extern "C" void lane(const float *in, const uint32_t *group, uint32_t *code) {
  const RoundingBits rounding = stochastic_rounding_bits(mix_bits(group[0]));
  code[0] = encode_root(in[0], group[1], rounding.root);
  code[1] = encode_ratio(in[1], decode_root(code[0], group[1]), code[0], rounding.ratio);
  code[2] = encode_root(in[2], group[2], round_to_nearest_bits().root);
  const SplitMaster split = encode_master(in[3], rounding, group[3]);
  code[3] = split.param, code[4] = split.correction;
}
""",
}
STAGES = [(top, "update") for top in TOPS if "_8bit_" not in top]
STAGES += [(top, stage) for top in TOPS if "_8bit_" in top for stage in ("update_codes", "encode")]
INSTRUCTIONS = {"mul": "imull", "fmul": "mulss", "fadd": "addss", "fsub": "subss", "fdiv": "divss", "fsqrt": "sqrtss"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts instructions of x86-64")
@pytest.mark.parametrize(("top", "stage"), STAGES)
def test_operators_are_limited_to_what_the_arithmetic_needs(top, stage, tmp_path):
    """Each operator serves two lanes. A lane's operations are counted in its compiled code, for any rule variant."""
    header, rule = re.search(
        r'#include "(\w+\.h)"\n\nusing Rule = (\w+);', (KERNELS / f"{top}.cpp").read_text()
    ).groups()
    includes = "".join(f'#include "{name}"\n' for name in (header, "codec.h", "float16.h"))
    (tmp_path / "lane.cpp").write_text(f"{includes}using Rule = {rule};\n{LANES_OF[stage]}")
    flags = ["-std=gnu++14", "-O1", "-fno-thread-jumps", "-ffp-contract=off", "-fno-math-errno", "-mno-avx", "-S"]
    command = ["g++", *flags, f"-I{ROOT / 'native' / 'include'}", tmp_path / "lane.cpp", "-o", "-"]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (body,) = re.findall(rf"^(?:inline|static) void {stage}\(.*?^}}", preprocessed(top), re.M | re.S)
    limits = dict(re.findall(r"ALLOCATION operation instances = (\w+) limit = (\d+)", body))
    per_lane = {op: len(re.findall(rf"\b{instruction}\b", code)) for op, instruction in INSTRUCTIONS.items()}
    assert limits == {op: str(n * LANES // 2) for op, n in per_lane.items() if n}


LISTENS = """
proc heard {args} { puts $args }
foreach name {open_project set_top add_files open_solution set_part create_clock} {
    interp alias {} $name {} heard $name
}
proc csynth_design {} {
    file mkdir csynth/solution/syn/report
    set report [open csynth/solution/syn/report/csynth.rpt w]
    puts $report "the report"
    close $report
}
source [lindex $argv 0]
"""


def test_csynth_script(tmp_path):
    """Runs the script in a Tcl with stubs of Vitis' commands: the files it names exist, and it prints the report."""
    if not shutil.which("tclsh"):
        pytest.skip("tclsh is not installed")
    (tmp_path / "listens.tcl").write_text(LISTENS)
    shutil.copytree(KERNELS, tmp_path / "hls_kernels", ignore=shutil.ignore_patterns("build"))
    script = tmp_path / "hls_kernels" / "csynth.tcl"
    command = ["tclsh", tmp_path / "listens.tcl", script]
    environment = {**os.environ, "KERNEL": "", "PART": "", "FREQUENCY": "250"}
    heard = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    assert heard[-1] == ""
    assert heard[-2] == "the report"
    told = dict(line.split(" ", 1) for line in heard[:-2])
    assert told["set_top"] == "csd_adamw_update"
    assert told["set_part"] == "xcku5p-ffvb676-2-e"
    assert told["create_clock"] == "-period 250MHz"
    source, _, flags = told["add_files"].partition(" -cflags ")
    assert Path(source).name == "csd_adamw_update.cpp"
    assert Path(source).is_file()
    assert flags.startswith("{-std=gnu++14 ")
    assert script.parent.joinpath("build", "csynth").is_dir()


# ---- What is built for the card ----------------------------------------------------


def kernel_sources():
    """Return kernel → (its arguments, {port: bundle}), from the sources."""
    kernels = {}
    for top in TOPS:
        text = preprocessed(top)
        arguments = re.search(rf"^void {top}\(([^)]*)\)", text, re.M)[1]
        ports = re.findall(r"#pragma HLS INTERFACE m_axi port = (\w+) bundle = (\w+)", text)
        control = re.findall(r"#pragma HLS INTERFACE s_axilite port = (\w+) bundle = control", text)
        arguments = [(a.split()[-1].lstrip("*"), "*" in a) for a in arguments.split(",")]
        assert sorted(port for port, _ in ports) == sorted(a for a, pointer in arguments if pointer)
        assert sorted(control) == sorted([*(a for a, _ in arguments), "return"])
        kernels[top] = ([a for a, _ in arguments], dict(ports))
    return kernels


def test_arguments_are_those_of_the_contract():
    """The arguments equal those of csd_kernel.h, and those of the table that emulated cards use."""
    contract = (ROOT / "native" / "include" / "csd_kernel.h").read_text()
    described, last = {}, []
    for names, arguments in re.findall(r"^//   (csd_.*)\n//       \(([^)]*)\)", contract, re.M):
        arguments = [a.strip() for a in arguments.replace("//", "").split(",")]
        expanded = [
            f"{a.split('_0 ..')[0]}_{k}" if ".." in a else a
            for a in arguments
            for k in range(int(a[-1]) + 1 if ".." in a else 1)
        ]
        if expanded[-1] == "and so on":
            expanded[-1:] = last[last.index("n_words") :]
        described |= dict.fromkeys(names.split(", "), last := expanded)
    assert described == {name: arguments for name, (arguments, _) in kernel_sources().items()}
    assert described == {name: [*k.buffers, *k.scalars] for name, k in xclbin.KERNELS.items()}
    assert xclbin.KERNELS.keys() == {xclbin.kernel_for(rule, "fp32") for rule in xclbin.RULES} | {
        xclbin.kernel_for(rule, "8bit") for rule in ("adamw", "adam")
    }


def test_reads_and_writes_do_not_wait_for_each_other():
    """Each bundle has at most one reader and one writer, which use separate channels."""
    for _, ports in kernel_sources().values():
        outputs = {p for p in ports if p.startswith("tile_out") or p in ("param", "report")}
        for group in (outputs, ports.keys() - outputs):
            bundles = [ports[p] for p in group]
            assert len(set(bundles)) == len(bundles)


DEFAULT = ["adamw", "adamw_8bit"]
CHOICES = [DEFAULT, ["sgd", "adagrad", "lion"], ["rmsprop"], ["adam", "adam_8bit"]]  # together, these are all kernels


@pytest.mark.parametrize("rules", CHOICES, ids=" ".join)
def test_every_port_is_connected_to_the_bank(rules, tmp_path):
    """For the chosen kernels, and again after other kernels are chosen."""
    sources, written = kernel_sources(), tmp_path / "connectivity.cfg"
    for chosen in rules[:1], rules, rules:
        before = written.stat().st_mtime_ns if written.exists() else None
        command = ["make", "-C", KERNELS, f"BUILD={tmp_path}", f"RULE={' '.join(chosen)}", written]
        subprocess.run(command, check=True, capture_output=True)
        expected, masters = ["[connectivity]"], 0
        for name in (f"csd_{rule}_update" for rule in chosen):
            arguments, ports = sources[name]
            expected += [f"nk={name}:1:{name}_1", *(f"sp={name}_1.{a}:bank0" for a in arguments if a in ports)]
            masters += len(set(ports.values()))
        assert masters <= 15  # the most that a bank allows (UG1393)
        assert written.read_text().splitlines() == expected
    assert written.stat().st_mtime_ns == before  # an unchanged file does not cause another link


def test_kernels_that_do_not_go_together_are_refused():
    for rules, why in (
        ("adamw Lion", "RULE is adamw Lion; it is one or several of adagrad "),
        ("adamw rmsprop sgd", "takes 19 AXI masters; a card has 15"),
    ):
        make = ["make", "-n", "-C", KERNELS, f"RULE={rules}"]
        result = subprocess.run(make, capture_output=True, text=True)
        assert result.returncode != 0
        assert why in result.stderr
    assert sorted(itertools.chain(*CHOICES)) == sorted(top.removeprefix("csd_").removesuffix("_update") for top in TOPS)


def dry_run(*arguments):
    """Return the commands that make would run: those of v++, as lists of words, and the others."""
    make = ["make", "--no-print-directory", "-n", "-C", KERNELS, "BUILD=nowhere", *arguments]
    lines = subprocess.run(make, check=True, capture_output=True, text=True).stdout.splitlines()
    commands = [line.split() for line in lines]
    return [c for c in commands if c[0] == "v++"], [c for c in commands if c[0] != "v++"]


@pytest.mark.parametrize("target", ["hw", "hw_emu", "sw_emu"])
def test_makefile(target):
    commands, _ = dry_run(f"TARGET={target}", "FREQUENCY=250")
    *all_compiles, link = commands
    platform = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
    for command in commands:
        assert command[command.index("--target") + 1] == target
        assert command[command.index("--platform") + 1] == platform
        assert "unsafe" not in " ".join(command)
    names = [f"csd_{rule}_update" for rule in DEFAULT]
    for name, compiles in zip(sorted(names), sorted(all_compiles, key=lambda c: c[-1]), strict=True):
        assert compiles[1] == "--compile"
        assert compiles[compiles.index("--kernel") + 1] == name
        assert compiles[compiles.index("--hls.clock") + 1] == f"250000000:{name}"
        assert compiles[-3:] == ["-o", f"nowhere/{name}.xo", f"{name}.cpp"]
        for include in (word[2:] for word in compiles if word.startswith("-I")):
            assert (KERNELS / include).is_dir()
            assert not (KERNELS / include / "hls_stream.h").exists()  # so that Vitis' own is used
    assert link[1] == "--link"
    assert link[link.index("--kernel_frequency") + 1] == "250"
    assert link[link.index("--config") + 1] == "nowhere/connectivity.cfg"
    objects = [f"nowhere/{name}.xo" for name in names]
    assert link[link.index("-o") + 1] == "nowhere/csd_optim.xclbin"
    assert sorted(link[link.index("-o") + 2 :]) == sorted(objects)


def test_installs_where_the_kernels_are_looked_for():
    *_, command = dry_run("install")[1]
    assert command == ["install", "-D", "-m", "644", "nowhere/csd_optim.xclbin", xclbin.INSTALLED]


def test_csynth_is_told_part_and_frequency():
    (command,) = dry_run("csynth", "FREQUENCY=250", "HLS=vitis-run --mode hls --tcl")[1]
    asked = "KERNEL=csd_adamw_update PART=xcku5p-ffvb676-2-e FREQUENCY=250 vitis-run --mode hls --tcl csynth.tcl"
    assert " ".join(command) == asked
    (command,) = dry_run("csynth", "KERNEL=csd_adamw_8bit_update")[1]
    assert command[0] == "KERNEL=csd_adamw_8bit_update"


def test_an_unknown_target_is_refused():
    make = ["make", "-n", "-C", KERNELS, "TARGET=gpu"]
    result = subprocess.run(make, capture_output=True, text=True)
    assert result.returncode != 0
    assert "TARGET is gpu; it is hw, hw_emu or sw_emu" in result.stderr
