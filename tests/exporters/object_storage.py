"""A real S3 server, SeaweedFS, the tool by which runs are copied to it, rclone, and trainermon with s3fs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.package_programs import find_wheels
from tests.ports import free_port
from tests.server_programs import find_program, running

BUCKET = "runs"
KEY, SECRET = "trainermon", "not-a-secret"
SYNC = Path(__file__).parents[2] / "docs/deploy/object_storage/sync.sh"


@dataclasses.dataclass(frozen=True)
class ObjectStorage:
    """A running server with the bucket `runs`, which lets in whoever has the credentials."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        """What tells a client where it is, and the credentials."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=900):
                return True
        except urllib.error.HTTPError as error:
            return error.code == 403  # it is up, and asks for credentials
        except OSError:
            return False

    @property
    def _remote(self) -> dict[str, str]:
        """What rclone needs to know the server as `store`."""
        options = {"TYPE": "s3", "PROVIDER": "Other", "ENV_AUTH": "true", "ENDPOINT": self.url}
        known = {f"RCLONE_CONFIG_STORE_{name}": value for name, value in options.items()}
        return {"RCLONE_CONFIG": "/dev/null", **known, **self.environment}

    def rclone(self, *arguments: str) -> str:
        """Return what rclone prints, to which the server is known as `store`."""
        return _call([find_program("rclone"), *arguments], self._remote)

    def sync(self, run: Path, *, host: str = "node-a") -> str:
        """Copy what a node has of the runs beside this one, as the documentation says; return the run's address."""
        with_rclone = f"{Path(find_program('rclone')).parent}:{os.environ['PATH']}"
        command = [str(SYNC), str(run.parent), f"store:{BUCKET}", host]
        _call(command, {**self._remote, "PATH": with_rclone})
        return f"s3://{BUCKET}/{run.name}"


@contextlib.contextmanager
def serving_objects(folder: Path) -> Iterator[ObjectStorage]:
    """Run a server whose data are in `folder`, on ports of loopback."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": KEY,
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {
        f"{part}.port{kind}": free_port() for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")
    }
    storage = ObjectStorage(f"http://127.0.0.1:{ports['s3.port']}")
    command = [
        str(find_wheels("seaweedfs") / "bin" / "weed"),
        *(
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-volume.max=20",
        ),
        *("-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    with running(command, log=folder / "weed.log", ready=storage.ready):
        storage.rclone("mkdir", f"store:{BUCKET}")
        yield storage


def trainermon(
    *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run a command with s3fs at hand, and with no credentials but those in `environment`."""
    return subprocess.run(
        [sys.executable, "-m", "trainermon", *arguments],
        env={
            **_without_settings(),
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": str(find_wheels("s3fs")),
            **environment,
        },
        text=True,
        capture_output=True,
        check=False,
    )


def _call(command: list[str], environment: Mapping[str, str]) -> str:
    environment = {**_without_settings(), **environment}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_", "RCLONE_"))}
