"""Deaths in the simulator: what they cost, by the cluster's own rules."""

from __future__ import annotations

import pytest

from dejavu.control.faults import AtStep, AtTime, Fault
from dejavu.control.plan import RecoveryTier
from dejavu.errors import InfeasibleError
from dejavu.ids import WorkerName
from dejavu.sim.machinery import Machinery
from dejavu.sim.simulation import Setting, SimulationResult, simulate

from harness.sim_kit import asked, costs, sim_plan

MACHINERY = Machinery(detection_s=0.5, replacement_s=3.0, standby_s=1.0)


def killed(worker: str, at_s: float) -> Fault:
    return Fault(kind="kill", worker=WorkerName(worker), trigger=AtTime(at_s=at_s))


def run(
    recovery: RecoveryTier,
    *faults: Fault,
    standby: int = 0,
    replication: int = 1,
    may_grow: bool = True,
    copy_steps: int = 1,
) -> SimulationResult:
    plan = sim_plan(
        "colocated", depth=4, replication=replication, recovery=recovery, standby=standby, copy_steps=copy_steps
    )
    setting = Setting(plan=plan, costs=costs(4.0, 0.04), machinery=MACHINERY, faults=faults, may_grow=may_grow)
    return simulate(setting, asked([101] * 4, prompt=10))


def test_without_a_failure_there_is_no_repair() -> None:
    result = run("replica")

    assert result.repairs == ()
    # Four prompts a stage apart, then a hundred rounds.
    assert result.makespan_s == pytest.approx(4.0 + 3.0 + 100 * 0.04, abs=0.1)


def test_a_death_costs_little_more_than_its_pause_where_replicas_are() -> None:
    without_s = run("replica").makespan_s

    result = run("replica", killed("w1", 9.0))

    (repair,) = result.repairs
    assert repair.rows == {"replica": 4}
    assert repair.prompt_tokens_recomputed == 0
    assert (repair.failed_s, repair.fenced_s, repair.formed_s) == pytest.approx((9.0, 9.5, 12.5))
    assert repair.pause_s == pytest.approx(3.5, abs=0.1)
    assert result.makespan_s == pytest.approx(without_s + 3.5, abs=0.2)


def test_what_has_not_left_with_a_copy_of_several_steps_is_made_again() -> None:
    more = set()
    for number in range(8):
        at_s = 9.0 + number * 0.04
        (each,) = run("replica", killed("w1", at_s)).repairs
        (together,) = run("replica", killed("w1", at_s), copy_steps=4).repairs
        assert together.rows == {"replica": 4}
        more.add(together.tokens_replayed - each.tokens_replayed)
    # Of each of the four rows up to three steps.
    assert min(more) >= 0
    assert 3 <= max(more) <= 12


def test_steps_that_take_long_do_not_wait_for_four_of_them() -> None:
    plan = sim_plan("colocated", depth=4, replication=1, copy_steps=4)
    fault = Fault(kind="kill", worker=WorkerName("w1"), trigger=AtStep(microbatch=0, step=11))
    setting = Setting(plan=plan, costs=costs(4.0, 0.6), machinery=MACHINERY, faults=[fault])

    (repair,) = simulate(setting, asked([20] * 4)).repairs

    # Two steps together take longer than half a second.
    assert repair.tokens_replayed <= 4 * 2


def test_a_standby_takes_the_place_sooner_than_a_new_process() -> None:
    slow, fast = run("replica", killed("w1", 9.0)), run("replica", killed("w1", 9.0), standby=1)

    assert fast.makespan_s == pytest.approx(slow.makespan_s - 2.0, abs=0.01)
    assert fast.workers[WorkerName("w4")].total_busy_s > 0


def test_replica_is_cheaper_than_recompute_and_that_is_cheaper_than_restart() -> None:
    spans = [run(tier, killed("w2", 10.0)).makespan_s for tier in ("replica", "recompute", "restart")]  # type: ignore[arg-type]

    assert spans == sorted(spans)
    assert spans[1] > spans[0] + 3.0, "recomputing passes every prompt again"
    assert spans[2] > spans[1] + 1.0, "restarting makes every token again, too"


