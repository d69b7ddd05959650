// Locks that belong to an open file hold as long as some process has that file: a table of lives of such locks,
// each tried with flock(2), with F_OFD_SETLK, and with flock(2) of a directory.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FLOCK, OFD, DIRECTORY, KINDS };
static const char *const KIND[] = {"flock", "ofd", "directory"};
static char *self;

static int open_file(int kind) {
    int fd = kind == DIRECTORY ? open("d", O_RDONLY) : open("l", O_RDWR | O_CREAT, 0644);
    if (fd < 0) perror("open");
    return fd;
}

// 0, or the error of the attempt.
static int lock(int fd, int kind, int type, int wait) {
    int result;
    if (kind == OFD) {
        struct flock l = {.l_type = type, .l_whence = SEEK_CUR, .l_start = 3, .l_len = 4};
        result = fcntl(fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &l);
    } else {
        int how = type == F_WRLCK ? LOCK_EX : type == F_RDLCK ? LOCK_SH : LOCK_UN;
        result = flock(fd, how | (wait ? 0 : LOCK_NB));
    }
    return result == 0 ? 0 : errno;
}

// Whether another open file could have the lock.
static const char *state(int kind) {
    int fd = open_file(kind), error = lock(fd, kind, F_WRLCK, 0);
    close(fd);
    return error == 0 ? "free" : error == EWOULDBLOCK || error == EACCES ? "held" : strerror(error);
}

static void say(const char *what, int kind) {
    printf("%s, %s: %s\n", KIND[kind], what, state(kind));
    fflush(stdout);
}

static void ends(pid_t child) {
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) printf("status %x\n", status);
}

// Runs this program once more, to do `what` with a descriptor that it inherits.
static void execute(const char *what, int fd, int kind) {
    char number[16], name[16];
    snprintf(number, sizeof number, "%d", fd);
    snprintf(name, sizeof name, "%d", kind);
    execl(self, self, what, number, name, (char *)0);
    _exit(99);
}

static void takes_in(const char *what, int kind, int exec, int how) {
    int fd = open_file(kind), ready[2];
    pipe(ready);
    pid_t child = fork();
    if (child == 0) {
        close(ready[0]);
        if (exec) execute("take", fd, kind);
        int failed = lock(fd, kind, F_WRLCK, 0);
        if (how == SIGKILL) raise(SIGKILL);
        _exit(failed);
    }
    int status;
    waitpid(child, &status, 0);
    say(what, kind);
    close(fd);
    say("and after the last close", kind);
    close(ready[0]), close(ready[1]);
}

// A child that ends after a byte in the pipe.
static pid_t waits(int to_child[2], int kind, int fd, int unlocks) {
    pid_t child = fork();
    if (child == 0) {
        char byte;
        close(to_child[1]);
        read(to_child[0], &byte, 1);
        if (unlocks) lock(fd, kind, F_UNLCK, 0);
        _exit(0);
    }
    return child;
}

static void lives(int kind) {
    int fd = open_file(kind), go[2];
    printf("%d\n", lock(fd, kind, F_WRLCK, 0));
    pid_t child = fork();
    if (child == 0) _exit(0);
    ends(child);
    say("after the exit of a child", kind);
    child = fork();
    if (child == 0) close(fd), _exit(0);
    ends(child);
    say("after a close in a child", kind);
    int other = dup(fd);
    close(fd);
    say("after the close of a duplicate", kind);
    pipe(go);
    child = waits(go, kind, other, 0);
    close(other);
    say("closed here, and open in a child", kind);
    write(go[1], "x", 1);
    ends(child);
    say("after the end of that child", kind);

    fd = open_file(kind);
    lock(fd, kind, F_WRLCK, 0);
    child = waits(go, kind, fd, 1);
    write(go[1], "x", 1);
    ends(child);
    say("unlocked by a child", kind);
    lock(fd, kind, F_RDLCK, 0);
    say("for reading", kind);
    close(fd);

    takes_in("taken by a child that has ended", kind, 0, 0);
    takes_in("taken by a child that was killed", kind, 0, SIGKILL);
    takes_in("taken by a program that has ended", kind, 1, 0);

    fd = open_file(kind);
    lock(fd, kind, F_WRLCK, 0);
    child = fork();
    if (child == 0) execute("look", fd, kind);
    close(fd);
    ends(child);
    say("and after it", kind);
    close(go[0]), close(go[1]);
}

static void nothing(int signal) {}

// One that waits gets the lock when it is given up, and no sooner; a signal ends the wait.
static void waiting(int kind) {
    int fd = open_file(kind), told[2];
    lock(fd, kind, F_WRLCK, 0);
    pipe(told);
    pid_t child = fork();
    if (child == 0) {
        struct sigaction action = {.sa_handler = nothing};
        close(fd);
        fd = open_file(kind);
        sigaction(SIGALRM, &action, 0);
        struct itimerval soon = {{0, 50000}, {0, 50000}}, never = {{0, 0}, {0, 0}};
        setitimer(ITIMER_REAL, &soon, 0);
        int interrupted = lock(fd, kind, F_WRLCK, 1);
        setitimer(ITIMER_REAL, &never, 0);
        write(told[1], &interrupted, sizeof interrupted);
        int failed = lock(fd, kind, F_WRLCK, 1);
        write(told[1], &failed, sizeof failed);
        _exit(0);
    }
    int first = -1, second = -1;
    read(told[0], &first, sizeof first);
    printf("%s, interrupted: %d\n", KIND[kind], first == EINTR);
    close(fd);
    read(told[0], &second, sizeof second);
    printf("%s, waited: %d\n", KIND[kind], second);
    ends(child);
    say("after all", kind);
}

int main(int argc, char **argv) {
    static char path[4096];
    path[readlink("/proc/self/exe", path, sizeof path - 1)] = 0;
    self = path;
    if (argc == 4) {
        int fd = atoi(argv[2]), kind = atoi(argv[3]);
        if (!strcmp(argv[1], "take")) return lock(fd, kind, F_WRLCK, 0);
        say("in the next program", kind);
        return 0;
    }
    mkdir("d", 0755);
    for (int kind = 0; kind < KINDS; kind++) {
        lives(kind);
        waiting(kind);
    }
    // The one kind knows nothing of the other.
    int fd = open_file(FLOCK), third = open_file(OFD);
    printf("%d %d\n", lock(fd, FLOCK, F_WRLCK, 0), lock(third, OFD, F_WRLCK, 0));
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 5};
    printf("%d %d %d %d\n", fcntl(fd, F_OFD_GETLK, &l), l.l_type, (int)l.l_start, (int)l.l_len);
    return 0;
}
