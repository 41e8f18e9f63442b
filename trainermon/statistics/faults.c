/*
 * Ends a call, and not the process, when a mapped file becomes shorter while it is read.
 *
 * An access behind the end of a mapped file is SIGBUS, which by default ends the process without a word. The handler
 * stays once it is there, and lets the one before it have what is not ours.
 */
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

struct box;
struct pair_sums;
void trainermon_pairs(const struct box *boxes, int64_t num_boxes, int64_t our_kind, int64_t their_kind,
                      struct pair_sums *sums);
int64_t trainermon_is_rounded(const struct box *boxes, int64_t num_boxes, int64_t our_kind, int64_t their_kind,
                              int64_t target);

static _Thread_local sigjmp_buf *way_out;
static _Thread_local int has_faulted;
static struct sigaction handler_before;
static int is_installed;

static void on_fault(int number, siginfo_t *info, void *context)
{
    (void)info;
    (void)context;
    if (way_out)
        siglongjmp(*way_out, 1);
    sigaction(number, &handler_before, NULL); /* the access is tried again, now under that handler */
}

static void catch_faults(void)
{
    struct sigaction action = {0};
    if (__atomic_exchange_n(&is_installed, 1, __ATOMIC_SEQ_CST))
        return;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &handler_before);
}

/* Whether the last guarded call in this thread ended because a file had become too short. */
int64_t trainermon_has_faulted(void)
{
    return has_faulted;
}

/* As trainermon_pairs; what is written is of no use after a fault. */
void trainermon_guarded_pairs(const struct box *boxes, int64_t num_boxes, int64_t our_kind, int64_t their_kind,
                              struct pair_sums *sums)
{
    sigjmp_buf here;
    catch_faults();
    has_faulted = sigsetjmp(here, 0);
    way_out = has_faulted ? NULL : &here;
    if (!has_faulted)
        trainermon_pairs(boxes, num_boxes, our_kind, their_kind, sums);
    way_out = NULL;
}

/* As trainermon_is_rounded; no after a fault. */
int64_t trainermon_guarded_is_rounded(const struct box *boxes, int64_t num_boxes, int64_t our_kind, int64_t their_kind,
                                      int64_t target)
{
    sigjmp_buf here;
    volatile int64_t found = 0;
    catch_faults();
    has_faulted = sigsetjmp(here, 0);
    way_out = has_faulted ? NULL : &here;
    if (!has_faulted)
        found = trainermon_is_rounded(boxes, num_boxes, our_kind, their_kind, target);
    way_out = NULL;
    return found;
}
