/*
 * The eight moments of many tensors in one pass: count, min, max, sum, sum of squares, zeros, NaNs, infinities.
 *
 * Plain C that knows neither Python nor torch: compiled.py loads it by ctypes. What is decided here:
 *
 *   - Sums run in double lanes. Those of bfloat16 and half, which are not bound by memory, run in float lanes that are
 *     emptied into double ones every FLUSH steps: a relative error of at most FLUSH * 2^-24 < 1e-6.
 *   - An item (ITEM elements) is first taken for ordinary. If its sum of squares says that an element was NaN or
 *     infinite it is read again, from cache, by loops that mask those; if its largest magnitude does not suit float
 *     lanes, by loops with double lanes. The next item begins with the loops that the last one needed, so that data
 *     which is never ordinary is not read twice.
 *   - Which sums an item gets depends on its elements alone, items have a fixed size and are merged in order: the
 *     result is the same bits for any number of threads.
 *
 * The loops over LANES are written for the compiler's vectoriser; benchmarks/bench_statistics.py tells whether it did.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16            /* elements that one step takes: an AVX-512 register of floats */
#define FLUSH 16            /* steps between two flushes of float lanes */
#define ITEM 65536          /* elements of a work item: small enough to be read again from the L2 cache */
#define GATHERED 4096       /* elements that are gathered from strided rows at a time, on the stack: 32 KiB at most */
#define READ_AHEAD 8192     /* bytes; the hardware's prefetcher stops at every 4 KiB page. 1.6 times faster from DRAM */
#define PARALLEL (1 << 22)  /* elements from which threads are worth their start of about 50 us */
#define MAX_THREADS 16

#define INLINE static inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch((const char *)(address) + READ_AHEAD, 0, 2)

/* One copy of each loop per instruction set; the loader picks one, which takes a libc with ifunc. GCC 11 knows no
 * levels, and its copies of the 16-bit loops are slower than the loops as they are. */
#ifdef CLONED /* a test builds one instruction set at a time */
#define CLONED_HALVES CLONED
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define CLONED_HALVES CLONED
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#define CLONED_HALVES
#else
#define CLONED
#define CLONED_HALVES
#endif

struct partial {
    double low, high, sum, sum_sq;
    int64_t zeros, nans, infs;
};

/* Reads at most ITEM elements: what lanes of counters can hold. */
typedef void scan(const void *elements, int64_t count, struct partial *part);

static const struct partial NOTHING = {INFINITY, -INFINITY, 0, 0, 0, 0, 0};

static inline void merge(struct partial *into, const struct partial *part)
{
    into->low = part->low < into->low ? part->low : into->low;
    into->high = part->high > into->high ? part->high : into->high;
    into->sum += part->sum;
    into->sum_sq += part->sum_sq;
    into->zeros += part->zeros;
    into->nans += part->nans;
    into->infs += part->infs;
}

/* ----------------------------------------------------------------------- float, double, integers: sums in double lanes
 *
 * STORED is what lies in memory, EACH what is done with one of it. Minimum and maximum begin with ABOVE and BELOW,
 * which no element exceeds. COUNTER is the unsigned type that gives the vectoriser least to convert. MASKED is a
 * constant.
 */

#define TAKE(k, element, ABOVE, BELOW, MASKED)                                                                         \
    do {                                                                                                               \
        __typeof__(low[0]) value = (element), least = value, most = value;                                             \
        zeros[k] += value == 0;                                                                                        \
        if (MASKED) {                                                                                                  \
            int finite = value - value == 0;                                                                           \
            nans[k] += value != value;                                                                                 \
            nonfinite[k] += !finite;                                                                                   \
            least = finite ? value : (ABOVE);                                                                          \
            most = finite ? value : (BELOW);                                                                           \
            value = finite ? value : 0;                                                                                \
        }                                                                                                              \
        double wide = (double)value;                                                                                   \
        low[k] = least < low[k] ? least : low[k];                                                                      \
        high[k] = most > high[k] ? most : high[k];                                                                     \
        sum[k] += wide;                                                                                                \
        sum_sq[k] += wide * wide;                                                                                      \
    } while (0)

