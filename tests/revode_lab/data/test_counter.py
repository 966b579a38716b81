from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from revode_lab.data.batches import _GAMMA, _mix, permutation, random_bits, stream_key

MASK = (1 << 64) - 1


@given(key=st.integers(0, MASK), indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_tensor_arithmetic_equals_unbounded_integers(key: int, indices: list[int]) -> None:
    expected = [_mix((index * _GAMMA + key) & MASK) for index in indices]
    found = random_bits(key, torch.tensor(indices)).tolist()
    assert [bits & MASK for bits in found] == expected


def test_mixing_is_splitmix64() -> None:
    # The first outputs of the reference generator seeded with 1234567 (its state moves by gamma before each output).
    outputs = [_mix((1234567 + step * _GAMMA) & MASK) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_differ_in_every_counter() -> None:
    keys = {stream_key(seed, stream, epoch) for seed in range(8) for stream in range(3) for epoch in range(8)}
    assert len(keys) == 8 * 3 * 8
    assert stream_key(-1, 0) != stream_key(1, 0)


def test_bits_are_balanced() -> None:
    bits = random_bits(stream_key(0, 0), torch.arange(20_000))
    share = torch.stack([(bits >> place & 1).double().mean() for place in range(64)])
    assert (share - 0.5).abs().max() < 0.02


@given(num_items=st.integers(0, 300), key=st.integers(0, MASK))
def test_permutation_permutes(num_items: int, key: int) -> None:
    assert permutation(num_items, key).sort().values.tolist() == list(range(num_items))
