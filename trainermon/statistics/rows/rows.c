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

/* Write the rows at `places`, and after them those of single numbers, as the columns of `out`, a table of eight lines. */
void trainermon_columns(const double *rows, const int64_t *places, int64_t num_places, const double *scalars,
                        int64_t num_scalars, double *out)
{
    int64_t width = num_places + num_scalars;
    for (int64_t i = 0; i < num_places; i++)
        for (int k = 0; k < NUM_STATISTICS; k++)
            out[k * width + i] = rows[places[i] * NUM_STATISTICS + k];
    for (int64_t i = 0; i < num_scalars; i++)
        write_scalar(scalars[i], out + num_places + i, width);
}

/* Whether one of `num_rows` rows counts a NaN or an infinity. */
int trainermon_any_nonfinite(const double *rows, int64_t num_rows)
{
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i * NUM_STATISTICS + NANS] != 0 || rows[i * NUM_STATISTICS + INFS] != 0)
            return 1;
    return 0;
}
