"""Meters of workers: who is asked when, and totals that never decrease."""

from __future__ import annotations

import msgspec

from dejavu.engine import messages as m
from dejavu.ids import Epoch, WorkerName
from dejavu.report.counters import LiveFigures, WorkerCounters
from dejavu.serving.latencies import Buckets, Latencies
from dejavu.serving.meters import LiveMeters

from harness.plans import split_plan


class Links:
    """Notes what it is told to send."""

    def __init__(self, epoch: int = 1) -> None:
        self.plan = msgspec.structs.replace(split_plan(token=2), epoch=Epoch(epoch))
        self.asked: list[str] = []

    def worker(self, name: str, message: m.AnyMessage) -> None:
        assert message == m.AskMeters(epoch=self.plan.epoch)
        self.asked.append(name)


def meters_message(
    worker: str, at_s: float, compute_s: float, *, incarnation: str = "i", epoch: int = 1, sent: int = 0
) -> m.Meters:
    counters = WorkerCounters(
        name=worker, pipeline="token", stage=0, layers=(0, 3), compute_s=compute_s, stream_bytes=int(compute_s * 100)
    )
    figures = LiveFigures(incarnation=incarnation, at_s=at_s, counters=counters, sent_bytes={"w2": sent})
    return m.Meters(epoch=Epoch(epoch), worker=WorkerName(worker), figures=figures)


def test_every_worker_is_asked_once_a_second_and_only_when_it_has_answered() -> None:
    meters, links = LiveMeters(), Links()
    meters.beat(links, 0.0)
    assert links.asked == list(links.plan.workers)
    meters.heard(meters_message("w1", 1.0, 0.0), "w1")
    meters.beat(links, 0.9)
    assert len(links.asked) == 3
    meters.beat(links, 1.0)
    assert links.asked[3:] == ["w1"]


def test_a_new_epoch_asks_everybody_at_once_whoever_owes_an_answer() -> None:
    meters = LiveMeters()
    meters.beat(Links(), 0.0)
    links = Links(epoch=2)
    meters.beat(links, 0.1)
    assert links.asked == list(links.plan.workers)


def test_what_others_say_is_not_heard() -> None:
    assert not LiveMeters().heard(m.ForgetSources(epoch=Epoch(1)), "w1")


def test_rates_are_over_the_workers_own_time_between_two_answers() -> None:
    meters = LiveMeters()
    assert meters.heard(meters_message("w1", 10.0, 4.0, sent=1000), "w1")
    assert meters.readings()["w1"].busy_share is None
    meters.heard(meters_message("w1", 12.0, 5.0, sent=1500), "w1")
    reading = meters.readings()["w1"]
    assert (reading.busy_share, reading.sent_bytes_per_s) == (0.5, {"w2": 250.0})


def test_a_long_pass_makes_no_stage_busier_than_wholly() -> None:
    meters = LiveMeters()
    meters.heard(meters_message("w1", 10.0, 0.0), "w1")
    meters.heard(meters_message("w1", 11.0, 5.0), "w1")
    assert meters.readings()["w1"].busy_share == 1.0


def test_totals_go_on_when_a_new_process_counts_from_zero_and_when_links_are_made_anew() -> None:
    meters = LiveMeters()
    meters.heard(meters_message("w1", 10.0, 4.0, sent=1000), "w1")
    meters.heard(meters_message("w1", 11.0, 5.0, sent=100, epoch=2), "w1")
    meters.heard(meters_message("w1", 1.0, 5.5, incarnation="j", sent=300, epoch=2), "w1")
    totals = meters.totals()["w1"]
    assert (totals.amounts["compute_seconds"], totals.amounts["streamed_bytes"]) == (10.5, 1050)
    assert totals.sent_bytes == {"w2": 1400}
    assert meters.readings()["w1"].busy_share is None


def test_values_at_a_bound_are_in_its_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    buckets.add([0.5, 1.0, 1.5, 9.0])
    made = buckets.snapshot()
    assert (made.counts, made.sum_s) == ((2, 1, 1), 12.0)


def test_tokens_are_counted_by_whole_seconds_and_old_ones_forgotten() -> None:
    latencies = Latencies()
    for at_s in (0.1, 0.9, 2.5, 3.2):
        latencies.token("r", at_s)  # type: ignore[arg-type]
    assert latencies.tokens_by_second(3.9) == [2, 0, 1]
    latencies.token("r", 500.0)  # type: ignore[arg-type]
    assert latencies.tokens_by_second(501.0, 3) == [0, 0, 1]
    assert latencies.tokens_by_second(4.0) == [0, 0, 0, 0]
