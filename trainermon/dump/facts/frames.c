/*
 * The frames of the interpreter that run now: which code each of them runs, and at which instruction.
 *
 * A stack is looked up for every call that a dump records. To walk it in Python takes ten times as long. Only public
 * functions of CPython are called, by the addresses that the interpreter itself gives: nothing of Python is needed to
 * build this.
 */
#include <stdint.h>

/* In the order of stacks.py. Each object that they return belongs to the caller. */
struct python {
    void *(*current_thread)(void);
    void *(*frame_of_thread)(void *thread);
    void *(*frame_below)(void *frame);
    void *(*code_of_frame)(void *frame);
    int (*instruction_of_frame)(void *frame);
    void (*release)(void *object);
};

struct place {
    void *code; /* its address, which is its id */
    int64_t instruction;
};

/* Write the places of at most `room` frames, from the innermost. Returns how many there are; `room`: perhaps more. The
 * caller holds the interpreter's lock. */
int64_t trainermon_frames(const struct python *python, struct place *places, int64_t room)
{
    int64_t found = 0;
    void *frame = python->frame_of_thread(python->current_thread());
    while (frame && found < room) {
        void *code = python->code_of_frame(frame), *below = python->frame_below(frame);
        places[found++] = (struct place){code, python->instruction_of_frame(frame)};
        python->release(code);
        python->release(frame);
        frame = below;
    }
    if (frame)
        python->release(frame);
    return found;
}
