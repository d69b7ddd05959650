/* Writes a page of the file that the first argument names, asynchronously and directly, and reads it back
   through the page cache, while two threads read it all the time. Prints how often old bytes came back. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, ROUNDS = 3000, READERS = 2 };

static atomic_int over;
static const char *path;

static void *reads(void *unused) {
    char page[PAGE];
    int fd = open(path, O_RDONLY);
    while (!over)
        if (pread(fd, page, PAGE, 0) != PAGE)
            exit(3);
    return unused;
}

int main(int count, char **arguments) {
    if (count != 2)
        return 2;
    path = arguments[1];
    int direct = open(path, O_RDWR | O_CREAT | O_DIRECT, 0644);
    int plain = open(path, O_RDONLY);
    char *page = aligned_alloc(PAGE, PAGE), seen[PAGE];
    memset(page, 0, PAGE);
    aio_context_t context = 0;
    if (pwrite(direct, page, PAGE, 0) != PAGE || syscall(SYS_io_setup, 1, &context) != 0)
        return 2;
    pthread_t readers[READERS];
    for (int i = 0; i < READERS; i++)
        pthread_create(&readers[i], NULL, reads, NULL);
    int stale = 0;
    for (int round = 1; round <= ROUNDS; round++) {
        memset(page, round, PAGE);
        struct iocb write = {
            .aio_lio_opcode = IOCB_CMD_PWRITE,
            .aio_fildes = direct,
            .aio_buf = (unsigned long)page,
            .aio_nbytes = PAGE,
        };
        struct iocb *list = &write;
        struct io_event event;
        if (syscall(SYS_io_submit, context, 1, &list) != 1 ||
            syscall(SYS_io_getevents, context, 1, 1, &event, NULL) != 1 || event.res != PAGE)
            return 2;
        if (pread(plain, seen, PAGE, 0) != PAGE)
            return 2;
        stale += memcmp(seen, page, PAGE) != 0;
    }
    over = 1;
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i], NULL);
    printf("%d\n", stale);
    return 0;
}
