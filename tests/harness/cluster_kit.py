"""Real clusters for tests: real etcd, real UCX, real worker processes, tiny models, and the oracle beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_module

from dejavu.config import Config, load, register_schema, validate
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.ids import Epoch, RequestId
from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.source import has_tokenizer
from dejavu.models.tokenizer import TextCodec
from dejavu.report.progress import SilentProgress
from dejavu.request import Completion, Request, Sampling
from dejavu.serving.controller import Controller
from dejavu.workflows.cluster import RunningCluster, running_cluster
from dejavu.workflows.preparation import declared, prepare_model
from operators.processes import WORKER_COMMAND


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
class Kit:
    """A running cluster and what a test needs to know of it."""

    config: Config
    plan: Plan
    cluster: RunningCluster
    codec: TextCodec | None
    controller: Controller
    observer: Collected

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return Path(self.plan.model.folder)

    def serve(self, requests: Sequence[Request]) -> dict[RequestId, Completion]:
        """Every request's completion by id."""
        self.observer.clear()
        self.controller.serve(requests)
        return self.observer.completions


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
    plan = place(declared(config), prepare_model(config.model, SilentProgress()), epoch=Epoch(1))
    folder = Path(plan.model.folder)
    codec = TextCodec(folder) if has_tokenizer(folder) else None
    output.mkdir(parents=True, exist_ok=True)
    with running_cluster(config, plan, output, SilentProgress(), worker_command=worker_command) as running:
        observer = Collected()
        controller = Controller(running.links, codec, observer, lambda: running.failure.reason)
        yield Kit(config=config, plan=plan, cluster=running, codec=codec, controller=controller, observer=observer)


def ragged_requests(
    num_requests: int, *, vocab_size: int, seed: int = 0, lengths: Sequence[int] = (1, 3, 17, 64), max_tokens: int = 12
) -> list[Request]:
    """Random prompts of the given lengths in turn, with unequal output lengths so that rows end at different steps."""
    chooser = random.Random(seed)
    return [
        Request(
            id=RequestId(f"r{index}"),
            prompt_tokens=tuple(chooser.randrange(vocab_size - 4) for _ in range(lengths[index % len(lengths)])),
            max_tokens=max(1, max_tokens - 3 * (index % 4)),
            sampling=Sampling(),
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
