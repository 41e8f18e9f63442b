"""`Watch`: takes what rollout engine and trainer say of a step, and reports why they differ."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainermon.core.topology import find_coordinates
from trainermon.rl import files, names
from trainermon.rl.causes import Limits
from trainermon.rl.digest import Digester, NamedTensors, WeightDigest, items
from trainermon.rl.holding import hold
from trainermon.rl.snapshots import snapshot
from trainermon.rl.stages import StageRecorder, as_array
from trainermon.rl.steps import Settings, WatchedStep, judge_step, series_of
from trainermon.rl.tokens import Flags
from trainermon.rl.values import Report, Sampling, WeightCheck
from trainermon.rl.weights import check_weights, wholes_of

_log = logging.getLogger(__name__)
MAX_PENDING = 2
"""Steps whose comparison may be under way; of further ones nothing is compared, and that is counted."""
REPORTS_KEPT = 16
PROMPTS_KEPT = 200_000
"""Prompts that are remembered, the latest; of older ones it is not known whether an engine has them in its cache."""
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


class TakesNumbers(Protocol):
    """What `TrainerMon` is to a watch."""

    def record(self, **values: float) -> None:
        """Record numbers of the step that is open."""


class Watch:
    """Watches whether the rollout engine samples from the policy that is trained.

    Nothing it does raises into training: after the first failure, which is logged, it goes on with the next step. The
    comparison runs in a thread of its own; what is passed in is copied first, from an accelerator without waiting.

    Args:
        folder: Where reports, digests and stages are written; every process of a job may use the same.
        monitor: A `TrainerMon`, which takes the main numbers of each step as series; None: they are in the reports.
        sampling: How the engine samples.
        dtype: The type in which the engine holds weights, as `bfloat16`, `bf16` or torch's own; what rounding gives
            depends on it. Empty or None: weights are compared as they are sent.
        is_mixture: The model is a mixture of experts.
        name_map: From the trainer's names of tensors to the engine's; `rl.names.hf_to_vllm` for vLLM and SGLang.
        limits: From where on something counts as a cause.
        rank: Number of this process; None: as torch.distributed or the launcher says.
    """

    def __init__(  # noqa: PLR0913 - what a watch is told
        self,
        folder: str | Path = "rl_out",
        *,
        monitor: TakesNumbers | None = None,
        sampling: Sampling | None = None,
        dtype: object = "bfloat16",
        is_mixture: bool = False,
        name_map: names.NameMap = names.same,
        limits: Limits | None = None,
        rank: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.rank = find_coordinates().rank if rank is None else rank
        self.num_failures = 0
        self.num_skipped = 0
        self._monitor = monitor
        self._settings = Settings(
            sampling=sampling or Sampling(),
            dtype=_type_name(dtype),
            is_mixture=is_mixture,
            name_map=name_map,
            limits=limits or Limits(),
        )
        self._stages = StageRecorder(self.folder / "stages", rank=self.rank)
        self._said: set[str] = set()
        self._step: WatchedStep | None = None
        self._reports: dict[int, Future[Report]] = {}
        self._unrecorded: list[Future[Report]] = []
        self._prompts_seen: dict[bytes, int] = {}
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainermon-rl")
        atexit.register(self.close)

    @property
    def sampling(self) -> Sampling:
        """How the engine samples."""
        return self._settings.sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._settings = dataclasses.replace(self._settings, sampling=sampling)

    def say_once(self, message: str) -> None:
        """Log a warning, unless it has been logged before."""
        if message not in self._said:
            self._said.add(message)
            _log.warning("trainermon.rl: %s", message)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return a context for one step: what is passed in inside it is compared when it is left."""
        outer, step = self._step, WatchedStep(number)
        self._step = step
        try:
            yield
        finally:
            self._step = outer
            with self._contained("compare"):
                self._compare(step)

    def rollout(  # noqa: PLR0913 - what an engine may know
        self,
        *,
        logprobs: Any,
        ids: Any = None,
        mask: Any = None,
        engine: str | None = None,
        version: int | None = None,
        prompts: Sequence[Any] | None = None,
        experts: Any = None,
    ) -> None:
        """Take what an engine logged of sequences that it sampled; call it again for those of another engine.

        Args:
            logprobs: Log-probabilities of the sampled tokens, nats: `[N, T]` (torch, numpy) or a list of N sequences.
            ids: The sampled tokens, of the same shape.
            mask: Which of them count, of the same shape; None: all.
            engine: Name of the engine; None: the only one of which weights were received, else `engine`.
            version: Version of the weights that it sampled with.
            prompts: N token sequences; tells prompts that the engine may have cached from new ones.
            experts: First expert of each token, `[N, T]` or `[N, T, layers]`.
        """
        with self._contained("rollout"):
            step = self._current()
            step.rollout.append(snapshot({"logprobs": logprobs, "ids": ids, "mask": mask, "experts": experts}))
            step.engines.append((engine, version))
            step.known.append(self._are_known(prompts, version))

    def train(
        self, *, logprobs: Any, ids: Any = None, mask: Any = None, again: Any = None, experts: Any = None
    ) -> None:
        """Take what the trainer computed for the same sequences, in the same order; call it again for more of them.

        `again` is a second computation of the same, in other micro batches: it measures what rounding alone gives. The
        other arguments are those of `rollout`. Log-probabilities must be of the policy *before* the step's update.
        """
        with self._contained("train"):
            self._current().train.append(
                snapshot({"logprobs": logprobs, "ids": ids, "mask": mask, "again": again, "experts": experts})
            )

    def sent(self, named_tensors: NamedTensors, *, version: int, dtype: object = None) -> Iterator[tuple[str, Any]]:
        """Pass names and tensors through, as they are sent to the engine, and take their digests on the way.

        Use what it returns where `named_tensors` was used: `engine.load_weights(watch.sent(named, version=12))`.

        Args:
            named_tensors: A mapping, or pairs of names and tensors; whole tensors, or DTensors.
            version: Number of these weights.
            dtype: The type in which the engine holds them; None: that of the watch; empty: as they are.
        """
        digester: Digester | None = Digester(self._settings.dtype if dtype is None else _type_name(dtype))
        for name, tensor in items(named_tensors):
            if digester is not None and not self._took(digester, names.same(name), tensor):
                digester = None  # a part of the digests would make the rest of the weights look missing
            yield name, tensor
        if digester is not None:
            with self._contained("sent"):
                if not digester.num_tensors:
                    self.say_once(f"no tensor was sent as version {version}: Watch.sent was given nothing")
                digest = WeightDigest(version=version, tensors=digester.finish(), shard=self.rank)
                files.write_digest(self.folder, digest)

    def received(
        self,
        named_tensors: NamedTensors,
        *,
        version: int,
        engine: str = "engine",
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        """Take the digests of what an engine holds, in the engine's process or wherever its tensors are.

        Args:
            named_tensors: The engine's parameters, on one of its ranks.
            version: The version that it should have.
            engine: Its name.
            shard: The engine's tensor-parallel rank.
            num_shards: How many of them there are.
        """
        with self._contained("received"):
            held = hold(
                named_tensors,
                version=version,
                engine=engine,
                shard=shard,
                num_shards=num_shards,
                name_map=self._settings.name_map,
                sent=wholes_of(files.read_sent(self.folder, version)),
            )
            files.write_digest(self.folder, held)

    def take(self, digests: WeightDigest | str | bytes) -> None:
        """Take the digests of what an engine's rank holds, or JSON of them: where it cannot write into the folder."""
        with self._contained("take"):
            held = digests if isinstance(digests, WeightDigest) else files.digest_from_json(digests)
            files.write_digest(self.folder, held)

    def save(self, **stages: Any) -> None:
        """Keep stages of the step (prompt, response, reward, advantage, …) in files, see `rl.StageRecorder`."""
        with self._contained("save"):
            self._stages.step_number = self._current().number
            self._stages.save(stages)

    def report(self, step: int, timeout_s: float = 600.0) -> Report | None:
        """Return the report on a step, waiting for it; None: nothing was compared, or the comparison failed.

        Raises:
            TimeoutError: It takes longer.
        """
        future = self._reports.get(step)
        if future is None or future.exception(timeout_s) is not None:
            return None
        self._record()
        return future.result()

    def check(self, version: int) -> WeightCheck | None:
        """Return whether the engines hold what was sent as `version`; None: one side said nothing yet."""
        digests = files.read_sent(self.folder, version)
        sent = wholes_of(digests)
        engines = {engine: wholes_of(found) for engine, found in files.read_held(self.folder, version).items()}
        if not digests or (sent and not engines):
            return None
        others = {
            number: wholes_of(files.read_sent(self.folder, number))
            for number in files.sent_versions(self.folder)
            if number != version
        }
        return check_weights(version, sent, engines, name_map=self._settings.name_map, others=others)

    def close(self) -> None:
        """Finish what is under way. Nothing more is compared after that."""
        atexit.unregister(self.close)
        self._thread.shutdown()
        with self._contained("close"):
            self._record()

    def _current(self) -> WatchedStep:
        if self._step is None:
            raise RuntimeError("no step is open: call it inside `with watch.step(number):`")
        return self._step

    def _compare(self, step: WatchedStep) -> None:
        self._record()
        if not step.rollout and not step.train:
            return
        if self._process != os.getpid():  # forked: the thread is the parent's
            self._process, self._reports, self._unrecorded = os.getpid(), {}, []
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainermon-rl")
        if sum(not future.done() for future in self._reports.values()) >= MAX_PENDING:
            self.num_skipped += 1
            self.say_once(
                f"steps follow each other faster than they can be compared: where {MAX_PENDING} wait, the next one is "
                "left out of the reports"
            )
            return
        step.sent = tuple(files.sent_versions(self.folder))
        self._reports = dict(list(self._reports.items())[-REPORTS_KEPT:])
        future = self._thread.submit(self._judge, step)
        self._reports[step.number] = future
        self._unrecorded.append(future)

    def _judge(self, step: WatchedStep) -> Report:
        """Compare a step; runs in the thread."""
        version = self._version(step)
        weights = None if version is None else self.check(version)
        report = judge_step(step, self._settings, weights)
        report = dataclasses.replace(report, version_lag=step.version_lag)
        with self._contained("write a report"):
            files.append_report(self.folder, self.rank, report)
        return report

    def _version(self, step: WatchedStep) -> int | None:
        versions = [version for _, version in step.engines if version is not None]
        return max(versions) if versions else max(step.sent, default=None)

    def _record(self) -> None:
        """Hand the numbers of finished steps to the monitor, in the thread of the training."""
        left = []
        for future in self._unrecorded:
            if not future.done():
                left.append(future)
            elif future.exception() is not None:
                self._failed("compare", future.exception())
            elif self._monitor is not None:
                self._monitor.record(**self._series(future.result()))
        self._unrecorded = left

    def _series(self, report: Report) -> dict[str, float]:
        return series_of(report, self._settings.limits, is_greedy=self.sampling.is_greedy)

    def _are_known(self, prompts: Sequence[Any] | None, version: int | None) -> Flags | None:
        """Return which prompts were sampled from under an older version of the weights; notes them."""
        if prompts is None or version is None:
            return None
        keys = [hashlib.blake2b(_bytes(prompt), digest_size=8).digest() for prompt in prompts]
        known = np.array([self._prompts_seen.get(key, version) < version for key in keys])
        for key in keys:  # the latest stand last
            self._prompts_seen.pop(key, None)
            self._prompts_seen[key] = version
        for key in list(itertools.islice(self._prompts_seen, max(0, len(self._prompts_seen) - PROMPTS_KEPT))):
            del self._prompts_seen[key]
        return known

    def _took(self, digester: Digester, name: str, tensor: Any) -> bool:
        """Have a tensor digested; return whether that succeeded."""
        before = self.num_failures
        with self._contained("sent"):
            digester.add(name, tensor)
        return self.num_failures == before

    @contextlib.contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # nothing of a monitor may reach training
            self._failed(what, error)

    def _failed(self, what: str, error: BaseException | None) -> None:
        self.num_failures += 1
        level = logging.WARNING if self.num_failures == 1 else logging.DEBUG
        _log.log(level, "trainermon.rl: %s failed, and the step is left out: %r", what, error, exc_info=error)


def _type_name(dtype: object) -> str:
    """Return the name of a type that is given by its name, a short one, or as torch's; "" for None."""
    name = str(dtype or "").removeprefix("torch.")
    return _ALIASES.get(name, name)


def _bytes(prompt: Any) -> bytes:
    """Return the tokens of a prompt, or its text, as bytes that are the same whatever it is held in."""
    if isinstance(prompt, str):
        return prompt.encode()
    return as_array(prompt, "prompt").astype(np.int64).tobytes()
