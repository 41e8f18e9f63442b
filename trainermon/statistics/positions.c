/*
 * The positional hash of a tensor: the sum, modulo 2^64, of a mix of each element's bits and of its index in the whole
 * tensor. positions.py says what it is for. Sums of integers have no order, so parts add up, whatever their shapes.
 *
 * The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
 * generators, OOPSLA 2014), with the constants of Stafford's variant 13.
 */
#include <stdint.h>

#ifdef CLONED /* a test builds one instruction set at a time */
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512dq", "avx2", "default")))
#else
#define CLONED
#endif

#define GOLDEN 0x9E3779B97F4A7C15u

static inline uint64_t mixed(uint64_t bits, uint64_t index)
{
    uint64_t x = bits + (index + 1) * GOLDEN;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The elements of one run lie side by side, and so do their indices. */
#define DEFINE_RUN(NAME, ELEMENT)                                                                                      \
    CLONED static uint64_t NAME(const char *data, int64_t count, uint64_t index)                                       \
    {                                                                                                                  \
        const ELEMENT *elements = (const ELEMENT *)data;                                                               \
        uint64_t sum = 0;                                                                                              \
        for (int64_t i = 0; i < count; i++)                                                                            \
            sum += mixed(elements[i], index + (uint64_t)i);                                                            \
        return sum;                                                                                                    \
    }

DEFINE_RUN(run8, uint8_t)
DEFINE_RUN(run16, uint16_t)
DEFINE_RUN(run32, uint32_t)
DEFINE_RUN(run64, uint64_t)

/* Return the hash of `num_runs` runs of `length` elements that lie end to end from `data` on; the indices of each begin
 * at `indices[run]`. `size` is the bytes of an element: 1, 2, 4 or 8. */
uint64_t trainermon_positions(
    const char *data, int64_t size, int64_t num_runs, int64_t length, const int64_t *indices)
{
    uint64_t sum = 0;
    for (int64_t run = 0; run < num_runs; run++) {
        const char *begin = data + run * length * size;
        uint64_t index = (uint64_t)indices[run];
        sum += size == 1   ? run8(begin, length, index)
               : size == 2 ? run16(begin, length, index)
               : size == 4 ? run32(begin, length, index)
                           : run64(begin, length, index);
    }
    return sum;
}
