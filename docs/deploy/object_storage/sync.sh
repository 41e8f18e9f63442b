#!/bin/sh
# Copies the runs below a folder to object storage, once: sync.sh RUNS TARGET [HOST], such as sync.sh /runs store:bucket/runs
# Call it every few minutes on every node (cron, a timer, a loop in a sidecar). TARGET is one of rclone.
#
# Of a run, what only this node writes (nodes/HOST) is mirrored: segments that were merged vanish there too, after the one
# that has their rows has arrived. Everything else is only added to. Nothing is moved: an agent starts again from its segments.
# The agent's token stays on the node: whoever has it can give the agent orders.
set -eu

runs=$1
target=$2
host=${3:-$(hostname)}

for run in "$runs"/*/; do
    name=$(basename "$run")
    rclone copy "$run" "$target/$name" --exclude '/nodes/**' --exclude '*.tmp'
    if [ -d "$run/nodes/$host" ]; then
        rclone sync "$run/nodes/$host" "$target/$name/nodes/$host" \
            --exclude token --exclude '*.tmp' --exclude .compact.lock --exclude '.spill/**'
    fi
done
