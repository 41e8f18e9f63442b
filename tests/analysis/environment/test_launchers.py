"""Which options a training gets, whatever launches it."""

import pytest

from trainermon.analysis.environment.launchers import find_training, hyperparameters_of, options_of
from trainermon.analysis.environment.shell.script import read_text

SCRIPT_OPTIONS = {"bf16": True, "lr": "1e-4"}
LAUNCHES = [
    ("torchrun --nproc_per_node 8 --standalone train.py", "torchrun", {"nproc_per_node": "8", "standalone": True}),
    ("torchrun --nproc-per-node=8 -m my.train", "torchrun", {"nproc-per-node": "8"}),
    ("python -m torch.distributed.launch --nproc_per_node 4 train.py", "torchrun", {"nproc_per_node": "4"}),
    ("python3.11 -u train.py", "python", {}),
    ("python -m my.train", "python", {}),
    ("/usr/bin/python train.py", "python", {}),
    ("deepspeed --num_gpus 8 --hostfile h train.py", "deepspeed", {"num_gpus": "8", "hostfile": "h"}),
    ("accelerate launch --multi_gpu --num_machines 4 train.py", "accelerate", {"multi_gpu": True, "num_machines": "4"}),
    ("msrun --worker_num 8 --join train.py", "msrun", {"worker_num": "8", "join": True}),
    ("mpirun -np 8 --allow-run-as-root --mca btl tcp python train.py", "mpirun",
     {"np": "8", "allow-run-as-root": True, "mca.btl": "tcp"}),
    ("srun --ntasks 8 torchrun --nnodes 2 train.py", "torchrun", {"ntasks": "8", "nnodes": "2"}),
    ("nohup env A=1 numactl --cpunodebind=0 torchrun --nnodes 1 train.py", "torchrun", {"nnodes": "1"}),
    ("trainermon run -- torchrun --nnodes 1 train.py", "torchrun", {"nnodes": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "launcher", "options"), LAUNCHES)
def test_a_launcher_is_known_and_its_options_are_not_the_scripts(line, launcher, options):
    """Msprobe finds nothing behind python, deepspeed or accelerate."""
    found = find_training([*line.split(), "--bf16", "--lr", "1e-4"])

    assert (found.launcher, dict(found.launcher_options)) == (launcher, options)
    assert found.script in ("train.py", "my.train")
    assert found.options == SCRIPT_OPTIONS


@pytest.mark.parametrize("line", ["tar xf a.tar", "python -c 'x'", "git status", "python"])
def test_what_starts_no_training_is_passed_over(line):
    assert find_training(line.split()) is None


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--bf16", "--adam-beta2", "0.95"], {"bf16": True, "adam-beta2": "0.95"}),
        (["--name", "two words"], {"name": "two words"}),
        (["--shift", "-1", "--eps", "-1e-5"], {"shift": "-1", "eps": "-1e-5"}),
        (["--rampup", "16", "16", "5"], {"rampup": ["16", "16", "5"]}),
        (["--a=b=c", "x", "--d"], {"a": "b=c", "arguments": "x", "d": True}),
        (["optim.lr=1", "+model.size=2", "data=s3"], {"optim.lr": "1", "model.size": "2", "data": "s3"}),
        (["-e", "1", "conf.yaml"], {"e": ["1", "conf.yaml"]}),
        (["--tag", "a", "--tag", "b"], {"tag": ["a", "b"]}),
    ],
)
def test_options_are_read_as_argparse_reads_them(words, options):
    """Msprobe takes the option behind a flag for its value, and cuts quoted values at blanks."""
    assert options_of(words) == options


def test_long_names_of_blocks_are_followed():
    """Msprobe does not expand blocks whose names have over 20 letters."""
    name = "A_VERY_LONG_NAME_OF_A_BLOCK_OF_ARGUMENTS"
    reading = read_text(f'{name}="--lr 1e-4 --bf16"\ntorchrun train.py ${name}\n', {})

    assert hyperparameters_of(reading)[0] == {
        "launcher": "torchrun",
        "script": "train.py",
        "lr": "1e-4",
        "bf16": True,
    }


def test_several_trainings_are_kept_apart_and_variables_are_the_last_ones():
    values, variables, notes = hyperparameters_of(
        read_text("export A=1\npython a.py --lr 1\nA=2 python b.py --lr $(cat lr)\n", {})
    )

    assert values["lr"] == "1"
    assert values["command2.lr"] == "$(cat lr)"
    assert variables == {"A": "2"}
    assert notes == ["line 3: $(cat lr): unresolved"]
