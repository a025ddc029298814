"""A stand-in for the Hugging Face Hub on this machine: it serves models and datasets by name, folders of files."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0" * 40
FILE = re.compile(rf"(?:/datasets)?/([\w.-]+/[\w.-]+)/resolve/(?:main|{COMMIT})/(.+)")
API = re.compile(rf"/api/(?:models|datasets)/([\w.-]+/[\w.-]+)(?:/(?:revision|tree)/(?:main|{COMMIT}))?")


@contextmanager
def serving(folders: dict[str, Path], home: Path) -> Iterator[dict[str, str]]:
    """Serve the folders by their names on the Hub. Yield the environment of a process that asks here, and has its
    caches in `home`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(folders)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(home),
        }
        server.shutdown()


def handler(folders: dict[str, Path]) -> type[BaseHTTPRequestHandler]:
    def content(path: str) -> bytes:
        if asked := FILE.fullmatch(path):
            return (folders[asked[1]] / asked[2]).read_bytes()
        name = API.fullmatch(path)[1]  # type: ignore[index]  # a TypeError is a 404 too
        files = [
            {"type": "file", "path": file.name, "rfilename": file.name, "size": file.stat().st_size, "oid": "0"}
            for file in folders[name].iterdir()
        ]
        return json.dumps(files if "/tree/" in path else {"id": name, "sha": COMMIT, "siblings": files}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                status, body, headers = 200, content(urlsplit(self.path).path), {"X-Repo-Commit": COMMIT}
            except (LookupError, OSError, TypeError):
                status, body, headers = 404, b"{}", {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}
            self.send_response(status)
            headers |= {"Content-Length": str(len(body)), "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  # http.server's name

    return Handler
