/* Threads that open, write, stat and close, while a timer's handler does the same: a handler may
 * interrupt any call. One of the threads forks. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile int ticks, bad;

static void on_tick(int number) {
    struct stat st;
    int fd = open("tick", O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0 || write(fd, "t", 1) != 1 || fstat(fd, &st) != 0 || close(fd) != 0) __sync_fetch_and_add(&bad, 1);
    __sync_fetch_and_add(&ticks, 1);
}

static void *work(void *argument) {
    char name[32];
    sprintf(name, "t%ld", (long)argument % 16);
    for (int i = 0; i < 10; i++) {
        int fd = open(name, O_RDWR | O_CREAT, 0644);
        struct stat st;
        if (fd < 0 || pwrite(fd, "x", 1, 0) != 1 || stat(name, &st) != 0 || st.st_size != 1 || close(fd) != 0)
            __sync_fetch_and_add(&bad, 1);
    }
    return NULL;
}

static void *forks(void *argument) {
    for (int i = 0; i < 5; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            struct stat st;
            _exit(stat(".", &st) != 0);
        }
        waitpid(pid, &status, 0);
        if (status != 0) __sync_fetch_and_add(&bad, 1);
    }
    return NULL;
}

int main(void) {
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval every = {{0, 2000}, {0, 2000}}, none = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &every, NULL);
    /* The handler runs on the first thread alone. */
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, NULL);
    pthread_t all[1000], forker;
    pthread_create(&forker, NULL, forks, NULL);
    for (long i = 0; i < 1000; i++) pthread_create(&all[i], NULL, work, (void *)i);
    pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
    for (int i = 0; i < 1000; i++) pthread_join(all[i], NULL);
    pthread_join(forker, NULL);
    setitimer(ITIMER_REAL, &none, NULL);
    struct stat st;
    int same = ticks == 0 || (stat("tick", &st) == 0 && st.st_size == ticks);
    unlink("tick");
    printf("%d bad, every tick was written: %d\n", bad, same);
    return 0;
}
