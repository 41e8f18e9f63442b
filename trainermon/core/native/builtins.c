/*
 * Functions that the interpreter calls as it calls its own: builtins.py makes them of the definitions below.
 *
 * A call through ctypes takes a tenth of a microsecond in a loop and more than two between two steps of a training, when
 * nothing of what it needs is in the cache; one of these a tenth of that. Nothing of Python is needed to build this: of
 * the interpreter only functions of its stable ABI are called, by the addresses that it gives itself. None of these
 * functions raises: what they cannot do they leave to their callers, and say so.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define FASTCALL 0x0080        /* METH_FASTCALL: arguments come as an array */
#define MOST_TENSORS 256       /* of one call */
#define MOST_KINDS 16          /* of elements */
#define PARALLEL (1 << 22)     /* elements from which moments.c would start threads */
#define WORTH_YIELDING 65536   /* elements that take longer to read than to let other threads of the interpreter run */
#define BLOCK_BEGIN 32         /* of a frame of the journal: docs/reference/journal.md */

typedef struct object object; /* PyObject */

/* What is called of the interpreter, in the order of builtins.py. An object that one returns belongs to the caller. */
struct python {
    object *(*call)(object *callable, ...);
    object *(*attribute)(object *owner, object *name);
    object *(*type)(object *of);
    object *(*item)(object *sequence, intptr_t index);
    intptr_t (*length)(object *sequence);
    int64_t (*integer)(object *number);
    double (*real)(object *number);
    object *(*boolean)(long value);
    object *(*number)(double value);
    void (*forget_error)(void);
    void (*release)(object *object);
    void *(*let_others_run)(void);
    void (*go_on)(void *thread);
};

/* What is asked of a tensor, and which answers are known, in the order of statistics/compiled.py. */
struct facts {
    object *yes, *no;                        /* True and False */
    object *types[2];                        /* of tensors whose memory is what they say */
    object *dtype, *is_cpu;                  /* names of attributes */
    object *is_contiguous, *is_negated;      /* methods: one whose sign bits are turned over says other than its memory */
    object *count, *address;
};

/* moments.c and crc32.c */
struct tensor {
    const char *data;
    int64_t count;
    int64_t kind;
};
int64_t trainermon_moments(const struct tensor *tensors, int64_t num_tensors, double *rows, int64_t num_threads);
int trainermon_crc32(const uint8_t *data, int64_t size, uint32_t *crc);

/* rows.c */
enum { SUM_SQ = 4, NANS = 6, ROW = 8 };
struct columns {
    const int64_t *places;
    int64_t num_places;
    double *scalars;
    int64_t num_scalars;
    double *out;
};
void trainermon_write_columns(const double *rows, const struct columns *to);
int trainermon_any_nonfinite(const double *rows, int64_t num_rows);

static struct python python;
static struct facts known;
static object *dtypes[MOST_KINDS]; /* NULL behind the last */
static int64_t kinds[MOST_KINDS];

void trainermon_bind_python(const struct python *functions)
{
    python = *functions;
}

void trainermon_bind_tensors(const struct facts *facts, object *const *of_dtypes, const int64_t *of_kinds)
{
    known = *facts;
    memcpy(dtypes, of_dtypes, sizeof dtypes);
    memcpy(kinds, of_kinds, sizeof kinds);
}

static object *answer(int is_done)
{
    if (!is_done)
        python.forget_error();
    return python.boolean(is_done);
}

/* Whether what was returned is `wanted`; it is released. */
static int is(object *returned, const object *wanted)
{
    if (returned)
        python.release(returned);
    return returned && returned == wanted;
}

/* The number that a method of a tensor returns; -1 if there is none. */
static int64_t returned_by(object *method, object *tensor)
{
    object *returned = python.call(method, tensor, NULL);
    int64_t value = returned ? python.integer(returned) : -1;
    if (returned)
        python.release(returned);
    return value;
}

static int64_t kind_of(object *tensor)
{
    object *dtype = python.attribute(tensor, known.dtype);
    int64_t kind = -1;
    for (int k = 0; dtype && k < MOST_KINDS && dtypes[k] && kind < 0; k++)
        if (dtypes[k] == dtype)
            kind = kinds[k];
    if (dtype)
        python.release(dtype);
    return kind;
}

/* Find where the elements of a tensor lie; 0 unless they do so one after the other, in memory of the host. */
static int find(object *tensor, struct tensor *found)
{
    object *type = python.type(tensor);
    int is_plain = is(type, known.types[0]) || type == known.types[1];
    if (!is_plain || (found->kind = kind_of(tensor)) < 0 || !is(python.attribute(tensor, known.is_cpu), known.yes) ||
        !is(python.call(known.is_contiguous, tensor, NULL), known.yes) ||
        !is(python.call(known.is_negated, tensor, NULL), known.no))
        return 0;
    if ((found->count = returned_by(known.count, tensor)) < 0)
        return 0;
    found->data = (const char *)(intptr_t)returned_by(known.address, tensor);
    return (intptr_t)found->data != -1;
}

