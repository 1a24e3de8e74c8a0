"""OLMo-core 3.0.0 trains on two CPU ranks and saves at step 6; its next ten losses are those of a run here."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import WSD, AdamWConfig, CosWithWarmup, LinearWithWarmup
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.train_module import TransformerTrainModuleConfig

from shardwise.config import config_from_sections
from shardwise.config.other_names import WORDS
from shardwise.optim.learning_rate import learning_rate
from shardwise_use.porting.recipes import recipe_of
from tests.interop.continued import AFTER, BEFORE, go_on, made

STEPS = 20
CASES = [("olmo2", "skip"), ("olmo3", "adamw"), ("olmo3-yarn", "adamw"), ("llama", "skip"), ("qwen3", "adamw")]
PRESETS = {
    "llama3_70B": None,  # its width, 8,196, is no multiple of 64 heads
    "olmo2_": "olmo2", "olmo3_": "olmo3", "llama2_": "llama", "llama3_": "llama", "qwen3_0_6B": "qwen3",
    "qwen3_8B": "qwen3", "gemma3_1B": None, "qwen3_5_4B": None, "olmoe_1B_7B": None, "ngpt_271M": None,
}  # fmt: skip
"""Beginning of the names of OLMo-core's own sizes → the family here."""
RECIPE_STEPS, LENGTH = 60, 128


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


def saved(scheduler: Any, at: Path) -> str:
    """The path of a config as the program saves it with a run."""
    tokens = TokenizerConfig.dolma2()
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=4 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=3e-3, betas=(0.9, 0.95)),
        max_grad_norm=1.0,
        scheduler=scheduler,
    )
    parts: dict[str, Any] = {
        "model": TransformerConfig.olmo2_190M(vocab_size=tokens.padded_vocab_size()),
        "train_module": module,
        "dataset": NumpyFSLDatasetConfig(paths=["a.npy"], sequence_length=LENGTH, tokenizer=tokens, work_dir="w"),
        "data_loader": NumpyDataLoaderConfig(global_batch_size=16 * LENGTH, seed=0),
        "trainer": TrainerConfig(save_folder="run", max_duration=Duration.tokens(RECIPE_STEPS * 16 * LENGTH)),
    }
    path = at / "config.json"
    path.write_text(json.dumps({name: part.as_config_dict() for name, part in parts.items()}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "scheduler",
    [
        CosWithWarmup(warmup=7),
        CosWithWarmup(warmup_fraction=0.1, alpha_f=0.0),
        LinearWithWarmup(warmup=7, alpha_f=0.2),
        WSD(warmup=7, decay=12, decay_fraction=None),
        WSD(warmup=7, decay_fraction=0.25),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_every_step_has_the_rate_of_the_maker(scheduler: Any, tmp_path: Path) -> None:
    made = recipe_of(saved(scheduler, tmp_path))
    assert made.problems == []
    config = config_from_sections(made.sections)
    assert (config.train.steps, config.train.global_batch, config.train.micro_batch) == (RECIPE_STEPS, 16, 4)
    assert config.model.family == "olmo2"
    ours = [learning_rate(config.optimizer, RECIPE_STEPS, step) for step in range(1, RECIPE_STEPS + 1)]
    theirs = [float(scheduler.get_lr(3e-3, step, RECIPE_STEPS)) for step in range(1, RECIPE_STEPS + 1)]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("preset", WORDS["model.preset"])
def test_a_preset_has_the_sizes_of_the_maker(preset: str) -> None:
    ours = WORDS["model.preset"][preset]
    (method,) = (name for name in dir(TransformerConfig) if name.lower() == preset)
    theirs = getattr(TransformerConfig, method)(vocab_size=512)
    mixer = theirs.block.sequence_mixer
    assert ours["model.hidden_size"] == theirs.d_model
    assert ours["model.num_hidden_layers"] == theirs.n_layers
    assert ours["model.intermediate_size"] == theirs.block.feed_forward.hidden_size
    assert ours["model.num_attention_heads"] == mixer.n_heads
    assert ours["model.num_key_value_heads"] == (mixer.n_kv_heads or mixer.n_heads)
    assert ours["model.rope_theta"] == mixer.rope.theta
    assert ours["model.rms_norm_eps"] == theirs.block.layer_norm.eps
