"""A loop of some steps whose engines are the policy in bfloat16, with a fault in it."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import log_softmax

from benchmarks.rollouts.cases import RolloutCase
from benchmarks.rollouts.policies import CERTAIN, VOCABULARY, Memory, Policy
from trainermon import rl

PROMPT, RESPONSE, SEQUENCES, POOL = 8, 32, 96, 12


@dataclasses.dataclass(slots=True)
class Sampled:
    """What an engine sampled: ids and log-probabilities `[N, RESPONSE]`, and first experts `[N, RESPONSE, layers]`."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    experts: torch.Tensor | None


def run_case(case: RolloutCase, family: str, *, seed: int) -> list[tuple[rl.Report, bool]]:
    """Return the report on each step, and whether the step had the fault."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        loop = _Loop(case, family, seed, Path(folder))
        reports = [(loop.step(number), bool(case.causes) and number >= case.begins) for number in range(case.steps)]
        loop.watch.close()
        if loop.watch.num_failures:
            raise RuntimeError(f"{case.name}, {family}: the watch failed")
        return reports


class _Loop:
    def __init__(self, case: RolloutCase, family: str, seed: int, folder: Path) -> None:
        self.case = case
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.policy = Policy(family, seed=seed)
        kind = torch.float16 if case.fault == "float16" else torch.bfloat16
        self.engines = [_Engine(copy.deepcopy(self.policy).to(kind), case, number) for number in range(case.engines)]
        cuts = {"top_p": {"top_p": case.strength}, "top_k": {"top_k": int(case.strength)}}.get(case.fault, {})
        said = {"temperature": case.strength, "raw": case.strength}.get(case.fault, 1.0)
        self.temperature = said if case.fault == "raw" else 1.0
        self.watch = rl.Watch(
            folder,
            rank=0,
            dtype=kind,
            is_mixture=hasattr(self.policy.layers[0], "router"),
            sampling=rl.Sampling(temperature=said, **cuts),
        )
        self.pool = self._prompts(POOL, certain=False if case.fault == "certain news" else None)

    def step(self, number: int) -> rl.Report:
        """Send, sample, compare, and change the weights a little."""
        faulty = number >= self.case.begins
        self._send(number, faulty=faulty)
        shares = self._shares()
        sampled = [
            engine.sample(torch.from_numpy(share), self.generator, faulty=faulty)
            for engine, share in zip(self.engines, shares, strict=True)
        ]
        prompts = torch.from_numpy(np.concatenate(shares))
        ids = torch.cat([each.ids for each in sampled])
        trained = _forced(self.policy, prompts, ids, self.temperature)
        mask = self._mask(ids)
        with self.watch.step(number):
            self._tell_rollouts(number, sampled, shares, mask, faulty=faulty)
            self._tell_trained(prompts, ids, trained, mask, faulty=faulty)
        self._update()
        report = self.watch.report(number)
        if report is None:
            raise RuntimeError(f"{self.case.name}: no report of step {number}")
        return report

    def _send(self, number: int, *, faulty: bool) -> None:
        named = dict(self.policy.named_parameters())
        if "digests" in self.case.told:
            named = dict(self.watch.sent(named, version=number))
        for engine in self.engines:
            engine.load(named, faulty=faulty)
            if "digests" in self.case.told:
                self.watch.received(engine.policy.named_parameters(), version=number, engine=f"engine-{engine.number}")

    def _prompts(self, count: int, *, certain: bool | None = None) -> np.ndarray:
        prompts = self.random.integers(2, VOCABULARY, (count, PROMPT))
        if certain is not None:
            prompts[:, 0] = self.random.integers(*((2, CERTAIN) if certain else (CERTAIN, VOCABULARY)), count)
        return prompts

    def _shares(self) -> list[np.ndarray]:
        """Return the prompts of each engine: half of them known from a pool, half new, four samples of each."""
        shares = []
        for number in range(self.case.engines):
            count = SEQUENCES // self.case.engines // 4
            old = self.pool[self.random.integers(0, POOL, count // 2)]
            new = self._prompts(count - len(old), certain=True if self.case.fault == "certain news" else None)
            both = np.concatenate([old, new])
            if self.case.fault == "certain engine":
                both = self._prompts(count, certain=number == 0)
            shares.append(both.repeat(4, 0))
        return shares

    def _mask(self, ids: torch.Tensor) -> np.ndarray:
        ends = ids.numpy() % 23 == 1
        mask: np.ndarray = np.cumsum(ends, 1) - ends == 0
        if self.case.fault == "tool tokens":
            mask[:, 6:12] = False
        if self.case.fault == "short":
            mask[::3, 1:] = False
        return mask

    def _tell_rollouts(
        self, number: int, sampled: list[Sampled], shares: list[np.ndarray], mask: np.ndarray, *, faulty: bool
    ) -> None:
        told, fault, first = self.case.told, self.case.fault if faulty else "", 0
        for engine, (each, share) in enumerate(zip(sampled, shares, strict=True)):
            counts = mask[first : first + len(share)]
            first += len(share)
            logged = torch.where(torch.from_numpy(counts), each.logprobs, 0.0)
            if fault == "infinite":
                lost = torch.rand(logged.shape, generator=self.generator) < self.case.strength
                logged = torch.where(lost, -torch.inf, logged)
            self.watch.rollout(
                logprobs=logged,
                ids=each.ids,
                mask=np.ones_like(counts) if fault == "padding" else counts,
                engine=f"engine-{engine}",
                version=number if told else None,
                prompts=list(share) if "prompts" in told else None,
                experts=each.experts if "experts" in told else None,
            )

    def _tell_trained(
        self, prompts: torch.Tensor, ids: torch.Tensor, trained: Sampled, mask: np.ndarray, *, faulty: bool
    ) -> None:
        told, fault = self.case.told, self.case.fault if faulty else ""
        logprobs = trained.logprobs
        if fault.startswith("shifted"):
            logprobs = torch.roll(logprobs, -1 if fault == "shifted back" else 1, 1)
        if fault == "nan":
            lost = torch.rand(logprobs.shape, generator=self.generator) < self.case.strength
            logprobs = torch.where(lost, torch.nan, logprobs)
        if fault == "ids":
            ids = torch.where(torch.arange(RESPONSE) > 5, (ids + 1) % VOCABULARY, ids)
        if fault == "lost":
            mask = mask.copy()
            mask[5, 0] = False
            ids, logprobs, mask = ids[:, : RESPONSE - 1], logprobs[:, : RESPONSE - 1], mask[:, : RESPONSE - 1]
        again = None
        if "again" in told:
            coarse = copy.deepcopy(self.policy).to(torch.bfloat16)
            again = _forced(coarse, prompts, ids, self.temperature).logprobs
        self.watch.train(
            logprobs=logprobs,
            ids=ids,
            mask=np.ones_like(mask) if fault == "padding" else mask,
            again=again,
            experts=trained.experts if "experts" in told else None,
        )

    def _update(self) -> None:
        for parameter in self.policy.parameters():
            size = parameter.square().mean().sqrt()
            parameter.add_(torch.randn(parameter.shape, generator=self.generator) * size * self.case.rate)
        if self.case.fault == "cooling":
            self.policy.head.weight.mul_(self.case.strength)
            self.policy.head.bias.mul_(self.case.strength)


class _Engine:
    def __init__(self, policy: Policy, case: RolloutCase, number: int) -> None:
        self.policy, self.case, self.number = policy, case, number
        self.memories: dict[bytes, Memory] = {}
        self.loads = 0
        self.disturbs = False
        for name, module in policy.named_modules():
            if name.endswith("router"):
                module.register_forward_pre_hook(self._misrouted)
            elif isinstance(module, torch.nn.Linear) and name != "head":
                module.register_forward_pre_hook(self._coarse)

    def load(self, named: dict[str, torch.Tensor], *, faulty: bool) -> None:
        """Take weights, as the fault lets it."""
        self.loads += 1
        for name, parameter in self.policy.named_parameters():
            if self.loads == 1 or not faulty or not self._ignores(name):
                parameter.copy_(named[name])

    def _ignores(self, name: str) -> bool:
        return {
            "stale": True,
            "stale engine": self.number == self.case.engines - 1,
            "layer": "layers.1." in name,
            "embedding": name == "embedding.weight",
        }.get(self.case.fault, False)

    def sample(self, prompts: torch.Tensor, generator: torch.Generator, *, faulty: bool) -> Sampled:
        """Return sampled responses, as the fault lets it."""
        fault = self.case.fault if faulty else ""
        self.disturbs = fault in ("router", "float8") or (fault == "float8 engine" and self.number == 0)
        hot = fault == "temperature" or (fault == "hot engine" and self.number == 0)
        temperature = self.case.strength if hot or fault == "raw" else 1.0
        logits, memory = self._after(prompts, fault)
        ids, logged, experts = [], [], []
        for _ in range(RESPONSE):
            samples = self._cut(log_softmax(logits / temperature, -1), fault)
            token = torch.multinomial(samples.exp(), 1, generator=generator)
            says = log_softmax(logits, -1) if fault == "raw" else samples
            ids.append(token[:, 0])
            logged.append(says.gather(1, token)[:, 0])
            experts.append(memory.experts[:])
            logits = self.policy(token[:, 0], memory)
        self.disturbs = False
        return Sampled(torch.stack(ids, 1), torch.stack(logged, 1), _stacked(experts))

    def _after(self, prompts: torch.Tensor, fault: str) -> tuple[torch.Tensor, Memory]:
        """Return logits and memory after the prompts; a cache that is kept has them of older weights."""
        if fault == "flipped":
            prompts = torch.cat([prompts[:, :1], prompts[:, 1:].flip(1)], 1)
        elif fault == "half prompt":
            prompts = prompts[:, : PROMPT // 2]
        elif fault == "last token":
            prompts = torch.cat([prompts[:, :-1], (prompts[:, -1:] + 17) % VOCABULARY], 1)
        memory = Memory()
        for place in range(prompts.shape[1] - 1):
            self.policy(prompts[:, place], memory)
        memory = self._cached(prompts, memory, fault)
        return self.policy(prompts[:, -1], memory), memory

    def _cached(self, prompts: torch.Tensor, fresh: Memory, fault: str) -> Memory:
        """Return the memory with what is known of prompts from before; only `cache` uses that."""
        if self.case.fault != "cache":
            return fresh
        rows: list[dict[str, torch.Tensor]] = []
        for number, prompt in enumerate(prompts):
            key = prompt.numpy().tobytes()
            row = {name: part[number].clone() for name, part in fresh.parts.items()}
            rows.append(self.memories.setdefault(key, Memory(row)).parts if fault else row)
            if not fault:
                self.memories[key] = Memory(row)
        return Memory({name: torch.stack([row[name] for row in rows]) for name in fresh.parts}, fresh.position)

    def _cut(self, logprobs: torch.Tensor, fault: str) -> torch.Tensor:
        if fault not in ("top_p", "top_k"):
            return logprobs
        ordered, order = logprobs.sort(descending=True, dim=-1)
        if fault == "top_k":
            lost = torch.arange(VOCABULARY).expand_as(ordered) >= self.case.strength
        else:
            lost = ordered.exp().cumsum(-1) - ordered.exp() >= self.case.strength
        cut = torch.zeros_like(lost).scatter(1, order, lost)
        return log_softmax(logprobs.masked_fill(cut, -torch.inf), -1)

    def _misrouted(self, _: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not self.disturbs or self.case.fault != "router":
            return None
        (hidden,) = inputs
        chosen = torch.rand(len(hidden), 1) < self.case.strength
        return (torch.where(chosen, torch.randn_like(hidden), hidden),)

    def _coarse(self, _: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not self.disturbs or not self.case.fault.startswith("float8"):
            return None
        return (inputs[0].to(torch.float8_e5m2).to(inputs[0].dtype),)


def _forced(policy: Policy, prompts: torch.Tensor, ids: torch.Tensor, temperature: float) -> Sampled:
    """Return what a policy says of given responses."""
    memory = Memory()
    for place in range(PROMPT - 1):
        policy(prompts[:, place], memory)
    logits = policy(prompts[:, -1], memory)
    logged, experts = [], []
    for place in range(ids.shape[1]):
        token = ids[:, place]
        logged.append(log_softmax(logits / temperature, -1).gather(1, token[:, None])[:, 0])
        experts.append(memory.experts[:])
        logits = policy(token, memory)
    return Sampled(ids, torch.stack(logged, 1), _stacked(experts))


def _stacked(experts: list[list[torch.Tensor]]) -> torch.Tensor | None:
    if not experts[0]:
        return None
    return torch.stack([torch.stack(each, 1) for each in experts], 1)
