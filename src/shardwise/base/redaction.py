"""Hides what no file, log or message may show: log-ins and query strings of URLs, secret arguments and variables.

A query string may be all that a presigned URL needs to be read, so it is hidden whatever it holds. Patterns are texts:
every command imports this module, few need it, and `re` keeps what it has compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "(redacted)"
_MARK = r"\(redacted\)"
# Up to the end of the word, without the punctuation of the sentence around it.
_END_OF_WORD = r"""[^\s'"<>]*[^\s'"<>),.:;\]]"""
# One slash is left of two where a URL was taken for a path.
_WEB_QUERY = rf"""(?i)(\bhttps?:/[^\s'"<>?]*\?)(?!{_MARK}){_END_OF_WORD}"""
# Of other schemes only what assigns a value: in a pattern such as s3://bucket/part-?.txt the mark is a wildcard.
_OTHER_QUERY = rf"""(://[^\s'"<>?]*\?)(?!{_MARK})(?=[^\s'"<>]*=){_END_OF_WORD}"""
# Libraries also show a URL without its host.
_SIGNED_BY = (
    r"x-(?:amz|goog|oss|cos|obs)-[\w-]+|(?:aws|oss)?accesskeyid|googleaccessid|signature|sig|policy|expires|key-pair-id"
    r"|(?:[\w-]*[_-])?(?:token|secret|password|credential)|(?:api|access)[_-]?key|hmac"
)
_PARAMETER = rf"""(?i)([?&#](?:{_SIGNED_BY})=)(?!{_MARK})[^\s'"<>&]+"""
# In a host's part nothing but a log-in ends with @. A password may have a slash, as the secret keys of S3 do. Digits
# alone after a colon are a port.
_LOGIN = r"""(?<=://)(?:[^/\s'"]+|[^/:@\s'"]*:(?!\d+(?:[/?#\s]|$))[^@\s'"]*)(?=@)"""

# The path of a webhook is its password. A list of `log.notify` in YAML or JSON ends at the next key.
_NOTIFIED = r"""\bnotify\b(?:['"]?\s*[:=].*(?:\n(?!\s*['"]?\w[\w.]*['"]?\s*(?::(?:\s|$)|=)).*)*|.*)"""
# Of punctuation only what is last, and a comma before the next address, are no part of a path.
_WEB_PATH = (
    rf"""(?i)(\bhttps?:/+(?!/))(?:[^/?#\s'"]*@)?((?:\[[\w:.]*\])?[^/?#@\s'"<>,\]]*)[/?#](?!{_MARK})"""
    rf"""(?:(?!,(?:https?:|env:))[^\s'"])+(?:(?<={_MARK})|(?<![<>),.:;\]}}]))"""
)

# Variables that decide how, how fast and where a run works. SLURM and MPI pass secret keys in variables with the same
# prefix as harmless ones, so of theirs only the variables that are named here are recorded.
_FAMILIES = (
    "CUDA_", "CUBLAS_", "CUDNN_", "NEURON_", "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_",
    "TORCHINDUCTOR_", "TORCHELASTIC_", "TRITON_", "SHARDWISE_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_",
    "ONEDNN_", "DNNL_", "MALLOC_",
)  # fmt: skip
_SLURM = """
    ARRAY_JOB_ID ARRAY_TASK_ID CLUSTER_NAME CPU_BIND CPUS_ON_NODE CPUS_PER_TASK DISTRIBUTION GPU_BIND GPUS GPUS_ON_NODE
    GPUS_PER_NODE GPUS_PER_TASK JOB_CPUS_PER_NODE JOB_END_TIME JOB_GPUS JOB_ID JOB_NAME JOB_NODELIST JOB_NUM_NODES
    JOB_PARTITION JOB_QOS JOB_START_TIME LOCALID MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NNODES NODEID NODELIST NPROCS
    NTASKS NTASKS_PER_NODE PROCID RESTART_COUNT STEP_ID STEP_NODELIST SUBMIT_DIR SUBMIT_HOST TASKS_PER_NODE
"""
_VARIABLES = {
    "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "XLA_FLAGS", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "TOKENIZERS_PARALLELISM", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "CONDA_DEFAULT_ENV", "XDG_CACHE_HOME", "TMPDIR", "SLURMD_NODENAME", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE",
    *(f"SLURM_{name}" for name in _SLURM.split()),
}  # fmt: skip
_SECRET_VARIABLE = (
    "(?i)TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|JWT|COOKIE|(?:^|_)(?:PASS|PW)(?:_|$)|_PWD(?:_|$)"
    "|^SHARDWISE_NODE$"
)
"""The last one holds what the launchers of a job show to its supervisor."""
# Arguments are matched by the end of their name: data.tokenizer and data.text_key are not secrets.
_SECRET_ARGUMENT = r"(?i)(?:^|[._-])(?:token|secret|pass(?:word|wd|phrase)?|pwd|pw|(?:api|access|secret)[_-]?key)$"


def redacted(text: str) -> str:
    """`text` without the log-ins and query strings of the URLs in it."""
    if ":/" in text or "=" in text:
        for query in (_WEB_QUERY, _OTHER_QUERY, _PARAMETER):
            text = re.sub(query, rf"\g<1>{REDACTED}", text)
    if "notify" in text and ":/" in text:
        text = re.sub(_NOTIFIED, lambda found: hosts_alone(found[0]), text)
    return re.sub(_LOGIN, REDACTED, text) if "://" in text else text


def hosts_alone(text: str) -> str:
    """`text` with no more than scheme and host of the web addresses in it."""
    return re.sub(_WEB_PATH, rf"\1\2/{REDACTED}", text)


def has_query(url: str) -> bool:
    """True if a URL has a query string."""
    return any(re.search(query, url) for query in (_WEB_QUERY, _OTHER_QUERY))


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line whose `name=value` and `--name value` secrets are hidden, and what `redacted` hides."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = re.search(_SECRET_ARGUMENT, name.lstrip("-")) is not None
        if hide_next:
            shown.append(REDACTED)
        elif secret and equals:
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(redacted(argument))
        hide_next = secret and not equals and argument.startswith("-")
    return shown


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Redact secrets in the values of environment variables, and select those that help to understand a run, by name.

    What is not listed here is not recorded, so a secret by any new name is not either. A value may have arguments.
    """
    return {
        name: _redacted_words(value)
        for name, value in sorted(variables.items())
        if name in _VARIABLES or (name.startswith(_FAMILIES) and not is_secret_variable(name))
    }


def _redacted_words(text: str) -> str:
    words = redacted(text).split()
    shown = redacted_arguments(words)
    return redacted(text) if shown == words else " ".join(shown)


def without_secrets(value: Any) -> Any:
    """A value of JSON or YAML without secrets: those of keys that are named as such, and what `redacted` hides."""
    if isinstance(value, Mapping):
        hidden = {key for key, inner in value.items() if isinstance(inner, str) and _is_secret_key(str(key))}
        shown = {str(key): REDACTED if key in hidden else without_secrets(inner) for key, inner in value.items()}
        if isinstance(targets := shown.get("notify"), list):
            shown["notify"] = [hosts_alone(str(target)) for target in targets]
        return shown
    if isinstance(value, list):
        is_command = all(isinstance(inner, str) for inner in value)
        return redacted_arguments(value) if is_command else [without_secrets(inner) for inner in value]
    if isinstance(value, str):
        return redacted(value)
    # YAML has dates and sets too.
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _is_secret_key(name: str) -> bool:
    """True if a key's value is a secret. A name in capitals is a variable's, any other name an argument's."""
    if name.isupper():
        return is_secret_variable(name) and name not in _VARIABLES
    return re.search(_SECRET_ARGUMENT, name) is not None


def is_secret_variable(name: str) -> bool:
    """True if the name of an environment variable says that its value is a secret."""
    return re.search(_SECRET_VARIABLE, name) is not None
