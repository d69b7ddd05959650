/* A volume of GlusterFS, mounted twice: `volume gluster://HOST/VOLUME`. */
#include "check.h"
#include <fcntl.h>
#include <sys/stat.h>

enum { LARGE = 300000 };

int main(int argc, char **argv) {
    char source[512], text[32] = {0}, *large = malloc(LARGE), *back = malloc(LARGE);
    struct stat st;
    int fd, other;
    CHECK(argc == 2 && large && back);
    for (int i = 0; i < LARGE; i++)
        large[i] = (char)(i * 7);
    CHECK(defuse_mount("a:", argv[1]) == 0);
    CHECK(defuse_mkdir("a:/dir", 0755) == 0);
    CHECK((fd = defuse_open("a:/dir/file", O_RDWR | O_CREAT | O_EXCL, 0640)) >= 0);
    CHECK(defuse_write(fd, "on servers", 10) == 10);
    CHECK(defuse_pwrite(fd, large, LARGE, 10) == LARGE);
    CHECK(defuse_fsync(fd) == 0);
    CHECK(defuse_pread(fd, text, 10, 0) == 10 && !memcmp(text, "on servers", 10));
    CHECK(defuse_fstat(fd, &st) == 0 && st.st_size == LARGE + 10 && (st.st_mode & 07777) == 0640);
    CHECK(defuse_close(fd) == 0);

    /* Another client of the volume, with the directory as its root. */
    snprintf(source, sizeof source, "%s,sub-directory=dir", argv[1]);
    CHECK(defuse_mount("b:", source) == 0);
    CHECK((other = defuse_open("b:/file", O_RDONLY, 0)) >= 0);
    CHECK(defuse_pread(other, back, LARGE, 10) == LARGE && !memcmp(back, large, LARGE));
    CHECK(defuse_close(other) == 0);
    FAILS(defuse_open("b:/dir/file", O_RDONLY, 0), ENOENT);
    CHECK(defuse_unmount("b:", 0) == 0);

    snprintf(source, sizeof source, "%s-absent", argv[1]);
    CHECK(defuse_mount("c:", source) == -1 && strstr(defuse_last_error(), "gluster volume info"));

    CHECK(defuse_unlink("a:/dir/file") == 0 && defuse_rmdir("a:/dir") == 0);
    FAILS(defuse_stat("a:/dir", &st), ENOENT);
    CHECK(defuse_unmount("a:", 0) == 0);
    free(large);
    free(back);
    puts("passed");
    return 0;
}
