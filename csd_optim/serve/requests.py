"""Every message between trainers and owners: closed structs. docs/wire-format.md says who sends each of them when.

Requests and answers travel on the control connection, each answer with its request's number. Tiles and news travel on
the other connections. Arrays follow as buffers: dtypes are in messages.py.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ..bindings import MIN_GRAIN
from ..errors import CSDRankError, CSDValueError
from ..store.check import MAX_SIZE
from .wire.connection import MESSAGE_BYTES
from .wire.schema import Message, Meta, Name, Number, Struct, Text, decoded, msgspec

MAX_TILE_ELEMS = 1 << 26  # the most that trainers may choose: the owner has memory for WINDOW tiles
MAX_TILES, MAX_PARAMS = 1 << 22, 1 << 20  # of a model
MAX_TRAINERS = 1 << 12
MAX_DEVICES = 1 << 10
# Free JSON, as a value of two bytes takes hundreds of bytes as a Python object: 0.5 GiB for the worst. Values are
# counted by commas and opening brackets: cheap, and never too low.
MAX_VALUES, DEPTH = 1 << 21, 8

Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Step = Number
TileElems = Annotated[int, Meta(ge=1, le=MAX_TILE_ELEMS)]
Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
Sections = Annotated[list[Identifier], Meta(min_length=1, max_length=4)]
Rows = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_PARAMS)]], Meta(max_length=MAX_PARAMS)]
RecordBytes = Annotated[int, Meta(ge=0, le=MESSAGE_BYTES)]
Nothing: msgspec.Raw = msgspec.Raw(b"null")


def snake(name: str) -> str:
    """Return the name of a class as a tag: `TakeBack` is `take_back`."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


# ---- answers ------------------------------------------------------------------------------


class Answer(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="answer", tag=snake):
    """An answer, which also tells the progress of commits."""

    n: Number = 0
    committed: Step = 0  # the last step that is durable
    begun_commits: Number = 0
    ended_commits: Number = 0


class Done(Answer, frozen=True, kw_only=True):
    """The request is executed."""


class Working(Answer, frozen=True, kw_only=True):
    """A sign of life: the request is being executed."""


class Failed(Answer, frozen=True, kw_only=True):
    """The request has failed, or is refused. `error`: name of one of our classes."""

    error: Text
    errno: Annotated[int, Meta(ge=0, le=1 << 16)]
    text: Text


class StoreFound(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer's store at an owner: facts from which trainers choose the round that all resume."""

    path: Text
    store: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")]  # empty without a commit
    rank: Number
    world_size: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)]
    is_first: bool
    is_missing: bool
    steps: Annotated[list[tuple[Number, Step]], Meta(max_length=16)]  # by round


class Found(Answer, frozen=True, kw_only=True):
    """Asks the trainer to choose a round."""

    found: StoreFound
    others: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_TRAINERS)]], Meta(max_length=MAX_TRAINERS)]
    owner: Text  # identifies the owner, whatever its address


class ExtentFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an extent's states are stored."""

    tile_elems: Annotated[int, Meta(ge=MIN_GRAIN, le=1 << 31)]
    sections: Sections
    codec: Text
    param_dtype: Text


class Welcome(Answer, frozen=True, kw_only=True):
    """The session is granted."""

    store: Name
    step: Step
    devices: Annotated[list[Text], Meta(min_length=1, max_length=MAX_DEVICES)]
    tbw: Annotated[list[Size], Meta(max_length=MAX_DEVICES)]
    window: Annotated[int, Meta(ge=1, le=1 << 16)]
    recovered: bool
    path: Text = ""  # the rest: of a store that was recovered
    manifest: msgspec.Raw = Nothing
    extents: Annotated[list[ExtentFields], Meta(max_length=MAX_PARAMS)] = msgspec.field(default_factory=list)
    record: msgspec.Raw = Nothing


