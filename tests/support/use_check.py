"""Any operation that uses a parameter before it has arrived raises an error: check_uses().

It costs 5 to 20 µs per operation, and torch.compile runs eagerly under it. It sees uses through views, `detach()`,
`.data`, NumPy arrays and `torch._foreach_*`; it does not see `tolist()`, `repr()`, `data_ptr()` or other threads.
"""

from support.inside import unguarded_rows
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from csd_optim.overlap.overlap import Overlap


class UsedTooEarly(Exception):
    """An operation used a parameter that had not arrived."""


class UseCheck(TorchDispatchMode):
    """A dispatch mode that raises UsedTooEarly if an operation on this thread uses a parameter still under way.

    `names`: the names of these parameters, by the address of their storage, `p.untyped_storage().data_ptr()`.
    """

    supports_higher_order_operators = True

    def __init__(self, names):
        super().__init__()
        self.names = names

    def enter(self):
        """Start to check; a no-op if this thread is checking already.

        The mode is inserted below all modes that the user has entered, so that the user may leave those before or after
        this one is left.
        """
        if self not in _get_current_dispatch_mode_stack():
            above = leave_modes(lambda mode: True)
            TorchDispatchMode.__enter__(self)
            reenter_modes(above)

    def exit(self):
        """Stop checking; a no-op on a thread that has not entered the mode."""
        if self in _get_current_dispatch_mode_stack():
            above = leave_modes(lambda mode: mode is not self)
            TorchDispatchMode.__exit__(self, None, None, None)
            reenter_modes(above)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)) if self.names else ():
            for address in addresses(leaf):
                if address and address in self.names:
                    raise UsedTooEarly(f"{func} uses {self.names[address]}, which the last step() is still updating")
        return func(*args, **(kwargs or {}))


def check_uses(monkeypatch):
    """Enter a UseCheck with each step that overlaps from now on; optimizers leave theirs when overlap ends."""
    was = {name: getattr(Overlap, name) for name in ("launch", "wait", "land", "close")}

    def launch(self, travel, record, **agreed):
        launched = was["launch"](self, travel, record, **agreed)
        if launched:
            check = vars(self).setdefault("use_check", UseCheck({}))
            states = [b for b in travel.spec.plan.param_states if b.index not in travel.accelerated.rows]
            sources = [(b, travel.spec.sources.get(b.index)) for b in states]
            waited_for = {b.index for b, source in sources if source and source.param_and_copy} | unguarded_rows(self)
            check.names = {address_of(b.local): b.name for b in states if b.index not in waited_for}
            check.addresses = {id(b.param): address_of(b.local) for b in states}
            check.enter()
        return launched

    def wait(self, params):
        params = list(params)
        was["wait"](self, params)
        if check := vars(self).get("use_check"):
            for p in params:
                check.names.pop(check.addresses.get(id(p)), None)

    def land(self):
        try:
            was["land"](self)
        finally:
            if check := vars(self).get("use_check"):
                check.names = {}

    def close(self):
        if check := vars(self).get("use_check"):
            check.exit()
        was["close"](self)

    for method in (launch, wait, land, close):
        monkeypatch.setattr(Overlap, method.__name__, method)


def address_of(tensor):
    return tensor.untyped_storage().data_ptr()


def leave_modes(predicate):
    """Leave modes, innermost first, while `predicate(mode)` is true; return them. Torch's own, always lowest, stay."""
    above = []
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if getattr(mode, "_mode_key", None) is not None or not predicate(mode):
            break
        # Not the mode's own __exit__, which may have side effects.
        TorchDispatchMode.__exit__(mode, None, None, None)
        above.append(mode)
    return above


def reenter_modes(above):
    """Enter again the modes that leave_modes() returned."""
    for mode in reversed(above):
        TorchDispatchMode.__enter__(mode)


def addresses(leaf):
    """Yield the storage address of a tensor, or of each tensor that it wraps; nothing for a tensor without memory."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
        return
    if is_traceable_wrapper_subclass(leaf):
        for name in leaf.__tensor_flatten__()[0]:
            yield from addresses(getattr(leaf, name))
        return
    try:
        yield address_of(leaf)
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of functorch transformations
        return
