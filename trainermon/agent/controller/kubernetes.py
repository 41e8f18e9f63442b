"""Finds agents in the pods of a namespace, by plain HTTPS with the pod's own service account.

It needs `list` on pods in that namespace, nothing else. A headless service by DNS needs no rights at all; this is for
sites whose job operator makes no service.

Source: Kubernetes API reference, "list or watch objects of kind Pod"; API concepts, "retrieving large result sets in
chunks"; "Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from trainermon.agent.controller.client import AgentAddress
from trainermon.agent.controller.settings import KubernetesSettings

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE_SIZE = 500
MAX_PAGES = 100
LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class KubernetesFinder:
    """Finds agents in the running pods that have a label, by asking the Kubernetes API.

    Attributes:
        settings: Label, namespace and port.
        scheme: `http` or `https`.
        account: Folder of the service account's token, certificate and namespace.
    """

    settings: KubernetesSettings
    scheme: str
    account: Path = ACCOUNT

    async def find(self) -> list[AgentAddress]:
        """Return the address of the agent in each running pod that has an IP address and the port."""
        pods = await asyncio.wait_for(self._list_pods(), LIMIT_S)
        found = (self._target(pod) for pod in pods)
        return [target for target in found if target is not None]

    async def _list_pods(self) -> list[Mapping[str, Any]]:
        token = (self.account / "token").read_text(encoding="ascii").strip()  # anew each time: it is renewed
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        query = {"labelSelector": self.settings.label_selector, "limit": str(PAGE_SIZE)}
        pods: list[Mapping[str, Any]] = []
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=context)) as session:
            for _ in range(MAX_PAGES):
                async with session.get(self._url(), params=query, allow_redirects=False) as reply:
                    if reply.status != 200:
                        raise ValueError(f"the Kubernetes API answers {reply.status}: {(await reply.text())[:300]}")
                    page = await reply.json()
                pods += page["items"]
                following = page["metadata"].get("continue")
                if not following:
                    return pods
                query["continue"] = following
        raise ValueError(f"more than {MAX_PAGES * PAGE_SIZE} pods match {self.settings.label_selector!r}")

    def _url(self) -> str:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        namespace = self.settings.namespace or (self.account / "namespace").read_text(encoding="utf-8").strip()
        return f"https://{_bracketed(host)}:{port}/api/v1/namespaces/{namespace}/pods"

    def _target(self, pod: Mapping[str, Any]) -> AgentAddress | None:
        status = pod.get("status", {})
        address = status.get("podIP")
        port = self._port(pod.get("spec", {}))
        is_leaving = "deletionTimestamp" in pod.get("metadata", {})
        if status.get("phase") != "Running" or is_leaving or not address or port is None:
            return None
        return AgentAddress(f"{self.scheme}://{_bracketed(address)}:{port}/")

    def _port(self, spec: Mapping[str, Any]) -> int | None:
        if self.settings.port.isdecimal():
            return int(self.settings.port)
        # A sidecar is an init container that goes on running.
        for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
            for port in container.get("ports", ()):
                if port.get("name") == self.settings.port:
                    return int(port["containerPort"])
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
