"""The configuration is met or refused: messages name the key, what was found, and what to write instead."""

import importlib.metadata
import importlib.util
import json
import sys
import traceback

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainermon.core.config import WITHOUT_EFFECT, AgentConfig, MonitorConfig, load_config, parse_config
from trainermon.core.config.outputs import OutputConfig
from trainermon.core.errors import ConfigError
from trainermon.core.values import DumpTask

REFUSED = [
    ({"wg_distribtion": True}, "wg_distribtion: unknown key; did you mean 'wg_distribution'?"),
    ({"agent": {"prot": 1}}, "agent.prot: unknown key; did you mean 'agent.port'?"),
    ({"step_interval": 0}, "step_interval: found 0, expected 1 or more"),
    ({"step_interval": "2"}, "step_interval: found '2', expected a whole number"),
    ({"step_interval": True}, "step_interval: found True, expected a whole number"),
    ({"wg_distribution": 1}, "wg_distribution: found 1, expected true or false"),
    ({"module_ranks": [0, "1"]}, r"module_ranks\[1\]: found '1', expected a whole number"),
    ({"module_ranks": [-1]}, r"module_ranks: found \(-1,\), expected ranks of 0 or more"),
    ({"targets": "h.0"}, "targets: found 'h.0', expected a list"),
    ({"agent": 3}, "agent: found 3, expected a mapping"),
    ({"agent": {"port": 70000}}, "agent.port: found 70000, expected 0 to 65535"),
    ({"replay": {"task": "tensors"}}, "replay.task: found 'tensors', expected 'statistics' or 'tensor'"),
    ({"alert": {"rules": [{"rule_name": "AnomalyInf"}]}}, r"alert.rules\[\].rule_name: found 'AnomalyInf', expected"),
    ({"escalation": {"margin_steps": 0}}, "escalation.margin_steps: found 0, expected 1 or more"),
    ({"escalation": {"max_per_hour": 1.5}}, "escalation.max_per_hour: found 1.5, expected a whole number"),
    ({"escalation": {"num_steps": True}}, "escalation.num_steps: found True, expected a whole number"),
    ({"escalation": {"max_dump_mb": -1}}, "escalation.max_dump_mb: found -1.0, expected 0 or more"),
    (
        {"cc_distribution": {"enabel": True}},
        "cc_distribution.enabel: unknown key; did you mean 'cc_distribution.enable'",
    ),
    (
        {"exclude": ["h", "1:~h.(0"]},
        r"exclude\[1\]: found 'h.\(0', expected a regular exp",
    ),
    (
        {"cc_distribution": {"cc_codeline": ["("]}},
        r"cc_distribution.cc_codeline\[0\]: found '\(', expected a regular exp",
    ),
    ({"sa_order": "b,h,s,d"}, "sa_order: found 'b,h,s,d', expected 's,b,h,d' or 'b,s,h,d'"),
    ({"l2_targets": {"attention": []}, "recording_l2_features": True}, "l2_targets.attention: unknown key"),
    ({"ndigits": 21}, "ndigits: found 21, expected 1 to 20"),
    ({"append_output": ["Dec03_21-34-40"]}, "append_output: found .* expected nothing or two timestamps"),
    ({"format": ["../x"]}, r"format\[0\]: found '../x', expected a name"),
    ({"format": ["csv", "infuxdb"]}, r"format\[1\]: found 'infuxdb', which nothing writes; did you mean 'influxdb'\?"),
    (
        {"format": "comet"},
        r"found 'comet', which nothing writes; expected one of api, csv, influxdb, mindformers, mlflow, null",
    ),
    ({"format": ["influxdb"]}, "format names influxdb, but influxdb.url is not set"),
    ({"influxdb": {"url": "tcp://x"}}, "influxdb.url: found 'another one', expected http://host:port or https"),
    (
        {"mlflow": {"tracking_uri": "postgresql+psycopg2://anne:kumquat@db/mlflow"}},
        "mlflow.tracking_uri: found 'an address with a password', expected one without it: set MLFLOW_TRACKING_URI",
    ),
    ({"influxdb": {"api": "v3"}}, "influxdb.api: found 'v3', expected v1 or v2"),
    ({"influxdb": {"batch_points": 0}}, "influxdb.batch_points: found 0, expected 1 to 100000"),
    (
        {"alert": {"rules": [{"rule_name": "AnomalyInf"}]}},
        "rule_name: found 'AnomalyInf', expected 'AnomalyTurbulence'",
    ),
    (
        {"alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": -1}}]}},
        "threshold: found -1.0, expected 0",
    ),
    ({"monitors": {}, "framework": "mindspore"}, "framework: found 'mindspore', expected one of pytorch, pt, torch"),
    ({"monitors": {"module": True}}, "monitors.module: found True, expected a mapping"),
]


