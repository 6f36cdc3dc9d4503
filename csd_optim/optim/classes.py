"""All optimizer classes, by name: for commands and configuration files."""

from __future__ import annotations

from .adagrad import CSDAdagrad
from .adamw import CSDAdam, CSDAdamL2
from .lion import CSDLion
from .muon import CSDMuon
from .optimizer import CSDOptimizer
from .rmsprop import CSDRMSprop
from .sgd import CSDSGD

_CLASSES: tuple[type[CSDOptimizer], ...] = (CSDAdam, CSDAdamL2, CSDSGD, CSDAdagrad, CSDRMSprop, CSDLion, CSDMuon)
OPTIMIZERS: dict[str, type[CSDOptimizer]] = {cls.__name__: cls for cls in _CLASSES}
