"""A small GRPO loop whose engine is a process of its own: a model in bfloat16 with a cache of keys and values.

The trainer has the same model in float32. The engine holds q, k, v and gate, up as one tensor each, as vLLM does; every
fault that `trainermon.rl` names can be put in. Prompts are counted over, so that some come again. Limits were chosen on
Llamas and mixtures; `OTHER_FAMILIES` are models that none was chosen on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import log_softmax
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trainermon import rl

Call = Callable[..., Any]
EOS, PAD = 1, 0
PROMPT, RESPONSE = 8, 32


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong. `name` is one of the causes, or a variant of it."""

    name: str = "none"
    temperature: float = 1.0
    top_p: float = 1.0


CASES = {
    "stale": ([Fault("stale")], "weights differ"),
    "one layer never sent": ([Fault("layer")], "weights differ"),
    "output layer never sent": ([Fault("lm_head")], "weights differ"),
    "k and v swapped": ([Fault("swapped")], "weights differ"),
    "raw": ([Fault("raw", temperature=0.7)], "temperature"),
    "temperature forgotten": ([Fault("forgotten", temperature=0.7)], "temperature"),
    "top_p": ([Fault("top_p", top_p=0.9)], "truncated support"),
    "padding": ([Fault("padding")], "padding"),
    "shifted": ([Fault("shifted")], "shifted"),
    "tokenized again": ([Fault("tokens differ")], "tokens differ"),
    "other context": ([Fault("other context")], "other context"),
    "stale cache": ([Fault("stale cache")], "stale cache"),
    "activations in float8": ([Fault("coarse")], "numerics"),
    "one of four engines": ([Fault(), Fault(), Fault(temperature=1.2), Fault()], "one engine"),
}
"""What is put into the engines, or into the trainer by the first of them, and the cause that is to be named."""
MIXTURE_CASES = {"routing": ([Fault("routing")], "routing")}
OTHER_FAMILIES = ("qwen", "neox", "olmo", "gemma")
"""Qwen2: eight layers, biases, tied embeddings. GPT-NeoX: parallel residuals, layer norms, q, k, v in one by heads.
OLMo 2: norms after the blocks, of queries and keys too. Gemma 2: windows, soft caps, norms around the blocks."""


