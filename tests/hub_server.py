"""A hub of our own on the loopback: enough of its HTTP interface for the real library to download one model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Hub:
    """url: for HF_ENDPOINT. requests: every path asked for. fetched: files whose content was sent."""

    url: str
    requests: list[str] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)


@contextmanager
def serve_hub(folder: Path, *, repository: str = "org/model", commit: str = COMMIT) -> Iterator[Hub]:
    """Serve the files of `folder` as the only repository, with the revisions `main` and `commit`."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(path)
            parts = path.strip("/").split("/")
            if path.startswith(f"/api/models/{repository}"):
                self.api(parts[4:])
            elif path.startswith(f"/{repository}/resolve/"):
                self.file(parts[3], "/".join(parts[4:]), body)
            else:
                self.json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

        def api(self, rest: list[str]) -> None:
            revision = rest[1] if len(rest) > 1 else "main"
            if revision not in ("main", commit):
                self.json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            elif rest[:1] == ["tree"]:
                self.json([self.entry(name) for name in sorted(files)])
            else:
                siblings = [{"rfilename": name} for name in sorted(files)]
                self.json({"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "private": False})

        def entry(self, name: str) -> dict[str, Any]:
            size = files[name].stat().st_size
            return {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(files[name].read_bytes()).hexdigest()}

        def file(self, revision: str, name: str, body: bool) -> None:
            if revision not in ("main", commit) or name not in files:
                self.json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            content = files[name].read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body:
                hub.fetched.add(name)
                self.wfile.write(content)

        def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for key, given in (headers or {}).items():
                self.send_header(key, given)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *values: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