class Extended(Answer, frozen=True, kw_only=True):
    """Parameters are added."""

    tile_elems: Annotated[int, Meta(ge=1, le=1 << 31)]


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error, as in Failed."""

    error: Text
    errno: Annotated[int, Meta(ge=0, le=1 << 16)]
    text: Text


class Finished(Answer, frozen=True, kw_only=True):
    """The step is kept or undone. `failed`: why it is undone, or why its commit has failed."""

    kept: bool
    step: Step
    failed: Failure | None = None


class Round(Answer, frozen=True, kw_only=True):
    """The last round that is durable here."""

    round: Number


class Values(Answer, frozen=True, kw_only=True):
    """The states that were asked for, an array each."""


Count = Size | Annotated[float, Meta(ge=0, lt=1e300)]
About = Text | int | bool | None


class DeviceCounts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of a device, and what they are of: see CSDAdam.stats()."""

    push_bytes: Count
    pull_bytes: Count
    read_bytes: Count
    write_bytes: Count
    total_write_bytes: Count
    updated: Count
    nonfinite: Count
    buffer_bytes: Count
    free_bytes: Count
    read_seconds: Count
    update_seconds: Count
    write_seconds: Count
    share: Count
    device: About
    backend: About
    direct_io: About
    p2p: About
    huge_pages: About
    numa_node: About
    block_bytes: About
    depth: About


COUNTS = DeviceCounts.__struct_fields__[: DeviceCounts.__struct_fields__.index("device")]
ABOUT = DeviceCounts.__struct_fields__[len(COUNTS) :]


class DeviceStats(Answer, frozen=True, kw_only=True):
    """The counts of devices."""

    devices: Annotated[list[DeviceCounts], Meta(max_length=MAX_DEVICES)]


# ---- requests -----------------------------------------------------------------------------

Answers = tuple[type[Answer], ...]


class Request(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op", tag=snake):
    """What a trainer asks. `answer`: what the owner may answer beside Failed."""

    n_arrays: ClassVar[int | None] = 0  # None: it depends
    answer: ClassVar[Answers] = (Done,)

    n: Number = 0  # the request's number


class Hello(Request, frozen=True, kw_only=True):
    """The first request: a session for a trainer."""

    answer: ClassVar[Answers] = (Welcome, Found)
    trainer: Annotated[int, Meta(ge=0, lt=MAX_TRAINERS)]
    trainers: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)]
    here: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)]  # the number of trainers with states at this owner
    token: Text  # the same for all trainers of a training
    mode: Literal["new", "overwrite", "resume", "attach"]
    model: Text  # see digest_of_entries()
    tile_elems: Annotated[int, Meta(ge=0, le=MAX_TILE_ELEMS)]  # 0: the owner chooses
    who: Text
    store: Name  # the identity of the store to attach to; in other modes, for a new store
    step: Step = 0  # the trainer's last step, if it attaches


class Choose(Request, frozen=True, kw_only=True):
    """Resumes this round; None: none."""

    answer: ClassVar[Answers] = (Welcome,)
    round: Annotated[int, Meta(ge=1, le=1 << 53)] | None


class Extend(Request, frozen=True, kw_only=True):
    """Adds parameters."""

    answer: ClassVar[Answers] = (Extended,)
    n_arrays: ClassVar[int | None] = 1
    sections: Sections
    codec: Text
    param_dtype: Text
    first_param: Size
    tile_elems: TileElems | None


class Free(Request, frozen=True, kw_only=True):
    """Removes parameters."""

    rows: Rows


class DiscardNewer(Request, frozen=True, kw_only=True):
    """Discards commits after the one that was resumed."""


class Describe(Request, frozen=True, kw_only=True):
    """Describes the parameters, for the store."""

    manifest: msgspec.Raw


class Write(Request, frozen=True, kw_only=True):
    """Sets elements of a state."""

    n_arrays: ClassVar[int | None] = 1
    row: Index
    section: Annotated[int, Meta(ge=0, le=3)]
    first: Size


class Writing(Request, frozen=True, kw_only=True):
    """Begins a bracket of writes."""

    rows: Rows


