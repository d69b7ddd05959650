/* Changes a range of the file that the first argument names in every way, one after the other and at random, and reads it back in
   every way after each change, while two threads read it all the time. Prints each pair in which old bytes came back. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LEN = 4 * 4096, ROUNDS = 600, WRITES = 5, READS = 4 };

static const char *WRITE[WRITES] = {"write", "direct write", "asynchronous direct write", "stored", "vectored write"};
static const char *READ[READS] = {"read", "direct read", "asynchronous direct read", "loaded"};

static atomic_int over;
static const char *path;
static int direct, plain, other;
static char *mapped, *mapped_apart;
static aio_context_t context;

static void fail(const char *what) {
    perror(what);
    exit(2);
}

static void *reads(void *maps) {
    static char pages[2][LEN];
    char *page = pages[maps != NULL];
    int fd = open(path, O_RDONLY);
    volatile char *seen = mmap(NULL, LEN, PROT_READ, MAP_SHARED, fd, 0);
    while (!over) {
        if (!maps && pread(fd, page, LEN, 0) != LEN)
            exit(3);
        for (int at = 0; maps && at < LEN; at += 4096)
            page[at] = seen[at];
    }
    return NULL;
}

static void submit(int opcode, char *bytes) {
    struct iocb job = {.aio_lio_opcode = opcode, .aio_fildes = direct, .aio_buf = (unsigned long)bytes, .aio_nbytes = LEN};
    struct iocb *list = &job;
    struct io_event event;
    if (syscall(SYS_io_submit, context, 1, &list) != 1 || syscall(SYS_io_getevents, context, 1, 1, &event, NULL) != 1 ||
        event.res != LEN)
        fail("aio");
}

static void change(int how, char *bytes) {
    struct iovec halves[2] = {{bytes, LEN / 2}, {bytes + LEN / 2, LEN / 2}};
    if (how == 0 && pwrite(plain, bytes, LEN, 0) != LEN)
        fail("write");
    if (how == 1 && pwrite(direct, bytes, LEN, 0) != LEN)
        fail("direct write");
    if (how == 2)
        submit(IOCB_CMD_PWRITE, bytes);
    if (how == 3)
        memcpy(mapped, bytes, LEN);
    if (how == 4 && pwritev(plain, halves, 2, 0) != LEN)
        fail("vectored write");
}

static void look(int how, char *bytes) {
    if (how == 0 && pread(other, bytes, LEN, 0) != LEN)
        fail("read");
    if (how == 1 && pread(direct, bytes, LEN, 0) != LEN)
        fail("direct read");
    if (how == 2)
        submit(IOCB_CMD_PREAD, bytes);
    if (how == 3)
        memcpy(bytes, mapped_apart, LEN);
}

int main(int count, char **arguments) {
    if (count != 2)
        return 2;
    path = arguments[1];
    direct = open(path, O_RDWR | O_CREAT | O_DIRECT, 0644);
    plain = open(path, O_RDWR);
    other = open(path, O_RDONLY);
    char *bytes = aligned_alloc(4096, LEN), *seen = aligned_alloc(4096, LEN);
    memset(bytes, 0, LEN);
    if (pwrite(plain, bytes, LEN, 0) != LEN || syscall(SYS_io_setup, 1, &context) != 0)
        fail("begin");
    mapped = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, plain, 0);
    mapped_apart = mmap(NULL, LEN, PROT_READ, MAP_SHARED, other, 0);
    if (mapped == MAP_FAILED || mapped_apart == MAP_FAILED)
        fail("mmap");
    pthread_t readers[2];
    for (long maps = 0; maps < 2; maps++)
        pthread_create(&readers[maps], NULL, reads, (void *)maps);
    static int old[WRITES][READS];
    unsigned random = 1;
    for (int round = 1; round <= ROUNDS; round++) {
        random = random * 1103515245 + 12345;
        int how = (random >> 16) % WRITES;
        /* Each page has bytes of its own. */
        for (int at = 0; at < LEN; at++)
            bytes[at] = (char)(round + at / 4096 * 31);
        change(how, bytes);
        for (int by = 0; by < READS; by++) {
            int in_turn = (by + round) % READS;
            memset(seen, -1, LEN);
            look(in_turn, seen);
            old[how][in_turn] += memcmp(seen, bytes, LEN) != 0;
        }
    }
    over = 1;
    for (int i = 0; i < 2; i++)
        pthread_join(readers[i], NULL);
    for (int how = 0; how < WRITES; how++)
        for (int by = 0; by < READS; by++)
            if (old[how][by])
                printf("%s, %s: %d times\n", WRITE[how], READ[by], old[how][by]);
    puts("done");
    return 0;
}
