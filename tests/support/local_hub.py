"""A small hub on 127.0.0.1, which answers the requests that huggingface_hub makes to download models."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


@dataclass
class LocalHub:
    """The models that the hub serves, and what it was asked for.

    - `models`: repository → directory; every model has the branch `main` and one commit, `COMMIT`
    - `gated`: repositories whose files need `TOKEN`
    - `served`: repository and path of every file that was downloaded
    - `requests`: method and path of every request
    """

    models: Mapping[str, Path]
    gated: frozenset[str] = frozenset()
    served: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def serving(hub: LocalHub) -> Iterator[LocalHub]:
    """Serve a hub at its `endpoint` while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            path = unquote(self.path).partition("?")[0].strip("/")
            hub.requests.append(f"{self.command} /{path}")
            is_api = path.startswith("api/models/")
            path = path.removeprefix("api/models/")
            repo = next((name for name in hub.models if path == name or path.startswith(f"{name}/")), None)
            if repo is None:
                self._refuse(401, "RepoNotFound")
                return
            rest = path[len(repo) :].strip("/").split("/")
            revision = rest[1] if len(rest) > 1 else "main"
            folder = hub.models[repo]
            if revision not in ("main", COMMIT):
                self._refuse(404, "RevisionNotFound")
            elif is_api:
                files = sorted(one for one in folder.rglob("*") if one.is_file())
                names = [one.relative_to(folder).as_posix() for one in files]
                if rest[0] == "tree":
                    self._send(body, [
                        {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}
                        for name, file in zip(names, files, strict=True)
                    ])  # fmt: skip
                else:
                    self._send(body, {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
            elif repo in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._refuse(401, "GatedRepo")
            elif not (file := folder / "/".join(rest[2:])).is_file():
                self._refuse(404, "EntryNotFound")
            else:
                content = file.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{_etag(file)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if body:
                    hub.served.append(f"{repo}/{file.relative_to(folder).as_posix()}")
                    self.wfile.write(content)

        def _send(self, body: bool, document: object) -> None:
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path, *, offline: bool = False) -> None:
    """Set what huggingface_hub reads from HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE when it is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache.parent / "harnesses.json"), raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
