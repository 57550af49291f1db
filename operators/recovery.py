"""Repairs the cluster: a failure is seen, fenced by a new epoch, its worker replaced, the cluster formed again. Pure.

One look at a time: ``step`` takes what is known and what was seen, and gives what is known now and what to do. A plan
is in force once it was found in the store; only then anybody is killed, started or told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as changed

from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.errors import InfeasibleError, InvalidTransition
from dejavu.ids import Epoch, WorkerName
from operators import launch
from operators.actions import Action, FailRun, KillWorker, Say, TellFenced, TellFormed
from operators.detection import Suspicion
from operators.findings import failures_of, finding_of, unbegun
from operators.membership import all_serving, attend, waits, without
from operators.observation import Moment, Observed
from operators.placement import epoch_of, is_in_store
from operators.repair_state import RepairState, Rules
from operators.replacement import Hands, choose

Step = tuple[RepairState, tuple[Action, ...]]

MAX_REPAIRS = 20
"""Within ``WINDOW_S``; a cluster that needs more does not get anywhere."""
WINDOW_S = 60.0


def step(state: RepairState, observed: Observed, now: Moment, rules: Rules) -> Step:
    """The state after one look, and what is to be done, in order."""
    state, adopted = _adopt(state, observed, now)
    before = state.attendance
    after = attend(
        before,
        observed,
        now.monotonic_s,
        names=(*state.newest.workers, *state.newest.standby),
        gone=state.gone,
        patience_s=rules.patience_s,
    )
    blind_s = now.monotonic_s if observed.members is None else state.blind_s
    state = replace(state, attendance=after, blind_s=blind_s)
    waiting_s = dict.fromkeys(unbegun(state, observed, rules), now.monotonic_s)
    state = replace(state, unbegun_s={**state.unbegun_s, **waiting_s})
    if observed.is_ending or state.problem is not None:
        return state, adopted
    failures = failures_of(state, before, observed, now, rules)
    state, lost = _lose(state, failures, observed, now)
    state, decided = _decide(state, observed, now, rules)
    if state.problem is not None or not state.is_fenced:
        return state, (*adopted, *lost, *decided)
    state, formed = _form(state, now)
    state, started = _start(state, observed, now, rules)
    return state, (*adopted, *lost, *decided, *started, *formed)


def suspected(state: RepairState, suspicion: Suspicion) -> RepairState:
    """The state in which somebody has lost a link to a worker.

    A word of another epoch, on a worker without a place, or said before changes nothing.
    """
    is_news = suspicion.worker in state.plan.workers and suspicion.worker not in state.suspicions
    if suspicion.epoch != state.plan.epoch or not state.is_fenced or not is_news:
        return state
    return replace(state, suspicions={**state.suspicions, suspicion.worker: suspicion})


def resumed(state: RepairState, epoch: Epoch, receipt: RestoreReceipt) -> RepairState:
    """The state in which the controller's rows go on in this epoch; a word of an epoch that was left is not heard."""
    journal = state.journal
    if journal is None or journal.epoch != epoch or journal.phase != "restore":
        return state
    done = changed(journal, phase="done", receipt=receipt)
    return replace(state, journal=None, finished=(*state.finished, done))


def _adopt(state: RepairState, observed: Observed, now: Moment) -> Step:
    """The pending plan is in force once the store has it: the dead of it are killed, and the controller is told."""
    plan = state.pending
    if plan is None or not is_in_store(plan, observed):
        return state, ()
    answered, left = state.findings[: state.num_covered], state.findings[state.num_covered :]
    dead = [finding.failure.worker for finding in answered if finding.is_dead]
    # A standby that is wanted no longer.
    dead += [name for name in state.plan.standby if name not in (*plan.workers, *plan.standby, *dead)]
    journal = state.journal
    if journal is not None:
        journal = changed(journal, fenced_s=now.wall_s, phase="fence" if left else "replace")
    after = replace(
        state,
        plan=plan,
        pending=None,
        findings=left,
        num_covered=0,
        fenced_s=now.monotonic_s,
        journal=journal,
        suspicions={},
    )
    return after, (*_kill(dead, observed), TellFenced(plan=plan))


