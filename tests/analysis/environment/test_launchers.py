"""Which options a training gets, whatever launches it."""

import pytest

from trainermon.analysis.environment.launchers import find_training, find_trainings, hyperparameters_of, options_of
from trainermon.analysis.environment.shell.script import read_text
from trainermon.analysis.environment.shell.words import ShellSyntaxError

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


OPTIONS = " --bf16 --lr 1e-4"
TORCHRUN = "torchrun --nnodes 2 train.py"
WRAPPED = [
    "env -u A -C /w B=1 {}",
    "nohup nice -n 5 timeout -k 5 1h taskset -c 0-3 stdbuf -o L {}",
    "sudo -u me -E time -f %e numactl --cpunodebind 0 -m 0 {}",
    "nsys profile -o out --trace cuda,nvtx -f true {}",
    "docker run --rm -it --gpus all --ipc=host -v /a:/b -e A=1 -w /w --shm-size 16g nvcr.io/pytorch:24.01-py3 {}",
    "docker run --rm --entrypoint env img:1 B=2 {}",
    "podman --log-level debug run --network host -e A img {}",
    "docker exec -it -w /w job {}",
    "singularity exec --nv -B /a:/b --env A=1,B=2 img.sif {}",
    "apptainer --quiet exec --nv --bind /a --pwd /w img.sif {}",
    "enroot start --rw -m /a:/b img {}",
    "conda run -n env --no-capture-output {}",
    "uv run --with numpy --frozen {}",
    "poetry run {}",
    "kubectl exec -it pod -c main -- {}",
    "bash -c '{}'",
    "sh -ec 'cd /w && set -x && exec {}'",
    "bash --norc -o pipefail -lc '{} 2>&1 | tee log'",
    "sbatch -N 2 --wrap='srun {}'",
    "srun -N 2 --container-image=img bash -c 'export A=1; {}'",
    "docker run img bash -lc \"sh -c '{}'\"",
    "mpirun -np 8 -x A bash -c '{}'",
    "env A=1 srun sh -c 'env B=2 singularity exec i.sif {}'",
    "ssh -p 22 -o A=b me@host 'cd /w && {}'",
    "ssh host {}",
    'eval "{}"',
    "CMD='{}'; eval $CMD",
    "eval eval '{}'",
]  # fmt: skip


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_training_is_found_in_whatever_stands_around_it(wrapped):
    reading = read_text(wrapped.format(TORCHRUN + OPTIONS), {})

    (found,) = [found for command in reading.commands for found in find_trainings(command.words, {})]

    assert (found.training.script, found.training.options) == ("train.py", SCRIPT_OPTIONS)
    assert found.training.launcher_options["nnodes"] == "2"
    assert found.is_certain


def test_what_is_set_around_a_training_is_among_its_variables():
    line = "env A=1 docker run -e B=2 --env=C=3 img:7 bash -c 'export D=4; E=5 python train.py --lr $D'"

    values, variables, notes = hyperparameters_of(read_text(line, {}))

    assert variables == {"A": "1", "B": "2", "C": "3", "D": "4", "E": "5"}
    assert (values["lr"], values["launcher.image"]) == ("4", "img:7")
    assert notes == []


def test_the_arguments_of_a_shell_are_those_of_its_text():
    assert find_training(["bash", "-c", 'exec "$@" --bf16', "_", "python", "a.py", "--x", "1 2"]).options == {
        "x": "1 2",
        "bf16": True,
    }


def test_what_a_scheduler_sets_is_unresolved_and_not_empty():
    line = "torchrun --node_rank $SLURM_NODEID --master_addr ${MASTER_ADDR} train.py --tag x$SLURM_JOB_ID --bf16"

    for wrapped in (line, f"srun bash -c '{line}'"):
        values, variables, notes = hyperparameters_of(read_text(wrapped, {}))

        assert values["launcher.node_rank"] == "${SLURM_NODEID}"
        assert (values["tag"], values["bf16"]) == ("x${SLURM_JOB_ID}", True)
        assert variables == {}
        said = [note.rsplit(": ", 2)[-2] for note in notes]
        assert said == ["${SLURM_NODEID}", "${MASTER_ADDR}", "x${SLURM_JOB_ID}"]


def test_a_text_that_starts_several_trainings_has_them_all():
    values, _, _ = hyperparameters_of(read_text("bash -c 'python a.py --lr 1; python b.py --lr 2'", {}))

    assert (values["lr"], values["command2.lr"]) == ("1", "2")


@pytest.mark.parametrize(
    "line",
    [
        "tar xf a.tar",
        "bash -c 'ls'",
        "bash run.sh",
        "docker run img",
        "docker ps",
        "env A=1",
        "python -c 'x'",
        "git status",
        "python",
    ],
)
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
        (["--bf16", "--no-bf16"], {"no-bf16": True}),
        (["--no_x", "--lr", "1", "--x"], {"lr": "1", "x": True}),
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


def test_what_is_evaluated_and_not_known_is_not_followed():
    reading = read_text('A=$(cat x)\neval "torchrun $A"\neval "B=1"\npython t.py --b $B\n', {})

    assert [command.words for command in reading.commands] == [("python", "t.py", "--b", "1")]
    assert reading.notes == ("line 2: eval torchrun $(cat x): not followed",)


def test_what_evaluates_itself_is_refused():
    with pytest.raises(ShellSyntaxError, match="more than 30 deep"):
        read_text("A='eval $A'\neval $A\n", {})
