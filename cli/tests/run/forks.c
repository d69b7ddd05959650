/* A thousand children, one after the other, each writing through the position that all share; the
 * last ones by vfork(2) and execve(2). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    int fd = open("f", O_RDWR | O_CREAT, 0644), status, bad = 0;
    for (int i = 0; i < 1000; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            char line[16];
            sprintf(line, "%04d\n", i);
            _exit(write(fd, line, 5) != 5);
        }
        waitpid(pid, &status, 0);
        bad += status != 0;
    }
    dup2(fd, 9);
    for (int i = 0; i < 5; i++) {
        pid_t pid = vfork();
        if (pid == 0) {
            execl("/bin/sh", "sh", "-c", "echo exec >&9", NULL);
            _exit(127);
        }
        waitpid(pid, &status, 0);
        bad += status != 0;
    }
    printf("%d bad, position %ld\n", bad, (long)lseek(fd, 0, SEEK_CUR));
    return 0;
}
