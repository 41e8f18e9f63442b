"""Bash is the truth: of every script it must give its commands the words that are read here."""

import random
import string

from tests.analysis.environment.shell.bash_argv import PROGRAMS, argv_of_bash
from trainermon.analysis.environment.shell.script import read_text

ENVIRON = {"HOME": "/somewhere", "GPUS": "8", "EMPTY": "", "SPACED": "a b  c", "MODEL_DIR": "/data/my model"}

MEGATRON = r"""#!/bin/bash
# Runs the "345M" parameter model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS:-4}
MASTER_ADDR=localhost
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE="$MODEL_DIR"/gpt2-vocab.json
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES   # a comment
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --rampup-batch-size 16 16 5859375
    --adam-beta1 0.9
    --fp16
    --lr 6.0e-5
)
if [ "$WORLD_SIZE" -gt 4 ]; then
    TRAINING_ARGS+=(--global-batch-size $((WORLD_SIZE * 2)))
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    "${TRAINING_ARGS[@]}" \
    --vocab-file "$VOCAB_FILE" --world ${WORLD_SIZE} 2>&1 | tee log.txt
"""
DEEPSPEED = r"""#!/usr/bin/env bash
set -euo pipefail
OUTPUT=${1:-./output}
ZERO_STAGE=${2:-}
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=3
fi
mkdir -p $OUTPUT
deepspeed --num_gpus ${GPUS} main.py \
   --data_path Dahoas/rm-static Dahoas/full-hh-rlhf \
   --data_split 2,4,4 --learning_rate 9.65e-6 --weight_decay 0. \
   --zero_stage $ZERO_STAGE --deepspeed --output_dir $OUTPUT &> $OUTPUT/training.log
"""
CASES = [
    MEGATRON,
    DEEPSPEED,
    "torchrun --bf16 --adam-beta2 0.95 a.py",
    "run 'single $GPUS' \"double $GPUS\" plain$GPUS \\$GPUS 'it'\"'\"'s'",
    "run a\\\nb c \\\n d\n",
    'run "# no comment" a#b # a comment',
    'A=(one "two three" four)\nrun "${A[@]}" ${A[@]} "${A[*]}" ${#A[@]} ${A[1]} ${A[-1]} "${A[@]:1}" "${A[@]:1:1}"',
    'A=()\nrun "${A[@]}" x ${A[@]}',
    'A+=(1)\nA+=(2 3)\nA[1]=x\nrun "${A[@]}"',
    'V=a\nV+=b\nrun $V ${V}c ${V:-d} ${W:-d e} "${W:-d e}" ${W-} ${V:+yes} ${W:+no} ${W:=set} $W',
    'run $SPACED "$SPACED" x${SPACED}y $EMPTY "$EMPTY" \'\' end',
    "V=' lead trail '\nrun a${V}b $V \"$V\" ${V}x",
    "P=/a/b.tar.gz\nrun ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P/a/x} ${P//a/x} ${P:1:3} ${P: -2} ${#P} ${P^^}",
    "run $((1+2*3)) $((GPUS/3)) $((GPUS%3)) $(( (GPUS+1) * 2 )) $((-7/2)) $((2**5)) $((GPUS>4)) $((GPUS<<1))",
    "for i in 1 2 a{b,c}; do run $i; done",
    "for ((i=0;i<2;i++)); do :; done; run end",
    "i=0; while [ $i -lt 3 ]; do run turn $i; i=$((i+1)); done",
    "i=0; until [ $i -ge 2 ]; do run $i; ((i++)) || i=$((i+1)); i=5; done",
    "case $GPUS in 4) run four;; 8|16) run eight;; *) run other;; esac",
    "case abc in a*) run a;; *) run b;; esac",
    'if [[ $GPUS == 8 && -n $HOME ]]; then run yes; else run no; fi\nif [ -z "$EMPTY" ]; then run empty; fi',
    "if [ 1 -eq 2 ]; then run a; elif [ a = a ]; then run b; else run c; fi",
    '[ -n "$EMPTY" ] && run a || run b\ntrue && run c; false || run d; ! false && run e',
    'f() { local x=$1; run $x "$@" $#; shift; run "$@"; }\nf \'a b\' c\nfunction g { run g; return; run never; }; g',
    "(X=1; run $X); run ${X:-unset}",
    "{ run a; run b; }",
    "run {1..4} {a..c} x{1,2}y pre{a,b}{c,d} '{1,2}' {single} {5..1..2}",
    'run ~ ~/x a~ "~"',
    "cat <<EOF > conf\nrun inside $GPUS\nEOF\nrun after",
    "cat <<-'EOF'\n\trun inside\n\tEOF\nrun after",
    "run a > out 2>&1 b < /dev/null >> more",
    'run $\'tab\\there\' $"double" "a\\$b\\\\c\\n"',
    "A=1 B=2 run $A",
    'export X=5 Y="a b"; run $X "$Y"; unset X; run ${X-gone}',
    "declare -a L=(1 2); declare N=3; readonly R=4; run ${L[1]} $N $R",
    'set -- a \'b c\'; run "$@" $1 "$2" $#; shift; run $1',
    'ARGS="--lr 1e-4 --name \'x y\'"\nrun $ARGS\nrun "$ARGS"',
    'ARGS="\n  --a 1 \\\n  --b 2\n"\nrun $ARGS',
    "N=GPUS; run ${!N}",
    "run a & run b; wait",
    "run a\nexit 0\nrun never",
    "run \"a'b\" 'c\"d' \"e\"f'g'",
    'run --opt="$SPACED" --opt=$SPACED',
    "run [1,2] a=b --x={y} a,b",
    "x=${GPUS}_${HOME##*/}; run $x ${x%_*}",
    'run "${EMPTY:-${GPUS:-1}}" ${UNSET:-"q $GPUS"} "${UNSET:-\'s\'}"',
    "if true; then\n  # comment\n  run a\nfi; run b",
    "for d in a b\ndo\n  [ $d = a ] && continue\n  run $d\ndone",
    "while true; do run once; break; done",
    "for x; do run $x; done; run none",
    "set -- p q; for x; do run $x; done",
    "run a;run b\r\n",
    'V=x; V=$V$V; V+="y z"; run $V "$V"',
    'A=($SPACED "$SPACED"); run ${#A[@]} "${A[@]}"',
    'A=(1 2); B=("${A[@]}" 3); run "${B[@]}" "x${B[@]}y"',
    "time run a; ! run b",
    "run a |& run b | run c",
    'if ! [ -z x ]; then run a; fi; if [ ! -z "" ]; then run b; else run c; fi',
    "[[ abc == a* ]] && run glob; [[ abc == 'a*' ]] || run literal",
    "[[ 3 -lt 10 && ( a == b || a == a ) ]] && run nested",
]


