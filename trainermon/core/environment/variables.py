"""What environment variables mean for a training: which change numbers, which speed, which only say where it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from trainermon.core.environment.secrets import Redactor


class VariableMeaning(Enum):
    """What a difference in a variable can do."""

    NUMBERS = "numbers"
    SPEED = "speed"
    PLACE = "place"
    UNKNOWN = "unknown"


def _any_of(text: str) -> re.Pattern[str]:
    return re.compile("|".join(word.replace("*", r"\w*") for word in text.split()))


_NUMBERS = _any_of(
    "NCCL_ALGO NCCL_PROTO NCCL_DETERMINISTIC NCCL_NVLS_ENABLE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS "
    "NCCL_COLLNET_ENABLE HCCL_DETERMINISTIC HCCL_ALGO CLOSE_MATMUL_K_SHIFT LCCL_DETERMINISTIC HCCL_OP_EXPANSION_MODE "
    "CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE CUDNN_DETERMINISTIC *TF32* *DETERMINISTIC* *ALLOW_FP16* "
    "OMP_NUM_THREADS MKL_NUM_THREADS MKL_CBWR MKL_DYNAMIC OPENBLAS_NUM_THREADS ATEN_CPU_CAPABILITY ONEDNN_* DNNL_* "
    "ATEN_INTRAOP_NUM_THREADS PYTHONHASHSEED NVTE_* FLASH_ATTENTION_* TORCHINDUCTOR_* TORCHDYNAMO_* TORCH_COMPILE_* "
    "PYTORCH_JIT* INF_NAN_MODE_* TE_PARALLEL_COMPILER JIT_COMPILE ASCEND_GLOBAL_JIT_COMPILE MS_ENABLE_* "
    "ROCBLAS_* HIPBLASLT_* MIOPEN_* XLA_FLAGS *_SEED SEED"
)
_SPEED = _any_of(
    "NCCL_* HCCL_* CUDA_LAUNCH_BLOCKING ASCEND_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF "
    "PYTORCH_NPU_ALLOC_CONF PYTORCH_ALLOC_CONF TORCH_NCCL_* TORCH_HCCL_* TASK_QUEUE_ENABLE CPU_AFFINITY_CONF KMP_* "
    "GOMP_* MALLOC_* LD_PRELOAD COMBINED_ENABLE MULTI_STREAM_MEMORY_REUSE GLOO_* UCX_* TOKENIZERS_PARALLELISM "
    "PYTORCH_NO_CUDA_MEMORY_CACHING TORCH_CUDNN_* CUDA_MODULE_LOADING CUDA_CACHE_* ACL_* TRITON_*"
)
_PLACE = _any_of(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_* NODE_RANK NNODES MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_* GROUP_WORLD_SIZE HOSTNAME HOST PWD OLDPWD HOME USER LOGNAME SHELL SHLVL _ TERM* LANG LC_\\w* TZ "
    "PATH PYTHONPATH LD_LIBRARY_PATH LIBRARY_PATH CPATH MANPATH INFOPATH TMPDIR TMP TEMP DISPLAY EDITOR PAGER LESS* "
    "LS_COLORS MAIL SSH_* XDG_* DBUS_* SLURM_* PMI* OMPI_* MPI_* PBS_* LSB_* K8S_* KUBERNETES_* JOB_* "
    "CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES ASCEND_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
    "NVIDIA_VISIBLE_DEVICES NVIDIA_* VIRTUAL_ENV* CONDA_* PS1 PROMPT_COMMAND HISTFILE HIST* COLORTERM COLUMNS LINES "
    "NCCL_SOCKET_IFNAME HCCL_SOCKET_IFNAME HCCL_IF_\\w* GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME NCCL_IB_HCA NCCL_DEBUG\\w* "
    "HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT RANK_TABLE_FILE RANK_ID DEVICE_ID PYTEST_* TRAINERMON_* MS_NODE_ID "
    "MS_SCHED_\\w* MS_ROLE MS_WORKER_NUM *PROXY *_proxy PIP_* DEBIAN_* GPG_* PYTHON_* PYTHONDONTWRITEBYTECODE "
    "PYTHONUNBUFFERED OUTPUT_DIR LOG_DIR *_LOG_LEVEL *_LOG_PATH"
)
_MEANINGS = ((_NUMBERS, VariableMeaning.NUMBERS), (_PLACE, VariableMeaning.PLACE), (_SPEED, VariableMeaning.SPEED))

PAIRS: Mapping[str, str] = {
    "HCCL_DETERMINISTIC": "NCCL_DETERMINISTIC",
    "HCCL_ALGO": "NCCL_ALGO",
    "ASCEND_LAUNCH_BLOCKING": "CUDA_LAUNCH_BLOCKING",
    "ASCEND_RT_VISIBLE_DEVICES": "CUDA_VISIBLE_DEVICES",
}
"""Variables of Ascend, and what they are called on other accelerators."""
DEFAULTS: Mapping[str, str] = {
    "HCCL_DETERMINISTIC": "False",
    "NCCL_DETERMINISTIC": "False",
    "ASCEND_LAUNCH_BLOCKING": "0",
    "CUDA_LAUNCH_BLOCKING": "0",
    "HCCL_INTRA_ROCE_ENABLE": "0",
    "HCCL_INTRA_PCIE_ENABLE": "1",
}
"""What an unset variable stands for."""


def meaning_of(name: str) -> VariableMeaning:
    """Return what a difference in the variable `name` can do.

    >>> meaning_of("NCCL_ALGO").value, meaning_of("NCCL_BUFFSIZE").value, meaning_of("MY_FLAG").value
    ('numbers', 'speed', 'unknown')
    """
    return next((meaning for pattern, meaning in _MEANINGS if pattern.fullmatch(name)), VariableMeaning.UNKNOWN)


def allowed_settings(environ: Mapping[str, str], redactor: Redactor) -> dict[str, str]:
    """Return the variables that are known to change numbers or speed: all that a run may keep of its environment."""
    known = (VariableMeaning.NUMBERS, VariableMeaning.SPEED)
    return {
        name: str(redactor.value(name, value)) for name, value in sorted(environ.items()) if meaning_of(name) in known
    }


def all_variables(environ: Mapping[str, str], redactor: Redactor) -> dict[str, str]:
    """Return all variables, without secrets; a name that is itself a secret is taken out too."""
    redactor.learn(environ)
    return {redactor.text(name): str(redactor.value(name, value)) for name, value in sorted(environ.items())}
