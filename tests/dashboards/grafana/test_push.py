"""`trainermon dashboards`: push, against a stand-in of Grafana's API, and write."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.dashboards.grafana.fake_grafana import FakeGrafana
from tests.ports import free_port
from trainermon.cli import main
from trainermon.dashboards.grafana.files import dashboards
from trainermon.dashboards.grafana.push import TOKEN_VARIABLE

PROMETHEUS = "http://prometheus:9090"


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGrafana]:
    fake = FakeGrafana(prefix="/tools/grafana")
    monkeypatch.setenv(TOKEN_VARIABLE, fake.token)
    yield fake
    fake.close()


def push(grafana: FakeGrafana, *more: str) -> int:
    return main(["dashboards", "push", grafana.url, *more])


def test_push_brings_folder_data_source_and_all_dashboards(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]):
    assert push(grafana, "--datasource-url", PROMETHEUS) == 0

    assert set(grafana.folders) == {"trainermon"}
    source = grafana.data_sources["trainermon-prometheus"]
    assert (source["type"], source["url"], source["access"]) == ("prometheus", PROMETHEUS, "proxy")
    files = {file.body["uid"]: file.body for file in dashboards("prometheus")}
    stored = {uid: dict(found["dashboard"]) for uid, found in grafana.dashboards.items()}
    for body in stored.values():
        del body["id"], body["version"]
    assert stored == files
    assert {found["meta"]["folderUid"] for found in grafana.dashboards.values()} == {"trainermon"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(files)
    assert all(line.startswith("created ") for line in lines)


def test_pushing_again_changes_nothing(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]):
    push(grafana, "--datasource-url", PROMETHEUS)
    grafana.writes.clear()
    capsys.readouterr()

    assert push(grafana, "--datasource-url", PROMETHEUS) == 0

    assert grafana.writes == []
    assert all(line.startswith("unchanged ") for line in capsys.readouterr().out.splitlines())


def test_what_somebody_has_changed_is_put_right_and_what_is_theirs_stays(grafana: FakeGrafana):
    push(grafana, "--datasource-url", PROMETHEUS)
    grafana.dashboards["trainermon-ranks"]["dashboard"]["title"] = "mine"
    grafana.dashboards["trainermon-layers"]["meta"]["folderUid"] = "elsewhere"
    source = grafana.data_sources["trainermon-prometheus"]
    source["jsonData"]["customQueryParameters"] = "max_source_resolution=5m"
    source["isDefault"] = True
    grafana.writes.clear()

    assert push(grafana, "--datasource-url", "http://other:9090") == 0

    prefix = "/tools/grafana/api"
    assert sorted(grafana.writes) == [f"POST {prefix}/dashboards/db"] * 2 + [f"PUT {prefix}/datasources/1"]
    assert grafana.dashboards["trainermon-ranks"]["dashboard"]["title"] == "trainermon / Ranks"
    assert grafana.dashboards["trainermon-layers"]["meta"]["folderUid"] == "trainermon"
    assert source["url"] == "http://other:9090"
    assert source["isDefault"] is True
    assert source["jsonData"]["customQueryParameters"] == "max_source_resolution=5m"


def test_a_data_source_from_a_file_is_left_alone(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]):
    push(grafana, "--datasource-url", PROMETHEUS)
    grafana.data_sources["trainermon-prometheus"] |= {"readOnly": True}

    assert push(grafana, "--datasource-url", "http://other:9090") == 1
    assert "provisioned from a file" in capsys.readouterr().err


def test_without_an_address_no_data_source_is_made(grafana: FakeGrafana):
    assert push(grafana, "--source", "influxdb") == 0

    assert grafana.data_sources == {}
    assert set(grafana.dashboards) == {file.body["uid"] for file in dashboards("influxdb")}


def test_the_token_may_come_from_a_file_and_is_never_shown(
    grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.delenv(TOKEN_VARIABLE)
    token = tmp_path / "token"
    token.write_text("glsa_token\n")
    assert push(grafana, "--token-file", str(token)) == 0

    token.write_text("glsa_expired")
    assert push(grafana, "--token-file", str(token)) == 1
    told = capfd.readouterr()
    assert "status 401: Unauthorized; is the token right" in told.err
    assert "glsa_" not in told.out + told.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ftp://grafana"], "expected http(s)://host"),
        (["http://admin:secret@grafana"], "expected http(s)://host"),
        (["http://grafana", "--datasource-url", "prometheus:9090"], "expected http://host:port"),
        (["http://grafana", "--datasource-url", "http://u:secret@prometheus"], "holds a password"),
        (["http://grafana", "--token-file", "missing"], "the token cannot be read"),
    ],
)
def test_a_wrong_argument_is_refused(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(TOKEN_VARIABLE, "token")

    assert main(["dashboards", "push", *arguments]) == 1

    told = capsys.readouterr().err
    assert expected in told
    assert "secret" not in told


def test_no_token_and_no_grafana_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    address = f"http://127.0.0.1:{free_port()}"
    assert main(["dashboards", "push", address]) == 1
    assert TOKEN_VARIABLE in capsys.readouterr().err

    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    assert main(["dashboards", "push", address]) == 1
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["prometheus", "influxdb"])
def test_write_gives_what_grafana_provisions_itself_from(source: str, tmp_path: Path):
    folder = tmp_path / "grafana"
    command = ["dashboards", "write", str(folder), "--source", source, "--datasource-url", "https://db:1"]

    assert main(command) == 0
    assert main(command) == 0

    written = {path.name: path.read_text() for path in (folder / "dashboards").iterdir()}
    assert written == {file.name: file.text for file in dashboards(source)}
    (provider,) = yaml.safe_load((folder / "provisioning/dashboards/trainermon.yaml").read_text())["providers"]
    assert provider["options"]["path"] == str(folder / "dashboards")
    assert provider["allowUiUpdates"] is False
    (made,) = yaml.safe_load((folder / "provisioning/datasources/trainermon.yaml").read_text())["datasources"]
    assert (made["type"], made["url"], made["uid"]) == (source, "https://db:1", f"trainermon-{source}")
    assert made.get("secureJsonData", {}) in ({}, {"httpHeaderValue1": "Token $INFLUXDB_TOKEN"})


def test_write_without_an_address_and_for_another_place(tmp_path: Path):
    assert main(["dashboards", "write", str(tmp_path), "--path", "/var/lib/grafana/dashboards/trainermon"]) == 0

    assert not (tmp_path / "provisioning/datasources").exists()
    (provider,) = yaml.safe_load((tmp_path / "provisioning/dashboards/trainermon.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards/trainermon"