class Written(Request, frozen=True, kw_only=True):
    """Ends a bracket of writes."""

    n_arrays: ClassVar[int | None] = 1


class Loading(Request, frozen=True, kw_only=True):
    """Begins the load of a state dict."""

    n_arrays: ClassVar[int | None] = 1
    rows: Rows
    record: msgspec.Raw


class Loaded(Request, frozen=True, kw_only=True):
    """Ends the load of a state dict."""

    n_arrays: ClassVar[int | None] = 1
    step: Step
    round: Number


class Read(Request, frozen=True, kw_only=True):
    """Asks for elements of a tile's states."""

    answer: ClassVar[Answers] = (Values,)
    tile: Index
    sections: Annotated[list[Annotated[int, Meta(ge=0, le=3)]], Meta(min_length=1, max_length=4)]
    first: Size
    count: Annotated[int, Meta(ge=1, le=MAX_TILE_ELEMS)]


class Begin(Request, frozen=True, kw_only=True):
    """Begins a step."""

    n_arrays: ClassVar[int | None] = 3
    begin: Annotated[int, Meta(ge=1, le=1 << 53)]  # its number: guesses and steps that are undone have one, too
    step: Step  # the number of completed steps
    order: Literal[0, 1, 2]  # TO_AND_FRO, SAME_ORDER, AS_PUSHED of bindings.py
    record_bytes: RecordBytes


class Reserve(Request, frozen=True, kw_only=True):
    """Reserves space for a longer record than Begin has said."""

    record_bytes: RecordBytes


class Drop(Request, frozen=True, kw_only=True):
    """Leaves parameters out of a step."""

    n_arrays: ClassVar[int | None] = 1
    begin: Number


class Finish(Request, frozen=True, kw_only=True):
    """Ends a step. If it is kept: `round` and `record` are of its commit, and two arrays follow."""

    answer: ClassVar[Answers] = (Finished,)
    n_arrays: ClassVar[int | None] = None
    begin: Number
    step: Step
    keep: bool
    frames: Number  # tiles that were sent
    round: Number = 0
    record: msgspec.Raw = Nothing


class TakeBack(Request, frozen=True, kw_only=True):
    """Undoes the last step that was kept."""

    begin: Number
    step: Step


class CommitRecord(Request, frozen=True, kw_only=True, tag="commit"):
    """Commits a record that was not part of Finish."""

    n_arrays: ClassVar[int | None] = 2
    step: Step
    round: Number
    record: msgspec.Raw


class Confirm(Request, frozen=True, kw_only=True):
    """Makes the last step's commit durable."""

    answer: ClassVar[Answers] = (Round,)


class Confirmed(Request, frozen=True, kw_only=True):
    """Tells that all trainers have confirmed the last round."""


class Wait(Request, frozen=True, kw_only=True):
    """Waits until everything is durable."""


class Stats(Request, frozen=True, kw_only=True):
    """Asks for the counts of devices."""

    answer: ClassVar[Answers] = (DeviceStats,)


class Save(Request, frozen=True, kw_only=True):
    """Begins a snapshot at a path."""

    path: Text


class Saved(Request, frozen=True, kw_only=True):
    """Waits for the snapshot."""


class Close(Request, frozen=True, kw_only=True):
    """Ends the session."""


def op_of(request: Request) -> str:
    """Return the name of a request."""
    return str(request.__struct_config__.tag)


REQUESTS: dict[str, type[Request]] = {str(kind.__struct_config__.tag): kind for kind in Request.__subclasses__()}
IN_SESSIONS = [kind for kind in REQUESTS.values() if kind not in (Hello, Choose)]
REQUEST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(functools.reduce(operator.or_, IN_SESSIONS))
ANSWER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(functools.reduce(operator.or_, Answer.__subclasses__()))
HELLO, CHOOSE = msgspec.json.Decoder(Hello), msgspec.json.Decoder(Choose)


