"""How two sides' tokens are paired: the same from arrays, tensors and ragged lists, and what is refused."""

import numpy as np
import pytest
import torch

from trainermon.rl.tokens import NotComparableError, joined, pair, read_side

IDS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
LOGPROBS = np.array([[-1.0, -2.0, -3.0, 9.0], [-4.0, -5.0, 9.0, 9.0]])


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, lambda each: torch.tensor(each).tolist()])
def test_padded_arrays_and_ragged_lists_give_the_same_tokens(kind):
    padded = read_side(kind(LOGPROBS), mask=kind(MASK), ids=kind(IDS))
    ragged = read_side([[-1.0, -2.0, -3.0], [-4.0, -5.0]], ids=[[5, 6, 7], [8, 9]])

    for one, other in ((padded, padded), (padded, ragged), (ragged, padded), (ragged, ragged)):
        tokens = pair(one, other)
        assert tokens.rollout.tolist() == tokens.train.tolist() == [-1, -2, -3, -4, -5]
        assert tokens.ids.tolist() == [5, 6, 7, 8, 9]
        assert tokens.sequence.tolist() == [0, 0, 0, 1, 1]
        assert tokens.position.tolist() == [0, 1, 2, 0, 1]


def test_several_calls_are_one_after_the_other():
    parts = joined([read_side([[-1.0], [-2.0, -3.0]]), read_side(torch.tensor([[-4.0, -5.0]]))])

    tokens = pair(parts, read_side([[-1.0], [-2.0, -3.0], [-4.0, -5.0]]))

    assert tokens.rollout.tolist() == tokens.train.tolist() == [-1, -2, -3, -4, -5]
    assert tokens.num_sequences == 3


def test_bfloat16_is_read_without_loss():
    values = torch.tensor([[-1.5, -2.25]], dtype=torch.bfloat16)

    assert read_side(values).logprobs.tolist() == [-1.5, -2.25]


def test_what_is_not_finite_is_counted_and_left_out():
    tokens = pair(read_side([[-1.0, -np.inf, -3.0]]), read_side([[-1.0, -2.0, np.nan]]))

    assert (tokens.rollout.tolist(), tokens.num_nonfinite) == ([-1.0], 2)


def test_what_the_mask_hides_may_be_anything():
    hidden = np.where(MASK, LOGPROBS, np.nan)

    assert pair(read_side(hidden, mask=MASK), read_side(LOGPROBS, mask=MASK)).num_nonfinite == 0


def test_tokens_that_count_on_one_side_only_are_counted():
    wider = MASK.copy()
    wider[1, 2] = 1

    tokens = pair(read_side(LOGPROBS, mask=MASK), read_side(LOGPROBS, mask=wider))

    assert (len(tokens), tokens.num_masks_differ) == (5, 1)


@pytest.mark.parametrize(
    ("rollout", "train", "message"),
    [
        (([[-1.0]], {}), ([[-1.0], [-2.0]], {}), "the rollout has 1 sequences and the trainer 2"),
        (([[-1.0, -2.0]], {}), ([[-1.0]], {}), "sequence 0 has 2 tokens of the rollout and 1 of the trainer"),
        (([[-1.0, -2.0]], {"ids": [[3, 4]]}), ([[-1.0, -2.0]], {"ids": [[3, 5]]}), "token 1 of sequence 0 is 4"),
        (([[-1.0]], {"mask": [[0]]}), ([[-1.0]], {}), "no token counts under the masks"),
        (([[np.nan]], {}), ([[-1.0]], {}), "all 1 log-probabilities are NaN or infinite"),
        (([[2.0]], {}), ([[-2.0]], {}), "half of the rollout's log-probabilities are above 0: were negative"),
        (([[0.0] * 20], {}), ([[-0.1, -0.2] * 10], {}), "all log-probabilities of the rollout are 0"),
        ((np.ones((2, 3, 1)), {}), (np.ones((2, 3)), {}), r"found shape \[2, 3, 1\], expected \[sequences, tokens\]"),
    ],
)
def test_what_cannot_be_paired_says_why(rollout, train, message):
    with pytest.raises(NotComparableError, match=message):
        pair(read_side(rollout[0], **rollout[1]), read_side(train[0], **train[1]))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(NotComparableError, match="mask has 1 sequences of 3 tokens, logprobs 2 of 4"):
        read_side(LOGPROBS, mask=np.ones((1, 3)))


def test_experts_of_several_layers_differ_where_any_does():
    one, other = np.zeros((1, 3, 2), int), np.array([[[0, 0], [0, 1], [0, 0]]])

    tokens = pair(read_side([[-1.0, -1.0, -1.0]], experts=one), read_side([[-1.0, -1.0, -1.0]], experts=other))

    assert tokens.experts_differ.tolist() == [False, True, False]
