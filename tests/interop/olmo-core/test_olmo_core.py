"""OLMo-core 3.0.0 trains on two CPU ranks and saves at step 6; its next ten losses are those of a run here."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.interop.continued import AFTER, BEFORE, go_on, made

STEPS = 20
CASES = [("olmo2", "skip"), ("olmo3", "adamw"), ("olmo3-yarn", "adamw"), ("llama", "skip"), ("qwen3", "adamw")]
PRESETS = {
    "llama3_70B": None,  # its width, 8,196, is no multiple of 64 heads
    "olmo2_": "olmo2", "olmo3_": "olmo3", "llama2_": "llama", "llama3_": "llama", "qwen3_0_6B": "qwen3",
    "qwen3_8B": "qwen3", "gemma3_1B": None, "qwen3_5_4B": None, "olmoe_1B_7B": None, "ngpt_271M": None,
}  # fmt: skip
"""Beginning of the names of OLMo-core's own sizes → the family here."""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of OLMo-core's run, and the losses of all steps."""
    (model, optimizer), folder = request.param, tmp_path_factory.mktemp("-".join(request.param))
    maker, lengths = Path(__file__).with_name("maker.py"), {"steps": STEPS, "stop": BEFORE + AFTER}
    return folder / "run", made(2, maker, folder, model=model, optimizer=optimizer, **lengths)


def test_the_next_ten_losses_are_olmo_cores(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    run, losses = trained
    go_on(run / f"step{BEFORE}", tmp_path / "run", "--from", "olmo-core", losses=losses)


def test_every_size_of_olmo_core_is_read_or_refused(tmp_path: Path) -> None:
    from olmo_core.nn.transformer import TransformerConfig

    from shardwise.base.errors import ConfigError
    from shardwise_use.importing.olmo_core import _model_of

    for name in dir(TransformerConfig):
        family = next((family for start, family in PRESETS.items() if name.startswith(start)), "")
        if family == "" or name.endswith("_like"):
            continue
        described = {"model": getattr(TransformerConfig, name)(vocab_size=1000).as_config_dict()}
        described = json.loads(json.dumps({**described, "train_module": {"max_sequence_length": 4096}}))
        with nullcontext() if family else pytest.raises(ConfigError, match="must be"):
            config, _ = _model_of(described, "config.json")
            assert config.family == family, name
