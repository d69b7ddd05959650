// Record locks of processes (F_SETLK): they end with the process, whatever its children have, and children
// wait for their own.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static int lock(int fd, int start, int wait) {
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = 1};
    return fcntl(fd, wait ? F_SETLKW : F_SETLK, &l) == 0 ? 0 : errno;
}

static int fd;

static void *waits(void *start) {
    lock(fd, (long)start, 1);
    return 0;
}

int main(void) {
    int told[2], go[2];
    char byte;
    pipe(told), pipe(go);
    fd = open("r", O_RDWR | O_CREAT, 0644);
    // A process that is killed while one of its children lives on.
    pid_t victim = fork();
    if (victim == 0) {
        lock(fd, 0, 0);
        if (fork() == 0) {
            close(go[1]);
            write(told[1], "x", 1);
            read(go[0], &byte, 1);
            _exit(0);
        }
        pause();
    }
    read(told[0], &byte, 1);
    printf("held: %d\n", lock(fd, 0, 0) != 0);
    kill(victim, SIGKILL);
    waitpid(victim, 0, 0);
    printf("after its end: %d\n", lock(fd, 0, 0));
    close(go[1]);

    // A child that waits, made while a thread of its parent does.
    fflush(stdout);
    pid_t holder = fork();
    if (holder == 0) {
        lock(fd, 1, 0), lock(fd, 2, 0);
        write(told[1], "x", 1);
        pause();
    }
    read(told[0], &byte, 1);
    pthread_t thread;
    pthread_create(&thread, 0, waits, (void *)1);
    usleep(200000);
    fflush(stdout);
    // Locks are tried and forks happen at the same moment, while the thread waits.
    int failed = 0;
    for (int i = 0; i < 300; i++) {
        int status = 0;
        lock(fd, 3, 0);
        pid_t one = fork();
        if (one == 0) _exit(lock(fd, 4, 1));
        waitpid(one, &status, 0);
        failed += status != 0;
    }
    printf("failed in children: %d\n", failed);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        printf("waited: %d\n", lock(fd, 2, 1));
        fflush(stdout);
        _exit(0);
    }
    usleep(200000);
    kill(holder, SIGKILL);
    waitpid(holder, 0, 0);
    waitpid(child, 0, 0);
    pthread_join(thread, 0);
    puts("done");
    return 0;
}
