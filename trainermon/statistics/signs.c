/*
 * The signs of many tensors in one pass over memory: two bitmaps of each, which of its elements are greater and which
 * are less than zero, how many elements are at most each of some bounds, and the eight moments. signs.py says what they
 * are for.
 *
 * Each ITEM of a tensor is read from memory by the loops of moments.c, and again from cache by those here. Of floats,
 * SSE2, which every x86-64 has, makes 16 bits at a time. Elsewhere comparisons give bytes, 64 at a time, which the
 * compiler's vectoriser does well, and eight bytes of 0 or 1 become eight bits by one multiplication. NaN is in neither
 * bitmap, and at most no bound.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LANES 32        /* sums that one loop keeps */
#define WORD 64         /* elements of a word of a bitmap */
#define TILE 2048       /* elements that stay in the first cache */
#define ITEM 65536      /* as in moments.c, whose sums depend on it; a multiple of TILE */
#define COLUMNS 8       /* of a row of moments */

#ifdef CLONED /* a test builds one instruction set at a time */
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

/* As signs.py packs it. Bitmaps have a bit for each element, the first in the lowest bit, padded to whole words with
 * zeros. `counts` is [num_bounds]: the elements that are at most each bound. */
struct signed_tensor {
    const char *data;
    int64_t count, kind;
    uint64_t *positive, *negative;
    int64_t *counts;
};

/* moments.c */
struct tensor {
    const char *data;
    int64_t count;
    int64_t kind;
};
int64_t trainermon_moments(const struct tensor *tensors, int64_t num_tensors, double *rows, int64_t num_threads);

