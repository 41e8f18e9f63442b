/*
 * How the elements of two arrays differ, in one pass: sums of squares and products, the largest difference and its
 * place, units in the last place, unequal elements, NaNs and infinities.
 *
 * Plain C that knows neither Python nor numpy: pairs.py loads it by ctypes. What is decided here:
 *
 *   - Sums run in double lanes, over the positions that are finite on both sides.
 *   - An item (ITEM elements) whose bytes are equal on both sides is read once more, from cache, for its squares alone.
 *   - Any other is first taken for finite; if its sums say otherwise, it is read again by a loop that masks.
 *   - Elements that do not lie side by side, or whose types differ, are gathered into buffers first: whatever the
 *     strides, the loops below see dense arrays.
 *
 * The loops over LANES are written for the compiler's vectoriser; benchmarks/bench_checkpoints.py tells whether it did.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define ITEM 8192        /* elements: both sides fit into the L2 cache, also as double */
#define GATHERED 2048    /* elements that are gathered at a time, on the stack */
#define DENSE 256        /* elements of a run from which it is read where it lies */
#define READ_AHEAD 4096  /* bytes */
#define MAX_DIMS 8

#define INLINE static inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch((const char *)(address) + READ_AHEAD, 0, 2)

#ifdef CLONED /* a test builds one instruction set at a time */
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif

enum kind { FLOAT, BFLOAT16, HALF, DOUBLE, NUM_KINDS };
static const int64_t SIZES[NUM_KINDS] = {4, 2, 2, 8};

/* One row of the table that pairs.py packs: a block of both arrays, sizes and strides in elements. */
struct box {
    const char *ours, *theirs;
    int64_t sizes[MAX_DIMS], our_strides[MAX_DIMS], their_strides[MAX_DIMS];
};

/* What is found, in the order of pairs.py. Places are numbers of elements, counted over all boxes in C order. */
struct pair_sums {
    double product, our_square, their_square, distance_square, largest;
    int64_t count, largest_at, ulps, unequal, first_unequal, our_nans, our_infs, their_nans, their_infs;
};

/* ------------------------------------------------------------------------------------------------------------- numbers */

INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE int64_t bits_of_double(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of_bfloat16(uint16_t bits)
{
    return float_of_bits((uint32_t)bits << 16);
}

/* As in moments.c. */
INLINE float float_of_half(uint16_t bits)
{
    uint32_t magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    uint32_t rebias = magnitude < 0x7c00 ? 112u << 23 : 224u << 23;
    uint32_t subnormal = bits_of_float((float)(int32_t)magnitude * 0x1p-24f);
    return float_of_bits(sign | (magnitude < 0x400 ? subnormal : (magnitude << 13) + rebias));
}

/* The bits as an integer that orders like the value: neighbours differ by one. */
INLINE int32_t order_of_float(float value)
{
    int32_t bits = (int32_t)bits_of_float(value);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

INLINE int32_t order_of_half(uint16_t bits)
{
    int32_t wide = (int16_t)bits;
    return wide ^ ((wide >> 31) & INT16_MAX);
}

INLINE int64_t order_of_double(double value)
{
    int64_t bits = bits_of_double(value);
    return bits ^ ((bits >> 63) & INT64_MAX);
}

/* ----------------------------------------------------------------------------------------------- one item, both dense
 *
 * STORED is what lies in memory, VALUE what number it stands for. ORDER gives an ORDERED integer of what is stored, and
 * STEP is what such integers of neighbours differ by.
 */

struct partial {
    double product, ours, theirs, distance, largest;
    uint64_t ulps;
    int64_t unequal, our_nans, our_infs, their_nans, their_infs;
};

#define TAKE(k, stored_a, stored_b, VALUE, REAL, ORDER, UNSIGNED, MASKED)                                              \
    do {                                                                                                               \
        __typeof__(stored_a) sa = (stored_a), sb = (stored_b);                                                         \
        REAL a = VALUE(sa), b = VALUE(sb);                                                                             \
        UNSIGNED order_a = (UNSIGNED)ORDER(sa), order_b = (UNSIGNED)ORDER(sb), apart;                                  \
        const UNSIGNED flip = (UNSIGNED)1 << (8 * sizeof(UNSIGNED) - 1);                                               \
        apart = (order_a ^ flip) > (order_b ^ flip) ? order_a - order_b : order_b - order_a;                           \
        unequal[k] += apart != 0;                                                                                      \
        if (MASKED) {                                                                                                  \
            int our_finite = a - a == 0, their_finite = b - b == 0, finite = our_finite & their_finite;                \
            our_nans[k] += a != a;                                                                                     \
            our_bad[k] += !our_finite;                                                                                 \
            their_nans[k] += b != b;                                                                                   \
            their_bad[k] += !their_finite;                                                                             \
            a = finite ? a : 0;                                                                                        \
            b = finite ? b : 0;                                                                                        \
            apart = finite ? apart : 0;                                                                                \
        }                                                                                                              \
        REAL gap = a - b < 0 ? b - a : a - b;                                                                          \
        double wide_a = (double)a, wide_b = (double)b, d = wide_a - wide_b;                                            \
        ulps[k] = apart > ulps[k] ? apart : ulps[k];                                                                   \
        largest[k] = gap > largest[k] ? gap : largest[k];                                                              \
        product[k] += wide_a * wide_b;                                                                                 \
        our_square[k] += wide_a * wide_a;                                                                              \
        their_square[k] += wide_b * wide_b;                                                                            \
        distance[k] += d * d;                                                                                          \
    } while (0)

#define DEFINE_SCAN(NAME, STORED, VALUE, REAL, ORDER, UNSIGNED, MASKED)                                                \
    CLONED static void NAME(const void *our_data, const void *their_data, int64_t count, struct partial *part)         \
    {                                                                                                                  \
        typedef STORED stored_t __attribute__((aligned(1), may_alias));                                                \
        const stored_t *ours = our_data, *theirs = their_data;                                                         \
        double product[LANES] = {0}, our_square[LANES] = {0}, their_square[LANES] = {0}, distance[LANES] = {0};        \
        REAL largest[LANES] = {0};                                                                                     \
        UNSIGNED ulps[LANES] = {0}, unequal[LANES] = {0};                                                              \
        UNSIGNED our_nans[LANES] = {0}, our_bad[LANES] = {0}, their_nans[LANES] = {0}, their_bad[LANES] = {0};         \
        int64_t i = 0;                                                                                                 \
        for (; i + LANES <= count; i += LANES) {                                                                       \
            PREFETCH(ours + i);                                                                                        \
            PREFETCH(theirs + i);                                                                                      \
            for (int k = 0; k < LANES; k++)                                                                            \
                TAKE(k, ours[i + k], theirs[i + k], VALUE, REAL, ORDER, UNSIGNED, MASKED);                             \
        }                                                                                                              \
        for (int k = 0; i < count; i++, k++)                                                                           \
            TAKE(k, ours[i], theirs[i], VALUE, REAL, ORDER, UNSIGNED, MASKED);                                         \
        memset(part, 0, sizeof *part);                                                                                 \
        for (int k = 0; k < LANES; k++) {                                                                              \
            part->product += product[k];                                                                               \
            part->ours += our_square[k];                                                                               \
            part->theirs += their_square[k];                                                                           \
            part->distance += distance[k];                                                                             \
            part->largest = largest[k] > part->largest ? (double)largest[k] : part->largest;                           \
            part->ulps = ulps[k] > part->ulps ? ulps[k] : part->ulps;                                                  \
            part->unequal += (int64_t)unequal[k];                                                                      \
            part->our_nans += (int64_t)our_nans[k];                                                                    \
            part->our_infs += (int64_t)(our_bad[k] - our_nans[k]);                                                     \
            part->their_nans += (int64_t)their_nans[k];                                                                \
            part->their_infs += (int64_t)(their_bad[k] - their_nans[k]);                                               \
        }                                                                                                              \
    }

/* The first element whose bits are not equal, and the first that is `largest` apart; -1: there is none. */
#define DEFINE_PLACES(NAME, STORED, VALUE, REAL, SAME)                                                                 \
    static void NAME(const void *our_data, const void *their_data, int64_t count, double largest, int64_t *unequal,    \
                     int64_t *furthest)                                                                                \
    {                                                                                                                  \
        typedef STORED stored_t __attribute__((aligned(1), may_alias));                                                \
        const stored_t *ours = our_data, *theirs = their_data;                                                         \
        *unequal = *furthest = -1;                                                                                     \
        for (int64_t i = 0; i < count && (*unequal < 0 || *furthest < 0); i++) {                                       \
            REAL gap = VALUE(ours[i]) - VALUE(theirs[i]);                                                              \
            if (*unequal < 0 && !SAME(ours[i], theirs[i]))                                                             \
                *unequal = i;                                                                                          \
            if (*furthest < 0 && (gap < 0 ? -gap : gap) == (REAL)largest)                                              \
                *furthest = i;                                                                                         \
        }                                                                                                              \
    }

#define SAME_FLOAT(a, b) (bits_of_float(a) == bits_of_float(b))
#define SAME_DOUBLE(a, b) (bits_of_double(a) == bits_of_double(b))
#define SAME_BITS(a, b) ((a) == (b))
#define SAME_VALUE(value) (value)
#define ORDER_OF_BFLOAT16 order_of_half

DEFINE_SCAN(scan_float, float, SAME_VALUE, float, order_of_float, uint32_t, 0)
DEFINE_SCAN(scan_float_masked, float, SAME_VALUE, float, order_of_float, uint32_t, 1)
DEFINE_SCAN(scan_bfloat16, uint16_t, float_of_bfloat16, float, ORDER_OF_BFLOAT16, uint32_t, 0)
DEFINE_SCAN(scan_bfloat16_masked, uint16_t, float_of_bfloat16, float, ORDER_OF_BFLOAT16, uint32_t, 1)
DEFINE_SCAN(scan_half, uint16_t, float_of_half, float, order_of_half, uint32_t, 0)
DEFINE_SCAN(scan_half_masked, uint16_t, float_of_half, float, order_of_half, uint32_t, 1)
DEFINE_SCAN(scan_double, double, SAME_VALUE, double, order_of_double, uint64_t, 0)
DEFINE_SCAN(scan_double_masked, double, SAME_VALUE, double, order_of_double, uint64_t, 1)
DEFINE_PLACES(places_of_float, float, SAME_VALUE, float, SAME_FLOAT)
DEFINE_PLACES(places_of_bfloat16, uint16_t, float_of_bfloat16, float, SAME_BITS)
DEFINE_PLACES(places_of_half, uint16_t, float_of_half, float, SAME_BITS)
DEFINE_PLACES(places_of_double, double, SAME_VALUE, double, SAME_DOUBLE)

struct loops {
    void (*scan)(const void *, const void *, int64_t, struct partial *);
    void (*masked)(const void *, const void *, int64_t, struct partial *);
    void (*places)(const void *, const void *, int64_t, double, int64_t *, int64_t *);
};

static const struct loops LOOPS[NUM_KINDS] = {
    {scan_float, scan_float_masked, places_of_float},
    {scan_bfloat16, scan_bfloat16_masked, places_of_bfloat16},
    {scan_half, scan_half_masked, places_of_half},
    {scan_double, scan_double_masked, places_of_double},
};

static void scan_item(enum kind kind, const void *ours, const void *theirs, int64_t count, struct pair_sums *sums)
{
    const struct loops *loops = &LOOPS[kind];
    struct partial part;
    int equal = memcmp(ours, theirs, (size_t)(count * SIZES[kind])) == 0;
    loops->scan(ours, equal ? ours : theirs, count, &part);
    if (!isfinite(part.ours) || !isfinite(part.theirs) || !isfinite(part.distance))
        loops->masked(ours, theirs, count, &part);
    if (part.unequal && (part.largest > sums->largest || sums->first_unequal < 0)) {
        int64_t unequal, furthest;
        loops->places(ours, theirs, count, part.largest, &unequal, &furthest);
        if (sums->first_unequal < 0)
            sums->first_unequal = sums->count + unequal;
        if (part.largest > sums->largest) {
            sums->largest = part.largest;
            sums->largest_at = sums->count + furthest;
        }
    }
    sums->count += count;
    sums->product += part.product;
    sums->our_square += part.ours;
    sums->their_square += part.theirs;
    sums->distance_square += part.distance;
    sums->ulps = (int64_t)(part.ulps > (uint64_t)sums->ulps ? part.ulps : (uint64_t)sums->ulps);
    sums->unequal += part.unequal;
    sums->our_nans += part.our_nans;
    sums->our_infs += part.our_infs;
    sums->their_nans += part.their_nans;
    sums->their_infs += part.their_infs;
}

/* -------------------------------------------------------------------------------------------------- boxes of any strides */

typedef void visit(void *context, const void *ours, const void *theirs, int64_t count);

/* Two dimensions become one where both arrays have no gap between them; returns how many are left, at least one. */
static int merge_dims(struct box *box)
{
    int last = 0;
    for (int d = 0; d < MAX_DIMS; d++) {
        if (box->sizes[d] == 1)
            continue;
        int joins = last > 0 && box->our_strides[last - 1] == box->our_strides[d] * box->sizes[d] &&
                    box->their_strides[last - 1] == box->their_strides[d] * box->sizes[d];
        int to = joins ? last - 1 : last++;
        box->sizes[to] = joins ? box->sizes[to] * box->sizes[d] : box->sizes[d];
        box->our_strides[to] = box->our_strides[d];
        box->their_strides[to] = box->their_strides[d];
    }
    if (last == 0) {
        box->sizes[0] = box->our_strides[0] = box->their_strides[0] = 1;
        last = 1;
    }
    return last;
}

#define DEFINE_GATHER(NAME, STORED, WIDE, VALUE)                                                                       \
    static void NAME(const void *from, int64_t stride, int64_t count, void *to)                                        \
    {                                                                                                                  \
        typedef STORED stored_t __attribute__((aligned(1), may_alias));                                                \
        const stored_t *stored = from;                                                                                 \
        WIDE *wide = to;                                                                                               \
        if (stride == 1)                                                                                               \
            for (int64_t i = 0; i < count; i++)                                                                        \
                wide[i] = VALUE(stored[i]);                                                                            \
        else                                                                                                           \
            for (int64_t i = 0; i < count; i++)                                                                        \
                wide[i] = VALUE(stored[i * stride]);                                                                   \
    }

DEFINE_GATHER(gather_float, float, float, SAME_VALUE)
DEFINE_GATHER(gather_16, uint16_t, uint16_t, SAME_VALUE)
DEFINE_GATHER(gather_double, double, double, SAME_VALUE)
DEFINE_GATHER(widen_bfloat16, uint16_t, float, float_of_bfloat16)
DEFINE_GATHER(widen_half, uint16_t, float, float_of_half)
DEFINE_GATHER(widen_float, float, double, SAME_VALUE)
DEFINE_GATHER(widen_bfloat16_twice, uint16_t, double, float_of_bfloat16)
DEFINE_GATHER(widen_half_twice, uint16_t, double, float_of_half)

typedef void gather(const void *from, int64_t stride, int64_t count, void *to);

static gather *gather_to(enum kind from, enum kind to)
{
    static gather *const AS_IS[] = {gather_float, gather_16, gather_16, gather_double};
    static gather *const TO_FLOAT[] = {gather_float, widen_bfloat16, widen_half, 0};
    static gather *const TO_DOUBLE[] = {widen_float, widen_bfloat16_twice, widen_half_twice, gather_double};
    return from == to ? AS_IS[from] : to == FLOAT ? TO_FLOAT[from] : TO_DOUBLE[from];
}

struct gathering {
    enum kind our_kind, their_kind, as;
    visit *visit;
    void *context;
    int64_t filled;
    double ours[GATHERED], theirs[GATHERED]; /* of whatever kind `as` says */
};

static void flush(struct gathering *gathering)
{
    if (gathering->filled)
        gathering->visit(gathering->context, gathering->ours, gathering->theirs, gathering->filled);
    gathering->filled = 0;
}

/* Visit one run of both arrays: where it lies if it is long and dense and the types are equal, else by the buffers. */
static void visit_run(struct gathering *g, const char *ours, int64_t our_stride, const char *theirs,
                      int64_t their_stride, int64_t length)
{
    int64_t our_size = SIZES[g->our_kind], their_size = SIZES[g->their_kind], as = SIZES[g->as];
    if (g->our_kind == g->as && g->their_kind == g->as && our_stride == 1 && their_stride == 1 && length >= DENSE) {
        flush(g);
        for (int64_t i = 0, taken; i < length; i += taken) {
            taken = length - i < ITEM ? length - i : ITEM;
            g->visit(g->context, ours + i * our_size, theirs + i * their_size, taken);
        }
        return;
    }
    for (int64_t i = 0, taken; i < length; i += taken) {
        taken = length - i < GATHERED - g->filled ? length - i : GATHERED - g->filled;
        gather_to(g->our_kind, g->as)(ours + i * our_stride * our_size, our_stride, taken,
                                      (char *)g->ours + g->filled * as);
        gather_to(g->their_kind, g->as)(theirs + i * their_stride * their_size, their_stride, taken,
                                        (char *)g->theirs + g->filled * as);
        g->filled += taken;
        if (g->filled == GATHERED)
            flush(g);
    }
}

static void visit_box(struct gathering *g, struct box box)
{
    int dims = merge_dims(&box), inner = dims - 1;
    int64_t at[MAX_DIMS] = {0}, our_size = SIZES[g->our_kind], their_size = SIZES[g->their_kind];
    for (;;) {
        visit_run(g, box.ours, box.our_strides[inner], box.theirs, box.their_strides[inner], box.sizes[inner]);
        int d = inner - 1;
        for (; d >= 0; d--) {
            box.ours += box.our_strides[d] * our_size;
            box.theirs += box.their_strides[d] * their_size;
            if (++at[d] < box.sizes[d])
                break;
            box.ours -= box.sizes[d] * box.our_strides[d] * our_size;
            box.theirs -= box.sizes[d] * box.their_strides[d] * their_size;
            at[d] = 0;
        }
        if (d < 0)
            return;
    }
}

static enum kind wider(enum kind ours, enum kind theirs)
{
    if (ours == theirs)
        return ours;
    return ours == DOUBLE || theirs == DOUBLE ? DOUBLE : FLOAT;
}

static int is_empty(const struct box *box)
{
    for (int d = 0; d < MAX_DIMS; d++)
        if (box->sizes[d] <= 0)
            return 1;
    return 0;
}

static void visit_boxes(const struct box *boxes, int64_t num_boxes, enum kind ours, enum kind theirs, enum kind as,
                        visit *visit, void *context)
{
    struct gathering gathering; /* not cleared: its buffers are large */
    gathering.our_kind = ours;
    gathering.their_kind = theirs;
    gathering.as = as;
    gathering.visit = visit;
    gathering.context = context;
    gathering.filled = 0;
    for (int64_t i = 0; i < num_boxes; i++)
        if (!is_empty(&boxes[i]))
            visit_box(&gathering, boxes[i]);
    flush(&gathering);
}

struct summing {
    enum kind kind;
    struct pair_sums *sums;
};

static void sum_run(void *context, const void *ours, const void *theirs, int64_t count)
{
    struct summing *summing = context;
    scan_item(summing->kind, ours, theirs, count, summing->sums);
}

/* Write what is found over all boxes. Units in the last place are those of the wider type. */
void trainermon_pairs(const struct box *boxes, int64_t num_boxes, int64_t our_kind, int64_t their_kind,
                      struct pair_sums *sums)
{
    struct summing summing = {wider((enum kind)our_kind, (enum kind)their_kind), sums};
    memset(sums, 0, sizeof *sums);
    sums->first_unequal = sums->largest_at = -1;
    visit_boxes(boxes, num_boxes, (enum kind)our_kind, (enum kind)their_kind, summing.kind, sum_run, &summing);
}

/* ------------------------------------------------------------------------------------------------------------ rounding */

/* To the nearest, ties to even, as float. */
INLINE float as_bfloat16(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? value : float_of_bits(rounded);
}

INLINE float as_half(float value)
{
    uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu, sign = bits & 0x80000000u;
    uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & 0xffffe000u;
    float subnormal = (float_of_bits(magnitude) + 0.5f) - 0.5f; /* a float below 1 and above 1/2 has steps of 2^-24 */
    uint32_t rounded = magnitude < 0x38800000u ? bits_of_float(subnormal) : normal > 0x477fe000u ? 0x7f800000u : normal;
    return magnitude > 0x7f800000u ? value : float_of_bits(sign | rounded);
}

struct rounding {
    enum kind kind, target;
    int64_t wrong;
};

#define DEFINE_COUNT(NAME, REAL, ROUND)                                                                                \
    CLONED static int64_t NAME(const REAL *ours, const REAL *theirs, int64_t count)                                    \
    {                                                                                                                  \
        int32_t wrong = 0;                                                                                             \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            float rounded = ROUND((float)ours[i]);                                                                     \
            wrong += !((REAL)rounded == theirs[i] || (rounded != rounded && theirs[i] != theirs[i]));                  \
        }                                                                                                              \
        return wrong;                                                                                                  \
    }

DEFINE_COUNT(wrong_bfloat16, float, as_bfloat16)
DEFINE_COUNT(wrong_half, float, as_half)
DEFINE_COUNT(wrong_float, double, SAME_VALUE)
DEFINE_COUNT(wrong_bfloat16_of_double, double, as_bfloat16)
DEFINE_COUNT(wrong_half_of_double, double, as_half)

static void count_wrong(void *context, const void *ours, const void *theirs, int64_t count)
{
    struct rounding *rounding = context;
    if (rounding->wrong)
        return;
    if (rounding->kind == FLOAT)
        rounding->wrong = rounding->target == BFLOAT16 ? wrong_bfloat16(ours, theirs, count)
                                                       : wrong_half(ours, theirs, count);
    else if (rounding->target == FLOAT)
        rounding->wrong = wrong_float(ours, theirs, count);
    else
        rounding->wrong = rounding->target == BFLOAT16 ? wrong_bfloat16_of_double(ours, theirs, count)
                                                       : wrong_half_of_double(ours, theirs, count);
}

/* Whether each of their elements is ours rounded to `target`; by way of float if ours are double. Reads no more after
 * the first run in which one is not. */
int64_t trainermon_is_rounded(const struct box *boxes, int64_t num_boxes, int64_t our_kind, int64_t their_kind,
                              int64_t target)
{
    enum kind as = our_kind == DOUBLE || their_kind == DOUBLE ? DOUBLE : FLOAT;
    struct rounding rounding = {as, (enum kind)target, 0};
    for (int64_t i = 0; i < num_boxes && !rounding.wrong; i++)
        visit_boxes(&boxes[i], 1, (enum kind)our_kind, (enum kind)their_kind, as, count_wrong, &rounding);
    return !rounding.wrong;
}
