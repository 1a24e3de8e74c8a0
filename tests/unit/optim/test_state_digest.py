"""The arithmetic of the state hash: which changes of a state change it, and which do not."""

import numpy as np

from shardwise.base.tensor_box import Box
from shardwise.optim.state_digest import StateHash, box_sum, digest_place

SHAPE = (6, 10)
PLACE = digest_place(step=3, samples=24, tokens=768, position=24, seed=7)


def numbers(dtype: str = "f4", shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def whole(values: np.ndarray) -> int:
    return box_sum(values, values.shape, Box.whole(values.shape))


def test_sums_have_each_bit_each_place_and_add_up() -> None:
    for dtype in ["f2", "f4", "f8"]:
        values = numbers(dtype, (3, 4))
        bits = values.view(f"u{values.itemsize}")
        sums = {whole(values)}
        for index in np.ndindex(values.shape):
            for bit in range(8 * values.itemsize):
                bits[index] ^= bits.dtype.type(1) << bits.dtype.type(bit)
                sums.add(whole(values))
                bits[index] ^= bits.dtype.type(1) << bits.dtype.type(bit)
        assert len(sums) == 1 + values.size * 8 * values.itemsize
    for dtype in ["f4", "f8"]:
        values = numbers(dtype)
        sums = {whole(values), whole(np.roll(values, 1, axis=0)), whole(np.roll(values, 1, axis=1))}
        for a, b in (((0, 0), (0, 1)), ((0, 0), (1, 0)), ((2, 3), (3, 2)), ((5, 9), (0, 0))):
            swapped, negated = values.copy(), values.copy()
            swapped[a], swapped[b] = values[b], values[a]
            negated[a] *= -1
            negated[b] *= -1
            sums |= {whole(swapped), whole(negated)}
        assert len(sums) == 3 + 8
    for shape in [(), (7,), (4, 5), (2, 3, 4)]:
        values = numbers("f4", shape)
        cut = values.size // 2
        boxes = [*Box.of_run(0, cut, shape), *Box.of_run(cut, values.size - cut, shape)]
        assert sum(box_sum(values[box.slices], shape, box) for box in boxes) % 2**64 == whole(values)


def test_the_whole_hash_has_names_states_and_the_place() -> None:
    sums = {"model": {"a": 1, "b": 2}, "exp_avg": {"a": 3, "b": 4}}
    states = [
        StateHash(PLACE, sums),
        StateHash({**PLACE, "position": 32}, sums),
        StateHash(PLACE, {**sums, "model": {"a": 2, "b": 1}}),
        StateHash(PLACE, {**sums, "model": {"a": 1, "c": 2}}),
        StateHash(PLACE, {"model": sums["exp_avg"], "exp_avg": sums["model"]}),
    ]
    assert len({state.text for state in states}) == len(states)
    assert StateHash(PLACE, dict(reversed(sums.items()))).text == states[0].text
    assert len(states[0].text) == 16
