"""The steps of one optimizer: each is prepared here, then taken, or handed to the mode that begins it in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..distributed.grad_norm import OwnNorm, Parts, norm_of, own_norm
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..distributed.reduce_scatter import ReducedGrads
from ..distributed.sharding import is_replicated
from ..engine.committer import NO_BALLOT
from ..errors import CSDError, CSDRuntimeError
from ..finalize import call_at_end
from ..params.groups import Groups, members, name_of
from ..params.state_map import StateMap
from ..store.format import Record
from ..store.user_state import checked_user_state
from .agreement import Capabilities, ParamsToCompare, Proposal, StepAgreement, agree_on_step, all_capable, bits_of
from .first_states import asks_for_states, create_states
from .history import StepHistory
from .initial_groups import InitialGroups
from .live import LiveStep
from .mode import InStep
from .prepare import (
    add_residuals,
    apply_outside_writes,
    bind,
    clip_scale,
    foresee,
    participants,
    parts_of_grads,
    repeats,
    specify,
)
from .resources import StepResources
from .resume import Resume
from .same_gradients import NOTHING, Sample, Samples
from .spec import Arguments, GradOptions, Participants, StepPlan, StepSpec
from .travel import Travel

NO_CAPABILITIES = Capabilities(can_launch=False, can_undo=False, votes_with_params=False)


@dataclass
class Ready:
    """What this rank has prepared for a step."""

    record: Record | None = None  # for the commit
    taking_part: Participants = field(init=False)  # this and `options`: not set for a step that began in backward
    options: GradOptions = field(init=False)
    travel: Travel | None = None  # None: this rank has nothing to do
    is_examined: bool = False  # all fields above but `travel` are set
    is_prepared: bool = False
    capabilities: Capabilities = NO_CAPABILITIES  # valid once `is_prepared`
    norm: OwnNorm | None = None  # this rank's share, if gradients are clipped and votes can carry the norm
    sample: Sample = NOTHING  # of gradients that have to be equal on all ranks

    def numbers(self) -> tuple[int, ...]:
        """Return the fields of a Proposal that say what is ready."""
        return self.is_examined, self.is_prepared, *self.capabilities, *bits_of(self.norm)


class Steps(StepHistory):
    """The steps of one optimizer. Knows the optimizer's arguments, but not torch's Optimizer, nor what drives a step.

    Refers to the optimizer weakly: hooks in a model hold this object, and may outlive the optimizer.
    """

    steps_taken: int
    has_updated: bool

    def __init__(self, optimizer: Arguments, state_map: StateMap, ranks: Ranks | None, for_sparse: str) -> None:
        """`for_sparse`: the optimizer to recommend for sparse gradients."""
        super().__init__(state_map, ranks)
        self._optimizer = weakref.ref(optimizer)
        self._for_sparse = for_sparse
        self.resume: Resume = Resume(state_map, ranks)
        self.initial_groups: InitialGroups = InitialGroups(state_map.rule_of)
        self.trained_seconds: float = 0.0  # seconds of training, from step to step, since the store was made
        self.plan: StepPlan | None = None  # of the last step that was prepared
        self.resources: StepResources = StepResources(state_map, ranks)
        # Of the last step: the factor on gradients; the norm of the gradients, if they were clipped.
        self.grad_scale: float = 1.0
        self.grad_norm: float | None = None
        self.ns_dtypes: list[str] = []  # the dtypes in which the last step's matrices were orthogonalized
        self.descending: bool = False  # the ranks exchange updated parameters of this step from the last to the first
        self.reduced: ReducedGrads = ReducedGrads(ranks)
        self._samples = Samples()

    # ---- the optimizer -----------------------------------------------------------------

    @property
    def groups(self) -> Groups:
        """The optimizer's groups, which load_state_dict() replaces; empty if the optimizer is gone."""
        return arguments.param_groups if (arguments := self.arguments) else []

    @property
    def arguments(self) -> Arguments | None:
        """The optimizer; None if it is gone."""
        return self._optimizer()

    def _alive(self) -> Arguments:
        arguments = self.arguments
        assert arguments is not None
        return arguments

    @property
    def options(self) -> GradOptions:
        a, rows = self._alive(), self.reduced.rows
        return GradOptions(a.grad_dtype, a.topk, a.topk_warmup, a.error_feedback, a.max_grad_norm, rows)

    def call_at_end(self, function: Callable[[], None]) -> weakref.finalize[Any, Any]:
        """Return a finalizer that calls `function` once the optimizer is gone, before its engine closes."""
        return call_at_end(self.arguments, function)  # finalizers run in reverse order of creation

    def reduce_bucket(self, bucket: Any) -> Any:
        """Reduce a DDP bucket, as its communication hook: see ReducedGrads.handle_bucket(). Needs no lock."""

        def divided() -> set[int]:
            params = (p for group in self.groups for p in list.__iter__(group["params"]))  # waits for no parameter
            return {id(p) for p in params if self.ranks and self.state_map.part(p).replicas is self.ranks}

        return self.reduced.handle_bucket(bucket, divided)

    def record(self) -> Record | None:
        """Return the next commit's record; None where nothing is durable.

        Raises CSDTypeError or CSDValueError if `user_state` cannot be stored.
        """
        if not self.engine.durable:
            return None
        return Record(
            groups=[*map(self.initial_groups.stored_hyperparameters, self.groups)],
            given=[*self.initial_groups.of(self.groups)],
            user_state=checked_user_state(self._alive().user_state, self.engine.states.record.user_state),
            seconds=self.trained_seconds,
        )

    # ---- a step is taken ---------------------------------------------------------------

    def live(self, travel: Travel, record: Record | None, *, votes_later: bool = False) -> LiveStep:
        """Return a step to begin. `record`, `votes_later`: see LiveStep."""
        return LiveStep(self, travel, record, votes_later=votes_later)

    def step(
        self,
        mode: InStep,
        scale: float | None,
        failure: CSDError | None,
        *,
        sharded: bool,
        skips: bool,
        joined: bool,
        unscaled: bool,
    ) -> bool:
        """Take a step in step(), as `mode` does it, unless some rank skips it. Returns whether it was skipped.

        `scale`: of the gradients. `failure`: why this rank cannot take the step. `joined`: see StepHook. `unscaled`:
        see why_grads_changed(). Raises what a step raises; if some rank cannot take it, on all ranks: a collective.
        """
        ballot, no_round = NO_BALLOT, None
        try:
            ballot = self.engine.committer.ballot(retry=True)
        except BaseException as e:  # even an interrupt, as other ranks would wait
            if self.ranks is None:
                raise
            no_round = e
        self.has_updated, self.grad_norm = mode.under_way is not None, None
        not_undone = self.why_undo_fails()  # a collective, so all ranks call it
        cause, ready = no_round or not_undone or failure, Ready()
        if not (cause or skips or joined):
            cause = why_grads_changed(self.groups, self.reduced, unscaled=unscaled)
        may_create = not (skips or joined or mode.under_way)
        if self.ranks is None:
            if cause:
                raise cause
            creates = may_create and asks_for_states(self.groups, self.state_map)
            agreed = StepAgreement(skips, creates, descending=False, scale=scale)
        else:
            divided: set[int] = set()
            creates = False
            if not cause:
                try:
                    divided = self._divided_matrices()
                    creates = may_create and asks_for_states(self.groups, self.state_map)
                    if not (skips or joined):
                        self._get_ready_early(mode, ready, scale)
                        if not mode.under_way:  # else the gradients were used and freed
                            number = self.steps_taken + 1
                            ready.sample = self._samples.take(number, self.groups, self.state_map, self.reduced)
                except BaseException as e:
                    cause = e
            under_way, descending = mode.under_way is not None, self.engine.descending
            about = self.steps_taken, mode.kind, under_way, descending, skips, joined, creates
            agreed = agree_on_step(
                self.ranks,
                ParamsToCompare(self.groups, self.state_map.param_states, sharded, self.reduced, divided),
                Proposal(*about, *ready.numbers()),
                ballot,
                self.engine.committer,
                scale=scale,
                failure=cause,
                sample=ready.sample,
            )
        if agreed.skips:
            mode.skip()
        elif agreed.creates:
            with all_ranks_or_none(self.ranks):
                create_states(self.engine, self.state_map, self.groups, self._taking_part(), self.options.grad_dtype)
        else:
            self._take(mode, agreed, Ready() if agreed.has_joined else ready)
        return agreed.skips

    def _take(self, mode: InStep, agreed: StepAgreement, ready: Ready) -> None:
        """Take a step on which all ranks have agreed. Raises what a step raises. A collective."""
        self.descending, capabilities = agreed.descending, agreed.capabilities
        scale = self.grad_scale = _factor(agreed.scale)
        max_norm = self._alive().max_grad_norm
        if max_norm is not None and not mode.under_way:
            if not agreed.is_examined:
                with all_ranks_or_none(self.ranks):
                    self._examine(mode, ready)
            if ready.norm and agreed.squares is not None:
                norm = ready.norm.total(agreed.squares)
            else:  # a collective, so not called if a rank has raised
                norm = norm_of(self._grads_of(ready))
            self.grad_norm = norm * abs(scale)
            scale *= clip_scale(self.grad_norm, max_norm)
        if capabilities is None:
            with all_ranks_or_none(self.ranks) as votes:
                if not ready.is_examined:
                    self._examine(mode, ready)
                if not ready.is_prepared:
                    self._prepare_ready(mode, ready, scale)
                votes.mine = ready.capabilities
            capabilities = all_capable(votes.all)
        travel, record = ready.travel, ready.record
        if mode.under_way:
            mode.end_step(record, all_can_undo=capabilities.can_undo)
        elif mode.launch(travel, record, all_can=capabilities.can_launch):
            pass
        elif travel is not None:
            self.live(travel, record).run(
                descending=self.descending,
                all_can_undo=capabilities.can_undo,
                votes_with_params=capabilities.votes_with_params,
            )
        elif self.ranks is not None:
            self._take_without_gradients(record, all_can_undo=capabilities.can_undo)

    def _get_ready_early(self, mode: InStep, ready: Ready, scale: float | None) -> None:
        """Prepare as much of a step as changes nothing: the ranks have not agreed on it yet."""
        if self.resume.pending:
            return
        self._examine(mode, ready)
        if ready.is_prepared:
            return
        if ready.options.max_grad_norm is not None:
            assert self.ranks
            ready.norm = own_norm(self._grads_of(ready), self.ranks)
        elif repeats(self.engine, self.state_map, self.plan, self.groups, ready.taking_part, ready.options):
            self._prepare_ready(mode, ready, _factor(scale))

    def _examine(self, mode: InStep, ready: Ready) -> None:
        """Examine what takes part in a step. Raises what a step raises."""
        ready.record = self.record()
        if mode.under_way:
            self._note_prepared(mode, ready, mode.under_way)
        else:
            self.resume.begin_step(self.engine, self.groups)
            ready.taking_part, ready.options = self._taking_part(), self.options
            mode.check(ready.taking_part)
        ready.is_examined = True

    def _grads_of(self, ready: Ready) -> Parts:
        return parts_of_grads(self.groups, self.state_map, ready.options.reduced)

    def _prepare_ready(self, mode: InStep, ready: Ready, grad_scale: float) -> None:
        self._note_prepared(mode, ready, self._prepare(ready.taking_part, grad_scale, ready.options, mode.compare))

    def _note_prepared(self, mode: InStep, ready: Ready, travel: Travel | None) -> None:
        can_undo = travel is None or (self.resources.can_undo(travel) and travel.accelerated.undoes)
        votes_with_params = can_undo and travel is not None and travel.can_vote_with_params
        capabilities = Capabilities(mode.can_launch(travel), can_undo, votes_with_params)
        ready.travel, ready.is_prepared, ready.capabilities = travel, True, capabilities

    def _take_without_gradients(self, record: Record | None, *, all_can_undo: bool) -> None:
        """Count and commit a step of the other ranks, for which this rank has no gradients; vote as LiveStep.run()."""
        with all_ranks_or_none(self.ranks):
            self.state_map.fill(self.engine)
            self.engine.committer.reserve(record)  # makes the store's file before other ranks commit this step
        if not all_can_undo:
            with all_ranks_or_none(self.ranks):
                pass
        self.steps_taken += 1
        self.engine.count_step_of_others()
        self.state_map.describe(self.engine, self.groups)
        self.commit(record)

    def prepare_without_gradients(self) -> LiveStep:
        """Return a step of all parameters that require gradients, to begin before there are gradients.

        The parameters themselves stand in for their gradients. Raises as step().
        """
        self.finish_undo()
        if not self.ranks:  # with several ranks the vote confirms
            self.engine.committer.confirm()
        record = self.record()
        self.resume.begin_step(self.engine, self.groups)
        taking_part = Participants([], [], [])
        for k, _, p in members(self.groups):
            if p.requires_grad:
                taking_part.params.append(p)
                taking_part.grads.append(p.detach())
                taking_part.groups_of.append(k)
        travel = self._prepare(taking_part, 1.0, self.options, one_by_one=True)
        assert travel is not None
        return self.live(travel, record)

    def foresee(self) -> LiveStep | None:
        """Return the next step, assuming that only gradients will change: see prepare.foresee().

        None if that is not possible now, or if the accelerator updates everything.
        """
        engine, optimizer = self.engine, self.arguments  # keeps the optimizer alive meanwhile
        if optimizer is None or engine.closed or not engine.idle or self.resume.pending:
            return None
        with engine.lock:
            if self.plan is None or self.undoing:
                return None
            options, rule_of = self.options, self.state_map.rule_of
            spec = foresee(engine, rule_of, self.state_map, self.plan, self.groups, self.grad_scale, options)
            if spec is None:
                return None
            travel = self.resources.prepare(engine, spec, foreseen=True)
            return self.live(travel, self.record()) if len(travel.may_begin) else None

    def _divided_matrices(self) -> set[int]:
        """Return the ids of sharded matrices that a step assembles: all ranks need gradients for these."""
        groups = (group for group in self.groups if self.state_map.rule_of(group).orthogonal)
        return {id(p) for group in groups for p in group["params"] if not is_replicated(p)}

    # ---- a step is prepared ------------------------------------------------------------

    def _taking_part(self) -> Participants:
        return participants(self.groups, type(self.arguments).__name__, self._for_sparse)

    def _prepare(
        self,
        taking_part: Participants,
        grad_scale: float,
        options: GradOptions,
        compare: Callable[[StepSpec], None] | None = None,
        *,
        one_by_one: bool = False,
    ) -> Travel | None:
        """Return a step that is ready to run; None if there is no gradient. Raises what a step raises.

        `compare` examines the step before anything changes. `one_by_one`: the gradients in `taking_part` are stand-ins;
        the real gradients arrive one after another.
        """
        engine, groups = self.engine, self.groups
        self.initial_groups.check_rules(groups)
        bound = bind(engine, self.state_map, groups, taking_part, options.grad_dtype, self.plan)
        if bound is None:
            if self.plan and self.plan.changes != self.state_map.changes:  # the plan may name parameters that have left
                self.plan = None
                self.resources.forget_gather()
            return None
        self.plan = bound.plan
        spec = specify(engine, self.state_map.rule_of, bound, groups, grad_scale, options)
        if compare:
            compare(spec)
        add_residuals(engine, self.state_map, spec)
        apply_outside_writes(engine, spec)
        travel = self.resources.prepare(engine, spec, one_by_one=one_by_one)
        self.ns_dtypes = travel.passes.dtypes
        return travel


def _factor(scale: float | None) -> float:
    """Return the factor that removes this scale from gradients."""
    return 1.0 if scale is None else 1.0 / scale


def why_grads_changed(groups: Groups, reduced: ReducedGrads, *, unscaled: bool) -> CSDError | None:
    """Return why a step cannot take the gradients that were reduced in backward; None if it can.

    `unscaled`: GradScaler has unscaled them.
    """
    for k, i, p in members(groups) if reduced.rows else ():
        if why := reduced.why_changed(p, unscaled=unscaled):
            return CSDRuntimeError(f"the gradient of {name_of(groups, k, i)} {why}")
    return None
