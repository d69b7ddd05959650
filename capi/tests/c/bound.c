/* A device of a manager in this process: `bound SOCKET`. Each line on the standard output waits for one on the standard
 * input. `bound SOCKET FILE` prints a file of the manager's tree, as anybody else sees it. */
#include "check.h"
#include <fcntl.h>

static void say(const char *what) {
    char answer[16];
    puts(what);
    fflush(stdout);
    CHECK(fgets(answer, sizeof answer, stdin));
}

static void show(const char *socket, const char *file) {
    char source[512], path[512], text[64] = {0};
    int fd;
    snprintf(source, sizeof source, "shared:%s", socket);
    snprintf(path, sizeof path, "tree:%s", file);
    CHECK(defuse_mount("tree:", source) == 0);
    CHECK((fd = defuse_open(path, O_RDONLY, 0)) >= 0);
    CHECK(defuse_read(fd, text, sizeof text - 1) >= 0);
    CHECK(defuse_close(fd) == 0 && defuse_unmount("tree:", 0) == 0);
    fputs(text, stdout);
}

static void put(const char *path, const char *text) {
    int fd;
    CHECK((fd = defuse_open(path, O_RDWR | O_CREAT, 0644)) >= 0);
    CHECK(defuse_write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    CHECK(defuse_fsync(fd) == 0 && defuse_close(fd) == 0);
}

int main(int argc, char **argv) {
    char source[512];
    CHECK(argc >= 2);
    if (argc == 3) {
        show(argv[1], argv[2]);
        return 0;
    }
    snprintf(source, sizeof source, "bound:%s,device=/none", argv[1]);
    CHECK(defuse_mount("fast:", source) == -1);
    CHECK(strstr(defuse_last_error(), "/none"));
    snprintf(source, sizeof source, "bound:%s,device=/one", argv[1]);
    CHECK(defuse_mount("fast:", source) == 0);
    put("fast:/first", "first");
    say("first");

    CHECK(defuse_unmount("fast:", 0) == 0);
    say("given back");

    CHECK(defuse_mount("fast:", source) == 0);
    put("fast:/second", "second");
    say("second");
    /* It is killed here. */
    return 1;
}
