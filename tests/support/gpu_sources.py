"""The sources of the kernels as a GPU's driver gets them: a list of all, and the compilers, which need no GPU."""

import ctypes
import functools
import importlib.metadata
import shutil

from csd_optim.compression.kernel_selection import DEFINES
from csd_optim.kernels.codes import CODES_DEFINES
from csd_optim.kernels.device_check import WAYS
from csd_optim.kernels.nvrtc import Compiler
from csd_optim.kernels.update import RULE_DEFINES

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PACKAGE = "nvidia-cuda-nvrtc"
# Each source with the macros by which it is compiled.
SOURCES = [
    (source, (*rule, *way))
    for source, rules in (("update.h", RULE_DEFINES), ("codes.h", CODES_DEFINES))
    for rule in rules.values()
    for way in WAYS.values()
]
SOURCES += [("topk.h", DEFINES)]


def compiled_as(source, defines):
    """Return a name for a source and its macros."""
    return " ".join([source, *(define.removeprefix("CSD_") for define in defines)])


@functools.cache
def nvrtc():
    """Return NVRTC of its package on PyPI; None if that is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    libraries = {path.name.partition(".so")[0]: str(path.locate()) for path in files if ".so" in path.name}
    ctypes.CDLL(libraries["libnvrtc-builtins"])  # NVRTC opens it by name, and has no run path to it
    return Compiler(libraries["libnvrtc"])


def clang():
    """Return the path of a clang++; None if none is installed."""
    names = ["clang++", *(f"clang++-{version}" for version in range(22, 13, -1))]
    return next(filter(None, map(shutil.which, names)), None)
