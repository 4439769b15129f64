"""The few calls of the Hugging Face Hub that pushing a folder and loading it back need, on localhost."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_test"
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Repositories in memory: files[repo][path]; all uploads are taken as regular files, not LFS."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.refuses_commits = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/api/whoami-v2":
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            return self._answer(200, {"type": "user", "name": "me", "orgs": [], "auth": {}})
        if path.startswith("/api/models/"):
            return self._answer(200, self._info("/".join(path.split("/")[3:5])))
        return self._file(path)

    def do_HEAD(self) -> None:
        self._file(urlsplit(self.path).path)

    def do_POST(self) -> None:
        body = self._body()
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted.get('organization', 'me')}/{wanted['name']}"
            self.server.files.setdefault(repo, {})
            is_private = wanted.get("visibility") == "private" or bool(wanted.get("private"))  # by version
            self.server.private.setdefault(repo, is_private)
            return self._answer(200, {"url": f"{self.server.url}/{repo}"})
        repo = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self._answer(200, {"files": answer})
        if "/commit/" in path:
            return self._commit(repo, [json.loads(line) for line in body.splitlines()])
        return self._answer(200, {})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        if self.server.refuses_commits:
            return self._answer(403, {"error": "Storage limit reached"})
        for file in (line["value"] for line in lines if line["key"] == "file"):
            self.server.files[repo][file["path"]] = base64.b64decode(file["content"])
        url = f"{self.server.url}/{repo}/commit/{COMMIT}"
        return self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _info(self, repo: str) -> dict[str, Any]:
        names = [{"rfilename": name} for name in self.server.files.get(repo, {})]
        return {"id": repo, "sha": COMMIT, "private": self.server.private.get(repo), "siblings": names}

    def _file(self, path: str) -> None:
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        data = self.server.files.get(repo, {}).get(rest.partition("/")[2])
        if data is None:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._answer(200, data, headers)

    def _answer(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
