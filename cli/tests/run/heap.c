/* Calls that a handler of a signal may make take nothing from the program's heap: the handler may
 * have interrupted malloc(3). The first call of each kind counts, on a thread that has made none. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
static __thread int watched;
static int taken;

static void count(void) { if (watched) __sync_fetch_and_add(&taken, 1); }
void *malloc(size_t n) { count(); return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { count(); return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { count(); return __libc_realloc(p, n); }
void free(void *p) { if (p) count(); __libc_free(p); }

#define DO(call) do { int before = taken; watched = 1; long r = (long)(call); watched = 0; \
    if (taken != before || r < 0) printf("%s = %ld: %d of the heap, %d\n", #call, r, taken - before, errno); } while (0)

static void *calls(void *unused) {
    char buf[4096];
    struct stat st;
    int fd, dir;
    DO(fd = open("heap", O_RDWR | O_CREAT, 0644));
    DO(write(fd, "0123456789", 10)); DO(pread(fd, buf, 4, 2)); DO(lseek(fd, 0, SEEK_SET)); DO(read(fd, buf, 3));
    DO(fstat(fd, &st)); DO(stat("heap", &st)); DO(access("heap", R_OK)); DO(fchmod(fd, 0600)); DO(chmod("heap", 0640));
    DO(ftruncate(fd, 8192)); DO(fsync(fd)); DO(mkdir("heapd", 0755)); DO(symlink("heap", "heapl")); DO(readlink("heapl", buf, sizeof buf));
    DO(stat("heapl", &st)); DO(link("heap", "heaph")); DO(rename("heaph", "heapd/h")); DO(dir = open("heapd", O_RDONLY | O_DIRECTORY));
    DO(syscall(SYS_getdents64, dir, buf, sizeof buf)); DO(openat(dir, "h", O_RDONLY)); DO(fchdir(dir)); DO(chdir("..")); DO(getcwd(buf, sizeof buf) ? 0 : -1);
    DO(unlink("heapd/h")); DO(rmdir("heapd")); DO(unlink("heapl"));
    struct flock lock = {.l_type = F_WRLCK, .l_len = 5};
    DO(fcntl(fd, F_SETLK, &lock)); DO(dup2(fd, 30)); DO(close(30)); DO(fcntl(fd, F_DUPFD, 40)); DO(utimensat(AT_FDCWD, "heap", NULL, 0));
    char *map;
    DO((map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED ? -1 : 0);
    map[5000] = 'x'; DO(msync(map, 8192, MS_SYNC)); DO(munmap(map, 8192));
    /* Out of the mount, and back. */
    DO(stat("/etc/passwd", &st)); DO(stat("/bin/sh", &st)); DO(open("/dev/null", O_RDWR)); DO(umask(022)); DO(pathconf("heap", _PC_NAME_MAX));
    pid_t pid;
    DO(pid = _Fork());
    if (pid == 0) { watched = 1; int r = stat("heap", &st) || write(fd, "x", 1) != 1; watched = 0; _exit(r || taken ? 1 : 0); }
    int status; DO(waitpid(pid, &status, 0)); printf("child %x\n", status);
    DO(unlink("heap")); DO(close(fd));
    return NULL;
}

int main(void) {
    pthread_t thread;
    setvbuf(stdout, NULL, _IONBF, 0);
    pthread_create(&thread, NULL, calls, NULL);
    pthread_join(thread, NULL);
    printf("%d\n", taken);
    return 0;
}
