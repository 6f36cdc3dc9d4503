"""csd_optim: optimizers of torch.optim whose state lives on computational storage devices."""

import logging
from importlib import import_module
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
    "CSDSGD",
    "CSDAdagrad",
    "CSDAdam",
    "CSDAdamL2",
    "CSDBusyError",
    "CSDError",
    "CSDLion",
    "CSDLostError",
    "CSDMemoryError",
    "CSDMuon",
    "CSDOSError",
    "CSDRMSprop",
    "CSDRankError",
    "CSDRuntimeError",
    "CSDStoreError",
    "CSDStoreExistsError",
    "CSDTornError",
    "CSDTypeError",
    "CSDUnavailableError",
    "CSDValueError",
    "CSDWarning",
    "Publisher",
    "Replica",
    "push",
]

if TYPE_CHECKING:
    from .optim.adagrad import CSDAdagrad
    from .optim.adamw import CSDAdam, CSDAdamL2
    from .optim.lion import CSDLion
    from .optim.muon import CSDMuon
    from .optim.push import push
    from .optim.rmsprop import CSDRMSprop
    from .optim.sgd import CSDSGD
    from .publish.publisher import Publisher
    from .replica.replica import Replica

    __version__: str
else:
    _LATER = {
        "CSDAdagrad": "optim.adagrad",
        "CSDAdam": "optim.adamw",
        "CSDAdamL2": "optim.adamw",
        "CSDLion": "optim.lion",
        "CSDMuon": "optim.muon",
        "CSDRMSprop": "optim.rmsprop",
        "CSDSGD": "optim.sgd",
        "Publisher": "publish.publisher",
        "Replica": "replica.replica",
        "push": "optim.push",
    }

    def __getattr__(name: str) -> Any:
        """Import lazily what takes long to load: the optimizers (and torch with them), the version."""
        if name in _LATER:
            value = getattr(import_module(f".{_LATER[name]}", __name__), name)
        elif name == "__version__":
            from importlib.metadata import version

            value = version("csd_optim")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # later lookups find it directly, without calling __getattr__
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


logging.getLogger("csd_optim").addHandler(logging.NullHandler())
