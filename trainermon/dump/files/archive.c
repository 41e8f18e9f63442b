/*
 * The file of a tensor in one call: the checksum of its elements, and one write of what stands before, in and behind them.
 *
 * The interpreter takes as long to put the parts of a file together and to open, write and close it as the system takes to
 * create it. tensor_files.py knows what the parts are; this is plain C that knows neither Python nor torch.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

int trainermon_crc32(const void *data, int64_t size, uint32_t *crc);

/* The parts of an archive; between them stand the elements' checksum, the elements, and the checksum again. */
struct archive {
    const char *parts[4];
    int64_t sizes[4];
};

enum { NO_SPACE = -1, NO_CHECKSUM = -2 };

/* Write a file of mode 0600. Returns 0, the system's error number, or one of the above: fewer bytes were written than there
 * are, or this processor computes no checksum, and nothing was done. */
int trainermon_save(const char *path, const struct archive *archive, const void *elements, int64_t size)
{
    uint32_t checksum = 0;
    int64_t written, total = 0;
    if (!elements)
        return EFAULT;
    if (!trainermon_crc32(elements, size, &checksum))
        return NO_CHECKSUM;
    struct iovec pieces[] = {
        {(void *)archive->parts[0], archive->sizes[0]}, {&checksum, sizeof checksum},
        {(void *)archive->parts[1], archive->sizes[1]}, {(void *)elements, size},
        {(void *)archive->parts[2], archive->sizes[2]}, {&checksum, sizeof checksum},
        {(void *)archive->parts[3], archive->sizes[3]},
    };
    enum { NUM_PIECES = sizeof pieces / sizeof pieces[0] };
    for (int i = 0; i < NUM_PIECES; i++)
        total += pieces[i].iov_len;
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return errno;
    written = writev(file, pieces, NUM_PIECES);
    int error = written < 0 ? errno : written < total ? NO_SPACE : 0;
    close(file);
    return error;
}