/* write_dense(tensors, address): write the rows of moments of a list of tensors from `address` on, and return True;
 * False if that takes a closer look at one of them, or threads. Rows may have been written then. */
static object *write_dense(object *self, object *const *arguments, intptr_t num_arguments)
{
    struct tensor found[MOST_TENSORS];
    object *tensors = arguments[0];
    intptr_t num_tensors = python.length(tensors);
    double *rows = (double *)(intptr_t)python.integer(arguments[1]);
    int64_t total = 0, missing;
    (void)self, (void)num_arguments;
    if (num_tensors < 0 || num_tensors > MOST_TENSORS)
        return answer(0);
    for (intptr_t t = 0; t < num_tensors; t++) {
        object *tensor = python.item(tensors, t);
        int is_found = tensor && find(tensor, &found[t]);
        if (tensor)
            python.release(tensor);
        if (!is_found || (total += found[t].count) >= PARALLEL)
            return answer(0);
    }
    void *thread = total > WORTH_YIELDING ? python.let_others_run() : NULL;
    missing = trainermon_moments(found, num_tensors, rows, 1);
    if (thread)
        python.go_on(thread);
    return answer(!missing);
}

/* seal_block(address, size, sequence, step, time): complete the frame of a block, whose head has all that never changes
 * and whose rows are written, and return True; False if the processor cannot. */
static object *seal_block(object *self, object *const *arguments, intptr_t num_arguments)
{
    uint8_t *frame = (uint8_t *)(intptr_t)python.integer(arguments[0]);
    int64_t size = python.integer(arguments[1]), sequence = python.integer(arguments[2]);
    int64_t step = python.integer(arguments[3]);
    double time_s = python.real(arguments[4]);
    uint32_t of_block = 0, of_head = 0;
    (void)self, (void)num_arguments;
    memcpy(frame + 8, &sequence, sizeof sequence);
    memcpy(frame + BLOCK_BEGIN, &step, sizeof step);
    memcpy(frame + BLOCK_BEGIN + 8, &time_s, sizeof time_s);
    if (!trainermon_crc32(frame + BLOCK_BEGIN, size - BLOCK_BEGIN, &of_block))
        return answer(0);
    memcpy(frame + 20, &of_block, sizeof of_block);
    trainermon_crc32(frame, BLOCK_BEGIN - 4, &of_head);
    memcpy(frame + BLOCK_BEGIN - 4, &of_head, sizeof of_head);
    return answer(1);
}

/* write_columns(rows, columns, scalars): write rows and a list of single numbers as rows.c does, and return True. */
static object *write_columns(object *self, object *const *arguments, intptr_t num_arguments)
{
    const double *rows = (const double *)(intptr_t)python.integer(arguments[0]);
    struct columns *columns = (struct columns *)(intptr_t)python.integer(arguments[1]);
    (void)self, (void)num_arguments;
    for (int64_t i = 0; i < columns->num_scalars; i++) {
        object *scalar = python.item(arguments[2], i);
        if (!scalar)
            return answer(0);
        columns->scalars[i] = python.real(scalar);
        python.release(scalar);
    }
    trainermon_write_columns(rows, columns);
    return answer(1);
}

/* any_nonfinite(rows, count): whether one of them counts a NaN or an infinity. */
static object *any_nonfinite(object *self, object *const *arguments, intptr_t num_arguments)
{
    const double *rows = (const double *)(intptr_t)python.integer(arguments[0]);
    (void)self, (void)num_arguments;
    return python.boolean(trainermon_any_nonfinite(rows, python.integer(arguments[1])));
}

/* norm(rows, places): the norm of the tensors of the rows at a list of places, all together. */
static object *norm(object *self, object *const *arguments, intptr_t num_arguments)
{
    const double *rows = (const double *)(intptr_t)python.integer(arguments[0]);
    double square = 0;
    (void)self, (void)num_arguments;
    for (intptr_t i = 0, count = python.length(arguments[1]); i < count; i++) {
        object *place = python.item(arguments[1], i);
        const double *row = rows + ROW * (place ? python.integer(place) : 0);
        if (place)
            python.release(place);
        square += row[NANS] != 0 ? NAN : row[SUM_SQ];
    }
    return python.number(sqrt(square));
}

/* PyMethodDef */
struct method {
    const char *name;
    object *(*function)(object *self, object *const *arguments, intptr_t num_arguments);
    int flags;
    const char *documentation;
};

struct method trainermon_builtin_write_dense = {"write_dense", write_dense, FASTCALL, NULL};
struct method trainermon_builtin_seal_block = {"seal_block", seal_block, FASTCALL, NULL};
struct method trainermon_builtin_write_columns = {"write_columns", write_columns, FASTCALL, NULL};
struct method trainermon_builtin_any_nonfinite = {"any_nonfinite", any_nonfinite, FASTCALL, NULL};
struct method trainermon_builtin_norm = {"norm", norm, FASTCALL, NULL};
