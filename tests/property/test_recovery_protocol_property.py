"""The protocol of recovery as a state machine: crashes, freezes, false alarms, broken links, late words, at any moment.

Every decision is the one that the cluster runs with (ring, restore, plans); processes and links are on paper.
"""

from __future__ import annotations

import random

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dejavu.control.ending import Limits
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.ids import Epoch, WorkerName

from harness.plans import made_up_spec
from harness.recovery_cluster import RecoveryCluster
from harness.recovery_model import EOS, VOCAB_SIZE, right_tokens
from harness.recovery_worker import Worker

NUM_LAYERS = 4
MOST_REQUESTS = 30
MOST_ACTIONS = 20_000
choices = st.integers(0, 1000)
ways = st.sampled_from([("process",), ("process", "standby"), ("process", "standby", "shrink"), ("shrink",)])
progress = st.sampled_from([0, 2, 10, 40, 100, 100, 200, 300])
"""How many actions of the cluster itself: a plan's workers join and tell in about 20, a step takes about 8."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    depth = draw(st.sampled_from([1, 2, 3, 3, 4]))
    declared = Declared(
        mode=draw(st.sampled_from(["colocated", "disaggregated"])),
        colocated_depth=depth,
        prompt_depth=draw(st.integers(1, 2)),
        token_depth=depth,
        prompt_rows=1,
        token_rows=draw(st.integers(1, 2)),
        in_flight=draw(st.integers(1, 3)),
        scheduling="row",
    )
    plan = place(declared, made_up_spec(num_layers=NUM_LAYERS), epoch=Epoch(1))
    first = len(plan.workers)
    return msgspec.structs.replace(
        plan,
        replication=min(depth - 1, draw(st.sampled_from([0, 1, 1, 1, 2, 3]))),
        recovery=draw(st.sampled_from(["replica"] * 6 + ["recompute", "restart"])),
        standby=tuple(WorkerName(f"w{first + number}") for number in range(draw(st.integers(0, 2)))),
    )


class RecoveryProtocol(RuleBasedStateMachine):
    """What the world does to the cluster, each after some of the cluster's own actions."""

    cluster: RecoveryCluster

    @initialize(plan=plans(), seed=choices, ways=ways, copy_lag=st.sampled_from([0.0, 0.3, 0.4, 0.5, 0.9]))
    def start(self, plan: Plan, seed: int, ways: tuple[str, ...], copy_lag: float) -> None:
        self.cluster = RecoveryCluster(plan, ways)
        self.chooser = random.Random(seed)
        self.copy_lag = copy_lag
        self.right: list[list[int]] = []

    @rule(most=progress)
    def go_on(self, most: int) -> None:
        """Some of what can happen by itself does, in any order."""
        self.run(most)

    @rule(most=progress, slow=choices)
    def go_on_while_nothing_reaches_one_process(self, most: int, slow: int) -> None:
        self.run(most, slow)

    @rule(most=progress, choice=choices)
    def crash(self, most: int, choice: int) -> None:
        self.run(most)
        self.some_worker(choice).is_alive = False

    @rule(most=progress, choice=choices)
    def freeze(self, most: int, choice: int) -> None:
        self.run(most)
        self.some_worker(choice).is_frozen = True

    @precondition(lambda self: any(worker.is_frozen for worker in self.cluster.processes))
    @rule(most=progress, choice=choices)
    def wake(self, most: int, choice: int) -> None:
        """A frozen process goes on, perhaps long after it was declared dead."""
        self.run(most)
        frozen = [worker for worker in self.cluster.processes if worker.is_frozen]
        frozen[choice % len(frozen)].is_frozen = False

    @rule(most=progress, choice=choices)
    def raise_a_false_alarm(self, most: int, choice: int) -> None:
        self.run(most)
        self.cluster.accused.add(self.some_worker(choice).name)

    @rule(most=progress, choice=choices)
    def break_a_link(self, most: int, choice: int) -> None:
        self.run(most)
        self.cluster.break_link(choice)

    @invariant()
    def no_stage_has_two_owners_in_an_epoch(self) -> None:
        owners = [(worker.epoch, worker.name) for worker in self.cluster.processes if worker.place is not None]
        assert len(owners) == len(set(owners))

    @invariant()
    def what_was_told_is_the_beginning_of_what_is_right(self) -> None:
        for one, right in zip(self.cluster.controller.asked, self.right, strict=True):
            assert one.tokens == right[: len(one.tokens)]

    def teardown(self) -> None:
        """Nothing more breaks: every request ends, right, whatever was late and whoever wakes."""
        if not hasattr(self, "cluster"):
            return
        self.come_to_rest()
        for worker in self.cluster.processes:
            worker.is_frozen = False
        self.come_to_rest()
        living = {worker.incarnation for worker in self.cluster.processes if worker.is_alive}
        assert living == {worker.incarnation for worker in self.cluster.current.values()}, "somebody acts for the dead"

    def come_to_rest(self) -> None:
        self.run(MOST_ACTIONS)
        assert not self.cluster.actions(), "the cluster does not come to rest"
        assert all(one.is_done and one.slot is None for one in self.cluster.controller.asked)
        self.what_was_told_is_the_beginning_of_what_is_right()

    def run(self, most: int, slow: int | None = None) -> None:
        """So many of the cluster's own actions, in any order, with something to do for it."""
        while len(self.right) < MOST_REQUESTS and sum(not one.is_done for one in self.cluster.controller.asked) < 3:
            self.ask()
        for _ in range(most):
            actions = self.cluster.actions(slow, copies_lag=self.chooser.random() < self.copy_lag)
            actions = actions or self.cluster.actions(slow)
            if not actions:
                return
            self.chooser.choice(actions)()

    def ask(self) -> None:
        prompt = [self.chooser.randrange(VOCAB_SIZE) for _ in range(self.chooser.randint(1, 5))]
        limits = Limits(max_tokens=self.chooser.choice([1, 2, 8, 20, 20, 20]), eos_token_ids=EOS)
        self.cluster.controller.ask(prompt, limits)
        self.right.append(right_tokens(NUM_LAYERS, prompt, limits))

    def some_worker(self, choice: int) -> Worker:
        workers = list(self.cluster.current.values())
        return workers[choice % len(workers)]


RecoveryProtocol.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEveryRequestEndsRightWhateverDies = RecoveryProtocol.TestCase
