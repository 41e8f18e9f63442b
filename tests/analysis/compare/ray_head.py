"""The head of a Ray cluster on this machine: prints its address, and stops all its processes when its input ends."""

import sys

from ray.cluster_utils import Cluster  # `python ray_head.py [CPUS]`

cluster = Cluster(
    initialize_head=True,
    head_node_args={
        "num_cpus": int((sys.argv[1:] or ["1"])[0]),
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
    },
)
try:
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
finally:
    cluster.shutdown()