def _lose(state: RepairState, failures: Sequence[Failure], observed: Observed, now: Moment) -> Step:
    """The failures of workers with a place are findings of a repair; a standby that died is only forgotten."""
    if not state.has_served:
        state, failures = _forgiven(state, failures, observed)
        if failures:
            return _fail(state, failures[0], "")
    findings = [finding_of(state, failure, now) for failure in failures if failure.worker in state.newest.workers]
    standbys = [failure for failure in failures if failure.worker not in state.newest.workers]
    dead = [*standbys, *(finding.failure for finding in findings if finding.is_dead)]
    # The end of a process that is counted as dead already must not be taken for the end of the next one.
    over = {(failure.worker, observed.pids[failure.worker]) for failure in dead if failure.worker in observed.pids}
    placed = tuple(finding.failure for finding in findings)
    names = {failure.worker for failure in placed}
    state = replace(
        state,
        handled=state.handled | over | {(gone.name, gone.pid) for gone in observed.exits},
        attendance=without(state.attendance, {failure.worker for failure in dead}),
        gone=state.gone | {failure.incarnation for failure in dead if failure.incarnation is not None},
        findings=(*state.findings, *findings),
        suspicions={name: suspicion for name, suspicion in state.suspicions.items() if name not in names},
        link_breaks={**state.link_breaks, **{f.worker: now.monotonic_s for f in placed if f.cause == "link"}},
    )
    if placed:
        state, refused = _note(state, placed, now)
        return state, refused
    said = tuple(Say(text=f"standby {failure.worker} {failure.reason}") for failure in standbys)
    return state, (*said, *_kill([failure.worker for failure in standbys], observed))


def _forgiven(
    state: RepairState, failures: Sequence[Failure], observed: Observed
) -> tuple[RepairState, Sequence[Failure]]:
    """While the cluster starts, one that somebody else started and that has gone is waited for as before it came."""
    gone = {failure.worker for failure in failures if failure.cause == "lease" and failure.worker not in observed.pids}
    left = [failure for failure in failures if failure.worker not in gone]
    return replace(state, attendance=without(state.attendance, gone)), left


def _note(state: RepairState, failures: tuple[Failure, ...], now: Moment) -> Step:
    """The failures are in the journal of the repair that is going on, or of a new one."""
    journal = state.journal
    if journal is not None:
        journal = changed(journal, failures=journal.failures + failures, phase="fence", fenced_s=None, replaced_s=None)
        return replace(state, journal=journal), ()
    recent_s = tuple(begun_s for begun_s in state.repairs_s if now.monotonic_s - begun_s < WINDOW_S)
    journal = RepairJournal(number=len(state.finished) + 1, epoch=state.newest.epoch, failures=failures)
    state = replace(state, journal=journal, repairs_s=(*recent_s, now.monotonic_s))
    if len(recent_s) >= MAX_REPAIRS:
        return _fail(state, failures[0], f"; the cluster keeps failing: {MAX_REPAIRS} repairs within {WINDOW_S:g} s")
    return state, ()


def _decide(state: RepairState, observed: Observed, now: Moment, rules: Rules) -> Step:
    """There is a next plan that answers all findings. Who is alive is only known while the store can be read."""
    if observed.members is None or state.problem is not None:
        return state, ()
    if epoch_of(observed.plan) > state.newest.epoch:
        reason = f"the store has a plan of epoch {epoch_of(observed.plan)}, newer than epoch {state.newest.epoch} here"
        return _end(state, f"{reason}: another controller leads this cluster", None)
    if state.pending is not None or not state.findings:
        return state, ()
    dead = {f.failure.worker: f.failure.incarnation for f in state.findings if f.is_dead}
    links = frozenset(f.failure.worker for f in state.findings if not f.is_dead)
    hands = _hands(state, observed, now, rules)
    try:
        choice = choose(state.plan, dead, links, hands, limits=rules.limits)
    except (InfeasibleError, InvalidTransition) as error:
        return _fail(state, state.findings[0].failure, f" and nobody can take its place: {error}")
    journal = state.journal
    if journal is not None:
        journal = changed(
            journal,
            epoch=choice.plan.epoch,
            how={**journal.how, **choice.how},
            replaced_by={**journal.replaced_by, **choice.by},
        )
    return replace(state, pending=choice.plan, num_covered=len(state.findings), journal=journal), ()


