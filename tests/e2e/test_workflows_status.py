"""``workflow=status`` on a real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dejavu.config import Config, StoreConfig, StoreKind
from dejavu.control.member import encode_json
from dejavu.errors import ConfigError
from dejavu.store import StoreClient
from dejavu.store.keys import Keys
from dejavu.workflows.status import run

from harness.plans import split_plan
from harness.store_server import StoreServer


@pytest.mark.slow
def test_the_status_of_a_cluster_is_read_and_one_that_is_not_there_is_refused_with_the_names_of_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = StoreServer(tmp_path)
    server.start()
    try:
        config = Config(store=StoreConfig(kind=StoreKind.external, endpoints=[server.endpoint]))
        with pytest.raises(ConfigError, match="holds no cluster at all"):
            run(config, tmp_path)
        client = StoreClient(server.spec)
        client.put(Keys("other").plan, encode_json(split_plan()))
        with pytest.raises(ConfigError, match=r"cluster.name=dejavu: the store has no such cluster\nvalid: other"):
            run(config, tmp_path)
        config.cluster.name = "other"
        run(config, tmp_path)
        client.close()
    finally:
        server.kill()
    assert "other: epoch 1, disaggregated" in capsys.readouterr().out
    assert json.loads((tmp_path / "status.json").read_text())["epoch"] == 1
