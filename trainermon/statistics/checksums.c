/*
 * Checksums of many tensors in one pass: the sum and the sum of squares, modulo 2^64, of the elements' bits taken as
 * signed integers of their size. checksums.py says what they are for, and makes one number of the two.
 *
 * Both sums are of integers, so neither the order of elements nor the number of threads changes a bit. The loops are
 * written for the compiler's vectoriser; benchmarks/bench_checksums.py tells whether it did.
 */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>

#define READ_AHEAD 8192    /* bytes; as in moments.c */
#define LINE 64            /* bytes that one prefetch fetches */
#define PARALLEL (1 << 22) /* elements from which threads are worth their start */
#define MAX_THREADS 16

#ifdef CLONED /* a test builds one instruction set at a time */
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#include <immintrin.h>
#define IN_PAIRS
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED
#endif

struct sums {
    uint64_t sum, squares;
};

struct tensor {
    const char *data;
    int64_t count;
    int64_t size; /* bytes of an element: 1, 2, 4 or 8 */
};

/* Each lane takes every LANES-th element. The square of a narrower element fits 63 bits, and as a product of signed
 * integers the compiler makes it of one instruction; that of 64 bits wraps, which only unsigned integers may. Elements
 * must lie at multiples of their size: a type without that, or one that may alias others, takes 1.6 times as long. */
#define DEFINE_SCAN(NAME, ELEMENT, SQUARED)                                                                            \
    CLONED static void NAME(const char *data, int64_t count, struct sums *into)                                        \
    {                                                                                                                  \
        enum { LANES = LINE / sizeof(ELEMENT) > 32 ? 32 : LINE / sizeof(ELEMENT) };                                    \
        const ELEMENT *elements = (const ELEMENT *)data;                                                               \
        uint64_t sum[LANES] = {0}, squares[LANES] = {0};                                                               \
        int64_t i = 0;                                                                                                 \
        for (; i + LANES <= count; i += LANES) {                                                                       \
            __builtin_prefetch((const char *)(elements + i) + READ_AHEAD, 0, 2);                                       \
            for (int k = 0; k < LANES; k++) {                                                                          \
                int64_t wide = elements[i + k];                                                                        \
                sum[k] += (uint64_t)wide;                                                                              \
                squares[k] += SQUARED;                                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        for (int k = 0; k < LANES; k++) {                                                                              \
            into->sum += sum[k];                                                                                       \
            into->squares += squares[k];                                                                               \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            int64_t wide = elements[i];                                                                                \
            into->sum += (uint64_t)wide;                                                                               \
            into->squares += SQUARED;                                                                                  \
        }                                                                                                              \
    }

DEFINE_SCAN(scan8, int8_t, (uint64_t)(wide * wide))
DEFINE_SCAN(scan16, int16_t, (uint64_t)(wide * wide))
DEFINE_SCAN(scan32, int32_t, (uint64_t)(wide * wide))
DEFINE_SCAN(scan64, int64_t, (uint64_t)wide * (uint64_t)wide)

#ifdef IN_PAIRS
/* Sixteen bits: one instruction multiplies and adds neighbours, which the vectoriser does not find, and which is the
 * difference between half the pace of reading and all of it. A sum of two squares is at most 2^31, so it is taken as
 * unsigned; sums of two elements are added up in 32 bits for as long as these hold them. */
#define PAIRS_HELD 16384

__attribute__((target("avx512bw"))) static void scan16_avx512(const char *data, int64_t count, struct sums *into)
{
    const __m512i ones = _mm512_set1_epi16(1), low = _mm512_set1_epi64(0xffffffff);
    __m512i sum = _mm512_setzero_si512(), squares = _mm512_setzero_si512();
    int64_t i = 0;
    while (i + 32 <= count) {
        __m512i held = _mm512_setzero_si512();
        int64_t end = count - i > 32 * PAIRS_HELD ? i + 32 * PAIRS_HELD : count;
        for (; i + 32 <= end; i += 32) {
            __builtin_prefetch(data + 2 * i + READ_AHEAD, 0, 2);
            __m512i words = _mm512_loadu_si512(data + 2 * i), pairs = _mm512_madd_epi16(words, words);
            held = _mm512_add_epi32(held, _mm512_madd_epi16(words, ones));
            squares = _mm512_add_epi64(squares, _mm512_and_si512(pairs, low));
            squares = _mm512_add_epi64(squares, _mm512_srli_epi64(pairs, 32));
        }
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(held)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(held, 1)));
    }
    into->sum += (uint64_t)_mm512_reduce_add_epi64(sum);
    into->squares += (uint64_t)_mm512_reduce_add_epi64(squares);
    scan16(data + 2 * i, count - i, into);
}

