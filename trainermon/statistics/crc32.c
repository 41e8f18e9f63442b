/*
 * The CRC-32 of zlib, PNG and Ethernet (polynomial 0x04C11DB7, bits reflected) of bytes in memory, by carry-less
 * multiplication where the processor has it. crc32.py says what it is for.
 *
 * After Gopal, Ozturk and others: Fast CRC computation for generic polynomials using PCLMULQDQ instruction (Intel, 2009):
 * four sums of 128 bits are folded 64 bytes ahead at a time, then into one. What is left of 16 bytes has the CRC of the
 * whole, and a table does those.
 */
#include <stdint.h>
#include <string.h>

#define READ_AHEAD 4096 /* bytes */

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

/* Continue the CRC-32 `crc` (0 at first) by `size` bytes, and return 1; 0 if the processor cannot. */
int trainermon_crc32(const uint8_t *data, int64_t size, uint32_t *crc)
{
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1"))
        return 0;
    *crc = ~(size < 64 ? by_table(~*crc, data, size) : by_folding(~*crc, data, size));
    return 1;
}
#else
int trainermon_crc32(const uint8_t *data, int64_t size, uint32_t *crc)
{
    (void)data, (void)size, (void)crc;
    return 0;
}
#endif
