"""Training files of MindFormers mean here what they mean there, or say where they do not."""

import pytest
import yaml

from trainermon.core.config import MindFormersConfig, parse_config
from trainermon.core.errors import ConfigError

pytestmark = pytest.mark.extras

# The example of MindFormers' documentation, with other values.
TRAINING = """
seed: 0
output_dir: './output'
monitor_config:
    monitor_on: True
    dump_path: './norms'
    target: ['layers.0', 'layers.[12]']
    invert: False
    step_interval: 5
    local_loss_format: ['log', 'tensorboard']
    device_local_loss_format: null
    local_norm_format: tensorboard
    device_local_norm_format: ['log']
    optimizer_state_format: null
    weight_state_format: log
    throughput_baseline: 12.5
    print_struct: False
    check_for_global_norm: False
    global_norm_spike_threshold: 1.0
tensorboard:
    tensorboard_dir: 'worker/tensorboard'
callbacks:
    - type: MFLossMonitor
"""


def training(**changes):
    raw = yaml.safe_load(TRAINING)
    raw["monitor_config"] |= changes
    return raw


def test_the_example_means_the_same():
    config, notes = parse_config(training())

    assert (config.output_dir, config.step_interval) == ("./norms", 5)
    assert config.targets == ("~layers.0", "~layers.[12]")
    assert (config.wg_distribution, config.mv_distribution, config.param_distribution) == (True, False, True)
    assert config.format == ("mindformers",)
    assert config.mindformers == MindFormersConfig(
        local_norm=("tensorboard",),
        device_local_norm=("log",),
        local_loss=("log", "tensorboard"),
        weight_state=("log",),
        throughput_baseline=12.5,
    )
    assert any(note.startswith("monitor_config.global_norm_spike_threshold has no effect") for note in notes)


def test_all_parameters_and_all_but_some():
    assert parse_config(training(target=None))[0].targets == ()
    assert parse_config(training(target=[".*"]))[0].targets == ()
    config, _ = parse_config(training(target=["norm"], invert=True))
    assert (config.targets, config.exclude) == ((), ("~norm",))


def test_nothing_is_collected_unless_it_is_switched_on():
    config, notes = parse_config(training(monitor_on=False))

    assert config.collect_times == 0
    assert any("monitor_on" in note for note in notes)


def test_what_no_event_file_can_take_is_logged():
    raw = training()
    del raw["tensorboard"]
    config, notes = parse_config(raw)

    assert config.mindformers.local_norm == config.mindformers.local_loss == ("log",)
    assert any(note.startswith("tensorboard is not configured") for note in notes)


def test_a_structure_is_written_and_the_training_goes_on():
    config, notes = parse_config(training(print_struct=True))

    assert config.print_struct
    assert any("the training goes on" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "layers"}, r"monitor_config\.target: found 'layers', expected a list"),
        ({"target": ["("]}, r"targets\[0\]: found '\(', expected a regular expression"),
        ({"invert": "yes"}, r"monitor_config\.invert: found 'yes'"),
        ({"local_norm_format": ["csv"]}, r"monitor_config\.local_norm_format: found \['csv'\], expected tensorboard"),
        ({"throughput_baseline": -1}, r"monitor_config\.throughput_baseline: found -1"),
        ({"monitor_on": 1}, r"monitor_config\.monitor_on: found 1, expected true or false"),
        ({"step_interval": 0}, "step_interval: found 0"),
    ],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(training(**changes))


def test_the_second_version_is_read():
    config, notes = parse_config(
        {
            "model": {"model_type": "deepseek_v3"},
            "monitor": {
                "train_state": {"local_norm": ["layers.0", "embed"], "local_loss": True, "device_norm": "embed"},
                "moe_monitor": {"save_tokens_per_expert_interval": 100},
            },
        }
    )

    assert config.targets == ("*layers.0*", "*embed*")
    assert (config.wg_distribution, config.monitor_mbs_grad) == (True, True)
    assert config.mindformers == MindFormersConfig(local_norm=("log",), device_local_norm=("log",), local_loss=("log",))
    assert notes == ("monitor.moe_monitor has no effect: the load of experts is always recorded",)


def test_one_norm_of_all_parameters_leaves_out_none():
    config, _ = parse_config({"monitor": {"train_state": {"local_norm": True, "device_norm": "embed"}}})
    assert config.targets == ()
