"""csd_optim: torch.optim.AdamW whose state lives on computational storage devices."""

import logging
from importlib.metadata import version

from .errors import (
    CSDBusyError,
    CSDError,
    CSDLostError,
    CSDMemoryError,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDTornError,
    CSDTypeError,
    CSDUnavailableError,
    CSDValueError,
    CSDWarning,
)
from .optim.adamw import CSDAdam

__version__ = version("csd_optim")
__all__ = [
    "CSDAdam",
    "CSDBusyError",
    "CSDError",
    "CSDLostError",
    "CSDMemoryError",
    "CSDOSError",
    "CSDRuntimeError",
    "CSDStoreError",
    "CSDStoreExistsError",
    "CSDTornError",
    "CSDTypeError",
    "CSDUnavailableError",
    "CSDValueError",
    "CSDWarning",
]

logging.getLogger("csd_optim").addHandler(logging.NullHandler())
