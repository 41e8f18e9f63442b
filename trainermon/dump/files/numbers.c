/*
 * The statistics of tensors as JSON: the shortest decimals that read back as the same doubles, as Python's repr has them.
 *
 * A dump of some hundred tensors has a thousand of these numbers, each of which takes the interpreter 1 us. The digits are
 * found by Schubfach (R. Giulietti, The Schubfach way to render doubles, 2020), with powers of ten that Python computes:
 * plain C that knows neither Python nor torch. See numbers.py.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { COUNT, MIN, MAX, SUM, SUM_SQ, ZEROS, NANS, INFS, NUM_STATISTICS };
enum { FIRST_POWER = -292, SIGNIFICAND_BITS = 53, EXPONENT_BIAS = 1075, MAX_DIGITS = 17, MAX_FIXED = 16, MIN_FIXED = -3 };

/* Below, a sum of squares has lost what counts: pairs.py. */
static const double LEAST_SQUARE = 0x1p-900;

typedef unsigned __int128 wide;

/* The upper 128 bits of 10^k, rounded up, for each k from FIRST_POWER. */
struct power {
    uint64_t high, low;
};

/* digits * 10^exponent */
struct decimal {
    uint64_t digits;
    int exponent;
};

/* The upper 64 bits of a product, the last of which says whether any bit below it is set, too. */
static uint64_t round_to_odd(struct power power, uint64_t factor)
{
    wide upper = (wide)power.high * factor + (uint64_t)((wide)power.low * factor >> 64);
    return (uint64_t)(upper >> 64) | ((uint64_t)upper > 1);
}

/* The shortest decimal that lies nearer to a positive double than to its neighbours, and of those the nearest to it. The
 * double is `significand` * 2^`exponent`, and its neighbours are `4 * significand` - 2 (or - 1) and + 2 in quarters. */
static struct decimal shortest(uint64_t significand, int exponent, int is_power_of_two, const struct power *powers)
{
    uint64_t is_odd = significand & 1;
    int k = (exponent * 1262611 - (is_power_of_two ? 524031 : 0)) >> 22; /* floor(log10 of what separates neighbours) */
    int shift = exponent + ((-k * 1741647) >> 19) + 1;                   /* floor(log2(10^-k)) */
    struct power power = powers[-k - FIRST_POWER];
    uint64_t lower = round_to_odd(power, (4 * significand - 2 + is_power_of_two) << shift) + is_odd;
    uint64_t value = round_to_odd(power, (4 * significand) << shift);
    uint64_t upper = round_to_odd(power, (4 * significand + 2) << shift) - is_odd;
    uint64_t floor = value / 4, tens = floor / 10;
    if (floor >= 10 && (lower <= 40 * tens) != (40 * tens + 40 <= upper))
        return (struct decimal){tens + (40 * tens + 40 <= upper), k + 1};
    if ((lower <= 4 * floor) != (4 * floor + 4 <= upper))
        return (struct decimal){floor + (4 * floor + 4 <= upper), k};
    return (struct decimal){floor + (value > 4 * floor + 2 || (value == 4 * floor + 2 && (floor & 1))), k};
}

static struct decimal decimal_of(double value, const struct power *powers)
{
    uint64_t bits, hidden = 1ull << (SIGNIFICAND_BITS - 1);
    memcpy(&bits, &value, sizeof bits);
    uint64_t fraction = bits & (hidden - 1);
    int biased = bits >> (SIGNIFICAND_BITS - 1) & 0x7ff;
    struct decimal found = biased ? shortest(fraction | hidden, biased - EXPONENT_BIAS, !fraction && biased > 1, powers)
                                  : shortest(fraction, 1 - EXPONENT_BIAS, 0, powers);
    while (found.digits % 10 == 0) {
        found.digits /= 10;
        found.exponent++;
    }
    return found;
}

static char *put_text(char *out, const char *text)
{
    size_t size = strlen(text);
    memcpy(out, text, size);
    return out + size;
}

static char *put_integer(char *out, uint64_t value)
{
    char digits[20];
    int num = 0;
    do
        digits[num++] = (char)('0' + value % 10);
    while (value /= 10);
    while (num)
        *out++ = digits[--num];
    return out;
}

static char *put_zeros(char *out, int num)
{
    memset(out, '0', num > 0 ? num : 0);
    return out + (num > 0 ? num : 0);
}

/* As Python's repr: with an exponent beyond 16 digits before the point, or three zeros behind it. */
static char *put_double(char *out, double value, const struct power *powers)
{
    char digits[MAX_DIGITS + 3];
    if (signbit(value))
        *out++ = '-';
    if (value == 0)
        return put_text(out, "0.0");
    struct decimal found = decimal_of(value, powers);
    int num = (int)(put_integer(digits, found.digits) - digits), point = num + found.exponent;
    digits[num] = 0;
    if (point > MAX_FIXED || point < MIN_FIXED) {
        *out++ = digits[0];
        if (num > 1) {
            *out++ = '.';
            out = put_text(out, digits + 1);
        }
        out = put_text(out, point > 0 ? "e+" : "e-");
        int exponent = point > 0 ? point - 1 : 1 - point;
        return put_integer(put_zeros(out, exponent < 10), exponent);
    }
    if (point <= 0)
        return put_text(put_zeros(put_text(out, "0."), -point), digits);
    if (point >= num)
        return put_text(put_zeros(put_text(out, digits), point - num), ".0");
    memcpy(out, digits, point);
    out[point] = '.';
    return put_text(out + point + 1, digits + point);
}

/* Write a line for each row of moments: its statistics as JSON items, or nothing where they are not those of fractions, or
 * they or their squares do not fit doubles. `out` takes 256 bytes for each. Returns how many bytes were written. */
int64_t trainermon_numbers(const double *rows, const uint8_t *are_fractions, int64_t num_rows,
                           const struct power *powers, char *out)
{
    char *begin = out;
    for (int64_t i = 0; i < num_rows; i++, *out++ = '\n') {
        const double *row = rows + i * NUM_STATISTICS;
        double finite = row[COUNT] - row[NANS] - row[INFS], mean = row[SUM] / finite, norm = sqrt(row[SUM_SQ]);
        int is_lost = row[SUM_SQ] < LEAST_SQUARE && (row[MIN] != 0 || row[MAX] != 0);
        if (!are_fractions[i] || !(finite > 0) || !isfinite(mean + norm) || is_lost)
            continue;
        out = put_double(put_text(out, "\"Max\": "), row[MAX], powers);
        out = put_double(put_text(out, ", \"Min\": "), row[MIN], powers);
        out = put_double(put_text(out, ", \"Mean\": "), mean, powers);
        out = put_double(put_text(out, ", \"Norm\": "), norm, powers);
        out = put_integer(put_text(out, ", \"nans\": "), (uint64_t)row[NANS]);
        out = put_integer(put_text(out, ", \"infs\": "), (uint64_t)row[INFS]);
        out = put_integer(put_text(out, ", \"zeros\": "), (uint64_t)row[ZEROS]);
    }
    return out - begin;
}
