"""The manifest, a store's description of its model, and checks of a model against it. See docs/store-format.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..distributed.sharding import UNSHARDED, Partition
from ..store.check import UNNAMED_RULE, rule_named
from ..store.format import Contents, Record
from ..store.layout import Extent
from ..store.sections import FP32, state_dtype_of
from .groups import Groups, members, name_of
from .param_state import ParamState
from .update_rule import RuleOf

CodecOf = Callable[[dict[str, Any], torch.Tensor], tuple[str, Any]]  # (group, parameter) → codec; see StateMap.codec_of
PartOf = Callable[[torch.Tensor], Partition]  # parameter → the part that this process updates


def manifest(
    rule_of: RuleOf, param_states: Sequence[ParamState], extents: Sequence[Extent], groups: Groups, part_of: PartOf
) -> dict[str, Any]:
    """Build the manifest of a model. `param_states`: in the order of the extents."""
    own = rule_of({}).name
    state_map = [(e, start) for e, extent in enumerate(extents) for start in extent.starts]
    place_of = {id(p): (k, i) for k, i, p in members(groups)}
    params = []
    for state, (extent, start) in zip(param_states, state_map, strict=True):
        k, i = place_of.get(id(state.param), (-1, -1)) if state.alive else (-1, -1)
        part = state.part if state.alive else UNSHARDED
        about = {"name": state.name, "group": k, "position": i, "shape": [], **_dtype_and_whole(state.param, part)}
        # Not the parameter's shape: it may have been resized, and have another place by now.
        about |= {"shape": list(state.own_master.shape), "stride": list(state.stride)}
        about |= {"extent": extent, "start": start, "numel": state.numel}
        params.append(about | _other_rule(own, state.rule))
    placed = {id(state.param) for state in param_states if state.alive}
    waiting = [
        {"name": name_of(groups, k, i), "group": k, "position": i, **describe_param(p, part_of(p))}
        | _other_rule(own, rule_of(groups[k]).name)
        for k, i, p in members(groups)
        if id(p) not in placed
    ]
    return {**_other_rule(UNNAMED_RULE, own), "params": params, "waiting": waiting}


def _other_rule(usual: str, name: str) -> dict[str, str]:
    """Return the "rule" entry of the manifest or of a parameter; empty if `name` is the usual rule."""
    return {} if name == usual else {"rule": name}


def rule_difference(stored: Contents, groups: Groups, rule_of: RuleOf) -> str | None:
    """Return why the rules of these groups cannot resume a store, or None."""
    manifest, own = stored.manifest, rule_of({}).name
    entries, of_store = (*manifest["params"], *manifest["waiting"]), manifest.get("rule", UNNAMED_RULE)
    if of_store != own and not any("rule" in about for about in (*entries, *groups)):
        return f"its states are those of the rule {of_store}, and this optimizer's is {own}"
    rules = [rule_of(group) for group in groups]
    for entry in entries:
        if not 0 <= entry["group"] < len(rules):  # the parameter was moved, or it is another model
            continue
        name, rule = rule_named(manifest, entry), rules[entry["group"]]
        if name != rule.name:
            return (
                f"the states of parameter {entry['name']} are those of the rule {name}, and that of its group is "
                f"{rule.name}"
            )
        sections = manifest["extents"][entry["extent"]]["sections"] if "extent" in entry else rule.sections
        if not rule.takes(sections):
            return f"its tiles have the sections {sections}, which are not those of the rule {name}"
    for kept in (stored.record.groups, stored.record.given):
        for rule, group in zip(rules, kept, strict=False):
            if missing := [key for key in rule.numbers if not _is_numeric(group.get(key))]:
                return f"a group of it has no {missing[0]}, which the rule {rule.name} needs"
    return None


def _is_numeric(value: object) -> bool:
    """Return whether `value` is a number or a list of numbers, as hyperparameters_of() stores hyperparameters."""
    return all(isinstance(v, (int, float)) for v in (value if isinstance(value, list) and value else [value]))


def codec_difference(stored: dict[str, Any], groups: Groups, codec_of: CodecOf) -> str | None:
    """Return a message if a parameter's stored codec differs from its group's `state_dtype`; None if all agree."""
    here = {(k, i): (name_of(groups, k, i), *codec_of(groups[k], p)) for k, i, p in members(groups)}
    for entry in stored["params"]:
        if (entry["group"], entry["position"]) not in here:
            continue
        name, wanted, _ = here[entry["group"], entry["position"]]
        stored_codec = stored["extents"][entry["extent"]].get("codec", FP32)
        if stored_codec != wanted:
            there, here_ = state_dtype_of(stored_codec), state_dtype_of(wanted)
            return (
                f"the states of parameter {name} are {there} there, and state_dtype says {here_} here. "
                f"Resume with state_dtype={there!r}; to change them, make a new store of it with "
                f"`csd-optim import STORE ... --state-dtype {here_}`"
            )
    return None


def describe_param(p: torch.Tensor, part: Partition) -> dict[str, Any]:
    """Return the manifest's fields about a parameter's part on this process: shape, dtype, place in the whole."""
    return {"shape": None if is_lazy(p) else list(part.of(p).shape), **_dtype_and_whole(p, part)}


def _dtype_and_whole(p: torch.Tensor, part: Partition) -> dict[str, Any]:
    return {"dtype": str(p.dtype).removeprefix("torch."), **part.manifest_fields()}


def digest_of_groups(groups: Groups, part_of: PartOf) -> str:
    """Return the digest of a model: digest_of_entries() of the groups' manifest."""
    return digest_of_entries(
        {"group": k, "position": i, **describe_param(p, part_of(p))} for k, i, p in members(groups)
    )


