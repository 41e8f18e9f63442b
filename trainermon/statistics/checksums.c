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

static void scan(const struct tensor *tensor, int64_t first, int64_t last, struct sums *into)
{
    const char *data = tensor->data + first * tensor->size;
    switch (tensor->size) {
    case 1:
        scan8(data, last - first, into);
        break;
    case 2:
        scan16(data, last - first, into);
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
