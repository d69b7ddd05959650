/* A table of descriptors that is full: the limit is the program's own, what is over it fails with
 * EMFILE, and all of it goes through exec. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LIMIT = 200 };

static void look(const char *who) {
    int readable = 0, directories = 0;
    for (int fd = 3; fd < LIMIT; fd++) {
        struct stat st;
        char byte;
        if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) directories++;
        else if (pread(fd, &byte, 1, 0) == 1 && byte == 'a' + fd % 26) readable++;
    }
    int more = open("f11", O_RDONLY);
    printf("%s: %d readable, %d directories, one more: %s\n", who, readable, directories, more < 0 ? strerrorname_np(errno) : "opened");
    printf("dup: %s, fcntl: %s, mkdir %d\n", dup(3) < 0 ? strerrorname_np(errno) : "done", fcntl(3, F_DUPFD, LIMIT) < 0 ? strerrorname_np(errno) : "done", mkdir("d", 0755) ? errno : 0);
    rmdir("d");
    fflush(stdout);
}

int main(int count, char **arguments) {
    if (count > 1) {
        look("after exec");
        return 0;
    }
    for (int fd = 3; fd < LIMIT; fd++) close(fd);
    struct rlimit limit = {LIMIT, LIMIT};
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int fd = 3;; fd++) {
        char name[32], byte = 'a' + fd % 26;
        sprintf(name, "f%d", fd);
        int got = fd % 5 ? open(name, O_RDWR | O_CREAT, 0644) : open(".", O_RDONLY | O_DIRECTORY);
        if (got < 0) {
            printf("%d: %s\n", fd, strerrorname_np(errno));
            break;
        }
        if (got != fd) printf("%d is not %d\n", got, fd);
        if (fd % 5) pwrite(fd, &byte, 1, 0);
    }
    look("full");
    close(42);
    printf("free again: %d\n", open("f11", O_RDONLY));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        /* The loader needs one to find its libraries. */
        close(151);
        execl("/proc/self/exe", "again", "x", NULL);
        printf("exec: %s\n", strerror(errno));
        return 1;
    }
    int status;
    waitpid(child, &status, 0);
    printf("ended %x\n", status);
    look("the parent");
    return 0;
}
