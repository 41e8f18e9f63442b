/*
 * How many elements of each tensor have which sign and exponent: the histograms of counting.py, in one pass.
 *
 * A TILE is first turned into the numbers of its elements' bins, one byte each, by loops that the compiler's vectoriser
 * does well; then these are counted. Neighbours often fall into one bin, and an increment has to wait for the one
 * before it in the same place of memory: so they go to TABLES tables in turn, which are added up at the end.
 */
#include <stdint.h>
#include <string.h>

#define BINS 128          /* as core/values.py says: negative from large to small, zero, positive from small to large */
#define ZERO 63
#define NOT_FINITE 127
#define LEAST_EXPONENT (-45)
#define OVER 62           /* places of magnitudes: 0 below the least exponent, 1 to 61 for each, 62 beyond the largest */
#define TILE 4096
#define TABLES 8
#define FLUSH (1 << 30)   /* elements that 32 bits can certainly count */

#ifdef CLONED /* a test builds one instruction set at a time */
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

typedef void find_bins(const void *elements, int64_t count, uint8_t *bins);

/* `exponent` is biased by `bias`; where all its bits are set, it is `special` and the number is not finite. */
INLINE uint8_t bin_of(int is_zero, int is_negative, int32_t exponent, int32_t bias, int32_t special)
{
    int32_t place = exponent - (bias + LEAST_EXPONENT - 1);
    place = place < 0 ? 0 : place;
    place = place > OVER ? OVER : place;
    int32_t bin = is_negative ? ZERO - 1 - place : ZERO + 1 + place;
    bin = is_zero ? ZERO : bin;
    return (uint8_t)(exponent == special ? NOT_FINITE : bin);
}

INLINE uint8_t bin_of_float(uint32_t bits)
{
    uint32_t magnitude = bits & 0x7fffffffu;
    return bin_of(magnitude == 0, bits >> 31 != 0, (int32_t)(magnitude >> 23), 127, 255);
}

INLINE uint8_t bin_of_bfloat16(uint16_t bits)
{
    return bin_of_float((uint32_t)bits << 16);
}

/* The subnormal numbers of half precision are ordinary ones here: float says their exponents. */
INLINE uint8_t bin_of_half(uint16_t bits)
{
    int32_t magnitude = bits & 0x7fff, exponent = magnitude >> 10;
    float subnormal = (float)magnitude * 0x1p-24f;
    uint32_t widened;
    memcpy(&widened, &subnormal, sizeof widened);
    int32_t as_float = exponent == 31 ? 255 : exponent ? exponent + 127 - 15 : (int32_t)(widened >> 23);
    return bin_of(magnitude == 0, bits >> 15 != 0, as_float, 127, 255);
}

INLINE uint8_t bin_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t magnitude = bits & INT64_MAX;
    return bin_of(magnitude == 0, bits >> 63 != 0, (int32_t)(magnitude >> 52), 1023, 2047);
}

#define DEFINE_BINS(NAME, STORED, BIN_OF)                                                                              \
    CLONED static void NAME(const void *data, int64_t count, uint8_t *bins)                                            \
    {                                                                                                                  \
        typedef STORED stored_t __attribute__((aligned(1), may_alias));                                                \
        const stored_t *elements = data;                                                                               \
        for (int64_t i = 0; i < count; i++)                                                                            \
            bins[i] = BIN_OF(elements[i]);                                                                             \
    }

DEFINE_BINS(bins_of_float, uint32_t, bin_of_float)
DEFINE_BINS(bins_of_bfloat16, uint16_t, bin_of_bfloat16)
DEFINE_BINS(bins_of_half, uint16_t, bin_of_half)
DEFINE_BINS(bins_of_double, double, bin_of_double)
DEFINE_BINS(bins_of_int8, int8_t, bin_of_double)
DEFINE_BINS(bins_of_int16, int16_t, bin_of_double)
DEFINE_BINS(bins_of_int32, int32_t, bin_of_double)
DEFINE_BINS(bins_of_int64, int64_t, bin_of_double)
DEFINE_BINS(bins_of_uint8, uint8_t, bin_of_double)
DEFINE_BINS(bins_of_uint16, uint16_t, bin_of_double)
DEFINE_BINS(bins_of_uint32, uint32_t, bin_of_double)
DEFINE_BINS(bins_of_uint64, uint64_t, bin_of_double)

/* In the order of native.py's table of dtypes. */
static const struct {
    int64_t size;
    find_bins *find;
} KINDS[] = {
    {4, bins_of_float}, {2, bins_of_bfloat16}, {2, bins_of_half},   {8, bins_of_double},
    {1, bins_of_int8},  {2, bins_of_int16},    {4, bins_of_int32},  {8, bins_of_int64},
    {1, bins_of_uint8}, {2, bins_of_uint16},   {4, bins_of_uint32}, {8, bins_of_uint64},
};

static void add_tables(uint32_t tables[TABLES][BINS], int64_t *row)
{
    for (int table = 0; table < TABLES; table++)
        for (int bin = 0; bin < BINS; bin++)
            row[bin] += tables[table][bin];
    memset(tables, 0, TABLES * sizeof tables[0]);
}

static void count_bins(const uint8_t *bins, int64_t count, uint32_t tables[TABLES][BINS])
{
    int64_t i = 0;
    for (; i + TABLES <= count; i += TABLES)
        for (int table = 0; table < TABLES; table++)
            tables[table][bins[i + table]]++;
    for (; i < count; i++)
        tables[0][bins[i]]++;
}

struct tensor {
    const char *data;
    int64_t count;
    int64_t kind;
};

/* Write one row of BINS counts per tensor. */
void trainermon_histograms(const struct tensor *tensors, int64_t num_tensors, int64_t *rows)
{
    uint32_t tables[TABLES][BINS] = {{0}};
    uint8_t bins[TILE];
    memset(rows, 0, (size_t)num_tensors * BINS * sizeof *rows);
    for (int64_t t = 0; t < num_tensors; t++, rows += BINS) {
        int64_t size = KINDS[tensors[t].kind].size, waiting = 0;
        for (int64_t i = 0, taken; i < tensors[t].count; i += taken) {
            taken = tensors[t].count - i < TILE ? tensors[t].count - i : TILE;
            KINDS[tensors[t].kind].find(tensors[t].data + i * size, taken, bins);
            count_bins(bins, taken, tables);
            waiting += taken;
            if (waiting + TILE > FLUSH) {
                add_tables(tables, rows);
                waiting = 0;
            }
        }
        add_tables(tables, rows);
    }
}
