/* Who asks is the matter of a thread for the kernel: raw calls change one thread, the C library's
 * functions all of them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *now(const char *name) {
    int fd = open(name, O_RDONLY);
    if (fd < 0) return strerrorname_np(errno);
    char byte;
    int got = read(fd, &byte, 1);
    close(fd);
    return got == 1 ? "read" : "empty";
}

static void say(const char *who) {
    char made[32];
    struct stat st = {0};
    sprintf(made, "made%ld", syscall(SYS_gettid));
    int fd = open(made, O_CREAT | O_EXCL | O_RDWR, 0600);
    int error = fd < 0 ? errno : 0;
    if (fd >= 0) fstat(fd, &st), close(fd), unlink(made);
    printf("%s: secret %s, group's %s, other's %s, makes %d for %d:%d, chmod %d, access %d\n", who, now("secret"),
           now("group"), now("other"), error, st.st_uid, st.st_gid, chmod("secret", 0600) ? errno : 0,
           access("secret", R_OK) ? errno : 0);
}

static pthread_barrier_t turn;
static void next(void) { pthread_barrier_wait(&turn), pthread_barrier_wait(&turn); }

static void *inherits(void *unused) {
    say("begun by the thread of 4321");
    return NULL;
}

static void *thread(void *unused) {
    say("a thread");
    next();
    int kept = open("secret", O_RDONLY), dir = open("inner", O_RDONLY | O_DIRECTORY);
    gid_t groups[] = {77, 78};
    syscall(SYS_setgroups, 2, groups);
    syscall(SYS_setresgid, 4322, 4322, 4322);
    syscall(SYS_setresuid, 4321, 4321, 4321);
    say("a thread of 4321");
    char byte;
    printf("what it had open: %zd\n", pread(kept, &byte, 1, 0));
    printf("in a directory that it had open: %d %d\n", openat(dir, "x", O_RDONLY) < 0 ? errno : 0, mkdirat(dir, "y", 0700) ? errno : 0);
    next();
    pthread_t other;
    pthread_create(&other, NULL, inherits, NULL);
    pthread_join(other, NULL);
    pid_t child = fork();
    if (child == 0) { say("its child"); fflush(stdout); _exit(0); }
    waitpid(child, NULL, 0);
    next();
    next();
    return NULL;
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    pthread_barrier_init(&turn, NULL, 2);
    chmod(".", 0777);
    mkdir("inner", 0755), close(open("inner/x", O_CREAT | O_WRONLY, 0644));
    const char *names[] = {"secret", "group", "other"};
    for (int i = 0; i < 3; i++) {
        int fd = open(names[i], O_CREAT | O_RDWR, 0600);
        write(fd, "x", 1), close(fd);
    }
    chown("group", 0, 78), chmod("group", 0040), chmod("other", 0004);
    say("at first");
    pthread_t other;
    pthread_create(&other, NULL, thread, NULL);
    pthread_barrier_wait(&turn);
    say("beside a thread");
    next();
    say("beside a thread of 4321");
    next();
    syscall(SYS_setfsuid, 4323);
    say("with the file-system user 4323");
    syscall(SYS_setfsuid, 0);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct caps[2];
    syscall(SYS_capget, &header, caps);
    caps[0].effective &= ~(1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH);
    syscall(SYS_capset, &header, caps);
    chown("secret", 4321, 4322);
    say("without two capabilities");
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
    pthread_join(other, NULL);
    seteuid(4324);
    say("by the C library");
    seteuid(0);
    pthread_create(&other, NULL, inherits, NULL);
    pthread_join(other, NULL);
    return 0;
}
