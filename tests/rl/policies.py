"""Two policies over made-up contexts, and what goes wrong between them, for many seeds at little cost."""

import numpy as np

from trainermon.rl.causes import Limits
from trainermon.rl.judging import judge
from trainermon.rl.tokens import pair, read_side
from trainermon.rl.values import Floor, Sampling

SEQUENCES, LENGTH, VOCABULARY = 128, 48, 200
FLOOR = Floor(mean_abs=0.02, source="measured")
FAULTS = {
    "shifted": "shifted",
    "padding of its own": "padding",
    "padding by the end token": "padding",
    "a prompt that counts": "padding",
    "raw log-probabilities": "temperature",
    "temperature forgotten": "temperature",
    "top_p": "truncated support",
    "top_k": "truncated support",
    "other context": "other context",
    "one engine": "one engine",
    "stale cache": "stale cache",
    "routing": "routing",
    "old weights": "unexplained",
}
"""What can go wrong, and the cause that is to be named; of old weights digests tell, and not these numbers."""


def normal(logits):
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def cut(logprobs, *, top_p=1.0, top_k=0):
    """Return log-probabilities after cutting the tail."""
    order = np.argsort(-logprobs, axis=-1)
    sorted_p = np.exp(np.take_along_axis(logprobs, order, -1))
    kept = sorted_p.cumsum(-1) - sorted_p < top_p
    if top_k:
        kept[..., top_k:] = False
    chosen = np.zeros_like(kept)
    np.put_along_axis(chosen, order, kept, -1)
    return normal(np.where(chosen, logprobs, -1e30))


class Step:
    """The tokens of a step, with a fault."""

    def __init__(self, seed, fault=None, *, noise=0.02):
        self.random = random = np.random.default_rng(seed)
        shape = (SEQUENCES, LENGTH, VOCABULARY)
        logits = random.normal(size=shape) * random.uniform(1.5, 3)
        logits[..., 0] += random.normal(3, 3, shape[:2])  # some tokens are nearly certain
        engine = self._engine_logits(logits, fault) + noise * random.normal(size=shape)
        heated = fault in ("raw log-probabilities", "temperature forgotten")
        self.temperature = random.uniform(0.6, 0.8) if heated else 1.0
        self.top_p = random.uniform(0.85, 0.95) if fault == "top_p" else 1.0
        samples = normal(engine / self.temperature)
        if fault in ("top_p", "top_k"):
            samples = cut(samples, top_p=self.top_p, top_k=20 if fault == "top_k" else 0)
        drawn = random.random((*shape[:2], 1))
        at = (np.exp(samples).cumsum(-1) < drawn).sum(-1, keepdims=True).clip(0, VOCABULARY - 1)
        self.ids = at[..., 0] + 2
        logged = normal(engine) if fault == "raw log-probabilities" else samples
        trained = normal(logits / (self.temperature if fault == "raw log-probabilities" else 1.0))
        self.rollout, self.train = (np.take_along_axis(each, at, -1)[..., 0] for each in (logged, trained))
        lengths = random.integers(LENGTH // 3, LENGTH + 1, (SEQUENCES, 1))
        self.mask = np.arange(LENGTH) < lengths
        self._miscount(fault, lengths)

    def _engine_logits(self, logits, fault):
        random = self.random
        other = random.normal(size=logits.shape)
        self.experts = np.zeros(logits.shape[:2], int)
        self.engines = [("a", 1)] * SEQUENCES
        if fault == "old weights":
            return logits + 0.3 * other
        if fault == "other context":
            return other * 2
        if fault == "stale cache":
            return logits + 0.3 * other * np.exp(-np.arange(LENGTH) / 12)[:, None]
        if fault == "routing":
            self.experts = (random.random(logits.shape[:2]) < 0.25).astype(int)
            return logits + 0.6 * other * self.experts[..., None]
        if fault == "one engine":
            self.engines = [("abcd"[n % 4], 1) for n in range(SEQUENCES)]
            return logits + 0.4 * other * (np.arange(SEQUENCES) % 4 == 2)[:, None, None]
        return logits

    def _miscount(self, fault, lengths):
        if fault == "shifted":
            self.train = np.roll(self.train, self.random.choice([-1, 1]), axis=1)
        if fault in ("padding of its own", "padding by the end token"):
            self.ids = np.where(self.mask, self.ids, 0)
            if fault == "padding by the end token":
                self.ids[np.arange(SEQUENCES), lengths[:, 0] - 1] = 0
            self.rollout = np.where(self.mask, self.rollout, 0.0)
            self.train = np.where(self.mask, self.train, self.random.normal(-3, 1, self.train.shape))
            self.mask = np.ones_like(self.mask)
        if fault == "a prompt that counts":
            prompt = np.arange(LENGTH) < self.random.integers(4, 10, (SEQUENCES, 1))
            self.rollout = np.where(prompt, 0.0, self.rollout)
            self.train = np.where(prompt, self.random.normal(-4, 1, self.train.shape), self.train)

    def report(self, *, with_ids=True, weights=None, floor=FLOOR, known=None, version_lag=None):
        ids = self.ids if with_ids else None
        tokens = pair(
            read_side(self.rollout, mask=self.mask, ids=ids, experts=self.experts * 0),
            read_side(self.train, mask=self.mask, ids=ids, experts=self.experts),
        )
        return judge(
            0,
            tokens,
            floor=floor,
            known_before=known,
            version_lag=version_lag,
            limits=Limits(),
            engines=self.engines,
            sampling=Sampling(temperature=self.temperature, top_p=self.top_p),
            weights=weights,
        )