def test_a_restart_counts_the_tokens_that_it_makes_again() -> None:
    (repair,) = run("restart", killed("w2", 10.0)).repairs

    assert repair.rows == {"restart": 4}
    assert repair.prompt_tokens_recomputed == 4 * 10
    assert repair.tokens_replayed >= 4 * 70


def test_without_copies_rows_are_recomputed() -> None:
    (repair,) = run("replica", killed("w2", 10.0), replication=0).repairs

    assert repair.rows == {"recompute": 4}
    assert repair.prompt_tokens_recomputed > 4 * 80


def test_a_death_while_the_cluster_is_repaired_is_part_of_that_repair() -> None:
    result = run("replica", killed("w1", 9.0), killed("w3", 10.0))

    (repair,) = result.repairs
    assert repair.workers == ["w1", "w3"]
    assert repair.formed_s == pytest.approx(10.0 + 0.5 + 3.0)
    # w2 held w1's rows and w0 those of w3, so all are still there.
    assert repair.rows == {"replica": 4}


def test_a_stage_and_its_holder_that_die_together_leave_nothing_to_go_on_from() -> None:
    (repair,) = run("replica", killed("w1", 9.0), killed("w2", 9.1)).repairs

    assert repair.rows == {"recompute": 4}


def test_a_second_failure_after_the_first_is_repaired_again() -> None:
    result = run("replica", killed("w1", 8.5), killed("w1", 13.0))

    assert [repair.rows for repair in result.repairs] == [{"replica": 4}] * 2


def test_without_new_processes_the_survivors_share_the_layers() -> None:
    result = run("replica", killed("w1", 9.0), may_grow=False)

    (repair,) = result.repairs
    assert repair.formed_s == pytest.approx(10.5)
    assert repair.rows == {"replica": 4}
    assert result.workers[WorkerName("w1")].total_busy_s < result.workers[WorkerName("w0")].total_busy_s


def test_a_cluster_without_survivors_is_infeasible() -> None:
    faults = [killed(f"w{number}", 9.0) for number in range(4)]

    with pytest.raises(InfeasibleError, match="all 4 workers"):
        run("replica", *faults, may_grow=False)


def test_a_kill_at_a_step_strikes_when_that_step_is_over() -> None:
    fault = Fault(kind="kill", worker=WorkerName("w3"), trigger=AtStep(microbatch=0, step=50))

    (repair,) = run("replica", fault).repairs

    assert repair.failed_s == pytest.approx(7.0 + 50 * 0.04, abs=0.1)


def test_a_kill_at_the_very_start_strikes() -> None:
    (repair,) = run("replica", killed("w1", 0.0)).repairs

    assert repair.failed_s == 0.0
    assert repair.pause_s is None, "no token came before it"


def test_a_fault_that_never_comes_is_counted() -> None:
    assert run("replica", killed("w1", 1e6)).faults_left == 1


def test_a_dead_prompt_stage_costs_only_the_prompts_that_were_under_way() -> None:
    plan = sim_plan("disaggregated", split=(1, 1), in_flight=2)
    setting = Setting(plan=plan, costs=costs(1.0, 0.1), machinery=MACHINERY, faults=[killed("w0", 1.5)])

    (repair,) = simulate(setting, asked([50, 50])).repairs

    assert repair.rows == {"replica": 1, "recompute": 1}
    assert repair.prompt_tokens_recomputed == 0


def test_failures_by_rate_come_about_as_often_as_said() -> None:
    plan = sim_plan("colocated", depth=4, replication=1)
    setting = Setting(plan=plan, costs=costs(1.0, 0.1), machinery=MACHINERY, failures_per_hour=60.0, seed=3)

    result = simulate(setting, asked([200] * 400))

    # Deaths of workers that are dead already strike nobody.
    assert 0.5 < len(result.repairs) / (result.makespan_s / 60.0) < 1.4
    assert result.num_tokens == 400 * 200


def test_the_second_replica_goes_on_while_the_first_is_repaired() -> None:
    plan = sim_plan("colocated", depth=2, replication=1)
    setting = Setting(plan=plan, replicas=2, costs=costs(1.0, 0.1), machinery=MACHINERY, faults=[killed("w0", 3.0)])

    result = simulate(setting, asked([40] * 4))

    assert [one.resumed for one in result.requests].count(0) == 2
