/*
 * Median and spread of rows that are sorted already.
 *
 * Plain C that knows neither Python nor numpy.
 */
#include <math.h>
#include <stdint.h>

static int64_t number_of_values(const float *ascending, int64_t width)
{
    int64_t count = width; /* NaN stands behind all others */
    if (!isnan(ascending[width - 1]))
        return count;
    int64_t low = 0;
    while (low < count) {
        int64_t middle = (low + count) / 2;
        if (isnan(ascending[middle]))
            count = middle;
        else
            low = middle + 1;
    }
    return count;
}

/* The least distance from `level` that `num` of the values are within. They stand side by side: their first place is
 * where the last of them begins to be further from the level than the first, or the one before. */
static float distance_of(const float *ascending, int64_t count, int64_t num, float level)
{
    int64_t first = 0, span = count - num; /* places that are not ruled out, less one */
    while (span > 0) {
        int64_t half = span / 2, place = first + half;
        int is_further = ascending[place + num - 1] - level >= level - ascending[place];
        first = is_further ? first : place + 1;
        span = is_further ? half : span - half - 1;
    }
    float distance = fmaxf(level - ascending[first], ascending[first + num - 1] - level);
    return first ? fminf(distance, level - ascending[first - 1]) : distance;
}

/* Of each of `num_rows` sorted rows: the number of its values, their median, the median of the deviations from it, and
 * the deviation that `share` of the values stay within. NaN without a value, and for the deviations from an infinite
 * median. */
void trainermon_spread(const float *rows, int64_t num_rows, int64_t width, double share, int64_t *counts, float *levels,
                       float *middles, float *bounds)
{
    for (int64_t i = 0; i < num_rows; i++, rows += width) {
        int64_t count = counts[i] = number_of_values(rows, width);
        levels[i] = middles[i] = bounds[i] = NAN;
        if (!count)
            continue;
        int64_t lower = (count - 1) / 2, upper = count / 2, within = (int64_t)(share * count);
        float level = levels[i] = (rows[lower] + rows[upper]) * 0.5f;
        if (!isfinite(level))
            continue;
        float middle = distance_of(rows, count, upper + 1, level);
        middles[i] = (lower == upper ? middle + middle : distance_of(rows, count, lower + 1, level) + middle) * 0.5f;
        bounds[i] = distance_of(rows, count, within ? within : 1, level);
    }
}
