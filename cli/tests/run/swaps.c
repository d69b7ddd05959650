/* A name is given to a file and to a fifo in turn, and taken away, by one process, while another one uses
 * it. Whatever it finds is one of them: what it opened is what fstat(2) says, and a name that goes away
 * under a call is ENOENT, as if it had gone before. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 4000 };

static void swap(void) {
    for (int round = 0; round < ROUNDS; round++) {
        close(open("file", O_WRONLY | O_CREAT, 0644));
        rename("file", "x");
        mkfifo("fifo", 0644);
        rename("fifo", "x");
        if (round % 2) unlink("x");
    }
}

static int mixed, others;

/* An error that no order of the two processes explains. */
static void look(const char *what, int result) {
    if (result < 0 && errno != ENOENT && errno != EEXIST && others++ == 0) printf("%s: %s\n", what, strerror(errno));
}

static void use(void) {
    struct stat stat;
    int fd = open("x", O_RDWR | O_NONBLOCK);
    look("open", fd);
    if (fd >= 0) {
        fstat(fd, &stat);
        ssize_t count = pwrite(fd, "a", 1, 0);
        if (S_ISREG(stat.st_mode) ? count != 1 : count >= 0 || errno != ESPIPE) mixed++;
        close(fd);
    }
    look("chmod", chmod("x", 0640));
    look("stat", lstat("x", &stat));
    look("link", link("x", "y"));
    unlink("y");
}

int main(void) {
    pid_t child = fork();
    if (child == 0) {
        swap();
        _exit(0);
    }
    while (waitpid(child, NULL, WNOHANG) == 0) use();
    printf("mixed %d, other errors %d\n", mixed, others);
    unlink("x");
    unlink("y");
    return 0;
}
