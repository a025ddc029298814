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
from urllib.parse import urlsplit

API = re.compile(r"/api/(models|datasets)/(\w+/\w+)(?:/(\w+)/\w+/?(.*))?")
FILE = re.compile(r"/(datasets|)/?(\w+/\w+)/resolve/\w+/(.+)")


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub(ThreadingHTTPServer):
    """`environment` makes a subprocess ask it; `requests` is what was asked, as "HEAD /team/name/resolve/main/file".
    A repository is a folder of files with one revision: its commit is another one as soon as any file is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self.environment = {"HF_ENDPOINT": self.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "dummy"}
        self.environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}

    def answer(self, path: str, body: bytes) -> tuple[object, dict[str, str]]:
        """The content (bytes, or what is sent as JSON) and further headers. Raises: LookupError, if there is none."""
        if path == "/api/validate-yaml":
            return {}, {}
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            (self.folder / "models/me" / name).mkdir(parents=True)
            return {"url": f"{self.url}/me/{name}"}, {}
        asked = API.fullmatch(path) or FILE.fullmatch(path)
        if asked is None:
            raise LookupError
        kind, name, *more = asked.groups("")
        repository = self.folder / (kind or "models") / name
        files = {file.name: file.read_bytes() for file in sorted(repository.iterdir())}
        commit = sha1(repr(files).encode())
        if asked.re is FILE:
            content = files[more[0]]
            return content, {"ETag": f'"{sha1(content)}"', "X-Repo-Commit": commit}
        action, inside = more
        if inside:  # a folder
            raise LookupError
        if action == "tree":
            return [{"type": "file", "path": n, "size": len(c), "oid": sha1(c)} for n, c in files.items()], {}
        if action == "preupload":
            # Regular files come inside the commit; "lfs" would have them sent to a second server.
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]}, {}
        if action == "commit":
            for file in [json.loads(line)["value"] for line in body.splitlines()[1:]]:
                (repository / file["path"]).write_bytes(base64.b64decode(file["content"]))
            return {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit}, {}
        return {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # without it each body waits 40 ms until the headers are acknowledged
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        # Also of what is refused: the next request of the connection starts after it.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {path}")
        status = 401
        content: object = {}
        headers: dict[str, str] = {}
        if self.command != "POST" or "Authorization" in self.headers:
            try:
                status, (content, headers) = 200, self.server.answer(path, body)
            except LookupError:
                status, headers = 404, {"X-Error-Code": "EntryNotFound"}
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
