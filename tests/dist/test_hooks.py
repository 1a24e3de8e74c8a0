"""A loss and an optimizer of the user's own train alike at every layout."""

from typing import Any

import pytest

from tests.dist.training import make_config, train


def test_hooks_train_alike_when_the_model_is_cut(ranks: Any) -> None:
    hooks = {
        "loss": "tests.own_hooks:cross_entropy",
        "optimizer": "tests.own_hooks:SignMomentum",
        "optimizer_options": {"momentum": 0.5},
    }
    plain = make_config()
    one = make_config(hooks=hooks)
    cut = make_config(hooks=hooks, parallel={"tensor": 2, "sequence": True})
    alone, whole = train(plain, steps=1), train(one)
    assert alone.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)  # it is the family's own loss
    for outcome in ranks(2).run(train, cut):
        assert outcome.losses == pytest.approx(whole.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(whole.norms, rel=1e-5)
        assert outcome.evaluation[0] == pytest.approx(whole.evaluation[0], rel=1e-5)
    assert whole.losses[3] < whole.losses[0]