def _hands(state: RepairState, observed: Observed, now: Moment, rules: Rules) -> Hands:
    """Who could take a place now."""
    attendance, standby = state.attendance, state.plan.standby
    ready = tuple(name for name in standby if waits(name, attendance))
    alive = (attendance.seen.keys() - attendance.missing_since_s.keys()) | observed.running
    startable = [name for name in state.plan.workers if launch.may_start(name, state.starts, now.monotonic_s)]
    return Hands(
        ready=ready,
        loading=tuple(name for name in standby if name in alive and name not in ready),
        startable=frozenset(startable if rules.may_grow else ()),
    )


def _form(state: RepairState, now: Moment) -> Step:
    """Once every worker serves in the epoch, and at the first time every standby waits, the controller is told."""
    plan, attendance = state.plan, state.attendance
    if state.formed_epoch == plan.epoch or not all_serving(plan, attendance):
        return state, ()
    if not state.has_served:
        if not all(waits(name, attendance) for name in plan.standby):
            return state, ()
        state = replace(state, attendance=replace(attendance, shaken_until_s=now.monotonic_s))
    journal = state.journal
    if journal is not None:
        journal = changed(journal, replaced_s=now.wall_s, phase="restore")
    addresses = {name: attendance.seen[name].address for name in plan.workers}
    after = replace(state, has_served=True, formed_epoch=plan.epoch, journal=journal)
    return after, (TellFormed(plan=plan, addresses=addresses),)


def _start(state: RepairState, observed: Observed, now: Moment, rules: Rules) -> Step:
    """Who has a place is started. A standby waits until no repair needs the machine; nobody grows who may not."""
    plan = state.plan
    if not state.has_served:
        wanted = (*plan.workers, *plan.standby)
    else:
        wanted = (*plan.workers, *(plan.standby if state.journal is None else ())) if rules.may_grow else ()
    actions = launch.decide(wanted, state.attendance, observed, state.starts, now.monotonic_s)
    if not rules.starts_processes:
        return _await(state, [action.name for action in actions])
    if not state.has_served:
        return state, actions
    started = [action.name for action in actions]
    return replace(state, starts=launch.noted(state.starts, started, now.monotonic_s)), actions


def _await(state: RepairState, names: Sequence[WorkerName]) -> Step:
    """Whoever starts workers is told once an epoch which are missed; of one that has come and gone, again."""
    epoch = state.plan.epoch
    told = {name: one for name, one in state.awaited.items() if name not in state.attendance.seen}
    news = [name for name in names if told.get(name) != epoch]
    said = tuple(Say(text=f"worker {name} is to be started elsewhere") for name in news)
    return replace(state, awaited={**told, **dict.fromkeys(news, epoch)}), said


def _kill(names: Sequence[WorkerName], observed: Observed) -> tuple[Action, ...]:
    return tuple(KillWorker(name=name) for name in names if name in observed.running)


def _fail(state: RepairState, failure: Failure, why: str) -> Step:
    """The run ends for this failure."""
    return _end(state, f"worker {failure.worker} {failure.reason}{why}", failure.worker)


def _end(state: RepairState, reason: str, worker: WorkerName | None) -> Step:
    finished = state.finished
    if state.journal is not None:
        finished = (*finished, changed(state.journal, phase="failed", problem=reason))
    after = replace(state, journal=None, finished=finished, problem=reason)
    return after, (FailRun(reason=reason, worker=worker),)
