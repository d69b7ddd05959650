/* Files on threads and in handlers that have but a small stack: aio_write(3) works on threads of the
 * C library with 16 KiB, and a handler may have an alternative stack of a few. */
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char stack[12288];

static void handle(int number) {
    struct stat stat;
    int fd = open("of a handler", O_RDWR | O_CREAT, 0600);
    if (write(fd, "x", 1) != 1 || fstat(fd, &stat) != 0 || stat.st_size != 1)
        _exit(3);
    close(fd);
}

static void *work(void *name) {
    FILE *file = fopen(name, "w");
    fputs("by a thread", file);
    fclose(file);
    mkdir("d", 0700);
    rename(name, "d/moved");
    return 0;
}

int main(void) {
    char text[4096];
    memset(text, 'a', sizeof text);
    int fd = open("f", O_RDWR | O_CREAT, 0600);
    for (int i = 0; i < 64; i++) {
        struct aiocb call = {.aio_fildes = fd, .aio_buf = text, .aio_nbytes = sizeof text, .aio_offset = i * 4096L};
        const struct aiocb *list[] = {&call};
        if (aio_write(&call) != 0)
            return 1;
        while (aio_error(&call) == EINPROGRESS)
            aio_suspend(list, 1, 0);
        if (aio_return(&call) != sizeof text)
            return 2;
    }
    struct stat stat;
    fstat(fd, &stat);
    printf("%ld bytes\n", (long)stat.st_size);

    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&other, 0) != 0 || sigaction(SIGUSR1, &action, 0) != 0)
        return 4;
    raise(SIGUSR1);

    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 16384);
    for (int i = 0; i < 50; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &small, work, "t") != 0)
            return 5;
        pthread_join(thread, 0);
    }
    puts("done");
    return 0;
}
