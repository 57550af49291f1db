"""Whatever dies, freezes or is cut off in whatever order: epochs follow each other, and the cluster forms again."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dejavu.control.plan import Plan
from dejavu.ids import Epoch, WorkerName
from operators import recovery
from operators.actions import FailRun, KillWorker, TellFenced, TellFormed
from operators.detection import Suspicion
from operators.placement import epoch_of

from harness.operator_world import RECEIPT, World, with_standby
from harness.plans import colocated_plan, split_plan

NAMES = st.integers(0, 4).map(lambda index: WorkerName(f"w{index}"))


class FailingCluster(RuleBasedStateMachine):
    """A world in which things fail at random; a controller behind it resumes when it is told that all serve."""

    world: World

    @initialize(
        plan=st.sampled_from((colocated_plan(3), split_plan(1, 2), split_plan(2, 2))),
        num_standby=st.integers(0, 1),
        may_grow=st.booleans(),
    )
    def bring_up(self, plan: Plan, num_standby: int, may_grow: bool) -> None:
        extra = tuple(WorkerName(f"w{len(plan.workers) + index}") for index in range(num_standby))
        self.world = World(with_standby(plan, *extra), may_grow=may_grow)
        self.highest_stored = 1
        self.given_out: dict[int, Plan] = {}

    @rule(name=NAMES, forget=st.booleans())
    def a_worker_is_killed(self, name: WorkerName, forget: bool) -> None:
        if name in self.world.running:
            self.world.kill(name, forget=forget)

    @rule(name=NAMES)
    def a_worker_freezes(self, name: WorkerName) -> None:
        if name in self.world.running:
            self.world.freeze(name)

    @rule(name=NAMES)
    def a_worker_says_it_cannot_go_on(self, name: WorkerName) -> None:
        member = self.world.members.get(name)
        if member is not None:
            self.world.members[name] = msgspec.structs.replace(member, problem="no memory")

    @rule(name=NAMES, back=st.integers(0, 1))
    def a_link_is_suspected(self, name: WorkerName, back: int) -> None:
        world = self.world
        epoch = Epoch(world.state.plan.epoch - back)
        suspicion = Suspicion(worker=name, epoch=epoch, reason="reset", by="somebody", since_s=world.now_s)
        world.state = recovery.suspected(world.state, suspicion)

    @rule(is_readable=st.booleans(), takes_plans=st.booleans())
    def the_store_comes_or_goes(self, is_readable: bool, takes_plans: bool) -> None:
        self.world.is_readable, self.world.takes_plans = is_readable, takes_plans

    @precondition(lambda self: self.world.is_readable)
    @rule()
    def the_store_loses_its_plan(self) -> None:
        self.world.plan = None

    @rule(after_s=st.sampled_from((0.0, 0.05, 0.4, 7.0)))
    def a_look(self, after_s: float) -> None:
        before = self.world.state.plan
        actions = self.world.look(after_s)
        fenced = [action.plan for action in actions if isinstance(action, TellFenced)]
        assert [plan.epoch for plan in fenced] in ([], [before.epoch + 1])
        journals = self.world.state.journals
        blamed = {failure.worker for failure in journals[-1].failures} if journals else set()
        killed = {action.name for action in actions if isinstance(action, KillWorker)}
        assert killed <= blamed | set(before.standby)

    @rule()
    def who_runs_serves(self) -> None:
        self.world.serve()

    @rule()
    def the_controller_resumes(self) -> None:
        if self.world.all_of(TellFormed):
            self.world.state = recovery.resumed(self.world.state, self.world.state.plan.epoch, RECEIPT)

    @invariant()
    def an_older_plan_is_never_put_over_a_newer_one(self) -> None:
        if self.world.plan is not None:
            assert epoch_of(self.world.plan) >= self.highest_stored
            self.highest_stored = epoch_of(self.world.plan)

    @invariant()
    def an_epoch_has_one_plan(self) -> None:
        """The answer to a put may be lost, so a plan that was tried may be in force."""
        plan = self.world.state.newest
        assert self.given_out.setdefault(plan.epoch, plan) == plan

    @invariant()
    def nobody_has_two_places(self) -> None:
        plan = self.world.state.newest
        assert len(set(plan.workers)) == len(plan.workers)
        assert not set(plan.workers) & set(plan.standby)

    def teardown(self) -> None:
        """When nothing fails any more, the cluster forms again, or has said why it cannot."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.is_readable = world.takes_plans = True
        for _ in range(200):
            world.serve()
            world.look(0.5)
            world.state = recovery.resumed(world.state, world.state.plan.epoch, RECEIPT)
        if world.state.problem is not None:
            assert len(world.all_of(FailRun)) == 1
            assert world.state.journals[-1].phase == "failed"
            return
        assert world.state.journal is None
        assert world.state.is_fenced
        assert world.state.formed_epoch == world.state.plan.epoch
        assert {journal.phase for journal in world.state.journals} <= {"done"}


TestFailingCluster = FailingCluster.TestCase
TestFailingCluster.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
