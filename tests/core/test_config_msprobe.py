"""Configurations that were written for msprobe's monitor mean here what they mean there, or say where they do not."""

import json

import pytest

from trainermon.core.config import (
    CollectivesConfig,
    L2Targets,
    MonitorConfig,
    is_followed,
    is_waiting,
    load_config,
    parse_config,
)
from trainermon.core.errors import ConfigError

# Every key of the first monitor, with a value that is not its default.
FIRST = {
    "targets": {"fc1": {"input": "tuple[1]:0"}, "1:fc2": {}},
    "start_step": 3,
    "collect_times": 5,
    "step_interval": 2,
    "print_struct": True,
    "module_ranks": [0, 3],
    "xy_distribution": True,
    "all_xy": True,
    "forward_only": True,
    "backward_only": False,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "mv_distribution": True,
    "param_distribution": True,
    "ur_distribution": True,
    "mg_direction": True,
    "cc_distribution": {"enable": True, "cc_codeline": ["train.py"], "cc_pre_hook": True, "cc_log_only": True},
    "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}], "dump": True},
    "format": "tensorboard",
    "ops": ["norm", "max", "nans", "shape"],
    "eps": 1e-6,
    "ndigits": 16,
    "step_count_per_record": 10,
    "append_output": ["Dec03_21-34-40", "Dec03_21-34-41"],
    "squash_name": True,
    "recording_l2_features": True,
    "l2_targets": {"attention_hook": ["0:attn"], "linear_hook": []},
    "sa_order": "b, s, h, d",
    "stack_info": True,
    "dynamic_on": True,
}
CHANGED_NAME = {"targets", "cc_distribution", "alert", "format", "l2_targets", "sa_order"}
NO_EFFECT = {"eps", "squash_name"}


@pytest.mark.extras
def test_every_key_of_the_first_monitor_is_read():
    config, _ = parse_config(FIRST)

    plain = {key for key in FIRST if key not in CHANGED_NAME | NO_EFFECT}
    assert {key: _listed(getattr(config, key)) for key in plain} == {key: FIRST[key] for key in plain}
    assert config.targets == ("*fc1*", "1:*fc2*")
    assert config.cc_distribution == CollectivesConfig(
        enable=True, cc_codeline=("train.py",), cc_pre_hook=True, cc_log_only=True
    )
    assert [(rule.rule_name, rule.args.threshold) for rule in config.alert.rules] == [("AnomalyTurbulence", 0.5)]
    assert config.alert.dump
    assert config.format == ("tensorboard",)
    assert config.l2_targets == L2Targets(attention_hook=("0:attn",), linear_hook=())
    assert config.sa_order == "b,s,h,d"


