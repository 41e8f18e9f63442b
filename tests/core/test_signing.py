"""Requests that are signed: good once, for what was signed, and without the secret in them."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from aiohttp import web

from tests.agent.web.test_http import fake_node
from trainermon.agent.controller.client import AgentAddress, AgentClient
from trainermon.agent.controller.settings import AgentAccess
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.http import build_application
from trainermon.core.signing import MAX_AGE_S, sign

TOKEN = "known-to-agents-and-controller"
PATH = "/api/commands"
BODY = b'{"id": "m1", "action": "dump"}'


def ask(method, path, authorization, body=b"", *, access=None):
    async def send():
        application = build_application(fake_node(), access=access or TokenAccess(TOKEN, read_token="reads"))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=application), base_url="http://127.0.0.1"
        ) as client:
            return await client.request(method, path, headers={"authorization": authorization}, content=body)

    return asyncio.run(send()).status_code


def signed(method="POST", path=PATH, body=BODY, *, token=TOKEN, age_s=0.0):
    return sign(token, method, path, body, now_s=time.time() - age_s)


def test_a_signed_order_is_accepted_and_a_signed_question_answered():
    assert ask("POST", PATH, signed(), BODY) == 202
    assert ask("GET", "/api/lines?names=loss", signed("GET", "/api/lines?names=loss", b"")) == 200


@pytest.mark.parametrize(
    "authorization",
    [
        signed(body=BODY.replace(b"m1", b"m2")),
        signed(path="/api/stop"),
        signed("PUT"),
        signed(token="another"),
        signed().replace(":", ";"),
        signed()[:-1],
        signed().replace("TMON-HMAC-SHA256 ", "TMON-HMAC-SHA256 9"),
        "TMON-HMAC-SHA256 ",
        "TMON-HMAC-SHA256 ::",
    ],
)
def test_a_signature_is_good_for_nothing_else(authorization):
    assert ask("POST", PATH, authorization, BODY) == 401


@pytest.mark.parametrize("age_s", [2 * MAX_AGE_S, -2 * MAX_AGE_S])
def test_a_signature_is_good_for_a_few_minutes(age_s):
    assert ask("POST", PATH, signed(age_s=age_s), BODY) == 401
    assert ask("GET", "/metrics", signed("GET", "/metrics", b"", age_s=age_s)) == 401


def test_a_question_of_another_query_is_not_answered():
    assert ask("GET", "/api/lines?names=loss", signed("GET", "/api/lines?names=grad_norm", b"")) == 401


def heard_by_a_stranger(*targets, **settings):
    """Return every request line, header and body that somebody hears who only says that he is an agent."""
    heard = []

    async def main():
        async def listen(request):
            heard.append((request.method, request.path_qs, dict(request.headers), await request.read()))
            return web.json_response({})

        runner = web.AppRunner(web.Application())
        runner.app.router.add_route("*", "/{path:.*}", listen)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        client = AgentClient(AgentAccess(timeout_s=30.0, **settings), token=TOKEN)
        for token in targets:
            await client.get(AgentAddress(url, token), "api/v1/checksums?after=3")
            await client.post(AgentAddress(url, token), "api/v1/escalations", {"id": "a", "run": "r"})
        await client.close()
        await runner.cleanup()

    asyncio.run(main())
    return heard


def test_a_stranger_who_is_taken_for_an_agent_learns_no_token_and_can_order_nothing_with_what_he_hears():
    (question, order) = heard_by_a_stranger(None)

    assert TOKEN not in repr((question, order))
    for _, _, headers, _ in (question, order):
        assert ask("POST", PATH, headers["Authorization"], BODY) == 401
        assert ask("POST", "/api/stop", headers["Authorization"]) == 401


def test_nothing_is_signed_for_an_address_that_nobody_has_vouched_for():
    assert not any("Authorization" in headers for _, _, headers, _ in heard_by_a_stranger(""))


def test_an_agents_own_token_signs_for_it_alone():
    _, (_, path, headers, body) = heard_by_a_stranger("its-own")
    mine, others = TokenAccess("its-own"), TokenAccess(TOKEN)

    assert json.loads(body)["run"] == "r"
    assert ask("POST", path, headers["Authorization"], body, access=others) == 401
    assert ask("POST", path, headers["Authorization"], body, access=mine) != 401


@pytest.mark.parametrize("url", ["http://192.0.2.1:9/", "http://agents.example:9/"])
def test_plain_http_to_other_machines_is_not_spoken_unless_it_is_told_so(url):
    async def main():
        client = AgentClient(AgentAccess(), token=TOKEN)
        try:
            await client.get(AgentAddress(url), "healthz")
        finally:
            await client.close()

    with pytest.raises(ValueError, match=r"plain HTTP to .* is not spoken: set agents\.https"):
        asyncio.run(main())
