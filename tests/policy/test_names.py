"""What is public is documented, exists, and stays what it is called."""

import dataclasses
import importlib
import inspect
import re
import typing

import pytest

import trainermon
from trainermon.core import catalogue, config, errors
from trainermon.core.values import STATISTICS, Kind

CONFIGS = [value for value in vars(config).values() if dataclasses.is_dataclass(value)]


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_every_configuration_field_is_documented(cls):
    text = "\n".join(inspect.getdoc(each) or "" for each in cls.__mro__)
    documented = set(re.findall(r"^\s{4,8}(\w+): ", text, re.MULTILINE))

    assert {field.name for field in dataclasses.fields(cls)} - documented == set()


def test_every_kind_and_statistic_is_described():
    assert set(catalogue.KINDS) == set(Kind)
    assert set(STATISTICS) <= set(catalogue.STATISTICS)


def test_every_error_stands_in_the_tree_of_the_docstring():
    names = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}

    assert {name for name in names if name not in (errors.__doc__ or "")} == set()


@pytest.mark.parametrize("module_name", ["trainermon", "trainermon.monitor", "trainermon.core.journal"])
def test_every_public_name_resolves_and_has_a_docstring(module_name):
    module = importlib.import_module(module_name)
    values = {name: getattr(module, name) for name in module.__all__}
    own = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}

    assert {name for name, value in own.items() if not inspect.getdoc(value)} == set()


def test_the_public_names_of_the_package_are_frozen():
    assert sorted(trainermon.__all__) == [
        "AccuracyDispatch",
        "ConfigChecker",
        "EnvironmentRecorder",
        "GradientMonitor",
        "PrecisionDebugger",
        "PtdbgDispatch",
        "SingleComparator",
        "SingleSave",
        "TrainerMon",
        "__version__",
        "check",
        "compare",
        "compare_checkpoints",
        "compare_distributed",
        "compile_friendly",
        "open_checkpoint",
    ]


def test_trainer_mon_has_the_signature_that_users_know():
    parameters = list(inspect.signature(trainermon.TrainerMon.__init__).parameters)
    monitored = list(inspect.signature(trainermon.TrainerMon.set_monitor).parameters)

    assert parameters == ["self", "config_file_path", "process_group", "params_have_main_grad"]
    assert monitored == ["self", "model", "optimizer", "grad_acc_steps", "tp_group", "dp_group", "start_iteration"]
    assert typing.get_type_hints(trainermon.TrainerMon.close)["return"] is type(None)