def _listed(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.extras
def test_keys_that_have_no_effect_are_reported_and_no_others():
    _, notes = parse_config(FIRST)

    assert [note.split(" ")[0].rstrip(":") for note in notes] == ["eps", "targets", "squash_name"]


def test_what_is_not_given_has_the_default_of_msprobe_and_the_log_says_so():
    config, notes = parse_config({"targets": {}})

    assert config.targets == ()
    assert (config.format, config.ops, config.wg_distribution) == (("csv",), ("norm",), False)
    assert any(note.startswith("wg_distribution is not given: false") for note in notes)
    assert any(note.startswith("format is not given: csv") for note in notes)


def test_own_configurations_keep_their_defaults():
    config, notes = parse_config({"targets": ["h.0"], "xy_distribution": True})

    assert (config.wg_distribution, config.format, notes) == (True, (), ())


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"forward_only": True, "backward_only": True, "xy_distribution": True}, "forward_only and backward_only"),
        ({"all_xy": True}, "all_xy has no effect: xy_distribution is false"),
        ({"forward_only": True, "xy_distribution": False}, "forward_only has no effect: xy_distribution is false"),
        ({"wg_distribution": False, "monitor_mbs_grad": True}, "monitor_mbs_grad has no effect: wg_distribution is fa"),
        ({"l2_targets": {"linear_hook": []}}, "l2_targets has no effect: recording_l2_features is false"),
        ({"format": [], "ops": ["max"]}, "ops has no effect: format names no form"),
        ({"ndigits": 3}, "ndigits has no effect: format names no form"),
        ({"ops": ["max", "median"]}, "ops: 'median' has no effect; known are norm, min"),
        ({"targets": {"fc": {"output": "tensor"}}}, "targets: the selectors of fc have no effect"),
        ({"alert": {"rules": [{"rule_name": "AnomalyTurbulence"}]}}, r"alert.rules[0] has no effect: args is missing"),
        ({"alert": {"rules": [{"args": {"threshold": 1}}]}}, "alert.rules[0] has no effect: rule_name is missing"),
        ({"alert": {"rules": None, "dump": True}}, "alert.dump has no effect: there are no rules"),
        ({"opt_ty": "Megatron_DistributedOptimizer"}, "opt_ty has no effect: the kind of the optimizer is found out"),
        ({"mg_distribution": True}, "mg_distribution has no effect"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_key_that_cannot_have_an_effect_is_reported_and_no_error(raw, says):
    _, notes = parse_config(raw)

    assert [note for note in notes if says in note] != []


@pytest.mark.parametrize(
    ("window", "times"),
    [((0, 1, 10), 10), ((3, 4, 12), 3), ((3, 4, 11), 2), ((5, 1, 5), 0), ((9, 1, 5), 0)],
)
def test_the_steps_before_the_last_are_counted_as_range_does(window, times):
    first, interval, stop = window
    config, _ = parse_config(
        {"monitors": {"weight_grad": {}}, "start_step": first, "step_interval": interval, "stop_step": stop}
    )

    assert config.collect_times == times == len(range(first, stop, interval))


def test_a_wrong_start_is_told_where_it_stands_and_not_in_the_number_of_steps():
    with pytest.raises(ConfigError, match=r"^start_step: found 'a', expected a whole number"):
        parse_config({"monitors": {"weight_grad": {}}, "start_step": "a", "stop_step": 5})


def test_names_of_which_nothing_was_cut_off_are_refused_where_they_are_none():
    with pytest.raises(ConfigError, match=r"targets\[0\]: found 3, expected text"):
        parse_config({"targets": [3], "squash_name": True, "xy_distribution": True})


def test_every_module_is_taken_where_one_target_is_the_whole_model():
    config, _ = parse_config({"targets": {"": {}, "fc": {}}, "xy_distribution": True})

    assert config.targets == ()


def test_both_sides_only_are_treated_as_neither():
    config, _ = parse_config({"forward_only": True, "backward_only": True, "xy_distribution": True})

    assert (config.forward_only, config.backward_only, config.xy_distribution) == (False, False, True)


def test_numbers_that_json_writes_with_an_exponent_are_whole(tmp_path):
    path = tmp_path / "monitor.json"
    path.write_text('{"targets": {}, "collect_times": 1e8, "start_step": null}')

    config, _ = load_config(path)

    assert (config.collect_times, config.start_step) == (100_000_000, 0)


def test_no_valid_op_means_the_norm():
    assert parse_config({"ops": ["median"]})[0].ops == parse_config({"ops": []})[0].ops == ("norm",)


SECOND = {
    "framework": "pt",
    "output_dir": "./out",
    "rank": 2,
    "start_step": 10,
    "stop_step": 21,
    "step_interval": 5,
    "step_count_per_record": 4,
    "format": "csv",
    "async_write": False,
    "patch_optimizer_step": True,
    "monitors": {
        "module": {"targets": ["mlp"], "ops": ["max"], "eps": 1e-8},
        "weight_grad": {"enabled": True, "monitor_mbs_grad": True, "micro_batch_number": 4},
        "optimizer": {"enabled": True, "ops": ["norm", "max"]},
        "param": {"enabled": True, "param_distribution": False},
        "cc": {"enabled": True, "cc_codeline": ["x"], "cc_pre_hook": True, "module_ranks": [0]},
        "extra": {"enabled": True},
    },
}


def test_every_key_of_the_second_monitor_is_read_or_reported():
    config, notes = parse_config(json.loads(json.dumps(SECOND)))

    assert config == MonitorConfig(
        output_dir="./out",
        module_ranks=(2,),
        start_step=10,
        step_interval=5,
        collect_times=3,  # 10, 15, 20
        step_count_per_record=4,
        format=("csv",),
        ops=("max", "min", "mean", "norm", "nans"),
        xy_distribution=True,
        wg_distribution=True,
        monitor_mbs_grad=True,
        mv_distribution=True,
        cc_distribution=CollectivesConfig(enable=True, cc_codeline=("x",), cc_pre_hook=True),
    )
    for key in ("module.eps", "weight_grad.micro_batch_number", "cc.module_ranks", "extra", "module.targets"):
        assert any(note.startswith(f"monitors.{key} has no effect") for note in notes), key
    for key in ("async_write", "patch_optimizer_step"):
        assert any(note.startswith(f"{key} has no effect") for note in notes), key


def test_modules_alone_are_chosen_by_parts_of_their_names():
    config, _ = parse_config({"monitors": {"module": {"targets": ["mlp"]}, "param": {"param_distribution": True}}})

    assert (config.targets, config.param_distribution, config.wg_distribution) == (("*mlp*",), False, False)
    assert config.ops == ("min", "max", "mean", "norm", "nans")


def test_names_of_which_the_beginning_was_cut_off_are_looked_for_anywhere():
    config, notes = parse_config({"targets": {"layers.0": {}, "1:layers.1": {}}, "squash_name": True})

    assert config.targets == ("*layers.0*", "1:*layers.1*")
    assert any(note.startswith("squash_name: names are not cut off") for note in notes)
    assert not any("squash_name" in note for note in parse_config({"targets": {}, "squash_name": False})[1])


@pytest.mark.parametrize(
    ("variable", "dynamic_on", "followed", "waiting"),
    [
        ("", False, False, False),
        ("", True, True, False),
        ("True", False, True, True),
        ("1", True, True, False),
        ("no", False, False, False),
    ],
)
def test_the_variable_makes_a_monitor_wait_until_the_file_starts_it(variable, dynamic_on, followed, waiting):
    config, environ = MonitorConfig(dynamic_on=dynamic_on), {"DYNAMIC_MONITOR": variable}

    assert (is_followed(config, environ), is_waiting(config, environ)) == (followed, waiting)
