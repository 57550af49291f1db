"""``workflow=apply``: change the declared state of a cluster that runs, and wait for what becomes of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.console import Console

from dejavu.clock import Clock, SystemClock
from dejavu.config import Config
from dejavu.control.changing import LIVE
from dejavu.control.spec_change import SpecChange, why_fixed
from dejavu.errors import ConfigError, DejavuError, InfeasibleError
from dejavu.report.amounts import printable, show_seconds
from dejavu.report.json_file import write_json
from dejavu.report.progress import Progress, RichProgress
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.workflows.external_store import external_store
from dejavu.workflows.wish import Wishes


def run(config: Config, output: Path) -> None:
    """The change is in force, and what became of it is in ``change.json``.

    Raises ConfigError for what cannot change or makes no sense, InfeasibleError for what does not fit, StoreUnavailable
    where nobody answers, DejavuError when nothing came of it in time.
    """
    check_live(config)
    console, clock = Console(), SystemClock()
    client = StoreClient(external_store(config.store))
    with contextlib.closing(client), RichProgress(Console(stderr=True), clock) as progress:
        change = applied(Wishes(client, Keys(config.cluster.name)), config, progress, clock)
    write_json(output / "change.json", change)
    console.print(_told(change), highlight=False, soft_wrap=True)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def check_live(config: Config) -> None:
    """Every key that is given can change while a cluster runs. Raises ConfigError naming the first that cannot."""
    for key in config.apply.wanted:
        if any(live.startswith(f"{key}.") for live in LIVE):
            raise ConfigError(f"{key}: give its keys one by one, such as {next(iter(LIVE))}=4")
        reason = why_fixed(key, LIVE)
        if reason is not None:
            raise ConfigError(f"{key}: cannot change while the cluster runs: {reason}")


def applied(wishes: Wishes, config: Config, progress: Progress, clock: Clock) -> SpecChange | None:
    """What became of the wish; None when the cluster is as wished already. See ``run`` for what it raises."""
    deadline_s = clock.monotonic() + config.apply.timeout_s
    wish = wishes.put(config, deadline_s, clock)
    if wish is None:
        return None
    progress.note(f"change {wish.revision}: {wish.text}")
    change = wishes.outcome(wish.revision, deadline_s, clock, progress)
    if change.phase == "done":
        return change
    reason = change.reason or "no reason was given"
    if change.phase == "failed":
        raise DejavuError(f"change {change.revision} came to nothing, the cluster has failed: {reason}")
    raise InfeasibleError(reason) if change.is_infeasible else ConfigError(reason)


def _told(change: SpecChange | None) -> str:
    if change is None:
        return "nothing to change: the cluster is declared so already"
    lines = [f"change {change.revision} is in force, epoch {change.epoch}: {change.text}"]
    receipt = change.receipt
    if receipt is not None and change.fenced_s is not None:
        rows = ", ".join(f"{count} by {tier}" for tier, count in sorted(receipt.rows.items())) or "none open"
        pause_s = max(receipt.resumed_s - change.fenced_s, 0.0)
        lines.append(f"tokens paused for {show_seconds(pause_s)}; rows that went on: {rows}")
    return printable("\n".join(lines))
