"""How many rows a microbatch should have, where that is left to the planner."""

from __future__ import annotations

from dataclasses import replace

from dejavu.planning.question import Question
from dejavu.planning.search import Answer, plan


def plan_with_rows(question: Question) -> Answer:
    """The best plan over microbatches of 1, 2, 4, ... ``question.rows`` rows; of equally fast ones the smallest.
    A swapped microbatch has no more either.

    A round of microbatches that the workload cannot fill counts for what it can: a plan for more rows than there are
    requests would promise a throughput that nobody sees.
    """
    answers = [plan(replace(question, rows=rows, most_rows=question.rows)) for rows in _sizes(question.rows)]
    possible = [answer for answer in answers if answer.chosen is not None]
    return min(possible, key=_request_s) if possible else answers[0]


def _sizes(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]


def _request_s(answer: Answer) -> float:
    """Seconds per request, with no more requests in a round than there are."""
    chosen = answer.chosen
    assert chosen is not None
    in_round = chosen.rows * chosen.num_machines
    return chosen.round_s / min(in_round, answer.question.lengths.num_requests)
