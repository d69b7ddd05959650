/* Files in memory, used without a system call:
 *
 *   cargo xtask library
 *   cc capi/examples/hello.c -o hello -Itarget/libdefuse/include -Ltarget/libdefuse/lib -ldefuse \
 *     -Wl,-rpath,$PWD/target/libdefuse/lib
 *   ./hello
 */
#include <defuse.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s: %s\n", what, strerror(errno), defuse_last_error());
    return 1;
}

int main(void) {
    char text[64] = {0};
    struct stat st;
    int fd;
    if (defuse_mount("mem:", "memory:,size=1M") < 0)
        return fail("mount");
    if (defuse_mkdir("mem:/d", 0755) < 0)
        return fail("mkdir");
    fd = defuse_open("mem:/d/hello", O_RDWR | O_CREAT, 0644);
    if (fd < 0)
        return fail("open");
    if (defuse_write(fd, "hello, world", 12) != 12)
        return fail("write");
    if (defuse_pread(fd, text, sizeof text, 0) != 12)
        return fail("read");
    if (defuse_fstat(fd, &st) < 0 || st.st_size != 12 || !S_ISREG(st.st_mode))
        return fail("fstat");
    if (defuse_open("mem:/missing", O_RDONLY, 0) != -1 || errno != ENOENT)
        return fail("a missing file");
    if (defuse_unmount("mem:", 0) != -1 || errno != EBUSY)
        return fail("unmounting what is in use");
    if (defuse_close(fd) < 0 || defuse_unmount("mem:", 0) < 0)
        return fail("unmount");
    printf("%s\n", text);
    return 0;
}