# ---- tiles and news ------------------------------------------------------------------------


class TileGradients(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Up: the gradients of a tile are the buffers, with `entries` words of Top-K entries at their end."""

    tile: Index
    begin: Number
    entries: Number = 0


class Down(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=snake):
    """What an owner sends by itself."""


class Parameters(Down, frozen=True, kw_only=True):
    """The new parameters of a tile are the buffers."""

    tile: Index
    begin: Number


class Alive(Down, frozen=True, kw_only=True):
    """A sign of life."""


class CommitNews(Down, frozen=True, kw_only=True):
    """The progress of commits, as in Answer."""

    committed: Step
    begun_commits: Number
    ended_commits: Number


class StepFailed(Down, frozen=True, kw_only=True):
    """The step with this number has failed."""

    begin: Number
    failed: Failure


GRADIENTS = msgspec.json.Decoder(TileGradients)
DOWN: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Parameters | Alive | CommitNews | StepFailed)
HEAD_BYTES = 1 << 16  # of the JSON of these


# ---- free JSON ----------------------------------------------------------------------------


class WholeTensor(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The tensor of which a parameter is a part."""

    shape: list[int]
    first: list[int]


class ParamFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A parameter in a manifest: see docs/store-format.md, whose checks follow."""

    name: str
    group: int
    position: int
    dtype: Text
    shape: list[int] | None
    of: WholeTensor | None = None
    rule: Text | None = None
    stride: list[int] | None = None
    extent: int = 0
    start: int = 0
    numel: int = 0
    part_of: int = 0
    first: int = 0


class DividedFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of a trainer with several owners: see part_manifest()."""

    params: Annotated[list[ParamFields], Meta(max_length=MAX_PARAMS)]
    extents: Annotated[list[ExtentFields], Meta(max_length=MAX_PARAMS)]
    extents_here: Annotated[list[Index], Meta(max_length=MAX_PARAMS)]
    tiles: Annotated[list[Index], Meta(max_length=MAX_TILES)]
    rank: Number
    world_size: Number


class ManifestFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of a model."""

    params: Annotated[list[ParamFields], Meta(max_length=MAX_PARAMS)]
    waiting: Annotated[list[ParamFields], Meta(max_length=MAX_PARAMS)]
    rule: Identifier | None = None
    divided: DividedFields | None = None


def _plain(depth: int) -> Any:
    """Return the type of JSON with at most `depth` levels."""
    found: Any = str | int | float | bool | None
    for _ in range(depth):
        found = str | int | float | bool | None | list[found] | dict[str, found]
    return found


MANIFEST = msgspec.json.Decoder(ManifestFields)
PLAIN: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, _plain(DEPTH - 1)])  # type: ignore[misc]


def packed(value: Any) -> msgspec.Raw:
    """Return free JSON as it travels. Raises CSDValueError for NaN, infinity and what is no JSON."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, TypeError) as e:
        raise CSDValueError(f"a message cannot be sent: {e}") from None
    return msgspec.Raw(text)


def unpacked(raw: msgspec.Raw, most: int = MAX_VALUES) -> dict[str, Any]:
    """Return a received record or manifest, with at most so many values. Raises CSDRankError."""
    text = bytes(raw)
    if (values := sum(map(text.count, (b",", b"[", b"{")))) > most:
        raise CSDRankError(f"a message cannot be understood: {values} values, and {most} are the limit")
    return decoded(PLAIN, text)


def described(raw: msgspec.Raw) -> dict[str, Any]:
    """Return a manifest that a trainer describes. Raises CSDRankError."""
    decoded(MANIFEST, raw)
    found: dict[str, Any] = msgspec.json.decode(raw)
    return found


def request_of(op: str, fields: Mapping[str, Any]) -> Request:
    """Return a request. Raises CSDValueError if a record or manifest cannot be sent."""
    free = {name: packed(fields[name]) for name in ("record", "manifest") if name in fields}
    return REQUESTS[op](**{**fields, **free})
