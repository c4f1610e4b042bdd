"""Buckets and optimization profiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.targets.buckets import decode_buckets, profiles, token_buckets


@pytest.mark.parametrize(
    ("max_num_seqs", "buckets"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (7, (1, 2, 4, 7)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),  # never a size above the maximum
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
    ],
)
def test_decode_buckets(max_num_seqs, buckets):
    assert decode_buckets(max_num_seqs) == buckets


def test_token_buckets_double_up_to_the_largest_step():
    assert token_buckets(512) == (64, 128, 256, 512)
    assert token_buckets(300) == (64, 128, 256, 300)
    assert token_buckets(48) == (48,)


def test_profiles_of_the_defaults():
    found = profiles(32, 512)
    assert [(p.kind, p.num_tokens, p.buckets) for p in found] == [
        ("decode", (1, 1, 2), (1, 2)),
        ("decode", (3, 4, 4), (4,)),
        ("decode", (5, 8, 8), (8,)),
        ("decode", (9, 16, 16), (16,)),
        ("decode", (17, 32, 32), (24, 32)),
        ("mixed", (1, 64, 64), (64,)),
        ("mixed", (65, 128, 128), (128,)),
        ("mixed", (129, 256, 256), (256,)),
        ("mixed", (257, 512, 512), (512,)),
    ]
    assert {p.num_seqs for p in found if p.kind == "mixed"} == {(1, 32, 32)}


def test_coarse_profiles():
    found = profiles(32, 512, coarse=True)
    assert [(p.kind, p.num_tokens, p.num_seqs, p.buckets) for p in found] == [
        ("decode", (1, 1, 2), (1, 1, 2), (1, 2)),
        ("decode", (3, 32, 32), (3, 32, 32), (4, 8, 16, 24, 32)),
        ("mixed", (1, 512, 512), (1, 32, 32), (64, 128, 256, 512)),
    ]
    assert [p.kind for p in profiles(1, 64, coarse=True)] == ["decode", "mixed"]


def test_shapes_of_a_profile():
    decode, mixed = profiles(2, 16)
    assert decode.shapes(5) == {
        **dict.fromkeys(("input_ids", "positions", "slot_mapping", "seq_lens", "logits_indices"), ((1,), (1,), (2,))),
        "block_table": ((1, 5), (1, 5), (2, 5)),
        "query_start_loc": ((2,), (2,), (3,)),
    }
    assert mixed.shapes(5)["input_ids"] == ((1,), (16,), (16,))
    assert mixed.shapes(5)["seq_lens"] == ((1,), (2,), (2,))


@given(st.integers(1, 300), st.integers(0, 5000), st.booleans())
def test_every_step_has_a_profile_and_every_bucket_one(max_num_seqs, extra, coarse):
    max_tokens = max_num_seqs + extra
    found = profiles(max_num_seqs, max_tokens, coarse=coarse)
    assert [profile.index for profile in found] == list(range(len(found)))
    decode = [profile for profile in found if profile.kind == "decode"]
    assert sum((profile.buckets for profile in decode), ()) == decode_buckets(max_num_seqs)
    for size in range(1, max_num_seqs + 1):
        assert sum(p.num_tokens[0] <= size <= p.num_tokens[2] for p in decode) == 1
    mixed = [profile for profile in found if profile.kind == "mixed"]
    for tokens in (1, max_num_seqs, max_tokens):
        assert any(p.num_tokens[0] <= tokens <= p.num_tokens[2] for p in mixed)
    for profile in found:
        low, opt, high = profile.num_tokens
        assert low <= opt <= high
        assert high > 1  # or TensorRT keeps a second copy of every layer
        assert all(low <= bucket <= high for bucket in profile.buckets)