#define DEFINE_SCAN_OF(NAME, STORED, EACH, ELEMENT, COUNTER, ABOVE, BELOW, MASKED)                                     \
    CLONED static void NAME(const void *data, int64_t count, struct partial *part)                                     \
    {                                                                                                                  \
        typedef STORED stored_t __attribute__((aligned(1), may_alias));                                                \
        const stored_t *elements = data;                                                                               \
        ELEMENT low[LANES], high[LANES];                                                                               \
        double sum[LANES] = {0}, sum_sq[LANES] = {0};                                                                  \
        COUNTER zeros[LANES] = {0}, nans[LANES] = {0}, nonfinite[LANES] = {0};                                         \
        int64_t i = 0;                                                                                                 \
        for (int k = 0; k < LANES; k++) {                                                                              \
            low[k] = ABOVE;                                                                                            \
            high[k] = BELOW;                                                                                           \
        }                                                                                                              \
        for (; i + LANES <= count; i += LANES) {                                                                       \
            PREFETCH(elements + i);                                                                                    \
            if (sizeof(STORED) > 4)                                                                                    \
                PREFETCH(elements + i + LANES / 2);                                                                    \
            for (int k = 0; k < LANES; k++)                                                                            \
                EACH(k, elements[i + k], ABOVE, BELOW, MASKED);                                                        \
        }                                                                                                              \
        for (int k = 0; i + k < count; k++)                                                                            \
            EACH(k, elements[i + k], ABOVE, BELOW, MASKED);                                                            \
        *part = NOTHING;                                                                                               \
        for (int k = 0; k < LANES; k++) {                                                                              \
            struct partial lane = {(double)low[k],    (double)high[k],   sum[k], sum_sq[k], (int64_t)zeros[k],         \
                                   (int64_t)nans[k], (int64_t)(nonfinite[k] - nans[k])};                               \
            merge(part, &lane);                                                                                        \
        }                                                                                                              \
    }

#define DEFINE_SCAN(NAME, ELEMENT, ...) DEFINE_SCAN_OF(NAME, ELEMENT, TAKE, ELEMENT, __VA_ARGS__)

DEFINE_SCAN(scan_float, float, uint32_t, INFINITY, -INFINITY, 0)
DEFINE_SCAN(scan_float_masked, float, uint32_t, INFINITY, -INFINITY, 1)
DEFINE_SCAN(scan_int8, int8_t, uint32_t, INT8_MAX, INT8_MIN, 0)
DEFINE_SCAN(scan_int16, int16_t, uint32_t, INT16_MAX, INT16_MIN, 0)
DEFINE_SCAN(scan_int32, int32_t, uint32_t, INT32_MAX, INT32_MIN, 0)
DEFINE_SCAN(scan_int64, int64_t, uint64_t, INT64_MAX, INT64_MIN, 0)
DEFINE_SCAN(scan_uint8, uint8_t, uint32_t, UINT8_MAX, 0, 0)
DEFINE_SCAN(scan_uint16, uint16_t, uint32_t, UINT16_MAX, 0, 0)
DEFINE_SCAN(scan_uint32, uint32_t, uint32_t, UINT32_MAX, 0, 0)
DEFINE_SCAN(scan_uint64, uint64_t, uint64_t, UINT64_MAX, 0, 0)

/* The square of a double is not exact: fused with the addition in one of the loops only, it would make them differ. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif
DEFINE_SCAN(scan_double, double, uint64_t, INFINITY, -INFINITY, 0)
DEFINE_SCAN(scan_double_masked, double, uint64_t, INFINITY, -INFINITY, 1)
#ifndef __clang__
#pragma GCC pop_options
#endif

/* ------------------------------------------------------------------------------------- bfloat16 and half: 16-bit lanes
 *
 * Order, zeros and kinds of elements are told from the 16 bits as an integer, 32 elements at a time. For the sums, two
 * elements are taken out of each 32-bit word: no lane has to move, and to a sum order does not matter.
 */

#define HALVES (2 * LANES) /* elements that one step takes */

struct half_format {
    float (*to_float)(uint32_t bits); /* the value of the low 16 bits; the others are zero */
    int16_t infinity;                 /* the bits of +infinity; a larger magnitude is NaN */
};

INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float float_of_bfloat16(uint32_t bits)
{
    return float_of_bits(bits << 16);
}

/* In integers, since not every compiler knows a half type; a subnormal half by way of a conversion, since to multiply a
 * subnormal float is slow. */
