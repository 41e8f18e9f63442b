/*
 * Counts what a pickle makes, and takes out of it what it memorises in vain.
 *
 * Python's pickler memorises every object, in case it comes again, and so keeps all of them alive while they are loaded:
 * of a checkpoint's metadata that is four times what stays. Here a pickle is read code by code, and nothing is made.
 * Source: Python's Lib/pickletools.py, protocols 0 to 5.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* What stands after a code: so many bytes, or what these say. */
enum { UNKNOWN = -1, LINE = 16, TWO_LINES, LENGTH1, LENGTH4, LENGTH8 };

enum { MARK_PUT = 'q', LONG_PUT = 'r', GET = 'h', LONG_GET = 'j', STOP = '.', MEMOIZE = 0x94, FRAME = 0x95 };

/* In the order of slim.py. */
struct counts {
    int64_t codes, objects, sets, tuples;
};

struct places {
    uint64_t *used;  /* a bit for each place in the memo that is asked for */
    uint32_t *ranks; /* how many of them there are before each 64 */
    int64_t num_memoized, num_put;
};

static int argument_of(uint8_t code)
{
    switch (code) {
    case '(': case '.': case '0': case '1': case '2': case 'N': case 'Q': case 'R': case 'a': case 'b': case 'd': case '}':
    case 'e': case 'l': case ']': case 'o': case 's': case 't': case ')': case 'u': case 0x81: case 0x85: case 0x86:
    case 0x87: case 0x88: case 0x89: case 0x8f: case 0x90: case 0x91: case 0x92: case 0x93: case MEMOIZE: case 0x97:
    case 0x98:
        return 0;
    case 'K': case GET: case MARK_PUT: case 0x80:
        return 1;
    case 'M':
        return 2;
    case 'J': case LONG_GET: case LONG_PUT:
        return 4;
    case 'G': case FRAME:
        return 8;
    case 'F': case 'I': case 'L': case 'P': case 'S': case 'V':
        return LINE;
    case 'c': case 'i':
        return TWO_LINES;
    case 'U': case 'C': case 0x8a: case 0x8c:
        return LENGTH1;
    case 'T': case 'X': case 'B': case 0x8b:
        return LENGTH4;
    case 0x8d: case 0x8e: case 0x96:
        return LENGTH8;
    default: /* also places in the memo as text, and extensions: pickle.py has to say something */
        return UNKNOWN;
    }
}

static uint64_t number_at(const uint8_t *data, int width)
{
    uint64_t found = 0;
    for (int i = 0; i < width; i++)
        found |= (uint64_t)data[i] << (8 * i);
    return found;
}

/* The place after the code at `place`; -1: it is unknown, or ends behind the pickle. */
static int64_t after(const uint8_t *data, int64_t size, int64_t place)
{
    int argument = argument_of(data[place]);
    int64_t end = place + 1;
    if (argument == UNKNOWN)
        return -1;
    if (argument == LINE || argument == TWO_LINES) {
        for (int lines = argument == LINE ? 1 : 2; lines > 0; lines--) {
            const uint8_t *found = memchr(data + end, '\n', (size_t)(size - end));
            if (!found)
                return -1;
            end = found - data + 1;
        }
        return end;
    }
    if (argument >= LENGTH1) {
        int width = argument == LENGTH1 ? 1 : argument == LENGTH4 ? 4 : 8;
        if (end + width > size)
            return -1;
        uint64_t length = number_at(data + end, width);
        end += width;
        return length > (uint64_t)(size - end) ? -1 : end + (int64_t)length;
    }
    return end + argument > size ? -1 : end + argument;
}

static void count(uint8_t code, int64_t length, struct counts *found)
{
    if (argument_of(code) < LINE)
        found->codes += length;
    switch (code) {
    case 't': case 0x85: case 0x86: case 0x87:
        found->tuples++;
        found->objects++;
        break;
    case 0x8f: case 0x91:
        found->sets++;
        found->objects++;
        break;
    case ']': case '}': case 'l': case 'd': case 'R': case 'i': case 'o': case 0x81: case 0x92:
        found->objects++;
        break;
    default:
        break;
    }
}

