"""What a worker has copied of its predecessor's steps is in the store: bounded writes, however many tokens."""

from __future__ import annotations

import msgspec

from dejavu.engine.host import Host


class Acknowledgements:
    """Main thread only. The value that is written is the newest; those in between are left out."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def publish(self) -> None:
        """What has changed since the last call will be in the store; nothing waits for it."""
        for stage, steps in self._host.kept.replicas.news().items():
            by_microbatch = {str(microbatch): step for microbatch, step in sorted(steps.items())}
            self._host.acknowledge(self._host.plan.token_pipeline.kind, stage, msgspec.json.encode(by_microbatch))
