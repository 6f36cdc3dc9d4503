"""Builds the native sources and their test programs in tests/native with sanitizers, and runs them: `make sanitize`.

Exits non-zero if a program fails or a sanitizer reports anything: memory errors, undefined behaviour, leaks, data
races. With the argument `aarch64` it builds them for that architecture instead, and QEMU runs them: `make aarch64`.
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
PROGRAMS = {  # in tests/native (the lesson: in csd.h itself), and what each drives
    "lesson": sorted((ROOT / "native" / "src").glob("*.cpp")),
    "engine_test": sorted((ROOT / "native" / "src").glob("*.cpp")),
    "codes_test": sorted((ROOT / "native" / "src").glob("*.cpp")),
    "kernels_test": [ROOT / "hls_kernels" / f"csd_{kernel}_update.cpp" for kernel in ("adamw", "lion", "adamw_8bit")],
    "crc32c_test": [ROOT / "native" / "src" / "crc32c.cpp"],
}
# Programs with so little arithmetic that half of their time is spent compiling.
UNOPTIMIZED = ("kernels_test",)
SEARCHED = ("native/include", "native/src", "hls_kernels", "hls_kernels/csim")
# tests/native/rules comes first: its rules.h, with a few more rules, replaces native/include/rules.h.
INCLUDE = [f"-I{ROOT}/{d}" for d in ("tests/native/rules", *SEARCHED)]
FLAGS = ["-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-sanitize-recover=all"]
# Warnings switched off: labels and pragmas are for HLS; GCC 12 reports uninitialized values in its own AVX-512 header;
# fields that an initializer leaves out are zero on purpose.
FLAGS += ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-unused-label", "-Wno-maybe-uninitialized", "-Wno-missing-field-initializers"]


@dataclass(frozen=True)
class Way:
    """One way to build and run all programs."""

    name: str
    flags: tuple[str, ...]
    compiler: str = os.environ.get("CXX", "g++")
    runner: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


# Freed memory is quarantined until 32 MB more are freed. With the default of 256, most time goes to fresh pages.
ASAN = {"ASAN_OPTIONS": "detect_leaks=1:check_initialization_order=1:strict_init_order=1:quarantine_size_mb=32"}
TSAN = {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
SANITIZED = [
    Way("address,undefined", ("-fsanitize=address,undefined",), environment=ASAN),
    Way("thread", ("-fsanitize=thread",), environment=TSAN),
]
AARCH64 = Way("aarch64", ("-static",), "aarch64-linux-gnu-g++", ("qemu-aarch64",))


def lesson() -> tuple[str, str]:
    """Return the example at the top of csd.h, a program in C, and the output that its comment promises."""
    header = (ROOT / "native" / "include" / "csd.h").read_text()
    lines = [line[7:] for line in header.splitlines() if line.startswith(" *     ")]
    program = "\n".join(lines[lines.index("#include <stdio.h>") :]) + "\n"
    return program[: program.index("\n}\n") + 3], next(line.split("// ")[1] for line in lines if "  // " in line)


def build(way: Way, name: str) -> Path:
    """Compile what has changed since the last time, as many files at once as there are cores."""
    directory = BUILD / way.name.replace(",", "-")
    directory.mkdir(parents=True, exist_ok=True)
    source = ROOT / "tests" / "native" / f"{name}.cpp"
    if name == "lesson":
        source = directory / "lesson.c"
        source.write_text(lesson()[0])
    sources = [*PROGRAMS[name], source]
    headers = [h for d in ("native", "hls_kernels", "tests/native") for h in (ROOT / d).rglob("*.h")]
    headers.append(Path(__file__))
    newest = max(h.stat().st_mtime for h in headers)
    flags = ["-O0" if name in UNOPTIMIZED else "-O1", *FLAGS, *way.flags, "-pthread", *INCLUDE]
    commands = []
    for source in sources:
        out = directory / f"{source.stem}.o"
        if not out.exists() or out.stat().st_mtime < max(newest, source.stat().st_mtime):
            language = ["-x", "c", "-std=c99", "-pedantic"] if source.suffix == ".c" else ["-std=c++17"]
            commands.append([way.compiler, *flags, *language, "-c", source, "-o", out])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as at_once:
        done = [*at_once.map(subprocess.run, commands)]
    if any(compiled.returncode for compiled in done):
        sys.exit(f"sanitize: {way.name}: does not compile")
    program = directory / name
    objects = [directory / f"{source.stem}.o" for source in sources]
    subprocess.run([way.compiler, *flags, *objects, "-o", program], check=True)
    return program


def runs_here(way: Way) -> bool:
    """Return whether this machine can run it: some lack a sanitizer's library, a compiler, or shadow memory."""
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory, "empty.cpp"), Path(directory, "empty")
        source.write_text("int main() {}\n")
        try:
            built = subprocess.run([way.compiler, *way.flags, source, "-o", program], capture_output=True)
            return built.returncode == 0 and subprocess.run([*way.runner, program], capture_output=True).returncode == 0
        except FileNotFoundError:
            return False


def run(way: Way, name: str) -> bool:
    """Run a program. Returns whether it succeeded without a report of the sanitizer."""
    start = time.monotonic()
    program = build(way, name)
    built = time.monotonic()
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1", **way.environment}
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:
        command = ["timeout", "-s", "ABRT", "300", *way.runner, program]  # a deadlock is a failure too
        result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    clean = result.returncode == 0 and not result.stderr
    clean &= name != "lesson" or result.stdout.strip() == lesson()[1]
    print(f"sanitize: {way.name}: {'clean' if clean else f'FAILED ({result.returncode})'}: {result.stdout.strip()}")
    print(f"          built in {built - start:.0f} s, ran in {time.monotonic() - built:.1f} s")
    print(result.stderr, end="")
    return clean


def main() -> None:
    failed = False
    for way in [AARCH64] if sys.argv[1:] == [AARCH64.name] else SANITIZED:
        if not runs_here(way):
            print(f"sanitize: {way.name}: SKIPPED, does not run on this machine with {way.compiler}")
            failed |= way is AARCH64  # the user has asked for it
            continue
        for name in PROGRAMS:
            if (way.name, name) != ("thread", "crc32c_test"):  # it has one thread
                failed |= not run(way, name)
    sys.exit(failed)


if __name__ == "__main__":
    main()