def test_the_words_of_every_case_are_those_of_bash(tmp_path):
    truth = argv_of_bash(CASES, tmp_path, ENVIRON)

    for script, expected in zip(CASES, truth, strict=True):
        assert sorted(words_read(script)) == sorted(expected), script
    assert sum(map(bool, truth)) > 50


def test_the_words_of_generated_scripts_are_those_of_bash(tmp_path):
    maker = random.Random(0)
    scripts = [generated(maker) for _ in range(200)]

    truth = argv_of_bash(scripts, tmp_path, ENVIRON)

    for script, expected in zip(scripts, truth, strict=True):
        assert words_read(script) == expected, script
    assert sum(map(len, truth)) > 300


def words_read(script):
    """Return the words of the programs that a script comes to."""
    reading = read_text(script, {**ENVIRON, "PATH": "/bin"})
    return [list(command.words) for command in reading.commands if command.words[0] in PROGRAMS]


def generated(maker):
    """Return a launch script of assignments, arrays, conditions and loops, at random."""
    lines = ["#!/bin/bash", "V0='first value'", "A0=(x 'y z')", "N0=3"]
    for _ in range(maker.randint(2, 7)):
        lines += statement(maker, depth=0)
    lines.append(f"torchrun --nproc_per_node {word(maker)} train.py " + " \\\n  ".join(word(maker) for _ in range(4)))
    return "\n".join(lines) + "\n"


def statement(maker, depth):
    kind = maker.choice(
        ["value", "value", "append", "array", "export", "number", "if", "for", "case", "comment", "run"]
    )
    number = maker.randint(0, 3)
    if depth > 1 and kind in ("if", "for", "case"):
        kind = "value"
    simple = {
        "value": f"V{number}={word(maker)}",
        "append": maker.choice([f"V{number}+={word(maker)}", f"A{number}+=({word(maker)})"]),
        "array": f"A{number}=(\n  {word(maker)}  # {maker.choice(string.punctuation)}\n  {word(maker)}\n)",
        "export": f"export E{number}={word(maker)}",
        "number": f"N{number}=$(({maker.randint(1, 9)} {maker.choice('+*-')} N0))",
        "comment": '# it\'s a "comment" with $V0 and (\n',
        "run": f"run {word(maker)} {word(maker)}{maker.choice(['', ' > log', ' 2>&1', ' | cat'])}",
    }
    if kind in simple:
        return [simple[kind]]
    return compound(maker, kind, depth, number)


def compound(maker, kind, depth, number):
    inner = [*statement(maker, depth + 1), ":"]
    if kind == "if":
        test = maker.choice(
            ['[ -n "$V1" ]', '[ -z "$E2" ]', "[[ $N0 -gt 2 ]]", '[ "$V0" = "first value" ]', "[[ $V3 == a* ]]"]
        )
        return [f"if {test}; then", *inner, "else", *statement(maker, depth + 1), ":", "fi"]
    if kind == "for":
        return [f"for V{number} in {word(maker)} {word(maker)}; do", *inner, f"run $V{number}", "done"]
    patterns = maker.choice(["a*", "first*", "x|y"])
    return [f'case "$V{number}" in', f"{patterns})", *inner, ";;", "*)", "run other ;;", "esac"]


def word(maker):
    """Return a word of one to three pieces, quoted and not."""
    number = maker.randint(0, 3)
    pieces = [
        "--lr",
        "1e-4",
        "'single $V0 \"q\"'",
        "\"double $V0 'q'\"",
        f"$V{number}",
        f"${{V{number}}}",
        f'"${{V{number}}}"',
        f"${{V{number}:-dflt}}",
        f'"${{V{number}:-d f}}"',
        f"${{V{number}:+alt}}",
        f"${{V{number}#f*t}}",
        f"${{V{number}%e}}",
        f"${{#V{number}}}",
        f'"${{A{number}[@]}}"',
        f"${{A{number}[@]}}",
        f"${{A{number}[0]}}",
        f"${{#A{number}[@]}}",
        f"$((N0 + {number}))",
        "\\$x",
        "a\\ b",
        "x{1,2}",
        "{a..c}",
        '""',
        "$EMPTY",
        "$SPACED",
        "path/to.file",
        "k=v",
        "a#x",
    ]
    return "".join(maker.choice(pieces) for _ in range(maker.choice([1, 1, 1, 2, 3])))
