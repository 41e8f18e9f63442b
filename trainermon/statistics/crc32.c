/*
 * The CRC-32 of zlib, PNG and Ethernet (polynomial 0x04C11DB7, bits reflected) of bytes in memory, by carry-less
 * multiplication where the processor has it. crc32.py says what it is for.
 *
 * After Gopal, Ozturk and others: Fast CRC computation for generic polynomials using PCLMULQDQ instruction (Intel, 2009):
 * four sums of 128 bits are folded 64 bytes ahead at a time, then into one. What is left of 16 bytes has the CRC of the
 * whole, and a table does those. Where the processor multiplies two or four pairs at a time (VPCLMULQDQ), 16 such sums
 * are folded 256 bytes ahead; they end as 256 bytes with the CRC of all before, and go on as above.
 */
#include <stdint.h>
#include <string.h>

#define READ_AHEAD 8192 /* bytes */
#define WIDE 256        /* bytes that one round of the wide folding takes */
#define ITEM 65536      /* as in moments.c: its elements lie in the cache when they are read again */
#define COLUMNS 8       /* of a row of moments */
#ifndef WIDEST          /* a test builds one width at a time */
#define WIDEST 64       /* bytes of a register */
#endif

/* moments.c and signs.c */
struct tensor {
    const char *data;
    int64_t count;
    int64_t kind;
};
int64_t trainermon_moments(const struct tensor *tensors, int64_t num_tensors, double *rows, int64_t num_threads);
void trainermon_merge_row(double *into, const double *row);

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define FOLDS __attribute__((target("pclmul,sse4.1")))

static uint32_t by_table(uint32_t state, const uint8_t *data, int64_t size)
{
    static const uint32_t of_half_byte[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    for (int64_t i = 0; i < size; i++) {
        state ^= data[i];
        state = state >> 4 ^ of_half_byte[state & 15];
        state = state >> 4 ^ of_half_byte[state & 15];
    }
    return state;
}

/* `sum` moved ahead by as many bits as `factors` stand for, and what lies there. */
FOLDS static inline __m128i folded(__m128i sum, __m128i factors, __m128i ahead)
{
    __m128i low = _mm_clmulepi64_si128(sum, factors, 0x00), high = _mm_clmulepi64_si128(sum, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), ahead);
}

FOLDS static inline __m128i loaded(const uint8_t *data)
{
    return _mm_loadu_si128((const __m128i *)(const void *)data);
}

/* `size` is 64 or more. */
FOLDS static uint32_t by_folding(uint32_t state, const uint8_t *data, int64_t size)
{
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4); /* x^(512-32), x^(512+32) modulo the polynomial */
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0); /* x^(128-32), x^(128+32) */
    __m128i sums[4];
    uint8_t rest[16];
    for (int k = 0; k < 4; k++)
        sums[k] = loaded(data + 16 * k);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int32_t)state));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        _mm_prefetch((const char *)data + READ_AHEAD, _MM_HINT_T0);
        for (int k = 0; k < 4; k++)
            sums[k] = folded(sums[k], by_64, loaded(data + 16 * k));
    }
    for (int k = 1; k < 4; k++)
        sums[k] = folded(sums[k - 1], by_16, sums[k]);
    for (; size >= 16; data += 16, size -= 16)
        sums[3] = folded(sums[3], by_16, loaded(data));
    memcpy(rest, &sums[3], sizeof rest);
    return by_table(by_table(0, rest, sizeof rest), data, size);
}

