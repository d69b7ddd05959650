/* Handlers that do file I/O of their own interrupt calls all the time. Without SA_RESTART what waits
 * fails with EINTR, with it goes on; what does not wait knows nothing of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

static volatile int ticks, bad;

static void on_tick(int number) {
    int before = errno;
    char bytes[8] = "";
    int fd = open("handled", O_RDWR | O_CREAT, 0644);
    if (fd < 0 || pwrite(fd, "handler", 7, 0) != 7 || pread(fd, bytes, 7, 0) != 7 || memcmp(bytes, "handler", 7) || close(fd) != 0) bad++;
    ticks++;
    errno = before;
}

static void storm(int flags, int microseconds) {
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = flags};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval every = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &every, NULL);
}

/* Writes and reads a file until a hundred handlers have run; everything has to be whole. */
static int regular(void) {
    int wrong = 0, begun = ticks;
    char out[5000], in[5000];
    while (ticks - begun < 100) {
        memset(out, 'a' + ticks % 26, sizeof out);
        int fd = open("file", O_RDWR | O_CREAT | O_TRUNC, 0644);
        wrong += fd < 0 || write(fd, out, sizeof out) != sizeof out || lseek(fd, 0, SEEK_SET) != 0;
        wrong += read(fd, in, sizeof in) != sizeof in || memcmp(in, out, sizeof in) || fsync(fd) != 0;
        struct stat st;
        wrong += rename("file", "other") != 0 || stat("other", &st) != 0 || st.st_size != sizeof out;
        wrong += unlink("other") != 0 || close(fd) != 0;
    }
    return wrong;
}

static void *later(void *at) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    int begun = ticks;
    while (ticks - begun < 20) usleep(1000);
    write(*(int *)at, "x", 1);
    return NULL;
}

/* A read that waits, until a byte comes after twenty handlers. */
static void waits(const char *who) {
    int ends[2], interrupted = 0;
    char byte;
    pthread_t thread;
    pipe(ends);
    pthread_create(&thread, NULL, later, &ends[1]);
    while (read(ends[0], &byte, 1) != 1) {
        if (errno != EINTR) bad++;
        interrupted = 1;
    }
    pthread_join(thread, NULL);
    printf("%s: read interrupted %d\n", who, interrupted);
    close(ends[0]), close(ends[1]);
}

/* A lock that somebody else has. */
static void locks(void) {
    int one = open("lock", O_RDWR | O_CREAT, 0644), two = open("lock", O_RDWR);
    flock(one, LOCK_EX);
    int answer = flock(two, LOCK_EX);
    printf("flock %d %s\n", answer, strerrorname_np(errno));
    struct flock mine = {.l_type = F_WRLCK};
    fcntl(one, F_OFD_SETLK, &mine);
    answer = fcntl(two, F_OFD_SETLKW, &mine);
    printf("lock %d %s\n", answer, strerrorname_np(errno));
    close(one), close(two), unlink("lock");
}

int main(void) {
    storm(0, 2000);
    printf("regular: %d\n", regular());
    waits("without SA_RESTART");
    locks();
    storm(SA_RESTART, 2000);
    printf("regular: %d\n", regular());
    waits("with SA_RESTART");
    struct itimerval none = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &none, NULL);
    unlink("handled");
    printf("%d bad\n", bad);
    return 0;
}