/* Reads the codes once; returns the place after the last one, -1 if that is not for us to judge. */
static int64_t look(const uint8_t *data, int64_t size, struct counts *found, struct places *places)
{
    for (int64_t place = 0, next; place < size; place = next) {
        uint8_t code = data[place];
        next = after(data, size, place);
        if (next < 0)
            return -1;
        if (code == STOP)
            return next;
        if (code == FRAME && number_at(data + place + 1, 8) > (uint64_t)(size - next))
            return -1;
        count(code, next - place, found);
        if (code == MEMOIZE)
            places->num_memoized++;
        if (code == MARK_PUT || code == LONG_PUT)
            places->num_put++;
        if (code == MARK_PUT || code == LONG_PUT || code == GET || code == LONG_GET) {
            uint64_t index = number_at(data + place + 1, (int)(next - place - 1));
            if (index > (uint64_t)(places->num_put + places->num_memoized))
                return -1;
            if (code == GET || code == LONG_GET)
                places->used[index >> 6] |= (uint64_t)1 << (index & 63);
        }
    }
    return -1;
}

static int is_used(const struct places *places, uint64_t index)
{
    return (int)(places->used[index >> 6] >> (index & 63) & 1);
}

static uint64_t rank_of(const struct places *places, uint64_t index)
{
    uint64_t before = places->used[index >> 6] & (((uint64_t)1 << (index & 63)) - 1);
    return places->ranks[index >> 6] + (uint64_t)__builtin_popcountll(before);
}

/* Writes the codes again, over themselves: each becomes no longer than it was. */
static int64_t rewrite(uint8_t *data, int64_t size, const struct places *places)
{
    int is_numbered = places->num_memoized > 0; /* by order, so that places move up */
    int64_t to = 0, memoized = 0;
    for (int64_t place = 0, next; place < size; place = next) {
        uint8_t code = data[place];
        uint64_t index = 0;
        next = after(data, size, place);
        if (code == FRAME)
            continue;
        if (code == MEMOIZE && !is_used(places, (uint64_t)memoized++))
            continue;
        if (code == GET || code == LONG_GET || code == MARK_PUT || code == LONG_PUT) {
            index = number_at(data + place + 1, (int)(next - place - 1));
            if ((code == MARK_PUT || code == LONG_PUT) && !is_used(places, index))
                continue;
            if (is_numbered && (code == GET || code == LONG_GET)) {
                index = rank_of(places, index);
                data[to++] = index < 256 ? GET : LONG_GET;
                for (int i = 0; i < (index < 256 ? 1 : 4); i++)
                    data[to++] = (uint8_t)(index >> (8 * i));
                continue;
            }
        }
        memmove(data + to, data + place, (size_t)(next - place));
        to += next - place;
    }
    return to;
}

/*
 * Counts what a pickle makes, and rewrites it without what is memorised and never asked for; returns its length then.
 * 0: it is damaged, or has codes that only Python judges; then it is as it was.
 */
int64_t trainermon_slim_pickle(uint8_t *data, int64_t size, struct counts *found)
{
    struct places places = {0};
    int64_t end, words = (size >> 6) + 2;
    memset(found, 0, sizeof *found);
    places.used = calloc((size_t)words, sizeof *places.used);
    places.ranks = malloc((size_t)words * sizeof *places.ranks);
    end = places.used && places.ranks ? look(data, size, found, &places) : -1;
    if (end > 0 && places.num_memoized && places.num_put) {
        end = size; /* no pickler counts places in both ways */
    } else if (end > 0) {
        uint32_t rank = 0;
        for (int64_t word = 0; word < words; word++) {
            places.ranks[word] = rank;
            rank += (uint32_t)__builtin_popcountll(places.used[word]);
        }
        end = rewrite(data, end, &places);
    }
    free(places.used);
    free(places.ranks);
    return end > 0 ? end : 0;
}