INLINE float float_of_bfloat16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* In integers, since not every compiler knows a half type. */
INLINE float float_of_half(uint16_t half)
{
    uint32_t magnitude = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16, bits;
    uint32_t rebias = magnitude < 0x7c00 ? 112u << 23 : 224u << 23;
    float scaled = (float)(int32_t)magnitude * 0x1p-24f, value;
    memcpy(&bits, &scaled, sizeof bits);
    bits = sign | (magnitude < 0x400 ? bits : (magnitude << 13) + rebias);
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float float_itself(float value)
{
    return value;
}

INLINE double double_itself(double value)
{
    return value;
}

/* The bits of 64 bytes that are 0 or 1; byte k becomes bit k. */
INLINE uint64_t packed(const uint8_t *bytes)
{
    uint64_t word = 0;
    for (int k = 0; k < 8; k++) {
        uint64_t eight;
        memcpy(&eight, bytes + 8 * k, sizeof eight);
        word |= (eight * 0x0102040810204080u >> 56) << (8 * k);
    }
    return word;
}

/* One word of each bitmap, from 64 values. */
#define DEFINE_WORD(VALUE)                                                                                             \
    INLINE void VALUE##s_word(const VALUE *values, uint64_t *positive, uint64_t *negative)                             \
    {                                                                                                                  \
        uint8_t above[WORD], below[WORD];                                                                              \
        for (int k = 0; k < WORD; k++)                                                                                 \
            above[k] = values[k] > 0;                                                                                  \
        for (int k = 0; k < WORD; k++)                                                                                 \
            below[k] = values[k] < 0;                                                                                  \
        *positive = packed(above);                                                                                     \
        *negative = packed(below);                                                                                     \
    }

DEFINE_WORD(double)

#ifdef __SSE2__
/* The bits of four masks of four floats each. Saturation leaves the bytes of a mask all ones or all zeros. */
INLINE uint64_t sixteen(__m128 a, __m128 b, __m128 c, __m128 d)
{
    __m128i low = _mm_packs_epi32(_mm_castps_si128(a), _mm_castps_si128(b));
    __m128i high = _mm_packs_epi32(_mm_castps_si128(c), _mm_castps_si128(d));
    return (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
}

INLINE void floats_word(const float *values, uint64_t *positive, uint64_t *negative)
{
    const __m128 zero = _mm_setzero_ps();
    uint64_t above = 0, below = 0;
    for (int k = 0; k < WORD; k += 16) {
        __m128 a = _mm_loadu_ps(values + k), b = _mm_loadu_ps(values + k + 4);
        __m128 c = _mm_loadu_ps(values + k + 8), d = _mm_loadu_ps(values + k + 12);
        above |= sixteen(_mm_cmplt_ps(zero, a), _mm_cmplt_ps(zero, b), _mm_cmplt_ps(zero, c), _mm_cmplt_ps(zero, d))
                 << k;
        below |= sixteen(_mm_cmplt_ps(a, zero), _mm_cmplt_ps(b, zero), _mm_cmplt_ps(c, zero), _mm_cmplt_ps(d, zero))
                 << k;
    }
    *positive = above;
    *negative = below;
}
#else
DEFINE_WORD(float)
#endif

/* `count` is a multiple of LANES. In functions of their own: inlined, the compiler vectorises them five times slower. */
#define DEFINE_COUNTS(VALUE)                                                                                           \
    CLONED static __attribute__((noinline)) int64_t VALUE##s_at_most(const VALUE *values, int64_t count, VALUE bound)  \
    {                                                                                                                  \
        int32_t within[LANES] = {0}, sum = 0;                                                                          \
        for (int64_t i = 0; i < count; i += LANES)                                                                     \
            for (int k = 0; k < LANES; k++)                                                                            \
                within[k] += values[i + k] <= bound;                                                                   \
        for (int k = 0; k < LANES; k++)                                                                                \
            sum += within[k];                                                                                          \
        return sum;                                                                                                    \
    }

DEFINE_COUNTS(float)
DEFINE_COUNTS(double)

/* Tile by tile: as VALUEs in the cache, then word by word, then bound by bound. What is missing of the last word is
 * NaN, which has no bit and is at most no bound. AS_THEY_ARE is a constant: whole tiles need no copy. */
#define DEFINE_SCAN(NAME, ELEMENT, VALUE, VALUE_OF, AS_THEY_ARE)                                                       \
    CLONED static void NAME(const struct signed_tensor *tensor, int64_t first, int64_t last, const double *bounds,     \
                            int64_t num_bounds)                                                                        \
    {                                                                                                                  \
        const ELEMENT *elements = (const ELEMENT *)tensor->data;                                                       \
        VALUE copied[TILE];                                                                                            \
        for (int64_t begin = first; begin < last; begin += TILE) {                                                     \
            int64_t count = last - begin < TILE ? last - begin : TILE, num_words = (count + WORD - 1) / WORD;          \
            const VALUE *values = copied;                                                                              \
            if (AS_THEY_ARE && count == TILE) {                                                                        \
                values = (const VALUE *)(const void *)(elements + begin);                                              \
            } else {                                                                                                   \
                for (int64_t k = 0; k < count; k++)                                                                    \
                    copied[k] = VALUE_OF(elements[begin + k]);                                                         \
                for (int64_t k = count; k < num_words * WORD; k++)                                                     \
                    copied[k] = NAN;                                                                                   \
            }                                                                                                          \
            for (int64_t word = 0; word < num_words; word++) {                                                         \
                int64_t at = begin / WORD + word;                                                                      \
                VALUE##s_word(values + WORD * word, &tensor->positive[at], &tensor->negative[at]);                     \
            }                                                                                                          \
            for (int64_t b = 0; b < num_bounds; b++)                                                                   \
                tensor->counts[b] += VALUE##s_at_most(values, num_words * WORD, (VALUE)bounds[b]);                     \
        }                                                                                                              \
    }

DEFINE_SCAN(scan_floats, float, float, float_itself, 1)
DEFINE_SCAN(scan_bfloat16s, uint16_t, float, float_of_bfloat16, 0)
DEFINE_SCAN(scan_halves, uint16_t, float, float_of_half, 0)
DEFINE_SCAN(scan_doubles, double, double, double_itself, 1)

/* In the order of signs.py's table of dtypes, with which moments.c's begins, too. */
static const struct {
    int64_t size;
    void (*scan)(const struct signed_tensor *, int64_t, int64_t, const double *, int64_t);
} KINDS[] = {{4, scan_floats}, {2, scan_bfloat16s}, {2, scan_halves}, {8, scan_doubles}};

/* Add a part's row of moments to that of the whole. */
void trainermon_merge_row(double *into, const double *row)
{
    for (int column = 0; column < COLUMNS; column++)
        if (column == 1)
            into[column] = row[column] < into[column] ? row[column] : into[column];
        else if (column == 2)
            into[column] = row[column] > into[column] ? row[column] : into[column];
        else
            into[column] += row[column];
}

/* Write the bitmaps and the row of moments of each tensor, and add to its counts. Elements lie one after another, at
 * multiples of their size. Rows have the bits that trainermon_moments gives them. */
void trainermon_signs_and_moments(const struct signed_tensor *tensors, int64_t num_tensors, const double *bounds,
                                  int64_t num_bounds, double *rows)
{
    for (int64_t t = 0; t < num_tensors; t++) {
        const struct signed_tensor *tensor = &tensors[t];
        double *whole = rows + COLUMNS * t, row[COLUMNS];
        trainermon_moments(&(struct tensor){tensor->data, 0, tensor->kind}, 1, whole, 1);
        for (int64_t first = 0; first < tensor->count; first += ITEM) {
            int64_t last = tensor->count - first < ITEM ? tensor->count : first + ITEM;
            struct tensor item = {tensor->data + first * KINDS[tensor->kind].size, last - first, tensor->kind};
            trainermon_moments(&item, 1, row, 1);
            trainermon_merge_row(whole, row);
            KINDS[tensor->kind].scan(tensor, first, last, bounds, num_bounds);
        }
    }
}

/* Count the bits in which two tensors' bitmaps differ: `counts[0]` in the positive ones, `counts[1]` in either. */
CLONED void trainermon_sign_differences(const uint64_t *positive, const uint64_t *other_positive,
                                        const uint64_t *negative, const uint64_t *other_negative, int64_t num_words,
                                        int64_t *counts)
{
    int64_t above = 0, either = 0;
    for (int64_t i = 0; i < num_words; i++) {
        uint64_t differ = positive[i] ^ other_positive[i];
        above += __builtin_popcountll(differ);
        either += __builtin_popcountll(differ | (negative[i] ^ other_negative[i]));
    }
    counts[0] = above;
    counts[1] = either;
}

/* The same for each of two files' tensors, whose bitmaps lie one after another, of a tensor first the positive one:
 * `num_words` is [num_tensors], `counts` [num_tensors, 2]. */
void trainermon_differences_of_files(const uint64_t *ours, const uint64_t *theirs, const int64_t *num_words,
                                     int64_t num_tensors, int64_t *counts)
{
    for (int64_t t = 0; t < num_tensors; t++) {
        int64_t length = num_words[t];
        trainermon_sign_differences(ours, theirs, ours + length, theirs + length, length, counts + 2 * t);
        ours += 2 * length;
        theirs += 2 * length;
    }
}
