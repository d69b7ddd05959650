/* Asynchronous operations. */
#include "check.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { PIECES = 64, PIECE = 4096 };

static atomic_int called;
static atomic_int wrong;
static int deadlocks;

static void count(const defuse_aio_event *event) {
    if (event->result != PIECE)
        atomic_fetch_add(&wrong, 1);
    atomic_fetch_add(&called, 1);
}

static int gate[2];

/* Keeps the only thread busy until the gate is opened. */
static void hold(const defuse_aio_event *event) {
    char byte;
    deadlocks = defuse_aio_destroy((int)event->data) == -1 && errno == EDEADLK;
    atomic_fetch_add(&called, 1);
    if (read(gate[0], &byte, 1) != 1)
        atomic_fetch_add(&wrong, 1);
}

static void moves_data(int aio, int fd) {
    static char out[PIECES][PIECE], in[PIECES][PIECE];
    defuse_aio_op ops[PIECES];
    defuse_aio_event events[PIECES];
    struct pollfd ready = {.fd = defuse_aio_eventfd(aio), .events = POLLIN};
    struct timespec none = {0, 0};
    int i, seen;
    CHECK(ready.fd >= 0 && poll(&ready, 1, 0) == 0);
    CHECK(defuse_aio_getevents(aio, 1, PIECES, events, &none) == 0);
    for (i = 0; i < PIECES; i++) {
        memset(out[i], 'a' + i % 26, PIECE);
        ops[i] = (defuse_aio_op){DEFUSE_AIO_WRITE, fd, out[i], PIECE, (int64_t)i * PIECE, (uint64_t)i, NULL};
    }
    CHECK(defuse_aio_submit(aio, ops, PIECES) == PIECES);
    CHECK(poll(&ready, 1, -1) == 1);
    /* There is room for a limited number of uncollected events. */
    FAILS(defuse_aio_submit(aio, ops, 1), EAGAIN);
    for (seen = 0; seen < PIECES;) {
        int found = defuse_aio_getevents(aio, 1, PIECES, events, NULL);
        CHECK(found > 0);
        for (i = 0; i < found; i++)
            CHECK(events[i].result == PIECE && events[i].data < PIECES);
        seen += found;
    }
    CHECK(poll(&ready, 1, 0) == 0);
    ops[0] = (defuse_aio_op){DEFUSE_AIO_FSYNC, fd, NULL, 0, 0, 7, NULL};
    ops[1] = (defuse_aio_op){DEFUSE_AIO_FDATASYNC, fd, NULL, 0, 0, 8, NULL};
    CHECK(defuse_aio_submit(aio, ops, 2) == 2 && defuse_aio_getevents(aio, 2, 2, events, NULL) == 2);
    CHECK(events[0].result == 0 && events[1].result == 0 && events[0].data + events[1].data == 15);
    for (i = 0; i < PIECES; i++)
        ops[i] = (defuse_aio_op){DEFUSE_AIO_READ, fd, in[i], PIECE, (int64_t)i * PIECE, (uint64_t)i, count};
    CHECK(defuse_aio_submit(aio, ops, PIECES) == PIECES);
    while (atomic_load(&called) < PIECES)
        usleep(1000);
    CHECK(atomic_load(&wrong) == 0 && memcmp(in, out, sizeof in) == 0);
    CHECK(defuse_aio_getevents(aio, 0, PIECES, events, NULL) == 0);
}

static void moves_vectors(int aio, int fd) {
    char a[10] = "0123456789", b[6] = "abcdef", back[17] = {0};
    struct iovec out[2] = {{a, 10}, {b, 6}}, in[2] = {{back, 3}, {back + 3, 13}};
    defuse_aio_op op = {DEFUSE_AIO_WRITEV, fd, out, 2, 100, 1, NULL};
    defuse_aio_event event;
    CHECK(defuse_aio_submit(aio, &op, 1) == 1 && defuse_aio_getevents(aio, 1, 1, &event, NULL) == 1);
    CHECK(event.result == 16);
    op = (defuse_aio_op){DEFUSE_AIO_READV, fd, in, 2, 100, 2, NULL};
    CHECK(defuse_aio_submit(aio, &op, 1) == 1);
    /* The vectors and the descriptor are no longer needed, only the memory. */
    memset(in, 0, sizeof in);
    CHECK(defuse_aio_getevents(aio, 1, 1, &event, NULL) == 1);
    CHECK(event.data == 2 && event.result == 16 && memcmp(back, "0123456789abcdef", 16) == 0);
}

