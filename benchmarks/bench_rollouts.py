"""How well rollouts are judged: faults and sound runs on small policies of several families.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_rollouts tuned
    OMP_NUM_THREADS=1 python -m benchmarks.bench_rollouts held-back    # cases, families and seeds no rule was chosen on

A faulty run is right if each of its faulty steps has the cause; a sound one if no step has any. Printed are also steps
without the fault that have a cause (false alarms), and faulty steps that are called consistent (false assurance).
"""

from __future__ import annotations

import argparse
import collections

import torch

from benchmarks.rollouts.cases import HELD_BACK, TUNED, RolloutCase
from benchmarks.rollouts.loop import run_case
from benchmarks.rollouts.policies import FAMILIES, HELD_BACK_FAMILIES
from trainermon import rl

SEEDS = {"tuned": (0, 1), "held-back": (7, 8)}
WITH_EXPERTS = ("moe", "single expert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("tuned", "held-back"))
    parser.add_argument("--families", nargs="+", choices=(*FAMILIES, *HELD_BACK_FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what each wrong step was said to be")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in (TUNED if args.half == "tuned" else HELD_BACK) if args.only in case.name]
    families = args.families or (FAMILIES if args.half == "tuned" else (*FAMILIES, *HELD_BACK_FAMILIES))
    totals = collections.Counter[str]()
    for family in families:
        of_family = collections.Counter[str]()
        for case in cases:
            if not case.needs_experts or family in WITH_EXPERTS:
                for seed in args.seeds or SEEDS[args.half]:
                    of_family += _judged(case, family, seed, verbose=args.verbose)
        print(f"{family:<16}{_line(of_family)}", flush=True)
        totals += of_family
    print(f"{'all':<16}{_line(totals)}, {totals['right'] / totals['runs']:.1%}")


def _line(found: collections.Counter[str]) -> str:
    return (
        f"{found['right']:>4} of {found['runs']:>4} runs right, {found['alarms']} false alarms in "
        f"{found['sound steps']} sound steps, {found['assurances']} false assurances in {found['faulty steps']} faulty"
    )


def _judged(case: RolloutCase, family: str, seed: int, *, verbose: bool) -> collections.Counter[str]:
    found = collections.Counter[str](runs=1)
    wrong = []
    for report, is_faulty in run_case(case, family, seed=seed):
        cause = str(report.causes[0].cause) if report.causes else ""
        found["faulty steps" if is_faulty else "sound steps"] += 1
        found["alarms"] += bool(cause) and not is_faulty
        found["assurances"] += is_faulty and report.verdict is rl.Verdict.CONSISTENT
        if cause not in case.causes if is_faulty else cause:
            wrong.append(report)
    found["right"] = int(not wrong)
    if wrong:
        print(f"  {family}, seed {seed}, {case.name}: {len(wrong)} steps wrong")
        if verbose:
            print("\n".join(f"    step {report.step}: {report.sentence}" for report in wrong[:3]))
    return found


if __name__ == "__main__":
    main()
