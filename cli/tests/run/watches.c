/* What happens to files is told by inotify(7), to whoever watches the directory, a file, or a link. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a directory tells of its names first: whoever has a file that is removed open decides whether
 * its own end comes before or after that. */
static void tell(int fd) {
    char room[8192] __attribute__((aligned(8)));
    ssize_t len = read(fd, room, sizeof room);
    for (int named = 1; named >= 0; named--)
        for (char *at = room; at < room + len;) {
            struct inotify_event *event = (void *)at;
            if (named == (event->len > 0)) printf("%d %x %s\n", event->wd, event->mask, named ? event->name : "");
            at += sizeof *event + event->len;
        }
}

static void watch(int fd, const char *path, unsigned mask) {
    int wd = inotify_add_watch(fd, path, mask);
    printf("%s: %d %s\n", path, wd, wd < 0 ? strerror(errno) : "");
}

int main(void) {
    unsigned names = IN_CREATE | IN_DELETE | IN_MOVE | IN_MODIFY | IN_CLOSE_WRITE;
    char cwd[PATH_MAX], path[PATH_MAX + 8];
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    mkdir("d", 0755);
    symlink("d", "l");
    close(open("d/x", O_WRONLY | O_CREAT, 0644));
    watch(fd, ".", names);
    watch(fd, "d", names);
    watch(fd, "l", names);
    watch(fd, "l", IN_DONT_FOLLOW | IN_DELETE_SELF);
    watch(fd, "l/x", IN_MODIFY | IN_DELETE_SELF);
    watch(fd, "none", names);
    watch(fd, "d/x", IN_ONLYDIR | names);
    getcwd(cwd, sizeof cwd);
    snprintf(path, sizeof path, "%s/d/..", cwd);
    printf("again %d\n", inotify_add_watch(fd, path, names));
    watch(fd, "/tmp", IN_DELETE_SELF);
    int file = open("d/y", O_WRONLY | O_CREAT, 0644);
    write(file, "1", 1);
    close(file);
    tell(fd);
    file = open("l/x", O_WRONLY | O_APPEND);
    write(file, "22", 2);
    ftruncate(file, 1);
    close(file);
    tell(fd);
    rename("d/y", "z");
    unlink("d/x");
    unlink("l");
    tell(fd);
    mkdir("e", 0755);
    rmdir("e");
    tell(fd);
    return 0;
}
