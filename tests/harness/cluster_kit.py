"""Real clusters for tests: real etcd, real UCX, real worker processes, tiny models, and the oracle beside them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_module

from dejavu.clock import SystemClock
from dejavu.config import Config, load, register_schema, validate
from dejavu.control.faults import Fault, FaultSchedule
from dejavu.control.journal import RepairJournal
from dejavu.control.member import Member, decode_member
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.control.receipts import receipts
from dejavu.ids import Epoch, RequestId, WorkerName
from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.tokenizer import TextCodec
from dejavu.report.counters import WorkerCounters
from dejavu.report.progress import SilentProgress
from dejavu.report.repairs import RepairReceipt
from dejavu.request import Completion, Request, Sampling
from dejavu.serving.controller import Controller
from dejavu.serving.overseer import Watcher
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.workflows.cluster import RunningCluster, running_cluster
from dejavu.workflows.generate import collect
from dejavu.workflows.injection import Injector, faults_of
from dejavu.workflows.preparation import cluster_model, codec_of, declared
from operators.worker_process import WORKER_COMMAND

from harness.fault_relay import FaultRelay, Several
from harness.launched import eventually


@dataclass(slots=True)
class Collected:
    """An observer that keeps everything of one ``serve``."""

    completions: dict[RequestId, Completion] = field(default_factory=dict)
    num_tokens: int = 0

    def clear(self) -> None:
        self.completions, self.num_tokens = {}, 0

    def token(self, request_id: RequestId, at_s: float) -> None:
        self.num_tokens += 1

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        assert completion.id not in self.completions, f"request {completion.id} ended twice"
        self.completions[completion.id] = completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of one workload."""

    completions: dict[RequestId, Completion]
    journals: tuple[RepairJournal, ...]
    """Of the repairs since it began; all are over."""
    counters: Mapping[str, WorkerCounters]

    @property
    def receipts(self) -> list[RepairReceipt]:
        """As ``metrics.json`` tells the repairs."""
        return receipts(self.journals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """A running cluster and what a test needs to know of it."""

    config: Config
    plan: Plan
    """The first one."""
    cluster: RunningCluster
    codec: TextCodec | None
    controller: Controller
    observer: Collected
    relay: FaultRelay

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return Path(self.plan.model.folder)

    @property
    def plan_now(self) -> Plan:
        """The one that the controller serves by."""
        return self.controller.links.plan

    def serve(self, requests: Sequence[Request]) -> dict[RequestId, Completion]:
        """Every request's completion by id; the configuration's faults have struck."""
        self._serve(requests, faults_of(self.config.fault), None)
        return self.observer.completions

    def run(
        self,
        requests: Sequence[Request],
        *faults: Fault,
        watcher: Watcher | None = None,
        dead: Collection[WorkerName] = (),
    ) -> Served:
        """Every request has ended, every fault has struck, and every repair is over.

        ``watcher`` hears what the faults hear. A worker that was killed or stopped for good, and those in ``dead``,
        have been found out, also when the requests did not need them any more.
        """
        num_before = len(self.cluster.journals())
        num_waiting = self._serve(requests, faults, watcher)
        completions = self.observer.completions
        assert num_waiting == 0, f"{num_waiting} faults had not come when the last request ended"
        self.settle(num_before, {*dead, *(fault.worker for fault in faults if is_for_good(fault))})
        counters, _ = collect(self.cluster)
        return Served(completions=completions, journals=self.cluster.journals()[num_before:], counters=counters)

    def settle(self, num_before: int, dead: set[WorkerName]) -> None:
        """Each of ``dead`` is in a journal after the first ``num_before``, and no repair is under way."""
        probe = Request(id=RequestId("probe"), prompt_tokens=(1, 2), max_tokens=2, ignore_eos=True)

        def is_over() -> bool:
            journals = self.cluster.journals()[num_before:]
            found = {failure.worker for journal in journals for failure in journal.failures}
            return dead <= found and all(journal.phase in ("done", "failed") for journal in journals)

        def is_over_or_goes_on() -> bool:
            # A repair ends with a token: somebody must ask for one.
            if not is_over():
                self._serve([probe], (), None)
            return is_over()

        eventually(is_over_or_goes_on, f"the ends of {dead} are repaired")

    def members(self) -> dict[WorkerName, Member]:
        """The registered workers."""
        keys = Keys(self.config.cluster.name)
        with closing(StoreClient(self.cluster.store)) as client:
            entries = client.get_prefix(keys.workers_prefix).entries
        return {member.name: member for member in (decode_member(entry.value) for entry in entries)}

    def wait_standbys(self) -> None:
        """Every standby of the plan waits, loaded."""

        def waits(name: WorkerName, members: Mapping[WorkerName, Member]) -> bool:
            return name in members and members[name].state == "ready" and members[name].pipeline is None

        eventually(
            lambda: (
                (members := self.members()) is not None and all(waits(name, members) for name in self.plan_now.standby)
            ),
            "every standby waits",
        )

    def _serve(self, requests: Sequence[Request], faults: Sequence[Fault], watcher: Watcher | None) -> int:
        """Every request has ended. Returns how many faults have not come."""
        self.observer.clear()
        with Injector(FaultSchedule(faults), self.cluster.launcher, SystemClock()) as injector:
            self.relay.point_at(injector if watcher is None else Several([injector, watcher]))
            try:
                self.controller.serve(requests)
            finally:
                self.relay.point_at(None)
            return injector.num_waiting


def is_for_good(fault: Fault) -> bool:
    """True for a fault whose worker does not come back by itself."""
    return fault.kind == "kill" or (fault.kind == "stop" and fault.for_s is None)


def configured(*overrides: str) -> Config:
    """The typed configuration of these overrides."""
    register_schema()
    with initialize_config_module("dejavu.conf", version_base="1.3"):
        config = load(compose("config", overrides=list(overrides)), Path.cwd())
    validate(config)
    return config


@contextmanager
def cluster(output: Path, *overrides: str, worker_command: Sequence[str] = WORKER_COMMAND) -> Iterator[Kit]:
    """A cluster that serves, as the overrides declare it."""
    config = configured(*overrides)
    plan = place(declared(config), cluster_model(config, SilentProgress()), epoch=Epoch(1))
    codec = codec_of(plan.model)
    output.mkdir(parents=True, exist_ok=True)
    with running_cluster(config, plan, output, SilentProgress(), worker_command=worker_command) as running:
        observer = Collected()
        relay = FaultRelay()
        controller = Controller(running.links, codec, observer, running, relay)
        yield Kit(
            config=config,
            plan=plan,
            cluster=running,
            codec=codec,
            controller=controller,
            observer=observer,
            relay=relay,
        )


def ragged_requests(
    num_requests: int,
    *,
    vocab_size: int,
    seed: int = 0,
    lengths: Sequence[int] = (1, 3, 17, 64),
    max_tokens: int = 12,
    is_sampled: bool = False,
    ignore_eos: bool = False,
) -> list[Request]:
    """Random prompts of the given lengths in turn, with unequal output lengths so that rows end at different steps."""
    chooser = random.Random(seed)
    return [
        Request(
            id=RequestId(f"r{index}"),
            prompt_tokens=tuple(chooser.randrange(vocab_size - 4) for _ in range(lengths[index % len(lengths)])),
            max_tokens=max(1, max_tokens - 3 * (index % 4)),
            sampling=Sampling(temperature=0.8, top_p=0.95, seed=index) if is_sampled else Sampling(),
            ignore_eos=ignore_eos,
        )
        for index in range(num_requests)
    ]


def reference_tokens(folder: Path, requests: Sequence[Request]) -> dict[RequestId, tuple[int, ...]]:
    """What transformers' own ``generate`` gives for each request alone, greedily."""
    model = load_reference(folder)
    return {
        request.id: tuple(
            generate_batch(model, [list(request.prompt_tokens)], request.max_tokens, ignore_eos=request.ignore_eos)[0]
        )
        for request in requests
    }


def tokens_of(completions: dict[RequestId, Completion]) -> dict[RequestId, tuple[int, ...]]:
    """Token ids by request."""
    return {request_id: completion.tokens for request_id, completion in completions.items()}