/* `size` is a multiple of WIDE, but not 0. */
#define DEFINE_WIDE_FOLDING(NAME, VECTOR, MULTIPLY, INSTRUCTIONS)                                                      \
    __attribute__((target(INSTRUCTIONS))) static uint32_t NAME(uint32_t state, const uint8_t *data, int64_t size)      \
    {                                                                                                                  \
        enum { NUM_SUMS = WIDE / sizeof(VECTOR) };                                                                     \
        uint64_t by_256[8]; /* x^(2048+32), x^(2048-32) modulo the polynomial */                                       \
        uint8_t rest[WIDE] = {0};                                                                                      \
        VECTOR factors, sums[NUM_SUMS], ahead;                                                                         \
        for (int k = 0; k < 8; k++)                                                                                    \
            by_256[k] = k % 2 ? 0x01322d1430 : 0x011542778a;                                                           \
        memcpy(&factors, by_256, sizeof factors);                                                                      \
        memcpy(rest, &state, sizeof state);                                                                            \
        for (int k = 0; k < NUM_SUMS; k++) {                                                                           \
            memcpy(&sums[k], rest + k * sizeof ahead, sizeof ahead);                                                   \
            memcpy(&ahead, data + k * sizeof ahead, sizeof ahead);                                                     \
            sums[k] ^= ahead;                                                                                          \
        }                                                                                                              \
        for (data += WIDE, size -= WIDE; size; data += WIDE, size -= WIDE) {                                           \
            for (int k = 0; k < WIDE; k += 64)                                                                         \
                _mm_prefetch((const char *)data + READ_AHEAD + k, _MM_HINT_T0);                                        \
            for (int k = 0; k < NUM_SUMS; k++) {                                                                       \
                memcpy(&ahead, data + k * sizeof ahead, sizeof ahead);                                                 \
                sums[k] = MULTIPLY(sums[k], factors, 0x00) ^ MULTIPLY(sums[k], factors, 0x11) ^ ahead;                 \
            }                                                                                                          \
        }                                                                                                              \
        memcpy(rest, sums, sizeof rest);                                                                               \
        return by_folding(0, rest, sizeof rest);                                                                       \
    }

DEFINE_WIDE_FOLDING(by_fours, __m512i, _mm512_clmulepi64_epi128, "avx512f,vpclmulqdq")
DEFINE_WIDE_FOLDING(by_twos, __m256i, _mm256_clmulepi64_epi128, "avx2,vpclmulqdq")

static uint32_t continued(uint32_t state, const uint8_t *data, int64_t size)
{
    int64_t wide = size & -WIDE;
    if (!wide || WIDEST < 32 || !__builtin_cpu_supports("vpclmulqdq"))
        wide = 0;
    else if (WIDEST == 64 && __builtin_cpu_supports("avx512f"))
        state = by_fours(state, data, wide);
    else if (__builtin_cpu_supports("avx2"))
        state = by_twos(state, data, wide);
    else
        wide = 0;
    data += wide, size -= wide;
    return size < 64 ? by_table(state, data, size) : by_folding(state, data, size);
}

/* Continue the CRC-32 `crc` (0 at first) by `size` bytes, and return 1; 0 if the processor cannot. */
int trainermon_crc32(const uint8_t *data, int64_t size, uint32_t *crc)
{
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1"))
        return 0;
    *crc = ~continued(~*crc, data, size);
    return 1;
}
#else
int trainermon_crc32(const uint8_t *data, int64_t size, uint32_t *crc)
{
    (void)data, (void)size, (void)crc;
    return 0;
}
#endif

/* Write the row of moments of each tensor of float32, with the bits that trainermon_moments gives it, and the CRC-32 of
 * its bytes, in one pass over memory; return 1, or 0 if the processor cannot. */
int trainermon_moments_and_crc32(const struct tensor *tensors, int64_t num_tensors, double *rows, uint32_t *crcs)
{
    for (int64_t t = 0; t < num_tensors; t++) {
        const struct tensor *tensor = &tensors[t];
        double *whole = rows + COLUMNS * t, row[COLUMNS];
        crcs[t] = 0;
        if (!trainermon_crc32((const uint8_t *)tensor->data, 0, &crcs[t]))
            return 0;
        trainermon_moments(&(struct tensor){tensor->data, 0, tensor->kind}, 1, whole, 1);
        for (int64_t first = 0; first < tensor->count; first += ITEM) {
            int64_t count = tensor->count - first < ITEM ? tensor->count - first : ITEM;
            struct tensor item = {tensor->data + first * (int64_t)sizeof(float), count, tensor->kind};
            trainermon_moments(&item, 1, row, 1);
            trainermon_merge_row(whole, row);
            trainermon_crc32((const uint8_t *)item.data, count * (int64_t)sizeof(float), &crcs[t]);
        }
    }
    return 1;
}
