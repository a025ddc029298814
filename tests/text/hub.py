"""A stand-in for the Hugging Face Hub on this machine, for tests that load models or data by name, or upload a run."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/]+)/?(.*))?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
Answer = tuple[int, object, dict[str, str]]


class HubError(Exception):
    """A status and, as clients tell several errors of one status apart by it, a code."""


class Repository:
    """A folder with one revision: "main", or its commit, which is another one as soon as any file is."""

    def __init__(self, folder: Path, revision: str = "main") -> None:
        if not folder.is_dir():
            raise HubError(404, "RepoNotFound")
        self.folder = folder
        self.paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
        self.files = {name: path.read_bytes() for name, path in self.paths.items() if path.is_file()}
        self.commit = hashlib.sha1(json.dumps([self.entry(name) for name in self.files]).encode()).hexdigest()
        if revision not in ("main", self.commit):
            raise HubError(404, "RevisionNotFound")

    def entry(self, name: str) -> dict[str, object]:
        content = self.files.get(name, b"")
        kind = "file" if name in self.files else "directory"
        return {"type": kind, "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def tree(self, inside: str, recursive: bool) -> list[dict[str, object]]:
        if inside and (inside not in self.paths or inside in self.files):
            raise HubError(404, "EntryNotFound")
        top = self.folder / inside
        return [self.entry(n) for n, p in self.paths.items() if p.parent == top or (recursive and top in p.parents)]

    def add(self, lines: bytes) -> None:
        for line in map(json.loads, lines.splitlines()[1:]):
            if line["key"] != "file":
                raise HubError(400, f"tests/text/hub.py does not know {line['key']}")
            path = self.folder / line["value"]["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(line["value"]["content"]))


class Hub(ThreadingHTTPServer):
    """`environment` makes a subprocess ask it; `requests` is what was asked, as "HEAD /team/name/resolve/main/file"."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self.environment = {"HF_ENDPOINT": self.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "dummy"}
        self.environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}

    def answer(self, path: str, query: str, body: bytes) -> Answer:
        """The status, the content (bytes, or what is sent as JSON) and further headers."""
        if path == "/api/validate-yaml":
            return 200, {}, {}
        if path == "/api/repos/create":
            return self.create(**json.loads(body))
        if asked := FILE.fullmatch(path):
            kind, name, revision, file = map(unquote, asked.groups(""))
            repository = Repository(self.folder / (kind or "models") / name, revision)
            if file not in repository.files:
                raise HubError(404, "EntryNotFound")
            etag = f'"{repository.entry(file)["oid"]}"'
            return 200, repository.files[file], {"ETag": etag, "X-Repo-Commit": repository.commit}
        if not (asked := API.fullmatch(path)):
            raise HubError(404, "RepoNotFound")
        kind, name, action, revision, inside = map(unquote, asked.groups(""))
        repository = Repository(self.folder / kind / name, revision or "main")
        siblings = [{"rfilename": file} for file in repository.files]
        content: object = {"id": name, "sha": repository.commit, "siblings": siblings}
        if action == "tree":
            content = repository.tree(inside, "recursive=true" in query.lower())
        elif action == "preupload":
            # Regular files come inside the commit; "lfs" would have them sent to a second server.
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            content = {"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]}
        elif action == "commit":
            repository.add(body)
            commit = Repository(repository.folder).commit
            content = {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit}
        return 200, content, {}

    def create(self, name: str, organization: str | None, **settings: object) -> Answer:
        """A model."""
        organization = organization or "me"
        (self.folder / "models" / organization / name).mkdir(parents=True)
        return 200, {"url": f"{self.url}/{organization}/{name}"}, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # without it each body waits 40 ms until the headers are acknowledged
    server: Hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        # Also of what is refused: the next request of the connection starts after it.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {url.path}")
        try:
            if self.command == "POST" and "Authorization" not in self.headers:
                raise HubError(401, "")
            status, content, headers = self.server.answer(url.path, url.query, body)
        except HubError as error:
            status, code = error.args
            content, headers = {"error": code}, {"X-Error-Code": code}
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_POST = do_GET  # noqa: N815 (http.server's names)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """Serves folder/models/ORG/NAME and folder/datasets/ORG/NAME, where uploads land too; caches in folder/home."""
    with Hub(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