static void refuses(int aio, int fd) {
    char byte;
    defuse_aio_op op = {99, fd, &byte, 1, 0, 1, NULL};
    defuse_aio_op two[2] = {{DEFUSE_AIO_READ, fd, &byte, 1, 0, 1, NULL},
                            {DEFUSE_AIO_READ, 9999, &byte, 1, 0, 2, NULL}};
    defuse_aio_event events[2];
    struct timespec never = {0, -1};
    FAILS(defuse_aio_submit(aio, &op, 1), EINVAL);
    FAILS(defuse_aio_submit(aio, NULL, 1), EFAULT);
    FAILS(defuse_aio_submit(aio, &op, -1), EINVAL);
    op = (defuse_aio_op){DEFUSE_AIO_READ, fd, NULL, 1, 0, 1, NULL};
    FAILS(defuse_aio_submit(aio, &op, 1), EFAULT);
    op = (defuse_aio_op){DEFUSE_AIO_READ, fd, &byte, 1, -5, 1, NULL};
    FAILS(defuse_aio_submit(aio, &op, 1), EINVAL);
    FAILS(defuse_aio_submit(9999, two, 1), EINVAL);
    FAILS(defuse_aio_submit(aio, two + 1, 1), EBADF);
    /* The first one is started and reported. */
    CHECK(defuse_aio_submit(aio, two, 2) == 1 && defuse_aio_getevents(aio, 1, 2, events, NULL) == 1);
    FAILS(defuse_aio_getevents(aio, 2, 1, events, NULL), EINVAL);
    FAILS(defuse_aio_getevents(aio, 0, 1, events, &never), EINVAL);
    FAILS(defuse_aio_create(0, 1), EINVAL);
    FAILS(defuse_aio_create(1, 2000), EINVAL);
    FAILS(defuse_aio_cancel(aio, 12345), ENOENT);
    FAILS(defuse_aio_eventfd(9999), EINVAL);
    FAILS(defuse_aio_destroy(9999), EINVAL);
}

static void cancels(int fd) {
    char buf[2][PIECE];
    int aio = defuse_aio_create(8, 1);
    defuse_aio_op first = {DEFUSE_AIO_READ, fd, buf[0], PIECE, 0, (uint64_t)aio, hold};
    defuse_aio_op second = {DEFUSE_AIO_READ, fd, buf[1], PIECE, 0, 1000, NULL};
    defuse_aio_event event;
    CHECK(aio >= 0 && pipe(gate) == 0);
    atomic_store(&called, 0);
    CHECK(defuse_aio_submit(aio, &first, 1) == 1);
    while (atomic_load(&called) == 0)
        usleep(1000);
    CHECK(defuse_aio_submit(aio, &second, 1) == 1);
    FAILS(defuse_aio_cancel(aio, (uint64_t)aio), EINPROGRESS);
    CHECK(defuse_aio_cancel(aio, 1000) == 0 && defuse_aio_getevents(aio, 1, 1, &event, NULL) == 1);
    CHECK(event.data == 1000 && event.result == -ECANCELED);
    CHECK(write(gate[1], "x", 1) == 1);
    /* Waits for the first one. */
    CHECK(defuse_aio_destroy(aio) == 0 && deadlocks && atomic_load(&wrong) == 0);
    FAILS(defuse_aio_destroy(aio), EINVAL);
    close(gate[0]);
    close(gate[1]);
}

static void errors_come_with_the_event(int aio, const char *name) {
    char byte = 0;
    int fd = defuse_open(name, O_RDONLY);
    defuse_aio_op op = {DEFUSE_AIO_WRITE, fd, &byte, 1, 0, 3, NULL};
    defuse_aio_event event;
    CHECK(fd >= 0 && defuse_aio_submit(aio, &op, 1) == 1 && defuse_close(fd) == 0);
    CHECK(defuse_aio_getevents(aio, 1, 1, &event, NULL) == 1 && event.result == -EBADF);
}

int main(int argc, char **argv) {
    char source[4096];
    const char *names[] = {"mem:/f", "/below/aio"};
    CHECK(argc == 2 && defuse_mount("mem:", "memory:") == 0);
    snprintf(source, sizeof source, "passthrough:%s", argv[1]);
    CHECK(defuse_mount("/below", source) == 0);
    for (int i = 0; i < 2; i++) {
        int fd = defuse_open(names[i], O_RDWR | O_CREAT, 0600), aio = defuse_aio_create(PIECES, i * 3);
        CHECK(fd >= 0 && aio >= 0);
        atomic_store(&called, 0);
        moves_data(aio, fd);
        moves_vectors(aio, fd);
        refuses(aio, fd);
        errors_come_with_the_event(aio, names[i]);
        cancels(fd);
        CHECK(defuse_aio_destroy(aio) == 0 && defuse_close(fd) == 0);
    }
    /* No operation keeps a file open beyond its end. */
    CHECK(defuse_unmount("mem:", 0) == 0 && defuse_unmount("/below", 0) == 0);
    puts("passed");
    return 0;
}