def new_model(seed: int = 0, *, family: str = "llama") -> Any:
    """Return a random model whose next tokens are neither certain nor alike."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8 if family == "qwen" else 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    grouped = {**sizes, "num_key_value_heads": 2}
    model: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**grouped)),
        "mixture": lambda: MixtralForCausalLM(MixtralConfig(**grouped, num_local_experts=8, num_experts_per_tok=2)),
        "qwen": lambda: Qwen2ForCausalLM(Qwen2Config(**grouped, tie_word_embeddings=True)),
        "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)),
        "olmo": lambda: Olmo2ForCausalLM(Olmo2Config(**grouped, eos_token_id=EOS)),
        "gemma": lambda: Gemma2ForCausalLM(Gemma2Config(**grouped, head_dim=16, sliding_window=24)),
    }[family]()
    last, scale = output_layer(model), 8.0 if family == "gemma" else 12.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale if name == last else 4.0)
    return model.eval()


def output_layer(model: Any) -> str:
    """Return the name of the parameter that gives logits."""
    weight = model.get_output_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is weight)


def experts_of(outcome: Any, sequences: int) -> torch.Tensor | None:
    """Return the first expert of each position, `[N, T, layers]`; None of a model without experts."""
    logits = getattr(outcome, "router_logits", None)
    return None if not logits else torch.stack([each.argmax(-1).view(sequences, -1) for each in logits], dim=-1)


def engine_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters as vLLM holds them: q, k, v in one tensor, gate and up in another."""
    held = dict(model.named_parameters())
    for name, tensor in held.items():
        if ".q_proj." in name:
            parts = [held[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            yield name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        elif ".gate_proj." in name:
            yield name.replace("gate_proj", "gate_up_proj"), torch.cat([tensor, held[name.replace("gate_", "up_")]])
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            yield name, tensor


def _disturbed(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return what a router sees, for one token in twenty something else."""
    (hidden,) = inputs
    chosen = torch.rand(*hidden.shape[:-1], 1) < 0.05
    return (torch.where(chosen, torch.randn_like(hidden), hidden),)


def _rounded(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return what a projection sees where activations are float8."""
    return (inputs[0].to(torch.float8_e5m2).to(inputs[0].dtype),)


class Engine:
    """Samples responses; runs in a process of its own, see `serve`."""

    def reset(self, folder: str, name: str, fault: Fault, family: str) -> None:
        """Begin anew, with the weights of a new trainer."""
        self.model = new_model(family=family).to(torch.bfloat16)
        self.watch = rl.Watch(folder, rank=1, name_map=rl.names.hf_to_vllm)
        self.name, self.fault, self.mixture = name, fault, family == "mixture"
        self.caches: dict[bytes, Any] = {}
        self.loads = 0
        if fault.name == "coarse":
            for module in self.model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(_rounded)
        if fault.name == "routing":  # as routers in another precision, only far worse
            for module_name, module in self.model.named_modules():
                if module_name.endswith("mlp.gate"):
                    module.register_forward_pre_hook(_disturbed)

    @torch.no_grad()
    def load(self, weights: dict[str, np.ndarray], version: int) -> None:
        """Take weights, as the fault lets it, and report what is held then."""
        self.loads += 1
        mine = dict(self.model.named_parameters())
        for name in weights:
            if self.loads == 1 or not self._ignores(name):
                mine[name].copy_(torch.from_numpy(self._loaded(weights, name)))
        if self.fault.name != "stale cache":
            self.caches.clear()
        self.watch.received(engine_tensors(self.model), version=version, engine=self.name)

    def _ignores(self, name: str) -> bool:
        return {
            "stale": True,
            "layer": ".layers.1." in name,
            "lm_head": name == output_layer(self.model),
        }.get(self.fault.name, False)

    def _loaded(self, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
        """Return what is loaded as `name`: other weights where k and v are swapped."""
        if self.fault.name != "swapped":
            return weights[name]
        if "query_key_value" in name:
            by_head = weights[name].reshape(4, 3, 16, -1)
            return by_head[:, [0, 2, 1]].reshape(weights[name].shape)
        swapped = {".k_proj.": ".v_proj.", ".v_proj.": ".k_proj."}
        return weights[next((name.replace(part, other) for part, other in swapped.items() if part in name), name)]

    @torch.no_grad()
    def generate(self, prompts: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return ids and log-probabilities of sampled responses, `[N, RESPONSE]`, and which tokens count."""
        generator = torch.Generator().manual_seed(seed)
        given = torch.from_numpy(prompts)
        if self.fault.name == "other context":
            given = torch.flip(given, dims=[1])  # as a template that puts the parts in another order
        self.experts: list[torch.Tensor | None] = []
        cache, logits = self._prefilled(given)
        done = torch.zeros(len(given), dtype=torch.bool)
        ids, logged, mask = [], [], []
        for _ in range(RESPONSE):
            raw = log_softmax(logits.float(), dim=-1)
            processed = self._processed(logits.float())
            token = torch.multinomial(processed.exp(), 1, generator=generator)[:, 0]
            says = raw if self.fault.name == "raw" else processed
            ids.append(torch.where(done, PAD, token))
            logged.append(torch.where(done, 0.0, says.gather(1, token[:, None])[:, 0]))
            mask.append(~done)
            done = done | (token % 23 == EOS)
            logits = self._forward(token[:, None], cache)
        experts = [each[:, -1] for each in self.experts[:RESPONSE] if each is not None]
        return {
            **({"experts": torch.stack(experts, 1).numpy()} if experts else {}),
            "ids": torch.stack(ids, 1).numpy(),
            "logprobs": torch.stack(logged, 1).numpy(),
            "mask": torch.stack(mask, 1).numpy(),
        }

    def _prefilled(self, prompts: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return cache and logits after the prompts; a stale cache has the keys and values of older weights."""
        if self.fault.name != "stale cache":
            cache = DynamicCache()
            return cache, self._forward(prompts, cache)
        layers: list[list[Any]] = []
        for prompt in prompts[:, :-1]:
            key = prompt.numpy().tobytes()
            if key not in self.caches:
                one = DynamicCache()
                self.model(input_ids=prompt[None], past_key_values=one, use_cache=True)
                self.caches[key] = [(layer.keys, layer.values) for layer in one.layers]
            layers.append(self.caches[key])
        cache = DynamicCache()
        for number in range(len(layers[0])):
            keys, values = (torch.cat([each[number][k] for each in layers]) for k in (0, 1))
            cache.update(keys, values, number)
        return cache, self._forward(prompts[:, -1:], cache)

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the logits after the last of `ids`, and note the experts that they went to."""
        wants = {"output_router_logits": True} if self.mixture else {}
        outcome = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **wants)
        self.experts.append(experts_of(outcome, len(ids)))
        return outcome.logits[:, -1]

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        scaled = log_softmax(logits / self.fault.temperature, dim=-1)
        if self.fault.top_p < 1.0:
            ordered, order = scaled.sort(descending=True, dim=-1)
            before = ordered.exp().cumsum(-1) - ordered.exp()
            cut = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, order, before >= self.fault.top_p)
            scaled = log_softmax(scaled.masked_fill(cut, -torch.inf), dim=-1)
        return scaled


def serve(connection: Any) -> None:
    """Answer calls that come through a pipe, until None comes."""
    torch.set_num_threads(1)
    engines: dict[int, Engine] = {}
    for number, method, arguments in iter(connection.recv, None):
        connection.send(getattr(engines.setdefault(number, Engine()), method)(*arguments))


@contextlib.contextmanager
def engine_process() -> Iterator[Call]:
    """Start a process for engines; gives a function that calls a method of engine number n in it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()

    def call(number: int, method: str, *arguments: Any) -> Any:
        ours.send((number, method, arguments))
        return ours.recv()

    try:
        yield call
    finally:
        ours.send(None)
        process.join(60)
        process.close()


class Trainer:
    """The policy in float32, and its updates."""

    def __init__(
        self,
        folder: Path,
        call: Call,
        faults: list[Fault],
        *,
        family: str = "llama",
        rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.fault, self.seed, self.mixture = faults[0], seed, family == "mixture"
        self.model = new_model(seed, family=family)
        self.watch = rl.Watch(
            folder,
            rank=0,
            name_map=rl.names.hf_to_vllm,
            is_mixture=self.mixture,
            sampling=rl.Sampling(temperature=self.fault.temperature, top_p=self.fault.top_p),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.random = np.random.default_rng(seed)
        self.prompts = self.random.integers(2, 199, (256, PROMPT))
        self.engines = [functools.partial(call, number) for number in range(len(faults))]
        for number, (engine, fault) in enumerate(zip(self.engines, faults, strict=True)):
            engine("reset", str(folder), f"engine-{number}", fault, family)

    def sync(self, version: int) -> None:
        """Send the weights to every engine."""
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        weights = {name: tensor.numpy() for name, tensor in self.watch.sent(named, version=version)}
        for engine in self.engines:
            engine("load", weights, version)

    def logprobs(self, prompts: np.ndarray, ids: np.ndarray) -> torch.Tensor:
        """Return the log-probabilities of responses, `[N, RESPONSE]`; their experts are in `experts` then."""
        tokens = torch.from_numpy(np.concatenate([prompts, ids], axis=1))
        wants = {"output_router_logits": True} if self.mixture else {}
        outcome = self.model(input_ids=tokens, **wants)
        experts = experts_of(outcome, len(tokens))
        self.experts = None if experts is None else experts[:, PROMPT - 1 : -1]
        logits = outcome.logits[:, PROMPT - 1 : -1].float()
        if self.fault.name == "raw":
            logits = logits / self.fault.temperature
        return log_softmax(logits, dim=-1).gather(2, tokens[:, PROMPT:, None])[..., 0]

    def step(self, number: int, *, sequences: int = 128) -> rl.Report:
        """Send weights, sample, compare, update; return the report."""
        self.sync(number)
        prompts = self.prompts[self.random.integers(0, len(self.prompts), sequences // 4).repeat(4)]
        shares = np.array_split(prompts, len(self.engines))
        outcomes = [
            engine("generate", share, self.seed * 10**6 + number * 100 + n)
            for n, (engine, share) in enumerate(zip(self.engines, shares, strict=True))
        ]
        ids, mask = (np.concatenate([outcome[name] for outcome in outcomes]) for name in ("ids", "mask"))
        logprobs = self.logprobs(prompts, ids)
        with self.watch.step(number):
            for n, (outcome, share) in enumerate(zip(outcomes, shares, strict=True)):
                counted = None if self.fault.name == "padding" else outcome["mask"]
                self.watch.rollout(
                    logprobs=outcome["logprobs"],
                    ids=outcome["ids"],
                    mask=counted,
                    engine=f"engine-{n}",
                    version=number,
                    prompts=list(share),
                    experts=outcome.get("experts"),
                )
            self._tell(ids, mask, logprobs.detach())
        reward = torch.from_numpy(((ids % 7 == 3) & mask).sum(1) / np.maximum(mask.sum(1), 1)).float()
        groups = reward.view(-1, 4)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
        counts = torch.from_numpy(mask)
        loss = -(torch.exp(logprobs - logprobs.detach()) * advantage)[counts].mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        report = self.watch.report(number)
        assert report is not None
        return report

    def _tell(self, ids: np.ndarray, mask: np.ndarray, logprobs: torch.Tensor) -> None:
        counted: np.ndarray | None = mask
        if self.fault.name == "padding":
            counted = None
        if self.fault.name == "shifted":
            logprobs = torch.roll(logprobs, 1, dims=1)
        if self.fault.name == "tokens differ":
            ids = np.where(np.arange(ids.shape[1]) > 5, (ids + 1) % 199, ids)
        self.watch.train(logprobs=logprobs, ids=ids, mask=counted, experts=self.experts)
