"""csd_optim: torch.optim.AdamW whose state lives on computational storage devices."""

import logging
from typing import TYPE_CHECKING, Any

from .errors import (
    CSDBusyError,
    CSDError,
    CSDLostError,
    CSDMemoryError,
    CSDOSError,
    CSDRankError,
    CSDRuntimeError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDTornError,
    CSDTypeError,
    CSDUnavailableError,
    CSDValueError,
    CSDWarning,
)

__all__ = [
    "CSDAdam",
    "CSDBusyError",
    "CSDError",
    "CSDLostError",
    "CSDMemoryError",
    "CSDOSError",
    "CSDRankError",
    "CSDRuntimeError",
    "CSDStoreError",
    "CSDStoreExistsError",
    "CSDTornError",
    "CSDTypeError",
    "CSDUnavailableError",
    "CSDValueError",
    "CSDWarning",
]

if TYPE_CHECKING:
    from .optim.adamw import CSDAdam

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """What takes a while comes when it is first asked for: CSDAdam, and torch with it."""
        if name == "CSDAdam":
            from .optim.adamw import CSDAdam as value
        elif name == "__version__":
            from importlib.metadata import version

            value = version("csd_optim")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # from now on it is found without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


logging.getLogger("csd_optim").addHandler(logging.NullHandler())