INLINE float float_of_half(uint32_t bits)
{
    uint32_t magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16, subnormal;
    uint32_t rebias = magnitude < 0x7c00 ? 112u << 23 : 224u << 23;
    float scaled = (float)(int32_t)magnitude * 0x1p-24f;
    memcpy(&subnormal, &scaled, sizeof subnormal);
    return float_of_bits(sign | (magnitude < 0x400 ? subnormal : (magnitude << 13) + rebias));
}

/* The 16 bits as an integer that orders like the value; its own inverse. */
INLINE int16_t order_key(int16_t bits)
{
    return bits ^ ((bits >> 15) & INT16_MAX);
}

INLINE void scan_halves(const void *data, int64_t count, const struct half_format format, const int masked,
                        struct partial *part)
{
    int16_t low[HALVES], high[HALVES];
    uint16_t zeros[HALVES] = {0}, nans[HALVES] = {0}, infs[HALVES] = {0};
    double sum[LANES] = {0}, sum_sq[LANES] = {0};
    for (int k = 0; k < HALVES; k++) {
        low[k] = INT16_MAX;
        high[k] = INT16_MIN;
    }
    for (int64_t i = 0, end; i < count; i = end) {
        float evens[LANES] = {0}, evens_sq[LANES] = {0}, odds[LANES] = {0}, odds_sq[LANES] = {0};
        end = i + FLUSH * HALVES < count ? i + FLUSH * HALVES : count;
        for (int64_t j = i; j < end; j += HALVES) {
            int16_t halves[HALVES];
            uint32_t words[LANES];
            PREFETCH((const int16_t *)data + j);
            memcpy(halves, (const int16_t *)data + j, sizeof halves);
            for (int k = 0; k < HALVES; k++) {
                int16_t magnitude = halves[k] & INT16_MAX, least = order_key(halves[k]), most = least;
                zeros[k] += magnitude == 0;
                if (masked) {
                    int finite = magnitude < format.infinity;
                    nans[k] += magnitude > format.infinity;
                    infs[k] += magnitude == format.infinity;
                    least = finite ? least : INT16_MAX;
                    most = finite ? most : INT16_MIN;
                    halves[k] = finite ? halves[k] : 0;
                }
                low[k] = least < low[k] ? least : low[k];
                high[k] = most > high[k] ? most : high[k];
            }
            memcpy(words, halves, sizeof words);
            for (int k = 0; k < LANES; k++) {
                float even = format.to_float(words[k] & 0xffff), odd = format.to_float(words[k] >> 16);
                evens[k] += even;
                odds[k] += odd;
                evens_sq[k] += even * even;
                odds_sq[k] += odd * odd;
            }
        }
        for (int k = 0; k < LANES; k++) {
            sum[k] += (double)evens[k] + odds[k];
            sum_sq[k] += (double)evens_sq[k] + odds_sq[k];
        }
    }
    *part = NOTHING;
    for (int k = 0; k < HALVES; k++) {
        struct partial lane = {INFINITY, -INFINITY, 0, 0, zeros[k], nans[k], infs[k]};
        if (low[k] <= high[k]) {
            lane.low = format.to_float((uint16_t)order_key(low[k]));
            lane.high = format.to_float((uint16_t)order_key(high[k]));
        }
        lane.sum = k < LANES ? sum[k] : 0;
        lane.sum_sq = k < LANES ? sum_sq[k] : 0;
        merge(part, &lane);
    }
}

/* Merge the elements that are too few for a step, of any kind and magnitude. */
INLINE void merge_remainder(const void *data, int64_t count, const struct half_format format, struct partial *part)
{
    float floats[HALVES];
    struct partial rest;
    for (int64_t k = 0; k < count; k++) {
        uint16_t bits;
        memcpy(&bits, (const uint16_t *)data + k, sizeof bits);
        floats[k] = format.to_float(bits);
    }
    if (count) {
        scan_float_masked(floats, count, &rest);
        merge(part, &rest);
    }
}

#define DEFINE_HALF_SCAN(NAME, TO_FLOAT, INFINITE, MASKED)                                                             \
    CLONED_HALVES static void NAME(const void *data, int64_t count, struct partial *part)                              \
    {                                                                                                                  \
        const struct half_format format = {TO_FLOAT, INFINITE};                                                        \
        int64_t whole = count / HALVES * HALVES;                                                                       \
        scan_halves(data, whole, format, MASKED, part);                                                                \
        merge_remainder((const uint16_t *)data + whole, count - whole, format, part);                                  \
    }

