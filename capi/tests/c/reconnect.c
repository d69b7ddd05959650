/* A server that ends and begins again, with the option reconnect: `reconnect SOCKET`. Each line on the standard output
 * waits for one on the standard input. */
#include "check.h"
#include <fcntl.h>
#include <sys/stat.h>

static void say(const char *what) {
    char answer[16];
    puts(what);
    fflush(stdout);
    CHECK(fgets(answer, sizeof answer, stdin));
}

int main(int argc, char **argv) {
    char source[512], text[32] = {0};
    struct stat before, after;
    int fd;
    CHECK(argc == 2);
    snprintf(source, sizeof source, "socket:%s,reconnect=soon", argv[1]);
    FAILS(defuse_mount("no:", source), EINVAL);
    CHECK(strstr(defuse_last_error(), "reconnect"));
    snprintf(source, sizeof source, "socket:%s", argv[1]);
    CHECK(defuse_mount("plain:", source) == 0);
    snprintf(source, sizeof source, "socket:%s,reconnect=100", argv[1]);
    CHECK(defuse_mount("x:", source) == 0);

    CHECK(defuse_mkdir("x:/dir", 0755) == 0);
    CHECK((fd = defuse_open("x:/dir/file", O_RDWR | O_CREAT, 0644)) >= 0);
    CHECK(defuse_write(fd, "durable", 7) == 7);
    CHECK(defuse_fsync(fd) == 0 && defuse_fstat(fd, &before) == 0);
    CHECK(defuse_stat("plain:/dir/file", &after) == 0 && after.st_size == 7);
    say("restart");

    /* The open file, its position and its name are there again; without the option nothing is. */
    CHECK(defuse_pread(fd, text, sizeof text, 0) == 7 && !memcmp(text, "durable", 7));
    CHECK(defuse_write(fd, " and not", 8) == 8);
    CHECK(defuse_fstat(fd, &after) == 0 && after.st_ino == before.st_ino && after.st_size == 15);
    CHECK(defuse_mkdir("x:/dir/other", 0755) == 0);
    CHECK(defuse_stat("x:/dir/file", &after) == 0 && after.st_ino == before.st_ino);
    FAILS(defuse_stat("plain:/dir/file", &after), ENOTCONN);
    say("restart");

    /* fsync(2) tells once of changes that may be lost with the second server. */
    FAILS(defuse_fsync(fd), EIO);
    CHECK(defuse_fsync(fd) == 0 && defuse_close(fd) == 0);
    CHECK(defuse_unmount("x:", 0) == 0 && defuse_unmount("plain:", 0) == 0);

    /* Without a server, calls end at the limit. */
    snprintf(source, sizeof source, "socket:%s,reconnect=1", argv[1]);
    CHECK(defuse_mount("x:", source) == 0);
    say("end");
    FAILS(defuse_stat("x:/late", &after), ENOTCONN);
    say("restart");
    CHECK(defuse_mkdir("x:/late", 0755) == 0);
    puts("passed");
    return 0;
}
