/* Threads are cancelled in calls that wait, and their cleanup uses files. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int ends[2], ready[2], cleaned;

static void clean(void *name) {
    int fd = open(name, O_WRONLY | O_CREAT, 0644);
    cleaned += fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0;
}

static void *waits(void *name) {
    char byte;
    pthread_cleanup_push(clean, name);
    int file = open(name, O_RDWR | O_CREAT, 0644);
    pwrite(file, "y", 1, 0);
    close(file);
    write(ready[1], "r", 1);
    read(ends[0], &byte, 1);
    pthread_cleanup_pop(0);
    return NULL;
}

static void *exits(void *name) {
    pthread_cleanup_push(clean, name);
    struct stat st;
    stat(name, &st);
    pthread_exit((void *)7);
    pthread_cleanup_pop(0);
    return NULL;
}

int main(void) {
    pipe(ends), pipe(ready);
    for (int i = 0; i < 50; i++) {
        char name[16];
        sprintf(name, "c%d", i % 4);
        pthread_t thread;
        void *value;
        pthread_create(&thread, NULL, i % 5 == 4 ? exits : waits, name);
        if (i % 5 != 4) {
            char byte;
            read(ready[0], &byte, 1);
            if (i % 2) usleep(1000);
            pthread_cancel(thread);
        }
        pthread_join(thread, &value);
        if (value != (i % 5 == 4 ? (void *)7 : PTHREAD_CANCELED)) printf("%d ended otherwise\n", i);
    }
    printf("%d were cleaned\n", cleaned);
    return 0;
}