__attribute__((target("avx2"))) static uint64_t total_of(__m256i lanes)
{
    uint64_t parts[4];
    _mm256_storeu_si256((__m256i *)parts, lanes);
    return parts[0] + parts[1] + parts[2] + parts[3];
}

__attribute__((target("avx2"))) static void scan16_avx2(const char *data, int64_t count, struct sums *into)
{
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi64x(0xffffffff);
    __m256i sum = _mm256_setzero_si256(), squares = _mm256_setzero_si256();
    int64_t i = 0;
    while (i + 16 <= count) {
        __m256i held = _mm256_setzero_si256();
        int64_t end = count - i > 16 * PAIRS_HELD ? i + 16 * PAIRS_HELD : count;
        for (; i + 16 <= end; i += 16) {
            __builtin_prefetch(data + 2 * i + READ_AHEAD, 0, 2);
            __m256i words = _mm256_loadu_si256((const __m256i *)(data + 2 * i));
            __m256i pairs = _mm256_madd_epi16(words, words);
            held = _mm256_add_epi32(held, _mm256_madd_epi16(words, ones));
            squares = _mm256_add_epi64(squares, _mm256_and_si256(pairs, low));
            squares = _mm256_add_epi64(squares, _mm256_srli_epi64(pairs, 32));
        }
        sum = _mm256_add_epi64(sum, _mm256_cvtepi32_epi64(_mm256_castsi256_si128(held)));
        sum = _mm256_add_epi64(sum, _mm256_cvtepi32_epi64(_mm256_extracti128_si256(held, 1)));
    }
    into->sum += total_of(sum);
    into->squares += total_of(squares);
    scan16(data + 2 * i, count - i, into);
}

static void scan_words(const char *data, int64_t count, struct sums *into)
{
    if (__builtin_cpu_supports("avx512bw"))
        scan16_avx512(data, count, into);
    else if (__builtin_cpu_supports("avx2"))
        scan16_avx2(data, count, into);
    else
        scan16(data, count, into);
}
#else
#define scan_words scan16
#endif

static void scan(const struct tensor *tensor, int64_t first, int64_t last, struct sums *into)
{
    const char *data = tensor->data + first * tensor->size;
    switch (tensor->size) {
    case 1:
        scan8(data, last - first, into);
        break;
    case 2:
        scan_words(data, last - first, into);
        break;
    case 4:
        scan32(data, last - first, into);
        break;
    default:
        scan64(data, last - first, into);
    }
}

/* The elements from number `first` to before number `last`, counted through all tensors: one thread's share. */
struct share {
    const struct tensor *tensors;
    int64_t num_tensors, first, last;
    struct sums *sums;
};

static void *scan_share(void *argument)
{
    struct share *share = argument;
    int64_t begin = 0;
    for (int64_t t = 0; t < share->num_tensors; t++) {
        int64_t end = begin + share->tensors[t].count;
        int64_t first = share->first > begin ? share->first : begin;
        int64_t last = share->last < end ? share->last : end;
        if (first < last) {
            struct sums part = {0, 0};
            scan(&share->tensors[t], first - begin, last - begin, &part);
            __atomic_fetch_add(&share->sums[t].sum, part.sum, __ATOMIC_RELAXED);
            __atomic_fetch_add(&share->sums[t].squares, part.squares, __ATOMIC_RELAXED);
        }
        begin = end;
    }
    return NULL;
}

/* Write sum and sum of squares of each tensor. Signals of the training process are for its own threads; the share of a
 * thread that cannot be started is done here. */
void trainermon_checksums(const struct tensor *tensors, int64_t num_tensors, struct sums *sums, int64_t num_threads)
{
    struct share shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int64_t total = 0;
    for (int64_t t = 0; t < num_tensors; t++) {
        sums[t].sum = sums[t].squares = 0;
        total += tensors[t].count;
    }
    num_threads = total < PARALLEL || num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int started[MAX_THREADS] = {0};
    for (int64_t i = 0; i < num_threads; i++) {
        struct share share = {tensors, num_tensors, total * i / num_threads, total * (i + 1) / num_threads, sums};
        shares[i] = share;
        started[i] = i > 0 && pthread_create(&threads[i], NULL, scan_share, &shares[i]) == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (int64_t i = 0; i < num_threads; i++)
        if (!started[i])
            scan_share(&shares[i]);
    for (int64_t i = 0; i < num_threads; i++)
        if (started[i])
            pthread_join(threads[i], NULL);
}
