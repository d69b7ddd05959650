/* Several file systems in one process: two of the same type and two of different types, with files
 * copied between them, a listing, reads that finish later, and statistics.
 *
 *   cargo xtask library
 *   cc capi/examples/tour.c -o tour -Itarget/libdefuse/include -Ltarget/libdefuse/lib -ldefuse \
 *     -Wl,-rpath,$PWD/target/libdefuse/lib
 *   mkdir -p /tmp/tour && ./tour /tmp/tour
 */
#define _GNU_SOURCE
#include <defuse.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECES = 4, PIECE = 64 * 1024, SIZE = PIECES * PIECE };

/* The numbers of the last line. */
static struct {
    int mounts, files, reads;
    long long bytes;
} done;

static void fail(const char *what) {
    fprintf(stderr, "tour: %s: %s: %s\n", what, strerror(errno), defuse_last_error());
    exit(1);
}

static void mount(const char *target, const char *source) {
    if (defuse_mount(target, source) < 0)
        fail(target);
    done.mounts++;
    printf("mounted %s\n", target);
}

static int open_file(const char *path, int flags) {
    int fd = defuse_open(path, flags, 0644);
    if (fd < 0)
        fail(path);
    return fd;
}

/* Copies between mounts of any types. */
static void copy(const char *from, const char *to) {
    int in = open_file(from, O_RDONLY), out = open_file(to, O_WRONLY | O_CREAT | O_TRUNC);
    ssize_t count, total = 0;
    while ((count = defuse_copy_file_range(in, NULL, out, NULL, SIZE, 0)) > 0)
        total += count;
    if (count < 0 || defuse_close(in) < 0 || defuse_close(out) < 0)
        fail(to);
    done.files++;
    done.bytes += total;
    printf("copied %zd bytes from %s to %s\n", total, from, to);
}

static void list(const char *path) {
    defuse_dir *dir = defuse_opendir(path);
    struct dirent *entry;
    if (dir == NULL)
        fail(path);
    while ((entry = defuse_readdir(dir)) != NULL)
        if (entry->d_type == DT_REG)
            printf("%s has %s\n", path, entry->d_name);
    defuse_closedir(dir);
}

/* Several concurrent reads, whose events come in any order. */
static void read_later(const char *path, const char *expected) {
    static char memory[SIZE];
    defuse_aio_op ops[PIECES];
    defuse_aio_event events[PIECES];
    int fd = open_file(path, O_RDONLY), aio = defuse_aio_create(PIECES, 0), i;
    if (aio < 0)
        fail("defuse_aio_create");
    for (i = 0; i < PIECES; i++) {
        memset(&ops[i], 0, sizeof ops[i]);
        ops[i].opcode = DEFUSE_AIO_READ;
        ops[i].fd = fd;
        ops[i].buf = memory + i * PIECE;
        ops[i].count = PIECE;
        ops[i].offset = (int64_t)i * PIECE;
        ops[i].data = (uint64_t)i;
    }
    if (defuse_aio_submit(aio, ops, PIECES) != PIECES)
        fail("defuse_aio_submit");
    if (defuse_aio_getevents(aio, PIECES, PIECES, events, NULL) != PIECES)
        fail("defuse_aio_getevents");
    for (i = 0; i < PIECES; i++)
        if (events[i].result != PIECE)
            fail("a read");
    done.reads += PIECES;
    done.bytes += SIZE;
    printf("read %d pieces of %s at once: %s\n", PIECES, path,
           memcmp(memory, expected, SIZE) ? "other bytes" : "the same bytes");
    defuse_aio_destroy(aio);
    defuse_close(fd);
}

static void statistics(const char *target) {
    char json[65536];
    if (defuse_statistics(target, json, sizeof json) < 0)
        fail(target);
    printf("statistics of %s %s\n", target, json);
}

int main(int argc, char **argv) {
    static const char *targets[] = {"mem:", "scratch:", "/data", "/more"};
    static char bytes[SIZE];
    char source[4096];
    int fd, i;
    if (argc != 2) {
        fprintf(stderr, "usage: tour DIRECTORY\n");
        return 2;
    }
    mount("mem:", "memory:");
    mount("scratch:", "memory:,size=16M");
    snprintf(source, sizeof source, "passthrough:%s", argv[1]);
    mount("/data", source);
    mount("/more", source);

    for (i = 0; i < SIZE; i++)
        bytes[i] = (char)(i / PIECE + i % 251);
    fd = open_file("mem:/one", O_WRONLY | O_CREAT | O_TRUNC);
    if (defuse_write(fd, bytes, SIZE) != SIZE || defuse_close(fd) < 0)
        fail("mem:/one");
    copy("mem:/one", "scratch:/two");
    copy("scratch:/two", "/data/three");
    list("/data");
    read_later("/more/three", bytes);
    for (i = 0; i < 4; i++)
        statistics(targets[i]);
    for (i = 0; i < 4; i++)
        if (defuse_unmount(targets[i], 0) < 0)
            fail(targets[i]);
    printf("done: %d mounts of 2 types, %d files copied, %d reads finished later, %lld bytes moved\n",
           done.mounts, done.files, done.reads, done.bytes);
    return 0;
}