def digest_of_entries(entries: Iterable[dict[str, Any]]) -> str:
    """Return the digest of a manifest's parameters: 64 digits; "" if a lazy parameter has no shape yet."""
    found = sorted((e["group"], e["position"], e["shape"], e["dtype"]) for e in entries if e["group"] >= 0)
    return "" if any(shape is None for *_, shape, _ in found) else hashlib.sha256(repr(found).encode()).hexdigest()


def first_difference(stored: dict[str, Any], groups: Groups, part_of: PartOf) -> str | None:
    """Describe the first difference between a manifest and the optimizer's groups; None if they agree."""
    placed = {(e["group"], e["position"]) for e in stored["params"]}
    there = {(e["group"], e["position"]): e for e in (*stored["params"], *stored["waiting"]) if e["group"] >= 0}
    here = {(k, i): {"name": name_of(groups, k, i), **describe_param(p, part_of(p))} for k, i, p in members(groups)}
    for k, i in sorted({*there, *here}):
        a, b, by_place = there.get((k, i)), here.get((k, i)), f"{k}.{i}"
        if a is None or b is None:
            entry, where = (b, "the model has") if b else (a, "the store has")
            assert entry is not None
            return f"only {where} a parameter {i} in group {k}: {entry['name']}, of shape {entry['shape']}"
        if a["name"] != b["name"] and by_place not in (a["name"], b["name"]):  # unless one side has no names
            return f"parameter {i} of group {k} is {a['name']} there and {b['name']} here"
        if b["shape"] is None and (k, i) in placed:
            return f"{b['name']} has no shape here yet: run the model once before the optimizer is made"
        for what in ("shape", "dtype"):
            if a[what] != b[what] and None not in (a[what], b[what]):
                return f"{what} of parameter {b['name']} is {a[what]} there and {b[what]} here"
        there_of, here_of = a.get("of"), b.get("of")
        if there_of and here_of and there_of != here_of and 0 not in (a["shape"] or ()):  # such as FSDP2 and HSDP
            parts = (f"of {of['shape']} from {of['first']} on" for of in (there_of, here_of))
            return f"the part of parameter {b['name']} is {' there, and '.join(parts)} here"
    return None


def ignored_by_resume(rule_of: RuleOf, given: Groups, record: Record) -> Iterator[str]:
    """Yield a message for each hyperparameter whose value in the script is ignored in favour of the store's.

    `given`: the hyperparameters that this process was started with.
    """
    for k, (now, then, resumed) in enumerate(zip(given, record.given, record.groups, strict=False)):
        own = [name for name in ("topk",) if name in now and name in resumed]  # optional in a group
        for name in (*rule_of(now).hyperparameters, *own):
            if now[name] not in (then.get(name), resumed[name]):
                yield (
                    f"{name} of group {k} goes on as {resumed[name]}, not {now[name]}; it was {then.get(name)} when "
                    f"the store was made. To change it, set opt.param_groups[{k}][{name!r}] after the construction"
                )
