"""A cluster on which one test after the other brings about faults; each looks up who has which place by then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dejavu.control.faults import Fault
from dejavu.request import Request, Sampling
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys

from harness.cluster_kit import Kit, Served, cluster, ragged_requests, tokens_of
from harness.judge import StatusLog, Tokens, assert_right, is_open, status_log
from harness.launched import eventually, own_store
from harness.processes import our_processes, shared_memory_files, wait_gone

TTL_S = 2
ROWS = ["strategy.microbatch.prompt=3", "strategy.microbatch.token=2", "strategy.in_flight=3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A cluster that serves, its workload, and what is right."""

    kit: Kit
    requests: Sequence[Request]
    expected: Tokens
    """Tokens of the workload without a fault."""
    status: StatusLog

    def suffer(self, *faults: Fault) -> Served:
        """The workload was served through these faults, and everything about it is right."""
        served = self.kit.run(self.requests, *faults)
        assert_right(served, self.expected)
        return served


@contextmanager
def field(folder: Path, *overrides: str, is_sampled: bool | None = None) -> Iterator[Field]:
    """A field; at its end no process, key, port or shared-memory file is left, whatever the tests did.

    ``is_sampled`` None: every other request is.
    """
    before, files = our_processes(), shared_memory_files()
    with own_store(folder) as store:
        words = ["model=tiny-llama", "store=external", f"store.endpoints=[{store.endpoints[0]}]", *ROWS, *overrides]
        with (
            status_log(store) as status,
            cluster(folder / "output", *words, f"cluster.lease_ttl_s={TTL_S}") as kit,
        ):
            requests = _requests(kit.plan.model.vocab_size, is_sampled)
            expected = tokens_of(kit.run(requests).completions)
            yield Field(kit=kit, requests=requests, expected=expected, status=status)
            addresses = [member.address for member in kit.members().values()]
        assert [address for address in addresses if is_open(address)] == []
        with closing(StoreClient(store)) as client:
            prefix = Keys("dejavu").prefix
            eventually(lambda: client.get_prefix(prefix).entries == (), "no key is left", TTL_S + 5.0)
    assert wait_gone(before, timeout_s=10.0) == {}
    assert shared_memory_files() - files == set()


def _requests(vocab_size: int, is_sampled: bool | None) -> list[Request]:
    requests = ragged_requests(18, vocab_size=vocab_size, seed=4, max_tokens=40, is_sampled=is_sampled is not False)
    if is_sampled is not None:
        return requests
    greedy = [msgspec.structs.replace(request, sampling=Sampling()) for request in requests[::2]]
    return [one for pair in zip(greedy, requests[1::2], strict=True) for one in pair]
