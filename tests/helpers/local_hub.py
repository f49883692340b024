"""A Hub on this machine: as much of its HTTP interface as uploading and downloading a small folder
takes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class LocalHub:
    """`repos` maps "user/name" to {"private": bool, "files": {path: bytes}}, and other branches
    than main to their files in "branches"; every state that one had can be had again by its hash.
    `refuses`: whether it lets nobody in. `gated`:
    repositories whose licence must be accepted first. `card_errors`: what it finds wrong with every
    card. `requests`: all that were made. `url`: the HF_ENDPOINT.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict] = {}
        self.refuses = False
        self.gated: set[str] = set()
        self.card_errors: list[dict[str, str]] = []
        self.requests: list[str] = []
        self._states: dict[str, dict] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                """Stay quiet."""

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, answer = hub.answer(unquote(urlparse(self.path).path), body)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_GET = do_POST = do_HEAD = do_PUT = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, dict, bytes]:
        """(status, headers, body) for a request."""
        if self.refuses:
            return 403, {}, b"{}"
        if path == "/api/validate-yaml":
            status, headers, answer = _json({"errors": self.card_errors, "warnings": []})
            return 400 if self.card_errors else status, headers, answer
        if path == "/api/repos/create":
            wish = json.loads(body)
            name = f"{wish.get('organization') or 'me'}/{wish['name']}"
            private = wish.get("private") or wish.get("visibility") == "private"
            self.repos.setdefault(name, {"private": bool(private), "files": {}, "branches": {}})
            return _json({"url": f"{self.url}/{name}", "name": name})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self._model(match[1], "revision", "main", body)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/settings", path):
            self.repos[match[1]]["private"] = json.loads(body)["visibility"] == "private"
            return _json({})
        if re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/.+", path):  # no folder has any
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        match = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/(preupload|commit|tree|revision|branch)/([^/]+)", path
        )
        if match:
            return self._model(match[1], match[2], match[3], body)
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match and match[1] in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if match and match[1] in self.repos:
            return self._file(match[1], match[2], match[3])
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _model(self, name: str, verb: str, revision: str, body: bytes) -> tuple[int, dict, bytes]:
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if name not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if verb == "branch":
            repo = self.repos[name]
            repo["branches"][revision] = dict(repo["files"])
            return _json({})
        files = self._at(name, revision)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if verb == "preupload":
            wished = [file["path"] for file in json.loads(body)["files"]]
            entry = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return _json({"files": [{"path": path, **entry} for path in wished]})
        if verb == "commit":
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            address = f"{self.url}/{name}/commit/{self._sha(files)}"
            return _json({"success": True, "commitOid": self._sha(files), "commitUrl": address})
        if verb == "tree":
            return _json(
                [
                    {"type": "file", "path": p, "size": len(c), "oid": _hash(c)}
                    for p, c in files.items()
                ]
            )
        siblings = [{"rfilename": path} for path in files]
        private = self.repos[name]["private"]
        about = {"id": name, "modelId": name, "sha": self._sha(files), "private": private}
        return _json({**about, "siblings": siblings})

    def _file(self, name: str, revision: str, path: str) -> tuple[int, dict, bytes]:
        files = self._at(name, revision)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit = {"X-Repo-Commit": self._sha(files)}
        if path not in files:
            return 404, {"X-Error-Code": "EntryNotFound", **commit}, b"{}"
        return 200, {"ETag": f'"{_hash(files[path])}"', **commit}, files[path]

    def _at(self, name: str, revision: str) -> dict[str, bytes] | None:
        repo = self.repos[name]
        branches = {"main": repo["files"], **repo.get("branches", {})}
        return branches.get(revision, self._states.get(revision))

    def _sha(self, files: dict[str, bytes]) -> str:
        sha = _hash(repr(sorted(files.items())).encode())
        self._states[sha] = dict(files)
        return sha


def _json(value: object) -> tuple[int, dict, bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
