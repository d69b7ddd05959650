/* Signals by the hundred, whose handler has a stack of its own and uses files, while files are used. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

static char stack[1 << 16];
static volatile sig_atomic_t handled;

static void handle(int number) {
    int before = errno;
    struct stat stat;
    char text[64], back[64];
    int fd = open("of a handler", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int len = snprintf(text, sizeof text, "%d of %d", (int)handled, number);
    if (fd < 0 || write(fd, text, len) != len || fstat(fd, &stat) != 0 || stat.st_size != len ||
        pread(fd, back, sizeof back, 0) != len || memcmp(text, back, len) != 0 || close(fd) != 0)
        _exit(3);
    handled++;
    errno = before;
}

int main(void) {
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK | SA_RESTART};
    struct itimerval once = {{0, 0}, {0, 0}};
    if (sigaltstack(&other, 0) != 0 || sigaction(SIGALRM, &action, 0) != 0)
        return 4;
    int round = 0;
    while (handled < 400) {
        /* Once a round, at another place of it each time: a slow handler must not be all that runs. */
        once.it_value.tv_usec = 20 + round * 37 % 600;
        setitimer(ITIMER_REAL, &once, 0);
        char text[64], back[64], name[32], to[32];
        struct stat stat;
        snprintf(name, sizeof name, "f%d", round % 7);
        snprintf(to, sizeof to, "g%d", round % 5);
        int len = snprintf(text, sizeof text, "round %d", round++);
        int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
        if (fd < 0 || write(fd, text, len) != len || pread(fd, back, sizeof back, 0) != len ||
            memcmp(text, back, len) != 0 || lstat(name, &stat) != 0 || stat.st_size != len)
            return 5;
        if (close(fd) != 0 || rename(name, to) != 0 || access(name, F_OK) == 0 || unlink(to) != 0)
            return 6;
    }
    puts("enough");
    return 0;
}
