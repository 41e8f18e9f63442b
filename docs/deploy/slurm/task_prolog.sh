#!/bin/sh
# TaskProlog of Slurm, run as the user before every task: what it prints becomes the task's environment.
# The folder must be the same on all nodes; a value that the user has set stays.
if [ -z "${TRAINERMON_OUTPUT:-}" ]; then
    echo "export TRAINERMON_OUTPUT=${SLURM_SUBMIT_DIR:-$HOME}/trainermon_output"
fi
