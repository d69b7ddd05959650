/* Stores into the hole of a mapped file on a file system that is full. Each way to end the mapping is tried in a child.
 * It must not end with 0 as if the bytes were in the file. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN (8 << 20)

static char *at;
static int fd;
static sigjmp_buf back;

static void on_bus(int number, siginfo_t *info, void *context) {
    char *where = info->si_addr;
    siglongjmp(back, info->si_code == BUS_ADRERR && where >= at && where < at + LEN ? 1 : 2);
}

static void map(int protection) {
    at = mmap(0, LEN, protection, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) perror("mmap"), _exit(9);
}

static void fill(void) {
    for (int i = 0; i < LEN; i += 4096) at[i] = 'd';
}

static void store(void) {
    map(PROT_READ | PROT_WRITE);
    fill();
}

static void unmapped(void) { store(), munmap(at, LEN), close(fd), _exit(0); }
static void in_parts(void) {
    store();
    munmap(at, LEN / 2), munmap(at + LEN / 2, LEN / 2);
    _exit(0);
}
static void left(void) { store(), _exit(0); }
static void returned(void) { store(), exit(0); }
static void replaced(void) {
    store(), mmap(at, LEN, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), _exit(0);
}
static void writable_later(void) {
    map(PROT_READ);
    if (mprotect(at, LEN, PROT_READ | PROT_WRITE)) perror("mprotect");
    fill(), munmap(at, LEN), _exit(0);
}
static void ignored(void) { signal(SIGBUS, SIG_IGN), store(), munmap(at, LEN), _exit(0); }
static void blocked(void) {
    sigset_t bus;
    sigemptyset(&bus), sigaddset(&bus, SIGBUS), sigprocmask(SIG_BLOCK, &bus, 0);
    store(), munmap(at, LEN), _exit(0);
}
static void handled(void) {
    struct sigaction action = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &action, 0);
    if (sigsetjmp(back, 1) == 0) store(), munmap(at, LEN), _exit(0);
    /* The library is as it was. */
    char text[8] = "";
    int other = open("fill", O_RDONLY);
    _exit(read(other, text, 1) == 1 && close(other) == 0 ? 7 : 8);
}
static void synced(void) {
    store();
    int first = msync(at, LEN, MS_SYNC) ? errno : 0, second = msync(at, LEN, MS_SYNC) ? errno : 0;
    munmap(at, LEN);
    _exit(first == ENOSPC && second == ENOSPC ? 7 : 0);
}
static void synced_file(void) {
    store();
    int first = fsync(fd) ? errno : 0, second = fsync(fd) ? errno : 0;
    munmap(at, LEN);
    _exit(first == ENOSPC && second == ENOSPC ? 7 : 0);
}
static void executes(void) { store(), execl("/bin/true", "true", NULL), _exit(7); }

static const struct {
    const char *name;
    void (*run)(void);
} ways[] = {{"unmapped", unmapped}, {"in parts", in_parts}, {"left", left}, {"returned", returned}, {"replaced", replaced}, {"writable later", writable_later}, {"ignored", ignored}, {"blocked", blocked}, {"handled", handled}, {"synced", synced}, {"synced file", synced_file}, {"executes", executes}};

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    int full = open("fill", O_RDWR | O_CREAT, 0644);
    static char piece[65536];
    memset(piece, 'f', sizeof piece);
    fd = open("holes", O_RDWR | O_CREAT, 0644);
    if (ftruncate(fd, LEN)) return 1;
    while (write(full, piece, sizeof piece) > 0) {}
    if (count > 1) {
        /* One way in this process, which may have no children. */
        ways[atoi(arguments[1])].run();
        return 0;
    }
    for (int i = 0; i < sizeof ways / sizeof *ways; i++) {
        pid_t child = fork();
        if (child == 0) ways[i].run();
        int status;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) printf("%s: %s\n", ways[i].name, sigabbrev_np(WTERMSIG(status)));
        else printf("%s: %s\n", ways[i].name, WEXITSTATUS(status) == 7 ? "told" : WEXITSTATUS(status) ? "?" : "LOST");
    }
    /* Killed with what it has stored: the next fsync tells. */
    int ends[2];
    char byte;
    pipe(ends);
    pid_t child = fork();
    if (child == 0) store(), write(ends[1], "x", 1), pause();
    read(ends[0], &byte, 1);
    kill(child, SIGKILL), waitpid(child, 0, 0);
    int told = 0;
    for (int i = 0; i < 1000 && !told; i++, usleep(1000)) told = fsync(fd) && errno == ENOSPC;
    printf("killed: %s\n", told ? "told" : "LOST");
    return 0;
}
