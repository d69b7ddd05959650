/* All calls that may wait, and a signal with a handler. The handler runs while the call waits. With SA_RESTART the call goes
 * on, and what it waits for comes only after ten handlers; without it fails with EINTR. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile int ticks;
/* To the child that holds what is waited for, and back. */
static int down[2], up[2];

static void on_tick(int number) {
    int before = errno;
    if (++ticks == 10) write(down[1], "x", 1);
    errno = before;
}

static void tick(int microseconds) {
    struct itimerval every = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &every, NULL);
}

static struct flock whole = {.l_type = F_WRLCK};
static struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "socket"};
static int pipe_ends[2];

static void say_held(void) { write(up[1], "h", 1); }
static void await(void) {
    char byte;
    read(down[0], &byte, 1);
}

/* For each call: what the child does, and the call. */
static void hold_record(void) {
    int fd = open("lock", O_RDWR);
    fcntl(fd, F_SETLK, &whole), say_held(), await();
}
static int record(void) { return fcntl(open("lock", O_RDWR), F_SETLKW, &whole); }
static void hold_flock(void) {
    int fd = open("lock", O_RDWR);
    flock(fd, LOCK_EX), say_held(), await();
}
static int lock_file(void) { return flock(open("lock", O_RDWR), LOCK_EX); }
static int share_file(void) { return flock(open("lock", O_RDONLY), LOCK_SH); }
static void hold_open_file(void) {
    int fd = open("lock", O_RDWR);
    fcntl(fd, F_OFD_SETLK, &whole), say_held(), await();
}
static int open_file(void) { return fcntl(open("lock", O_RDWR), F_OFD_SETLKW, &whole); }
static void write_fifo(void) { say_held(), await(), open("fifo", O_WRONLY); }
static int read_fifo(void) { return open("fifo", O_RDONLY) < 0 ? -1 : 0; }
static void read_end(void) { say_held(), await(), open("fifo", O_RDONLY); }
static int write_end(void) { return open("fifo", O_WRONLY) < 0 ? -1 : 0; }
static int through_link(void) { return open("link", O_RDONLY) < 0 ? -1 : 0; }
static void serve(void) {
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    unlink("socket"), bind(fd, (void *)&name, sizeof name), listen(fd, 0);
    /* Its queue is full. */
    connect(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&name, sizeof name);
    say_held(), await(), accept(fd, 0, 0), await();
}
static int join(void) { return connect(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&name, sizeof name); }
static void empty_pipe(void) {
    static char bytes[1 << 20];
    say_held(), await();
    while (read(pipe_ends[0], bytes, sizeof bytes) > 0) {}
}
static int into_pipe(void) {
    off_t at = 0;
    return sendfile(pipe_ends[1], open("data", O_RDONLY), &at, 4096) > 0 ? 0 : -1;
}
static int by_splice(void) {
    loff_t at = 0;
    return splice(open("data", O_RDONLY), &at, pipe_ends[1], NULL, 4096, 0) > 0 ? 0 : -1;
}

static const struct {
    const char *name;
    void (*hold)(void);
    int (*call)(void);
} calls[] = {{"F_SETLKW", hold_record, record}, {"flock", hold_flock, lock_file}, {"shared flock", hold_flock, share_file}, {"F_OFD_SETLKW", hold_open_file, open_file}, {"fifo to read", write_fifo, read_fifo}, {"fifo to write", read_end, write_end}, {"fifo by a link", write_fifo, through_link}, {"connect", serve, join}, {"sendfile", empty_pipe, into_pipe}, {"splice", empty_pipe, by_splice}};

static void one(int at, int flags) {
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = flags};
    char byte;
    pipe(down), pipe(up), pipe(pipe_ends);
    fcntl(pipe_ends[1], F_SETFL, O_NONBLOCK);
    while (write(pipe_ends[1], &action, 4096 < sizeof action ? 4096 : sizeof action) > 0) {}
    fcntl(pipe_ends[1], F_SETFL, 0);
    pid_t child = fork();
    if (child == 0) {
        close(pipe_ends[1]);
        calls[at].hold();
        exit(0);
    }
    read(up[0], &byte, 1);
    ticks = flags ? 0 : 1000;
    sigaction(SIGALRM, &action, NULL);
    tick(2000);
    int answer = calls[at].call(), error = errno;
    tick(0);
    printf("%s, %s: %s, handled %d\n", calls[at].name, flags ? "SA_RESTART" : "no flag", answer < 0 ? strerrorname_np(error) : "done", flags ? ticks >= 10 : ticks > 1000);
    fflush(stdout);
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    for (int fd = 3; fd < 60; fd++) close(fd);
}

int main(void) {
    static char bytes[8192];
    int fd = open("data", O_RDWR | O_CREAT, 0644);
    write(fd, bytes, sizeof bytes), close(fd), close(open("lock", O_RDWR | O_CREAT, 0644));
    mkfifo("fifo", 0644), symlink("fifo", "link");
    for (int at = 0; at < sizeof calls / sizeof *calls; at++) one(at, SA_RESTART), one(at, 0);
    unlink("socket");
    return 0;
}
