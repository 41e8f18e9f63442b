"""Who may read and who may order: every way in, the right credentials and all kinds of wrong ones; and TLS."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import ssl
import urllib.request

import httpx
import pytest

from tests.agent.web.test_http import fake_node
from tests.certificates import make_certificate
from trainermon.agent.web.access import AccessSettings, TokenAccess, open_access
from trainermon.agent.web.http import build_application
from trainermon.agent.web.server import WebServer
from trainermon.core.errors import ConfigError

READING = ("/", "/metrics", "/api/run", "/events")


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def ask(access, method, path, authorization=None, host="127.0.0.1:1"):
    async def send():
        application = build_application(fake_node(), access=access, hosts=("*.training.svc",))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url="http://x") as client:
            headers = {"host": host} | ({"authorization": authorization} if authorization else {})
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


@pytest.fixture
def closed():
    return TokenAccess("orders", "own", read_token="reads", user="prometheus", password="pass:wörd")


@pytest.mark.parametrize("path", ["/metrics", "/api/run", "/", "/static/app.js"])
@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer reads", 200),
        ("bearer reads", 200),
        ("Bearer orders", 200),
        ("Bearer own", 200),
        (basic("prometheus", "pass:wörd"), 200),
        (basic("prometheus", "wrong"), 401),
        (basic("somebody", "pass:wörd"), 401),
        ("Basic !", 401),
        ("Bearer ", 401),
        ("Bearer readsx", 401),
        ("Basic reads", 401),
    ],
)
def test_reading_that_is_closed_opens_with_the_right_credentials_only(closed, path, authorization, status):
    answer = ask(closed, "GET", path, authorization)

    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"].startswith('Basic realm="trainermon"')
        assert "reads" not in answer.text


@pytest.mark.parametrize("authorization", [None, "Bearer reads", basic("prometheus", "pass:wörd")])
def test_whoever_may_read_may_not_order(closed, authorization):
    assert ask(closed, "POST", "/api/flush", authorization).status_code == 401


@pytest.mark.parametrize("token", ["orders", "own"])
def test_every_token_of_orders_opens_orders(closed, token):
    assert ask(closed, "POST", "/api/flush", f"Bearer {token}").status_code == 200


def test_probes_need_no_credentials(closed):
    assert ask(closed, "GET", "/healthz", host="10.1.2.3:9461").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("10.1.2.3:9461", 200), ("[fd00::1]:9461", 200), ("10.1.2.3.evil.example", 421), ("evil.example", 421)],
)
def test_an_address_is_no_rebound_name(host, status):
    assert ask(TokenAccess("t"), "GET", "/api/run", host=host).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [("a.training.svc:80", 200), ("A.B.Training.svc", 200), ("training.svc", 421), ("xtraining.svc", 421)],
)
def test_a_pattern_allows_the_names_below_it(host, status):
    assert ask(TokenAccess("t"), "GET", "/api/run", host=host).status_code == status


def test_whoever_holds_a_secret_may_use_any_name():
    assert ask(TokenAccess("t"), "GET", "/api/run", "Bearer t", host="agent.elsewhere.svc").status_code == 200
    assert ask(TokenAccess("t"), "POST", "/api/flush", "Bearer t", host="agent.elsewhere.svc").status_code == 200


def test_secrets_come_from_files_and_the_environment(tmp_path):
    (tmp_path / "password").write_text("p\n")
    environ = {
        "TRAINERMON_TOKEN": "t",
        "TRAINERMON_USER": "u",
        "TRAINERMON_PASSWORD_FILE": str(tmp_path / "password"),
        "TRAINERMON_READ_TOKEN": "r",
    }
    settings = AccessSettings().completed(environ)
    access = open_access(settings, environ)

    assert settings.user == "u"
    for authorization in ("Bearer t", "Bearer r", basic("u", "p")):
        assert access.may_read(authorization.encode())
    assert access.may_order(b"Bearer t")
    assert not access.may_order(b"Bearer r")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "TRAINERMON_TOKEN"),
        ({"token_file": "/nonexistent/token"}, "/nonexistent/token"),
        ({"token_file": "EMPTY"}, "is empty"),
        ({"token_file": "TOKEN", "user": "u"}, "TRAINERMON_PASSWORD"),
    ],
)
def test_what_is_missing_is_named_and_no_secret_is(tmp_path, settings, named):
    (tmp_path / "TOKEN").write_text("very-secret")
    (tmp_path / "EMPTY").write_text(" \n")
    paths = {key: str(tmp_path / value) if value.isupper() else value for key, value in settings.items()}

    with pytest.raises(ConfigError, match=named) as caught:
        open_access(AccessSettings(**paths), {})
    assert "very-secret" not in str(caught.value)


def test_a_certificate_needs_its_key():
    with pytest.raises(ConfigError, match="tls_cert_file and tls_key_file together"):
        AccessSettings(tls_cert_file="cert.pem")


def test_secrets_are_not_shown(closed):
    assert "orders" not in repr(closed)


def test_over_tls_the_page_is_served_to_whoever_trusts_the_certificate(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn")
    certificate = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=certificate.chain)

    def get(url, context):
        with urllib.request.urlopen(url, context=context, timeout=900) as answer:
            return answer.status

    async def scenario():
        application = build_application(fake_node(), access=TokenAccess("t"))
        server = WebServer(application, host="127.0.0.1", ports=(0,), certificate=certificate)
        try:
            assert server.url.startswith("https://127.0.0.1:")
            status = await asyncio.to_thread(get, server.url + "healthz", trusting)
            with pytest.raises(OSError, match="certificate verify failed"):
                await asyncio.to_thread(get, server.url + "healthz", ssl.create_default_context())
            with pytest.raises(OSError, match=r"."):
                await asyncio.to_thread(get, server.url.replace("https", "http") + "healthz", None)
        finally:
            await server.close()
        return status

    assert asyncio.run(scenario()) == 200


def test_a_certificate_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    certificate = make_certificate(tmp_path)
    (tmp_path / "key.pem").write_text("no key")

    async def scenario():
        WebServer(
            build_application(fake_node(), access=TokenAccess("t")),
            host="127.0.0.1",
            ports=(0,),
            certificate=certificate,
        )

    with pytest.raises(OSError, match=r"."):
        asyncio.run(scenario())


def test_a_server_that_listens_everywhere_is_told_to_others_by_its_name():
    async def scenario():
        server = WebServer(build_application(fake_node(), access=TokenAccess("t")), host="0.0.0.0", ports=(0,))
        try:
            return server.url, server.target
        finally:
            await server.close()

    url, target = asyncio.run(scenario())
    assert url.startswith("http://127.0.0.1:")
    assert target.rpartition(":")[0] == socket.gethostname()