DEFINE_HALF_SCAN(scan_bfloat16, float_of_bfloat16, 0x7f80, 0)
DEFINE_HALF_SCAN(scan_bfloat16_masked, float_of_bfloat16, 0x7f80, 1)
DEFINE_HALF_SCAN(scan_half, float_of_half, 0x7c00, 0)
DEFINE_HALF_SCAN(scan_half_masked, float_of_half, 0x7c00, 1)

/* bfloat16 whose squares would leave float's range: a word's two elements, one after the other, in double lanes. */
#define TAKE_PAIR(k, word, ...)                                                                                        \
    do {                                                                                                               \
        uint32_t bits = (word);                                                                                        \
        TAKE(k, float_of_bits(bits << 16), __VA_ARGS__);                                                               \
        TAKE(k, float_of_bits(bits & 0xffff0000u), __VA_ARGS__);                                                       \
    } while (0)

DEFINE_SCAN_OF(scan_pairs, uint32_t, TAKE_PAIR, float, uint32_t, INFINITY, -INFINITY, 0)
DEFINE_SCAN_OF(scan_pairs_masked, uint32_t, TAKE_PAIR, float, uint32_t, INFINITY, -INFINITY, 1)

static void scan_bfloat16_wide(const void *data, int64_t count, struct partial *part)
{
    const struct half_format format = {float_of_bfloat16, 0x7f80};
    scan_pairs(data, count / 2, part);
    if (!isfinite(part->sum_sq))
        scan_pairs_masked(data, count / 2, part);
    merge_remainder((const uint16_t *)data + count - count % 2, count % 2, format, part);
}

/* ------------------------------------------------------------------------------------------------------------ items */

enum { ORDINARY, MASKED, WIDE };

struct kind {
    int64_t size;
    scan *scans[3];
    double least, most; /* magnitudes between which the first two scans are accurate */
};

/* In the order of compiled.py's table of dtypes. */
static const struct kind KINDS[] = {
    {4, {scan_float, scan_float_masked}, 0, INFINITY},
    {2, {scan_bfloat16, scan_bfloat16_masked, scan_bfloat16_wide}, 0x1p-40, 0x1p40},
    {2, {scan_half, scan_half_masked}, 0, INFINITY},
    {8, {scan_double, scan_double_masked}, 0, INFINITY},
    {1, {scan_int8}, 0, INFINITY},
    {2, {scan_int16}, 0, INFINITY},
    {4, {scan_int32}, 0, INFINITY},
    {8, {scan_int64}, 0, INFINITY},
    {1, {scan_uint8}, 0, INFINITY},
    {2, {scan_uint16}, 0, INFINITY},
    {4, {scan_uint32}, 0, INFINITY},
    {8, {scan_uint64}, 0, INFINITY},
};

static int suits_float_lanes(const struct kind *kind, const struct partial *part)
{
    double magnitude = -part->low > part->high ? -part->low : part->high;
    return magnitude <= 0 || (magnitude >= kind->least && magnitude <= kind->most);
}

/* Scan one item, beginning with the scan `*next` that the item before it asked for. */
static void scan_item(const struct kind *kind, const void *data, int64_t count, int *next, struct partial *part)
{
    int used = *next;
    kind->scans[used](data, count, part);
    if (used == ORDINARY && !isfinite(part->sum_sq))
        kind->scans[used = MASKED](data, count, part);
    if (suits_float_lanes(kind, part) == (used == WIDE))
        kind->scans[used = used == WIDE ? MASKED : WIDE](data, count, part);
    *next = used == MASKED && !part->nans && !part->infs ? ORDINARY : used;
}

static void write_row(double *row, int64_t count, const struct partial *part)
{
    row[0] = (double)count;
    row[1] = part->low;
    row[2] = part->high;
    row[3] = part->sum;
    row[4] = part->sum_sq;
    row[5] = (double)part->zeros;
    row[6] = (double)part->nans;
    row[7] = (double)part->infs;
}

/* ----------------------------------------------------------------------------------------------------- many tensors */

struct tensor {
    const char *data;
    int64_t count;
    int64_t kind;
};

