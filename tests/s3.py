"""An S3 server on this machine, in place of Amazon's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

S3FileSystem: Any = fsspec.get_filesystem_class("s3")
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1", "no_proxy": "*"}


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of a server with a bucket `bucket`, which this process and those that it starts find."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    S3FileSystem.clear_instance_cache()  # another test's is connected to a server that is gone
    yield client
    S3FileSystem.clear_instance_cache()
    server.stop()
