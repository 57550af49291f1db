"""``workflow=serve`` as a user starts it, over TLS and with a key, and the clients that users have."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from dejavu.models.tiny import make_tiny
from dejavu.store.spec import StoreSpec

from harness.launched import Launched, launched

KEY = "test-key"
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }};{% endfor %}a"
CONTEXT = 256
PATIENCE_S = 60.0


def chatty_model(folder: Path) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    made = folder / "chatty"
    if not made.exists():
        shutil.copytree(make_tiny("llama", folder, num_layers=2, context=CONTEXT), made)
        config = json.loads((made / "tokenizer_config.json").read_text())
        (made / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return made


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that is its own authority, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
    return cert, key


@dataclass(slots=True)
class Served:
    """A service that answers."""

    run: Launched
    url: str
    cert: Path
    client: openai.OpenAI

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON."""
        with contextlib.closing(self._connection()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def num_open(self) -> int:
        """Requests that have not ended."""
        counts = self.get("/state")[1]["requests"]
        return int(counts["queued"] + counts["running"])

    def ask_and_leave(self, body: Mapping[str, object]) -> None:
        """A completion was asked for, and the connection is closed: nobody waits for the first token."""
        headers = {"Authorization": f"Bearer {KEY}"}
        with contextlib.closing(self._connection()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def curl(self, path: str, body: Mapping[str, object], *, key: str = KEY) -> tuple[int, str]:
        """Status and body, from curl."""
        words = [
            "curl",
            "-sS",
            "--cacert",
            str(self.cert),
            "-H",
            f"Authorization: Bearer {key}",
            "-d",
            json.dumps(body),
        ]
        done = subprocess.run(
            [*words, "-w", "\n%{http_code}", f"{self.url}{path}"], check=True, capture_output=True, text=True
        )
        content, _, status = done.stdout.rpartition("\n")
        return int(status), content

    def strike(self, worker: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """The worker's process has got the signal."""
        (member,) = (one for one in self.run.members().values() if one.name == worker)
        os.kill(member.pid, signum)

    def _connection(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.cert))
        return http.client.HTTPSConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S, context=context)

    def end(self) -> int:
        """It was told to stop, and its exit status."""
        self.run.send(signal.SIGTERM)
        return self.run.end()[0]


@contextlib.contextmanager
def served(folder: Path, store: StoreSpec, *overrides: str) -> Iterator[Served]:
    """A service of a tiny model; at the end it is gone."""
    cert, key = make_certificate(folder)
    words = [
        "workflow=serve",
        "serve.port=0",
        f"serve.api_key={KEY}",
        f"serve.tls_cert={cert}",
        f"serve.tls_key={key}",
        *overrides,
    ]
    with launched(folder, store, *words) as run:
        url = _url_of(run)
        verify = ssl.create_default_context(cafile=str(cert))
        http_client = openai.DefaultHttpxClient(verify=verify)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=http_client, max_retries=0) as client:
            yield Served(run=run, url=url, cert=cert, client=client)


def _url_of(run: Launched) -> str:
    assert run.process.stderr is not None
    said = []
    for line in run.process.stderr:
        said.append(line)
        if line.startswith("serving "):
            return line.rsplit(" ", 1)[1].strip().removesuffix("/v1")
    raise AssertionError(f"it does not serve:\n{''.join(said)}")