@pytest.mark.extras
@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_be_met_is_refused_with_the_path_of_the_key(raw, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_a_file_and_its_mapping_give_the_same(tmp_path, suffix):
    raw = {"targets": ["h.0"], "agent": {"port": 8000}, "replay": {"memory_mb": 10}}
    path = tmp_path / f"config{suffix}"
    path.write_text(json.dumps(raw) if suffix == ".json" else yaml.safe_dump(raw))

    assert load_config(path) == load_config(raw)
    assert load_config(path)[0].agent == AgentConfig(port=8000)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.json", None, "cannot be read"),
        ("broken.json", "{", "is not valid JSON"),
        ("broken.yaml", "a: [", "is not valid YAML"),
        ("list.json", "[1]", "found a list at the top"),
        ("key.json", '{"start_stp": 1}', "start_stp: unknown key"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=f"{name}: .*{message}") as caught:
        load_config(path)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1  # its cause is in the message


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)) + "targets: *a59\n"
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))
HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "bomb.yaml": (BOMB, "the aliases stand for more than 100000 values"),
    "merges.yaml": (MERGES, "the aliases stand for more than 100000 values"),
    "itself.yaml": ("&a [*a]", "the aliases stand for more than 100000 values"),
    "deep.yaml": ("[" * 5000, "is nested too deeply"),
    "deep.json": ("[" * 100_000, "is nested too deeply"),
    "date.yaml": ("targets: 2024-13-45", "is not valid YAML: month must be in 1..12"),
    "digits.yaml": ("step_interval: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
    "digits.json": ('{"step_interval": ' + "9" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
    "hexadecimal.yaml": ("step_interval: -0x" + "f" * 5000, "found an int that Python does not write out"),
    "huge.yaml": ("a: b\n" * 100_000, "has more than 262144 bytes"),
    "huge.json": (" " * 2_000_000 + "{}", "has more than 1048576 bytes"),
    "long.json": (json.dumps({"step_interval": "x" * 900_000}), "step_interval: found 'xxx"),
    "wide.json": (json.dumps({"step_interval": [[["x"] * 100] * 100] * 20}), "step_interval: found "),
    "key.json": (json.dumps({"x" * 900_000: 1}), "xxx: unknown key"),
    "latin.yaml": (b"targets: \xff", "cannot be read"),
    "half.json": (r'{"step_interval": "\ud800"}', "step_interval: found"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_a_short_message(tmp_path, name):
    content, message = HOSTILE[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isascii()


def test_an_alias_that_stands_for_little_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("targets: &names [h.0, h.1]\ncc_distribution: {enable: true, cc_codeline: *names}\n")

    assert load_config(path)[0].cc_distribution.cc_codeline == ("h.0", "h.1")


def test_an_empty_yaml_file_means_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")

    assert load_config(path) == (MonitorConfig(), ())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from([*MonitorConfig.__dataclass_fields__, *WITHOUT_EFFECT, "monitors", "stop_step"]) | st.text()


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_mapping_is_read_or_refused_as_a_configuration_error(raw):
    try:
        config, _ = parse_config(raw)
    except ConfigError:
        return
    assert isinstance(config, MonitorConfig)


def test_a_configuration_may_be_a_mapping_and_nothing_but_a_file_beside_that():
    assert load_config({"step_interval": 3}) == parse_config({"step_interval": 3})
    with pytest.raises(ConfigError, match="configuration: found list, expected the path of a file, a mapping, or None"):
        load_config([])  # type: ignore[arg-type]  # which is what is tested


def test_yaml_without_its_package_says_what_else_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "monitor.yaml"
    path.write_text("step_interval: 3")

    with pytest.raises(ConfigError, match=r"monitor.yaml: YAML needs the package pyyaml; .* write the file as JSON"):
        load_config(path)


def test_a_choice_is_given_by_its_name():
    assert parse_config({"replay": {"task": "tensor"}})[0].replay.task is DumpTask.TENSOR


def test_outputs_are_taken_out_of_the_whole_configuration():
    config, _ = parse_config({"format": "csv", "ndigits": 4, "step_interval": 3})

    assert OutputConfig(**config.output_fields()) == OutputConfig(format=("csv",), ndigits=4)


def test_a_format_needs_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    parse_config({"format": "csv"})
    with pytest.raises(ConfigError, match=r"'tensorboard' needs the package tensorboard, .*pip install tensorboard$"):
        parse_config({"format": "tensorboard"})


def test_a_format_that_another_package_registers_is_known(monkeypatch):
    point = importlib.metadata.EntryPoint("theirs", "their.module:Exporter", "trainermon.exporters")
    with pytest.raises(ConfigError, match="found 'theirs', which nothing writes"):
        parse_config({"format": "theirs"})

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])

    assert parse_config({"format": "theirs"})[0].format == ("theirs",)
