/* More descriptors than most programs have: where the library keeps its own makes no difference to
 * what is opened, used, closed and put at a number. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { MANY = 5000 };

static int all[MANY];

int main(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < 3 * MANY) {
        printf("the limit of this machine is too low to tell\n");
        return 0;
    }
    int opened = 0, used = 0, closed = 0, put = 0;
    for (int i = 0; i < MANY; i += 2) {
        opened += (i % 4 ? pipe(all + i) : socketpair(AF_UNIX, SOCK_STREAM, 0, all + i)) == 0;
        char byte = 'x';
        used += write(all[i + 1], &byte, 1) == 1 && read(all[i], &byte, 1) == 1;
    }
    int file = open("f", O_RDWR | O_CREAT, 0644);
    used += write(file, "text", 4) == 4;
    for (int at = 3000; at < 8000; at += 97) {
        struct stat st;
        if (fcntl(at, F_GETFD) >= 0) continue;
        put += dup2(file, at) == at && fstat(at, &st) == 0 && st.st_size == 4 && close(at) == 0;
    }
    for (int i = 0; i < MANY; i++) closed += close(all[i]) == 0;
    printf("%d opened, %d used, %d closed, some put %d\n", opened, used, closed, put > 0);
    /* Files and directories outside, which are of the kinds that the library has at such numbers. */
    int outside = 0, again = 0, moved = 0, ranged = 0;
    for (int i = 0; i < MANY; i++) outside += (all[i] = open(i % 2 ? "/etc/passwd" : "/usr", O_RDONLY)) >= 0;
    for (int i = 0; i < MANY; i++) closed += close(all[i]) == 0;
    for (int i = 0; i < MANY; i++) again += close(all[i]) == 0;
    for (int i = 0; i < MANY; i++) all[i] = open("/etc/passwd", O_RDONLY);
    for (int i = 0; i < MANY; i += 7) moved += dup2(all[1], all[i]) == all[i];
    ranged = close_range(all[0], all[MANY - 1], 0);
    for (int i = 0; i < MANY; i++) again += fcntl(all[i], F_GETFD) >= 0;
    printf("outside %d, closed %d, again %d, moved %d, ranged %d\n", outside, closed, again, moved, ranged);
    int left = open("f", O_RDONLY);
    char text[5] = "";
    printf("in the mount %zd %s\n", read(left, text, 4), text), close(left);
    printf("again %d, file %d\n", close(all[MANY - 1]) < 0 && errno == EBADF, close(file));
    return 0;
}
