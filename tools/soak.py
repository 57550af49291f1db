"""A long run over a real cluster in which workers die, freeze, are cut off and are slow at random; then the verdict.

    python tools/soak.py [--minutes 10] [--faults 200] [--seed 1] [--rate 4] [--json soak.json] [overrides...]

Requests arrive all the time. Each is a copy of one of some templates, whose tokens were made before the first fault and
were compared with transformers' own ``generate`` where they are greedy. Afterwards the history is checked: every
request ended exactly once, with the tokens of its template, none doubled, lost or foreign. Exits with 1 on any
violation. Overrides are those of ``dejavu.run``, e.g. ``strategy.replication=0``.

Whom a fault strikes, when, and which one it is are drawn from --seed, but not what the cluster does meanwhile: the
same seed gives another run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from rich.console import Console
from soak_history import Expected, History, arrivals, templates
from soak_report import Soaked, show, summary
from soak_storm import Storm

from dejavu.clock import SystemClock
from dejavu.config import Config, load, register_schema, validate
from dejavu.control.journal import RestoreReceipt
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import Epoch, RequestId, WorkerName
from dejavu.models.reference import generate_batch, load_reference
from dejavu.report.json_file import write_json
from dejavu.report.progress import SilentProgress
from dejavu.request import Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.controller import Controller
from dejavu.workflows.cluster import RunningCluster, running_cluster
from dejavu.workflows.preparation import declared, prepare_model

TTL_S = 2
DEFAULTS = (
    "model=tiny-llama",
    "strategy.replication=1",
    "strategy.standby=2",
    "strategy.microbatch.token=4",
    f"cluster.lease_ttl_s={TTL_S}",
)
SPLIT = ("strategy.split.prompt=1", "strategy.split.token=2")
"""Unless the overrides choose a strategy."""
NUM_TEMPLATES = 48
MAX_TOKENS = 40
GRACE_S = 120.0
"""After the last arrival everything must have ended within it."""


class Deadline:
    """The cluster as the controller's overseer, which does not wait for ever."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._is_past = threading.Event()
        self._timer: threading.Timer | None = None

    def begin(self, after_s: float) -> None:
        """The run fails so many seconds from now."""
        self._timer = threading.Timer(after_s, self._is_past.set)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """There is no deadline any more."""
        if self._timer is not None:
            self._timer.cancel()

    def why_failed(self) -> str | None:
        """See ``Overseer``."""
        if self._is_past.is_set():
            return f"not all requests had ended {GRACE_S:g} s after the last one came"
        return self._cluster.why_failed()

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        """See ``Overseer``."""
        self._cluster.suspect(worker, epoch, reason)

    def link(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> ClusterLinks:
        """See ``Overseer``."""
        return self._cluster.link(plan, addresses)

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        """See ``Overseer``."""
        self._cluster.resumed(epoch, receipt)


def configured(overrides: Sequence[str]) -> Config:
    """The typed declaration."""
    register_schema()
    shape = () if any(word.startswith("strategy=") for word in overrides) else SPLIT
    with initialize_config_module("dejavu.conf", version_base="1.3"):
        config = load(compose("config", overrides=[*DEFAULTS, *shape, *overrides]), Path.cwd())
    validate(config)
    return config


def soak(config: Config, folder: Path, *, minutes: float, faults: int, seed: int, rate: float) -> Soaked:
    """The whole run: templates first, then arrivals and the storm beside them."""
    plan = place(declared(config), prepare_model(config.model, SilentProgress()), epoch=Epoch(1))
    models = templates(NUM_TEMPLATES, vocab_size=plan.model.vocab_size, max_tokens=MAX_TOKENS, seed=seed)
    requests = arrivals(models, rate=rate, until_s=60 * minutes, seed=seed)
    with running_cluster(config, plan, folder, SilentProgress()) as cluster:
        history = History()
        deadline, relay = Deadline(cluster), _Relay(history)
        controller = Controller(cluster.links, None, relay, deadline)
        expected = _expected(controller, relay, models, Path(plan.model.folder))
        storm = Storm(
            cluster=cluster,
            chooser=random.Random(seed),
            most_faults=faults,
            for_s=60 * minutes,
            ttl_s=config.cluster.lease_ttl_s,
        )
        clock = SystemClock()
        start_s, problem = clock.monotonic(), None
        storm.start()
        deadline.begin(60 * minutes + GRACE_S)
        try:
            controller.serve(requests)
        except DejavuError as error:
            problem = str(error)
        finally:
            deadline.end()
            storm.stop()
        return Soaked(
            history=history,
            requests=requests,
            expected=expected,
            journals=cluster.journals(),
            faults=dict(storm.counts),
            num_at_once=storm.num_at_once,
            wall_s=clock.monotonic() - start_s,
            problem=problem,
        )


class _Relay:
    """Tells one history after the other."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.to = history

    def token(self, request_id: RequestId, at_s: float) -> None:
        self.to.token(request_id, at_s)

    def ended(self, completion: object, token_times_s: Sequence[float]) -> None:
        self.to.ended(completion, token_times_s)  # type: ignore[arg-type]

    def back(self) -> None:
        self.to = self._history


def _expected(controller: Controller, relay: _Relay, models: Sequence[Request], folder: Path) -> Expected:
    """The templates' tokens without a fault. Raises DejavuError when greedy ones are not those of ``generate``."""
    relay.to = History()
    controller.serve(models)
    tokens = {completion.id: completion.tokens for completion in relay.to.endings}
    relay.back()
    reference = load_reference(folder)
    for model in models:
        if not model.sampling.is_greedy:
            continue
        prompt = list(model.prompt_tokens)
        right = generate_batch(reference, [prompt], model.max_tokens, ignore_eos=model.ignore_eos)[0]
        if tuple(right) != tokens[model.id]:
            raise DejavuError(f"template {model.id} differs from generate without any fault")
    return tokens


def main() -> None:
    """Prints the table, writes the file, and exits with 1 when anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=200, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--json", type=Path, default=Path("soak.json"))
    parser.add_argument("--folder", type=Path, help="for the workers' logs (default: a temporary one)")
    arguments, overrides = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with tempfile.TemporaryDirectory() as temporary:
        soaked = soak(
            configured(overrides),
            arguments.folder or Path(temporary),
            minutes=arguments.minutes,
            faults=arguments.faults,
            seed=arguments.seed,
            rate=arguments.rate,
        )
    figures = summary(soaked)
    write_json(arguments.json, figures)
    show(Console(), figures)
    sys.exit(1 if soaked.violations else 0)


if __name__ == "__main__":
    main()
