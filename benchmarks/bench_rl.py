"""What watching rollouts costs, and how well it names causes, on loops that its limits were not chosen on.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_rl cost                  # a step of 100,000 tokens; digests of weights
    OMP_NUM_THREADS=1 python -m benchmarks.bench_rl faults --seeds 1 2 3  # GRPO with an engine in another process
    OMP_NUM_THREADS=1 python -m benchmarks.bench_rl clean --steps 2000    # a sound loop: nothing may be raised

Limits were chosen on the Llama of seed 0; `faults` and `clean` run others of these, mixtures of experts, and with
`--families qwen neox` models that no limit was chosen on. CPU time.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_statistics import c_reader
from benchmarks.measure import interleaved
from tests.rl.loop import CASES, MIXTURE_CASES, OTHER_FAMILIES, Call, Fault, Trainer, engine_process
from trainermon import rl
from trainermon.rl.snapshots import snapshot
from trainermon.rl.steps import Settings, WatchedStep, judge_step

TOKENS, SEQUENCES = 100_000, 250
FAMILIES = ("llama", "mixture", *OTHER_FAMILIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "faults", "clean"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES[:2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--elements", type=int, default=1_000_000_000, help="of the weights that are digested, bfloat16"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "cost":
        tokens_cost()
        digest_cost(args.elements)
    else:
        {"faults": lambda: faults(args.seeds, args.families), "clean": lambda: clean(args)}[args.part]()


def tokens_cost() -> None:
    random = np.random.default_rng(0)
    shape = (SEQUENCES, TOKENS // SEQUENCES)
    rollout = torch.from_numpy(-random.exponential(1.0, shape)).float()
    passed = {"logprobs": rollout, "ids": torch.from_numpy(random.integers(0, 9999, shape)), "mask": rollout < 1}
    train = {"logprobs": rollout + 0.01 * torch.randn(shape), "mask": rollout < 1}
    settings = Settings(
        sampling=rl.Sampling(), dtype="bfloat16", is_mixture=False, name_map=rl.names.same, limits=rl.Limits()
    )
    step = WatchedStep(0, rollout=[snapshot(passed)], train=[snapshot(train)], engines=[("a", 1)], known=[None])
    nothing = interleaved(lambda: None, lambda: (snapshot(passed), snapshot(train)), pairs=31, warm_up=3)
    print(f"a step of {TOKENS:,} tokens: copied in {nothing.extra_ms:.2f} ms in the thread of the training")
    compared = interleaved(lambda: None, lambda: judge_step(step, settings, None), pairs=31, warm_up=3)
    print(f"  compared in {compared.extra_ms:.1f} ms in a thread of its own")


def digest_cost(elements: int) -> None:
    weights = {}
    for number in range(max(1, elements // 33_554_432)):
        weights[f"layer{number}"] = torch.randint(-(2**15), 2**15, (8192, 4096), dtype=torch.int16).view(torch.bfloat16)
    read = c_reader()
    assert read is not None, "no C compiler"
    ratio = interleaved(lambda: read(list(weights.values())), lambda: rl.digest_tensors(weights), pairs=7, warm_up=1)
    count = sum(tensor.numel() for tensor in weights.values())
    print(f"digests of {count:,} bfloat16 weights against reading them once in C: {ratio.text()}")


def faults(seeds: list[int], families: list[str]) -> None:
    right, total, wrong = collections.Counter[str](), collections.Counter[str](), []
    with engine_process() as call:
        for family, seed in itertools.product(families, seeds):
            for name, (fault, cause) in {**CASES, **(MIXTURE_CASES if family == "mixture" else {})}.items():
                for report in _reports(call, fault, family=family, seed=seed, steps=4)[1:]:
                    found = str(report.causes[0].cause) if report.causes else "nothing"
                    total[name] += 1
                    right[name] += found == cause
                    if found != cause:
                        wrong.append(f"  {name}, {family}, seed {seed}: {report.sentence}")
    for name in total:
        print(f"{name:<28}{right[name]:>4} of {total[name]}")
    print(f"{'all':<28}{right.total():>4} of {total.total()}, {right.total() / total.total():.1%}")
    print("\n".join(wrong))


def clean(args: argparse.Namespace) -> None:
    with engine_process() as call:
        for family in args.families:
            steps = args.steps // len(args.families)
            reports = _reports(call, [Fault(), Fault()], family=family, seed=args.seeds[0], steps=steps)
            raised = [report for report in reports if report.causes]
            print(f"{family}: {len(raised)} of {len(reports)} sound steps have a cause", flush=True)
            print("\n".join(f"  step {report.step}: {report.sentence}" for report in raised[:10]))


def _reports(call: Call, faults: list[Fault], *, family: str, seed: int, steps: int) -> list[rl.Report]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), call, faults, family=family, seed=seed)
        reports = [trainer.step(number) for number in range(steps)]
        trainer.watch.close()
        assert not trainer.watch.num_failures
        return reports


if __name__ == "__main__":
    main()
