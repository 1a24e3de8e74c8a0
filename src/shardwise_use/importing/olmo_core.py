"""stub"""

from pathlib import Path

from shardwise_use.importing.hugging_face import ForeignModel


def open_olmo_core(source: Path, *, weights_only: bool = False) -> ForeignModel:
    raise NotImplementedError
