"""What a controller is told: a YAML or JSON file, read strictly, with the command line's words in place of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.agent.web.access import AccessSettings
from trainermon.core.documents import read_document
from trainermon.core.errors import ConfigError
from trainermon.core.strict import build, require

PORT = 9462


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """Agents in pods, found through the API with the pod's own service account.

    Attributes:
        label_selector: Which pods, as `kubectl get pods --selector` takes it.
        port: Name or number of the agent's container port.
        namespace: Where they are; the controller's own if it is not given.
    """

    label_selector: str
    port: str = "metrics"
    namespace: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """The ways in which agents are found; several may be given.

    Attributes:
        agents: `host:port` of each agent.
        dns: `name:port`; every address of the name is an agent, as with a headless service.
        run_directory: Run directory on a shared file system; each node's agent has written its address there.
        kubernetes: Pods by label.
        refresh_s: Seconds between two looks.
    """

    agents: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    run_directory: str | None = None
    kubernetes: KubernetesSettings | None = None
    refresh_s: float = 10.0

    def __post_init__(self) -> None:
        given = self.agents or self.dns or self.run_directory or self.kubernetes
        require(given, "discovery", "nothing", "agents, dns, run_directory or kubernetes")
        for key in ("agents", "dns"):
            for entry in getattr(self, key):
                host, _, port = entry.rpartition(":")
                require(host and port.isdecimal(), f"discovery.{key}", entry, "host:port")
        require(self.refresh_s > 0, "discovery.refresh_s", self.refresh_s, "a number of seconds above 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """The settings of the connections to agents.

    Attributes:
        token_file: Token that requests to agents are signed with; the controller's own if it is not given, and with
            `run_directory` each node's.
        https: They speak HTTPS.
        plain_http: Those on other machines may be spoken to over plain HTTP. No secret is ever sent, but whoever is on
            the way can read answers and change them.
        ca_file: Certificates that theirs are checked against, instead of the system's.
        server_name: Name in their certificate, where they are reached by address.
        poll_s: Seconds between two looks at each agent.
        timeout_s: Longest time for one request.
        tries: How often at most an order is sent to an agent that does not answer.
    """

    token_file: str | None = None
    https: bool = False
    plain_http: bool = False
    ca_file: str | None = None
    server_name: str | None = None
    poll_s: float = 1.0
    timeout_s: float = 0.5
    tries: int = 3

    def __post_init__(self) -> None:
        require(self.poll_s > 0, "agents.poll_s", self.poll_s, "a number of seconds above 0")
        require(self.timeout_s > 0, "agents.timeout_s", self.timeout_s, "a number of seconds above 0")
        require(1 <= self.tries <= 10, "agents.tries", self.tries, "1 to 10")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """The controller's limits on escalations (dumps that alerts or people ask for).

    Attributes:
        max_per_hour: Escalations of one run in any hour; more are suppressed.
        max_age_s: An alert that began longer ago, in seconds, is not followed.
        give_up_s: An escalation that no agent could be told for so many seconds has failed.
    """

    max_per_hour: int = 3
    max_age_s: float = 900.0
    give_up_s: float = 300.0

    def __post_init__(self) -> None:
        require(self.max_per_hour >= 0, "limits.max_per_hour", self.max_per_hour, "0 or more")
        require(0 < self.max_age_s <= 86400, "limits.max_age_s", self.max_age_s, "0 to 86400")
        require(self.give_up_s > 0, "limits.give_up_s", self.give_up_s, "a number of seconds above 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """All settings of a controller.

    Attributes:
        discovery: Where agents are looked for.
        state_dir: Folder of the journal of escalations; it must survive a restart.
        host: Address to listen on.
        port: Port to listen on.
        allowed_hosts: Further names under which the page may be asked for without credentials.
        access: Who may read and order, and the certificate.
        agents: How agents are spoken to.
        limits: How many escalations are carried out.
    """

    discovery: DiscoverySettings
    state_dir: str
    host: str = "127.0.0.1"
    port: int = PORT
    allowed_hosts: tuple[str, ...] = ()
    access: AccessSettings = dataclasses.field(default_factory=AccessSettings)
    agents: AgentAccess = dataclasses.field(default_factory=AgentAccess)
    limits: LimitSettings = dataclasses.field(default_factory=LimitSettings)

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        require(bool(self.state_dir), "state_dir", self.state_dir, "a folder")


def load_settings(path: Path | None, words: Mapping[str, Any]) -> ControllerSettings:
    """Read the controller's settings from the file `path` (None: defaults); `words` take precedence.

    Args:
        path: YAML or JSON file.
        words: Settings from the command line, nested as in the file.

    Raises:
        ConfigError: The file cannot be read, or has an unknown key, a wrong type or an impossible value.
    """
    plain: Any = {}
    if path is not None:
        try:
            plain = read_document(path, is_yaml=True) or {}
        except ConfigError as error:
            raise ConfigError(f"the controller's settings: {path} {error}") from error
        require(isinstance(plain, Mapping), str(path), plain, "a mapping")
    try:
        return build(ControllerSettings, _merged(plain, words))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None


def _merged(plain: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(plain)
    for key, value in words.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and (below is None or isinstance(below, Mapping)):
            merged[key] = _merged(below or {}, value)
        else:
            merged[key] = value
    return merged
