"""Refuses a version of torch with which results would be wrong, or no optimizer could be made."""

import re

from ..errors import CSDUnavailableError

OLDEST = (2, 9)


def check_torch(version: str) -> None:
    """Raise CSDUnavailableError for a torch that is too old. `version`: torch.__version__."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        raise CSDUnavailableError(
            f"csd_optim needs torch 2.9 or later, and this is {version}: with 2.8 and 2.7, schedules whose learning "
            "rates are tensors go on at other rates after a resume, and older versions lack decoupled_weight_decay of "
            "Adam. Upgrade torch"
        )
