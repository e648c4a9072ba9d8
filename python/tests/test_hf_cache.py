# SPDX-License-Identifier: Apache-2.0
"""The layers of KVCache against plain lists of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import framework_or_skip

torch = framework_or_skip("torch")
transformers = framework_or_skip("transformers")

from leanattn._hf_cache import DECODE_TOKENS, FixedLayer, FixedWindowLayer, GrowingLayer, KVCache  # noqa: E402

HEADS, DIM, ROOM = 2, 4, 3000
STEP = (
    st.tuples(st.just("add"), st.integers(1, 150))
    | st.tuples(st.just("crop"), st.integers(0, 64))
    | st.tuples(st.just("beams"), st.permutations([0, 0, 1]))
)


def tokens(batch, count, first):
    """Tokens that say whose they are and where: K[b, h, t, :] is b, h, the position, 1."""
    k = torch.zeros(batch, HEADS, count, DIM)
    k[..., 0] = torch.arange(batch)[:, None, None]
    k[..., 1] = torch.arange(HEADS)[None, :, None]
    k[..., 2] = torch.arange(first, first + count)
    k[..., 3] = 1
    return k


def shown(layer, keys, new, offset, n):
    """What a step sees, in order: [batch, heads, tokens, d], from what update returned and get_mask_sizes said before."""
    offset = int(offset)
    first = max(0, -offset)
    last = new - offset
    assert keys.shape[2] == n and 0 <= first <= last <= n
    return keys[:, :, first:last], offset + first


@pytest.mark.parametrize("kind", ["growing", "fixed", "growing window", "fixed window"])
@given(steps=st.lists(STEP, min_size=1, max_size=30), window=st.integers(1, 90))
def test_layer(kind, steps, window):
    """The tokens of a step are those of a list, the last of a window at least, in order and each once. What is cropped is never more than
    64 tokens behind the farthest that was written."""
    layer = {
        "growing": lambda: GrowingLayer(),
        "fixed": lambda: FixedLayer(ROOM * 2),
        "growing window": lambda: GrowingLayer(window),
        "fixed window": lambda: FixedWindowLayer(ROOM * 2, window),
    }[kind]()
    right = torch.zeros(2, HEADS, 0, DIM)
    stamp = farthest = 0
    for what, value in steps:
        total = right.shape[2]
        if what == "add" and total < ROOM:
            new = tokens(2, value, stamp)
            stamp += value
            n, offset = layer.get_mask_sizes(value) if layer.is_initialized else (None, None)
            if n is None:
                layer.lazy_initialization(new, new)
                n, offset = layer.get_mask_sizes(value)
            keys, values = layer.update(new, 2 * new)
            right = torch.cat([right, new], 2)
            seen, first = shown(layer, keys, right.shape[2], offset, n)
            needed = right.shape[2] if "window" not in kind else min(right.shape[2], window - 1 + value)
            assert seen.shape[2] >= needed and first == right.shape[2] - seen.shape[2]
            assert torch.equal(seen[:, :, -needed:], right[:, :, -needed:])
            assert torch.equal(shown(layer, values, right.shape[2], offset, n)[0], 2 * seen)
            farthest = max(farthest, right.shape[2])
        elif what == "crop" and value <= total and farthest - (total - value) <= DECODE_TOKENS:
            layer.crop(-value)
            right = right[:, :, : total - value]
        elif what == "beams" and total:
            index = torch.tensor(value[:2])
            layer.reorder_cache(index)
            right = right[index]
        assert int(layer.get_seq_length()) == right.shape[2]


def test_crop_refuses_what_a_window_has_passed():
    layer = GrowingLayer(10)
    layer.update(tokens(1, 100, 0), tokens(1, 100, 0))
    layer.crop(-64)
    with pytest.raises(ValueError, match=r"crop\(-1\): 9 tokens are stored, the first of them at position 27"):
        layer.crop(-1)
    with pytest.raises(ValueError, match="given as a negative number"):
        layer.crop(5)


def test_recording_keeps_everything_until_crop():
    layer = GrowingLayer(10)
    layer.activate_past_recording()
    layer.update(tokens(1, 500, 0), tokens(1, 500, 0))
    layer.crop(-400)
    assert layer.get_seq_length() == 100
    assert torch.equal(layer.update(tokens(1, 1, 100), tokens(1, 1, 100))[0][..., 2], torch.arange(91.0, 101).expand(1, HEADS, 10))


def test_nothing_moves_within_a_block():
    """A token is written where it stays, and the others stay where they are."""
    for layer in (GrowingLayer(), FixedLayer(2000), FixedWindowLayer(2000, 200)):
        layer.update(tokens(1, 100, 0), tokens(1, 100, 0))
        where = layer.keys.data_ptr()
        for i in range(100):
            layer.update(tokens(1, 1, 100 + i), tokens(1, 1, 100 + i))
        assert layer.keys.data_ptr() == where


def test_batch_operations():
    layer = GrowingLayer()
    layer.update(tokens(2, 5, 0), tokens(2, 5, 0))
    layer.batch_repeat_interleave(2)
    assert layer.keys[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    layer.batch_select_indices(torch.tensor([0, 3]))
    assert layer.keys[:, 0, 0, 0].tolist() == [0, 1]
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.update(tokens(2, 1, 7), tokens(2, 1, 7))[0][..., 2].tolist() == [[[7.0]] * 2] * 2


@pytest.mark.parametrize("max_len", [0, -1, 3.0, True, "3"])
def test_max_len_is_a_number_of_tokens(max_len):
    with pytest.raises(ValueError, match=f"max_len {max_len!r}: a whole number of tokens above 0 is needed, or None"):
        KVCache(transformers.LlamaConfig(num_hidden_layers=1), max_len)


@pytest.mark.parametrize("max_len", [None, 8])
def test_a_cache_needs_a_configuration(max_len):
    with pytest.raises(ValueError, match="config is a dict: a configuration of transformers is needed"):
        KVCache({}, max_len)
    with pytest.raises(ValueError, match="config is a Linear: its config is needed"):
        KVCache(torch.nn.Linear(1, 1), max_len)


def test_a_step_beyond_max_len_is_refused_and_changes_nothing():
    layer = KVCache(transformers.LlamaConfig(num_hidden_layers=1), 5).layers[0]
    with pytest.raises(ValueError, match="max_len 5 is full: 0 tokens are stored, and 6 more do not fit"):
        layer.update(tokens(1, 6, 0), tokens(1, 6, 0))
    layer.update(tokens(1, 4, 0), tokens(1, 4, 0))
    with pytest.raises(ValueError, match="max_len 5 is full: 4 tokens are stored, and 2 more do not fit"):
        layer.update(tokens(1, 2, 4), tokens(1, 2, 4))
    layer.update(tokens(1, 1, 4), tokens(1, 1, 4))
    assert int(layer.get_seq_length()) == 5
    layer.crop(-1)
    layer.update(tokens(1, 1, 4), tokens(1, 1, 4))
    with pytest.raises(ValueError, match="max_len 5 is full"):
        layer.update(tokens(1, 1, 5), tokens(1, 1, 5))
    ring = FixedWindowLayer(5, 2)
    for i in range(100):
        ring.update(tokens(1, 1, i), tokens(1, 1, i))