static int64_t min_count(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void scan_tensors(const struct tensor *tensors, int64_t num_tensors, double *rows)
{
    for (int64_t t = 0; t < num_tensors; t++) {
        const struct kind *kind = &KINDS[tensors[t].kind];
        struct partial whole = NOTHING, part;
        int next = ORDINARY;
        for (int64_t i = 0; i < tensors[t].count; i += ITEM) {
            scan_item(kind, tensors[t].data + i * kind->size, min_count(ITEM, tensors[t].count - i), &next, &part);
            merge(&whole, &part);
        }
        write_row(rows + 8 * t, tensors[t].count, &whole);
    }
}

struct item {
    const char *data;
    int64_t count;
    const struct kind *kind;
    struct partial part;
};

struct work {
    struct item *items;
    int64_t num_items;
    atomic_llong taken;
};

static void *scan_items(void *argument)
{
    struct work *work = argument;
    const struct kind *kind = NULL;
    int next = ORDINARY;
    for (int64_t i; (i = atomic_fetch_add(&work->taken, 1)) < work->num_items;) {
        struct item *item = &work->items[i];
        next = item->kind == kind ? next : ORDINARY;
        kind = item->kind;
        scan_item(kind, item->data, item->count, &next, &item->part);
    }
    return NULL;
}

/* Signals of the training process are for its own threads. A thread that cannot be started is done without. */
static void run_threads(struct work *work, int num_threads)
{
    pthread_t threads[MAX_THREADS];
    int started = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < num_threads - 1 && started < MAX_THREADS &&
           pthread_create(&threads[started], NULL, scan_items, work) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    scan_items(work);
    while (started > 0)
        pthread_join(threads[--started], NULL);
}

static int scan_in_threads(const struct tensor *tensors, int64_t num_tensors, double *rows, int num_threads)
{
    struct work work = {0};
    for (int64_t t = 0; t < num_tensors; t++)
        work.num_items += (tensors[t].count + ITEM - 1) / ITEM;
    struct item *item = work.items = malloc((size_t)work.num_items * sizeof *work.items);
    if (!item)
        return 0;
    for (int64_t t = 0; t < num_tensors; t++) {
        const struct kind *kind = &KINDS[tensors[t].kind];
        for (int64_t i = 0; i < tensors[t].count; i += ITEM, item++) {
            item->data = tensors[t].data + i * kind->size;
            item->count = min_count(ITEM, tensors[t].count - i);
            item->kind = kind;
        }
    }
    run_threads(&work, num_threads);
    item = work.items;
    for (int64_t t = 0; t < num_tensors; t++) {
        struct partial whole = NOTHING;
        for (int64_t i = 0; i < tensors[t].count; i += ITEM, item++)
            merge(&whole, &item->part);
        write_row(rows + 8 * t, tensors[t].count, &whole);
    }
    free(work.items);
    return 1;
}

/* Write one row of eight doubles per tensor. Returns 0, or 1 + the index of a tensor that has elements but no memory:
 * nothing is written then. */
int64_t trainermon_moments(const struct tensor *tensors, int64_t num_tensors, double *rows, int64_t num_threads)
{
    int64_t total = 0;
    for (int64_t t = 0; t < num_tensors; t++) {
        if (!tensors[t].data && tensors[t].count)
            return 1 + t;
        total += tensors[t].count;
    }
    if (num_threads < 2 || total < PARALLEL || !scan_in_threads(tensors, num_tensors, rows, (int)num_threads))
        scan_tensors(tensors, num_tensors, rows);
    return 0;
}

/* Write the row of one tensor that lies in memory as `num_runs` runs of `length` elements, `stride` elements apart. */
void trainermon_moments_strided(const char *data, int64_t kind_index, int64_t num_runs, int64_t length, int64_t stride,
                                double *row)
{
    const struct kind *kind = &KINDS[kind_index];
    char gathered[GATHERED * sizeof(double)];
    struct partial whole = NOTHING, part;
    int next = ORDINARY;
    int64_t filled = 0;
    for (int64_t run = 0; run < num_runs; run++) {
        const char *source = data + run * stride * kind->size;
        for (int64_t i = 0, taken; i < length; i += taken) {
            taken = min_count(length - i, GATHERED - filled);
            memcpy(gathered + filled * kind->size, source + i * kind->size, (size_t)(taken * kind->size));
            filled += taken;
            if (filled == GATHERED || (run == num_runs - 1 && i + taken == length)) {
                scan_item(kind, gathered, filled, &next, &part);
                merge(&whole, &part);
                filled = 0;
            }
        }
    }
    write_row(row, num_runs * length, &whole);
}
