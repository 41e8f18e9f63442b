"""What a user asks of the monitor: read from JSON or YAML, checked completely, then frozen.

Key names are those of msprobe's monitor where it has the quantity, and its files are read unchanged. A key that is
unknown, of the wrong type, out of range or at odds with another is an error that names the key's path, what was found,
what was expected and the nearest right name. A key that msprobe accepts and that can have no effect here is reported.

| module | decides |
|---|---|
| `schema` | which keys there are, and what a value must be |
| `outputs` | the same of the forms that a run is written in |
| `run` | what of it the agent of a node is told |
| `msprobe` | what is different in a file that was written for msprobe, first or second version |
| `mindformers` | what is different in a training file of MindFormers |
| `dynamic` | when a configuration is followed, and when it waits |
| `reading` | how a file becomes a configuration |
"""

from trainermon.core.config.dynamic import is_followed, is_waiting
from trainermon.core.config.msprobe import WITHOUT_EFFECT
from trainermon.core.config.outputs import (
    ENTRY_POINTS,
    FORMATS,
    InfluxDBConfig,
    MindFormersConfig,
    MlflowConfig,
    OutputConfig,
    PushgatewayConfig,
    WandbConfig,
)
from trainermon.core.config.reading import load_config, parse_config
from trainermon.core.config.run import RunSettings
from trainermon.core.config.schema import (
    OPS,
    AgentConfig,
    AlertConfig,
    AnomalyArguments,
    AnomalyRuleConfig,
    CollectivesConfig,
    EscalationConfig,
    HangConfig,
    L2Targets,
    MonitorConfig,
    ReplayConfig,
)

__all__ = [
    "ENTRY_POINTS",
    "FORMATS",
    "OPS",
    "WITHOUT_EFFECT",
    "AgentConfig",
    "AlertConfig",
    "AnomalyArguments",
    "AnomalyRuleConfig",
    "CollectivesConfig",
    "EscalationConfig",
    "HangConfig",
    "InfluxDBConfig",
    "L2Targets",
    "MindFormersConfig",
    "MlflowConfig",
    "MonitorConfig",
    "OutputConfig",
    "PushgatewayConfig",
    "ReplayConfig",
    "RunSettings",
    "WandbConfig",
    "is_followed",
    "is_waiting",
    "load_config",
    "parse_config",
]
