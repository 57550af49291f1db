"""``workflow=status``: how a cluster stands, as its store tells it. Reads only, whoever started the cluster."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.console import Console

from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.control.standing import standing
from dejavu.report.cluster_status import ClusterStatus
from dejavu.report.json_file import write_json
from dejavu.report.status_table import render_status
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.workflows.external_store import external_store, unknown_cluster


def run(config: Config, output: Path) -> None:
    """The status is on the terminal and in ``status.json``.

    Raises ConfigError where the store has no such cluster, StoreUnavailable where nobody answers.
    """
    status = read_status(StoreClient(external_store(config.store)), Keys(config.cluster.name))
    write_json(output / "status.json", status)
    console = Console()
    render_status(console, status, now_s=SystemClock().now())
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def read_status(client: StoreClient, keys: Keys) -> ClusterStatus:
    """How the cluster stands now; the client is closed. Raises ConfigError naming the clusters that there are."""
    with contextlib.closing(client):
        snapshot = client.get_prefix(keys.prefix)
        if snapshot.entries:
            return standing(keys, {entry.key: entry.value for entry in snapshot.entries})
        raise unknown_cluster(client, keys)
