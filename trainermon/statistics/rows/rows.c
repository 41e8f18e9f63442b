/*
 * What is asked of rows of moments in the host's memory at every step: columns for the journal, and whether all is
 * finite.
 *
 * Plain C that knows neither Python nor torch. A row is eight doubles, in the order of `values.STATISTICS`.
 */
#include <math.h>
#include <stdint.h>

enum { COUNT, MIN, MAX, SUM, SUM_SQ, ZEROS, NANS, INFS, NUM_STATISTICS };

static void write_scalar(double value, double *column, int64_t stride)
{
    int is_finite = isfinite(value), is_nan = isnan(value);
    column[COUNT * stride] = 1;
    column[MIN * stride] = is_finite ? value : INFINITY;
    column[MAX * stride] = is_finite ? value : -INFINITY;
    column[SUM * stride] = is_finite ? value : 0;
    column[SUM_SQ * stride] = is_finite ? value * value : 0;
    column[ZEROS * stride] = value == 0;
    column[NANS * stride] = is_nan;
    column[INFS * stride] = !is_finite && !is_nan;
}

/* Where columns are written: filled once, as each argument of a call costs the caller more than what is done with it. */
struct columns {
    const int64_t *places;
    int64_t num_places;
    const double *scalars;
    int64_t num_scalars;
    double *out; /* eight lines */
};

/* Write the rows at some places as columns, and after them those of single numbers. */
void trainermon_write_columns(const double *rows, const struct columns *to)
{
    int64_t width = to->num_places + to->num_scalars;
    for (int64_t i = 0; i < to->num_places; i++)
        for (int k = 0; k < NUM_STATISTICS; k++)
            to->out[k * width + i] = rows[to->places[i] * NUM_STATISTICS + k];
    for (int64_t i = 0; i < to->num_scalars; i++)
        write_scalar(to->scalars[i], to->out + to->num_places + i, width);
}

/* Whether one of `num_rows` rows counts a NaN or an infinity. */
int trainermon_any_nonfinite(const double *rows, int64_t num_rows)
{
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i * NUM_STATISTICS + NANS] != 0 || rows[i * NUM_STATISTICS + INFS] != 0)
            return 1;
    return 0;
}
