"""The laws of an optimizer's settings, in words: learning rates, weight decay, betas. `settings` judges them."""

from __future__ import annotations

from trainermon.alerts.laws.law import Law
from trainermon.alerts.laws.settings import Collapse, GoesOn, InProportion, MildDecay, Steady, SwitchedOff
from trainermon.core.catalogue import GROUP_SETTINGS, LEARNING_RATE_SERIES, WEIGHT_DECAY_SERIES
from trainermon.core.values import Kind

SETTING_LAWS: tuple[Law, ...] = (
    Law(
        name="in-proportion",
        sentence="The learning rates of an optimizer's groups change together.",
        broken="The learning rate of some parameter groups changed otherwise than that of the others",
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(LEARNING_RATE_SERIES,),
        relation=InProportion,
        settings={"factor": 2},
        tolerance="groups whose schedules end at different rates drift apart little by little",
        exceptions=("schedules of single groups that change in stages", "rates of zero, as of groups that rest"),
        causes=("code that adjusts the rate reaches some of the groups only, or one of them twice",),
        look_at="who writes to param_groups, and whether it goes through all of them",
    ),
    Law(
        name="steady",
        sentence="Weight decay, betas, epsilon and momentum stay what they are, or change little by little.",
        broken="A setting of the optimizer (weight decay, betas, epsilon, momentum) jumped",
        rows=(Kind.STEP,),
        phase="optimizer",
        names=tuple(GROUP_SETTINGS),
        relation=Steady,
        settings={"factor": 4},
        tolerance="none: a factor of 4 in one step (of betas: of their distance from 1) is a jump",
        exceptions=(
            "what begins from zero, or ends there: see `setting-switched-off`",
            "what was changed between two starts of the job",
        ),
        causes=(
            "the state of another optimizer was loaded, and its groups with it",
            "code that changes one group by its number reaches another one",
        ),
        look_at="what writes to param_groups: load_state_dict, add_param_group, callbacks",
    ),
    Law(
        name="not-switched-off",
        sentence="Weight decay, epsilon and the learning rate of one group are not set to zero all at once.",
        broken="A setting of the optimizer (weight decay, epsilon, the rate of one group) was set to zero",
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(WEIGHT_DECAY_SERIES, "epsilon", LEARNING_RATE_SERIES),
        relation=SwitchedOff,
        settings={"steps": 0},
        tolerance="none: zero is exact",
        exceptions=(
            "schedules that end at zero",
            "stages of a training that do without it on purpose",
            "rates of all groups: see `learning-rate-zero`; of groups that take turns all but the first rest",
        ),
        causes=(
            "the state of another optimizer was loaded, and its groups with it",
            "a group was replaced by one that leaves the setting out",
        ),
        look_at="what writes to param_groups: load_state_dict, add_param_group, callbacks",
    ),
    Law(
        name="no-collapse",
        sentence="Learning rates fall little by little, or by stages.",
        broken="The learning rate fell by orders of magnitude within one step",
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(LEARNING_RATE_SERIES,),
        relation=Collapse,
        settings={"factor": 10000},
        tolerance="a factor of 10000 in one step is none of a stage",
        exceptions=("rates below a tenth of the largest one before, where a schedule ends", "rates of exactly zero"),
        causes=(
            "a schedule that counts steps gets epochs, or is stepped beyond its end",
            "a callback sets the rate from a metric that is zero or not finite",
        ),
        look_at="who writes to param_groups, and what the scheduler counts",
    ),
    Law(
        name="mild-decay",
        sentence="Weight decay takes a small share off the weights in a step.",
        broken="Weight decay takes an implausibly large share off the weights in each step",
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(WEIGHT_DECAY_SERIES, LEARNING_RATE_SERIES),
        relation=MildDecay,
        settings={"share": 0.005},
        tolerance="learning rate times weight decay is at most 0.005: weights that learn nothing halve in 140 steps",
        exceptions=(
            "learning rates of 0.3 and more, of optimizers that find theirs",
            "trainings of a few hundred steps with a decay as strong on purpose",
        ),
        causes=("the decay was written down wrongly, or scaled twice", "decay and rate of two groups were swapped"),
        look_at="weight_decay of the group, and whether the optimizer multiplies it by the learning rate",
    ),
    Law(
        name="goes-on",
        sentence="After a restart the learning rate goes on where it was.",
        broken="After a restart the learning rate is not what it was before",
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(LEARNING_RATE_SERIES,),
        relation=GoesOn,
        settings={"factor": 2},
        tolerance="a factor of 2",
        exceptions=("restarts that count steps from 0", "rates that are changed, or warmed up again, on purpose"),
        causes=(
            "the scheduler's state is not in the checkpoint, or was loaded before the optimizer's",
            "the scheduler was made after the optimizer's state was loaded, and wrote its first rate into it",
        ),
        look_at="whether scheduler.load_state_dict is called, and last_epoch",
    ),
)
