"""The tables of a `.vis.db` file, as msprobe 26.2.0 writes them."""

from __future__ import annotations

SUFFIX = ".vis.db"
ROOT = "DefaultModel"
"""Name of the node that all are in."""
TARGET, GOLDEN = "NPU", "Bench"
MODULE, FUNCTION, COLLECTION = "0", "1", "9"
"""Types of nodes. A collection is a row of functions between two modules."""
PASS, WARNING, ERROR = 0.0, 0.5, 1.0
"""Precision indexes: those of warnings are from 0.3 on, those of errors from 0.6 on."""
WARNING_FROM, ERROR_FROM = 0.3, 0.6

TASKS = {"statistics": "summary", "checksum": "md5", "tensor": "summary"}
"""What msprobe calls a comparison, by our mode."""
DIFFERENCES = (
    "Max diff",
    "Min diff",
    "Mean diff",
    "L2norm diff",
    "MaxRelativeErr",
    "MinRelativeErr",
    "MeanRelativeErr",
    "NormRelativeErr",
)
"""What is written of each tensor that was compared; of these the last four in per cent."""
TIPS = {
    "Max diff": "the target's largest element minus the golden one's",
    "Min diff": "the target's smallest element minus the golden one's",
    "Mean diff": "the target's mean minus the golden one's",
    "L2norm diff": "the target's norm minus the golden one's",
}
_DESCRIPTION = "trainermon compare: what rounding and the inputs' differences explain passes"
COLOURS = {
    "#FFFCF3": {"value": [0, WARNING_FROM], "description": _DESCRIPTION, "accuracy_level": "pass"},
    "#FFDC7F": {"value": [WARNING_FROM, ERROR_FROM], "description": _DESCRIPTION, "accuracy_level": "warning"},
    "#FF704D": {"value": [ERROR_FROM, 1], "description": _DESCRIPTION, "accuracy_level": "error"},
    "#C7C7C7": {"value": [], "description": "has no counterpart", "accuracy_level": "unmatched node"},
}

NODE_COLUMNS = {
    "id": "TEXT PRIMARY KEY",
    "graph_id": "TEXT NOT NULL",
    "node_order": "INTEGER NOT NULL",
    "node_name": "TEXT NOT NULL",
    "node_type": "TEXT NOT NULL",
    "up_node": "TEXT",
    "sub_nodes": "TEXT",
    "precision_index": "INTEGER",
    "overflow_level": "TEXT",
    "micro_step_id": "INTEGER NOT NULL",
    "matched_node_link": "TEXT",
    "stack_id": "TEXT",
    "parallel_merge_info": "TEXT",
    "matched_distributed": "TEXT",
    "modified": "INTEGER NOT NULL",
    "input_data": "TEXT",
    "output_data": "TEXT",
    "data_source": "TEXT",
    "dump_data_dir": "TEXT",
    "step": "INTEGER NOT NULL",
    "rank": "INTEGER NOT NULL",
    "is_distributed": "INTEGER",
}
CONFIG_COLUMNS = {
    "id": "TEXT PRIMARY KEY",
    "graph_type": "TEXT NOT NULL",
    "task": "TEXT",
    "tool_tip": "TEXT",
    "micro_steps": "INTEGER",
    "overflow_check": "INTEGER",
    "node_colors": "TEXT NOT NULL",
    "rank_list": "TEXT NOT NULL",
    "step_list": "TEXT NOT NULL",
}
STACK_COLUMNS = {"id": "TEXT PRIMARY KEY", "stack_info": "TEXT"}
TABLES = {"tb_nodes": NODE_COLUMNS, "tb_config": CONFIG_COLUMNS, "tb_stack": STACK_COLUMNS}
INDEXES = (
    ("step", "rank", "data_source", "up_node", "node_order"),
    ("step", "rank", "data_source", "node_name"),
    ("step", "rank", "data_source", "node_order"),
    ("step", "rank", "node_order"),
    ("step", "rank", "micro_step_id", "node_order"),
    ("step", "rank", "modified", "matched_node_link"),
    ("is_distributed",),
)


def create_table(name: str) -> str:
    """Return the statement that makes one of `TABLES`."""
    columns = ", ".join(f"{column} {kind}" for column, kind in TABLES[name].items())
    return f"CREATE TABLE {name} ({columns})"


def create_indexes() -> list[str]:
    """Return the statements that make the indexes of tb_nodes."""
    return [f"CREATE INDEX index{n} ON tb_nodes ({', '.join(columns)})" for n, columns in enumerate(INDEXES, 1)]


def insert_row(name: str) -> str:
    """Return the statement that adds a row with all columns of one of `TABLES`."""
    return f"INSERT INTO {name} VALUES ({', '.join('?' * len(TABLES[name]))})"  # noqa: S608 - names of our own
