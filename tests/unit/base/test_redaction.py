"""What is hidden in texts that are kept."""

from datetime import date

import pytest

from shardwise.base.errors import ConfigError, DataError, RunError
from shardwise.base.redaction import recorded_variables, redacted, redacted_arguments, without_secrets
from tests.rows import rows_of

ROWS = rows_of(__file__)

SIGNED = "https://store.example/data.txt?X-Amz-Credential=AKIA%2F20261121&X-Amz-Signature=5ecret"


@pytest.mark.parametrize(("text", "shown"), ROWS["texts"])
def test_log_ins_and_query_strings_are_hidden_in_any_text(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown, "a text may pass twice"


def test_errors_command_lines_and_records_hide_secrets() -> None:
    for kind in [RunError, ConfigError, DataError]:
        assert str(kind(f"{SIGNED} is wrong")) == "https://store.example/data.txt?(redacted) is wrong"
        error = ConfigError([f"a: {SIGNED}", "b"])
        assert "5ecret" not in f"{error} {error!r} {error.args} {error.problems}"
    for given, shown in [
        (["--api-key", "abc", "next"], ["--api-key", "(redacted)", "next"]),
        (
            ["--db-pwd=abc", "--pass", "abc", "-pw", "abc"],
            ["--db-pwd=(redacted)", "--pass", "(redacted)", "-pw", "(redacted)"],
        ),
        (["--bypass", "abc", "passes=3"], ["--bypass", "abc", "passes=3"]),
        (["data.path=s3://user:pass@bucket/x"], ["data.path=s3://(redacted)@bucket/x"]),
    ]:
        assert redacted_arguments(given) == shown
    # The value of a key hides with its name; a key that only sounds like a secret keeps its value.
    record = {
        "data": {"tokenizer": "gpt2", "text_key": "text", "path": "s3://me:5ecret@bucket/x", "day": date(2026, 1, 1)},
        "launch": {"environment": {"HF_TOKEN": "5ecret", "DB_PASSWD": "5ecret", "TOKENIZERS_PARALLELISM": "false"}},
        "hub": [{"api_key": "5ecret", "token": None}],
        "command": ["shardwise", "train", "hub.token=5ecret", "--password", "5ecret"],
        "loss": 2.5,
    }
    assert without_secrets(record) == {
        "data": {"tokenizer": "gpt2", "text_key": "text", "path": "s3://(redacted)@bucket/x", "day": "2026-01-01"},
        "launch": {
            "environment": {"HF_TOKEN": "(redacted)", "DB_PASSWD": "(redacted)", "TOKENIZERS_PARALLELISM": "false"}
        },
        "hub": [{"api_key": "(redacted)", "token": None}],
        "command": ["shardwise", "train", "hub.token=(redacted)", "--password", "(redacted)"],
        "loss": 2.5,
    }


def test_only_variables_that_help_are_recorded() -> None:
    helpful = {
        "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1", "SHARDWISE_CACHE": "/data", "MASTER_ADDR": "node1", "WORLD_SIZE": "8",
        "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "3",
        "HF_HOME": "/hf", "NCCL_BYPASS": "1", "TORCH_PASSES": "a  b", "NCCL_CROSS_NIC": "0",
    }  # fmt: skip
    secret = {
        "SLURM_JWT": "eyJ0", "SLURM_SPANK_X": "word", "OMPI_MCA_orte_hnp_uri": "17;tcp://node1", "HF_TOKEN": "hf_x",
        "PMIX_SECURITY_MODE": "munge", "PMI_FD": "7", "NCCL_TEST_TOKEN": "word", "SHARDWISE_API_KEY": "word",
        "SHARDWISE_NODE": '{"secret": "word"}',
        "SHARDWISE_S3_PWD": "word", "TRITON_PW": "word", "NCCL_PASS_1": "word", "FI_DB_PASSPHRASE": "word",
        "AWS_SESSION_TOKEN": "word", "MY_DIARY": "word", "PATH": "/bin",
    }  # fmt: skip
    assert recorded_variables({**helpful, **secret}) == helpful
    login = {
        "HF_ENDPOINT": "https://me:word@example.org/models",
        "NCCL_X": SIGNED,
        "NCCL_FOO": "--password  word --level 3",
        "XLA_FLAGS": "--a=1 --my_token=word",
    }
    assert recorded_variables(login) == {
        "HF_ENDPOINT": "https://(redacted)@example.org/models",
        "NCCL_X": "https://store.example/data.txt?(redacted)",
        "NCCL_FOO": "--password (redacted) --level 3",
        "XLA_FLAGS": "--a=1 --my_token=(redacted)",
    }
