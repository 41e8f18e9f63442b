/*
 * What a spike condition learns of a step of many series: one pass over them, where numpy takes twenty.
 *
 * Plain C that knows neither Python nor numpy.
 */
#include <math.h>
#include <stdint.h>

enum { FIRST_VALUES = 8 }; /* the first level is their mean */

/* What is remembered of the series, one element for each; spikes.py says what they mean. */
struct spikes {
    float *levels, *magnitudes; /* no magnitudes: of logarithms */
    float *window;              /* a row of `width` for each series */
    int64_t *next;
    int32_t *num_learned;
    float *firsts; /* NULL where the first level does not matter */
    int32_t *num_firsts;
    int64_t width;
    int32_t num_starting, refresh_every, warmup;
    float tiny;
};

/* The series of a step: those from `first` on, or those at `slots`; and those of them with something to do. */
struct step {
    const int64_t *slots;
    int64_t first, count;
    const float *seen, *missed;
    int64_t *started, *due; /* room for `count` slots each */
    int64_t num_started, num_due;
};

static inline int64_t slot_of(const struct step *step, int64_t i)
{
    return step->slots ? step->slots[i] : step->first + i;
}

/* As numpy's maximum: NaN where either is. */
static inline float larger(float first, float second)
{
    return first > second || isnan(first) ? first : second;
}

static void follow(const struct spikes *of, int64_t slot, float seen)
{
    const float share = 0.125f; /* a power of two: rounded once, with or without a fused multiplication */
    of->levels[slot] += share * (seen - of->levels[slot]);
    if (of->magnitudes)
        of->magnitudes[slot] += share * (larger(fabsf(seen), of->tiny) - of->magnitudes[slot]);
}

static void learn_first(const struct spikes *of, int64_t slot, float seen)
{
    if (!of->firsts || of->num_firsts[slot] >= FIRST_VALUES)
        return;
    of->num_firsts[slot]++;
    of->firsts[slot] = (float)(of->firsts[slot] + (double)(seen - of->firsts[slot]) / of->num_firsts[slot]);
}

/* Learn values, and what they missed the levels by. Writes the slots whose level begins, and those whose trend is due. */
void trainermon_learn_spikes(const struct spikes *of, struct step *step)
{
    step->num_started = step->num_due = 0;
    for (int64_t i = 0; i < step->count; i++) {
        int64_t slot = slot_of(step, i);
        follow(of, slot, step->seen[i]);
        learn_first(of, slot, step->seen[i]);
        int32_t num_learned = ++of->num_learned[slot];
        int64_t place = of->next[slot];
        of->window[slot * of->width + place] = num_learned <= of->num_starting ? step->seen[i] : step->missed[i];
        of->next[slot] = place + 1 == of->width ? 0 : place + 1;
        if (num_learned == of->num_starting)
            step->started[step->num_started++] = slot;
        if (num_learned % of->refresh_every == 0 || num_learned == of->warmup + 1)
            step->due[step->num_due++] = slot;
    }
}
