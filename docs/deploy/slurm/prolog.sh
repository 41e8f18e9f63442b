#!/bin/sh
# Prolog and Epilog of Slurm, run by slurmd as root on every node of a job. At the start of a job the agent of its user
# begins to follow this node's runs; at the end it is looked after once more, so that what a lost agent has left is
# stored. It is no part of the job's cgroup, so the job's end does not end it; it ends by itself when idle.
#
# A prolog that fails drains the node, and one that hangs holds up the job: this one does neither.
set -u

user=${SLURM_JOB_USER:-}
case $user in
    "" | root | *[!A-Za-z0-9._-]*) exit 0 ;;
    *) ;;
esac

if ! timeout --kill-after=1 5 systemctl start "trainermon-node@$user.service"; then
    logger -t trainermon -p user.warning "job ${SLURM_JOB_ID:-?}: the agent of $user is not up; ranks start their own" || :
fi
exit 0
