from shardwise.base.errors import ConfigError, DataError, RunError, ShardwiseError, divisors, nearest_numbers


def test_errors_and_numbers_near_a_value() -> None:
    assert str(ConfigError("a is wrong")) == "a is wrong"
    both = ConfigError(["a is wrong", "b is wrong"])
    assert both.problems == ["a is wrong", "b is wrong"]
    assert str(both) == "- a is wrong\n- b is wrong"
    assert (ShardwiseError("").exit_code, RunError("").exit_code) == (1, 1)
    assert (ConfigError("").exit_code, DataError("").exit_code) == (2, 2)
    assert issubclass(ConfigError, ValueError)
    for sign in ["\x1b", "\u2028", "\ud800"]:
        assert str(ConfigError(f"a{sign}b\tc\nd")) == f"a{ascii(sign)[1:-1]}b\tc\nd"
    for value, valid, expected in [(3, [1, 2, 4, 8], [2, 4]), (4, [1, 4], [4]), (9, [1, 2], [2]), (1, [2, 4], [2])]:
        assert nearest_numbers(value, valid) == expected
    for number, expected in [(1, {1}), (12, {1, 2, 3, 4, 6, 12}), (16, {1, 2, 4, 8, 16}), (2**31 - 1, {1, 2**31 - 1})]:
        assert divisors(number) == expected
