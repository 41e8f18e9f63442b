"""Exporters by name: built in, registered by another package, or unknown."""

import importlib.metadata

import pytest

from trainermon.core.config import ENTRY_POINTS, FORMATS, PushgatewayConfig
from trainermon.core.errors import ConfigError
from trainermon.exporters.export import (
    BUILT_IN,
    IN_PROCESS,
    Exporter,
    ExportSettings,
    NullExporter,
    StoreExporter,
    make_exporter,
)


class Registered(Exporter):
    def __init__(self, settings):
        self.settings = settings

    def write(self, header, block):
        pass


@pytest.mark.extras
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_form_can_be_made(tmp_path, name):
    gateway = PushgatewayConfig(url="http://127.0.0.1:9091")  # which is not asked
    exporter = make_exporter(name, ExportSettings(run_dir=tmp_path, node_dir=tmp_path, pushgateway=gateway))

    assert isinstance(exporter, Exporter | StoreExporter)
    exporter.close()


def test_the_monitor_knows_the_names_without_importing_an_exporter():
    assert set(FORMATS) == {*BUILT_IN, *IN_PROCESS}


def test_another_package_registers_a_form(tmp_path, monkeypatch):
    point = importlib.metadata.EntryPoint("mine", f"{__name__}:Registered", ENTRY_POINTS)
    points = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda _: Registered)

    assert isinstance(make_exporter("mine", ExportSettings(run_dir=tmp_path)), Registered)


def test_an_unknown_form_is_refused_with_the_known_ones(tmp_path):
    known = "api, csv, influxdb, mindformers, mlflow, null, pushgateway, tensorboard, wandb"
    with pytest.raises(ConfigError, match=f"format: found 'cvs', expected one of {known}"):
        make_exporter("cvs", ExportSettings(run_dir=tmp_path))


def test_a_form_that_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(BUILT_IN, "csv", "trainermon.exporters.not_there:Exporter")

    with pytest.raises(ConfigError, match="format 'csv' cannot be written: No module named"):
        make_exporter("csv", ExportSettings(run_dir=tmp_path))


def test_the_null_exporter_counts(tmp_path):
    exporter = make_exporter("null", ExportSettings(run_dir=tmp_path))

    exporter.write(None, None)
    exporter.flush()
    exporter.close()

    assert isinstance(exporter, NullExporter)
    assert (exporter.num_blocks, exporter.num_flushes, exporter.is_closed) == (1, 1, True)
