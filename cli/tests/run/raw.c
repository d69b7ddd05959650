/* System calls that no library makes: by instructions of the program itself. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <poll.h>
#include <unistd.h>
#include <ucontext.h>

/* Some C libraries name calls of 64 bits by macros. */
#undef pread64

static long raw(long n, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long value;
    __asm__ volatile("syscall"
                     : "=a"(value)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return value;
}
#define RAW(n, ...) RAW_(n __VA_OPT__(, ) __VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define RAW_(n, a, b, c, d, e, f, ...) \
    raw(SYS_##n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static void say(const char *what, long value)
{
    printf("%s %ld\n", what, value);
    fflush(stdout);
}

/* What must not change: registers and the red zone. */
static void registers(void)
{
    long bad;
    __asm__ volatile(
        "movq $77, -8(%%rsp)\n movq $78, -128(%%rsp)\n"
        "mov $1, %%rdi\n mov $2, %%rsi\n mov $3, %%rdx\n mov $4, %%r10\n mov $5, %%r8\n mov $6, %%r9\n"
        "mov $7, %%rbx\n mov $8, %%r12\n mov $9, %%r13\n mov $10, %%r14\n mov $11, %%r15\n"
        "mov $39, %%eax\n syscall\n"
        "mov $21, %%eax\n lea path(%%rip), %%rdi\n mov $0, %%esi\n syscall\n"
        "sub $0, %%rax\n setne %%al\n movzx %%al, %%eax\n"
        "cmp $0, %%rsi\n jne 1f\n cmp $3, %%rdx\n jne 1f\n cmp $4, %%r10\n jne 1f\n cmp $5, %%r8\n jne 1f\n"
        "cmp $6, %%r9\n jne 1f\n cmp $7, %%rbx\n jne 1f\n cmp $8, %%r12\n jne 1f\n cmp $9, %%r13\n jne 1f\n"
        "cmp $10, %%r14\n jne 1f\n cmp $11, %%r15\n jne 1f\n"
        "cmpq $77, -8(%%rsp)\n jne 1f\n cmpq $78, -128(%%rsp)\n jne 1f\n jmp 2f\n"
        "1: or $2, %%eax\n"
        "2:\n .pushsection .rodata\n path: .asciz \"f\"\n .popsection\n"
        : "=a"(bad)
        :
        : "rdi", "rsi", "rdx", "r10", "r8", "r9", "rbx", "r12", "r13", "r14", "r15", "rcx", "r11", "memory", "cc");
    say("registers", bad);
}

static void files(void)
{
    char text[64] = {0};
    long fd = RAW(open, "f", O_CREAT | O_RDWR, 0644);
    say("write", RAW(write, fd, "hello raw", 9));
    say("lseek", RAW(lseek, fd, 6, SEEK_SET));
    say("read", RAW(read, fd, text, 3));
    puts(text);
    say("mkdir", RAW(mkdir, "d", 0755));
    say("again", RAW(mkdir, "d", 0755));
    say("rename", RAW(rename, "f", "d/g"));
    say("link", RAW(link, "d/g", "f"));
    long dir = RAW(openat, AT_FDCWD, "d", O_DIRECTORY | O_RDONLY);
    char entries[1024];
    long len = RAW(getdents64, dir, entries, sizeof entries), count = 0;
    for (long at = 0; at < len; at += *(unsigned short *)(entries + at + 16))
        count++;
    say("entries", count);
    struct stat st;
    say("newfstatat", RAW(newfstatat, dir, "g", &st, 0));
    say("size", st.st_size);
    say("chdir", RAW(fchdir, dir));
    char cwd[256];
    say("getcwd", RAW(getcwd, cwd, sizeof cwd) > 0 && strstr(cwd, "/d") != 0);
    say("chdir", RAW(chdir, ".."));
    say("close", RAW(close, dir));
    char *map = (char *)RAW(mmap, 0, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
    say("mmap", (long)map > 0 && !memcmp(map, "hello raw", 9));
    /* What was opened by one door is closed by the other. */
    FILE *stream = fdopen(fd, "r+");
    rewind(stream);
    if (fgets(text, sizeof text, stream))
        puts(text);
    fclose(stream);
    say("closed", RAW(fcntl, fd, F_GETFD));
}

static void processes(void)
{
    long fd = RAW(open, "f", O_RDWR);
    fflush(stdout);
    signal(SIGUSR2, SIG_IGN);
    signal(SIGUSR1, exit);
    for (int kind = 0; kind < 5; kind++) {
        long child;
        struct {
            unsigned long flags, pidfd, child_tid, parent_tid, exit, stack, size, tls;
        } args = {.exit = SIGCHLD};
        /* CLONE_CLEAR_SIGHAND, as posix_spawn(3) since glibc 2.38. */
        if (kind == 4)
            args.flags = 1UL << 32;
        if (kind == 0)
            child = RAW(fork);
        else if (kind == 1)
            child = RAW(clone, SIGCHLD);
        else if (kind == 2 || kind == 4)
            child = RAW(clone3, &args, sizeof args);
        else
            child = fork();
        if (child == 0) {
            RAW(lseek, fd, 1, SEEK_CUR);
            char name[] = {'c', '0' + kind, 0};
            long own = RAW(open, name, O_CREAT | O_WRONLY, 0600);
            RAW(write, own, "child", 5);
            long grandchild = RAW(fork);
            if (grandchild == 0)
                RAW(exit_group, RAW(write, own, "x", 1) == 1 ? 4 : 5);
            int status;
            RAW(wait4, grandchild, &status, 0, 0);
            struct sigaction first, second;
            sigaction(SIGUSR1, 0, &first);
            sigaction(SIGUSR2, 0, &second);
            int kept = (first.sa_handler == exit) * 16 + (second.sa_handler == SIG_IGN) * 32;
            RAW(exit_group, WEXITSTATUS(status) + kind + kept);
        }
        int status = 0;
        say("waited", RAW(wait4, child, &status, 0, 0) == child);
        say("status", WEXITSTATUS(status));
        say("position", RAW(lseek, fd, 0, SEEK_CUR));
    }
    RAW(close, fd);
    /* vfork(2): the child executes another program. */
    char *argv[] = {"cat", "c0", "c3", 0};
    extern char **environ;
    long child;
    __asm__ volatile("syscall" : "=a"(child) : "a"(SYS_vfork) : "rcx", "r11", "memory");
    if (child == 0) {
        RAW(execve, "/bin/cat", argv, environ);
        RAW(exit_group, 127);
    }
    int status;
    RAW(wait4, child, &status, 0, 0);
    printf("\nexec %d\n", WEXITSTATUS(status));
    fflush(stdout);
}

static volatile int caught, seen_blocked;
/* The time from the end of a SIGALRM to the next one, if there shall be one. A timer of its own pace
   would leave no time between two signals where a handler takes longer than its interval. */
static volatile long alarm_again;

static void set_alarm(void)
{
    struct itimerval once = {.it_value.tv_usec = alarm_again};
    setitimer(ITIMER_REAL, &once, 0);
}
static volatile long in_handler;

static void handler(int number, siginfo_t *info, void *context)
{
    char text[8];
    long fd = RAW(open, "f", O_RDONLY);
    in_handler += RAW(read, fd, text, 5);
    RAW(close, fd);
    struct stat st;
    in_handler += stat("f", &st);
    sigset_t now;
    RAW(rt_sigprocmask, SIG_BLOCK, 0, &now, 8);
    seen_blocked += sigismember(&now, SIGUSR2) + 10 * sigismember(&now, number);
    caught++;
    if (alarm_again)
        set_alarm();
}

static void signals(void)
{
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    sigaddset(&action.sa_mask, SIGUSR2);
    sigaction(SIGUSR1, &action, 0);
    raise(SIGUSR1);
    RAW(tgkill, getpid(), gettid(), SIGUSR1);
    say("caught", caught);
    say("in handler", in_handler);
    say("blocked", seen_blocked);
    struct sigaction old;
    sigaction(SIGUSR1, 0, &old);
    say("old", old.sa_sigaction == handler && (old.sa_flags & ~0x4000000) == SA_SIGINFO && sigismember(&old.sa_mask, SIGUSR2));

    /* On a stack of its own, and a small one below it. */
    stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536}, seen;
    say("sigaltstack", sigaltstack(&stack, 0));
    action.sa_flags |= SA_ONSTACK;
    sigaction(SIGUSR1, &action, 0);
    RAW(kill, getpid(), SIGUSR1);
    say("caught", caught);
    say("sigaltstack", RAW(sigaltstack, 0, &seen) == 0 && seen.ss_sp == stack.ss_sp && seen.ss_flags == 0);

    /* All is blocked, and calls are made. */
    unsigned long all = ~0ul, none = 0, before;
    say("sigprocmask", RAW(rt_sigprocmask, SIG_SETMASK, &all, &before, 8));
    struct stat st;
    say("stat", RAW(stat, "f", &st));
    RAW(kill, getpid(), SIGUSR1);
    say("waits", caught);
    unsigned long pending = 0, mask = 0;
    RAW(rt_sigpending, &pending, 8);
    RAW(rt_sigprocmask, SIG_BLOCK, 0, &mask, 8);
    printf("%lx %lx\n", pending, mask);
    sigset_t full;
    sigfillset(&full);
    sigdelset(&full, SIGUSR1);
    say("sigsuspend", RAW(rt_sigsuspend, &full, 8));
    say("caught", caught);
    RAW(kill, getpid(), SIGUSR1);
    struct timespec second = {1, 0};
    say("ppoll", RAW(ppoll, 0, 0, &second, &full, 8));
    say("caught", caught);
    RAW(kill, getpid(), SIGUSR1);
    struct {
        void *set;
        long len;
    } pair = {&full, 8};
    say("pselect6", RAW(pselect6, 0, 0, 0, 0, &second, &pair));
    say("caught", caught);
    say("libc's", sigprocmask(SIG_SETMASK, 0, &full) == 0 && sigismember(&full, SIGTERM));
    RAW(kill, getpid(), SIGUSR1);
    say("sigprocmask", RAW(rt_sigprocmask, SIG_SETMASK, &before, 0, 8));
    say("caught", caught);
    sigfillset(&full);
    sigprocmask(SIG_SETMASK, &full, 0);
    say("stat", RAW(stat, "f", &st));
    sigdelset(&full, SIGALRM);
    sigaction(SIGALRM, &action, 0);
    struct itimerval soon = {.it_value.tv_usec = 20000};
    setitimer(ITIMER_REAL, &soon, 0);
    say("sigsuspend", sigsuspend(&full) == -1 && errno == EINTR);
    say("caught", caught);
    sigprocmask(SIG_SETMASK, (sigset_t *)&before, 0);

    /* A call that blocks is interrupted, and one is restarted. */
    int ends[2];
    RAW(pipe, ends);
    setitimer(ITIMER_REAL, &soon, 0);
    char byte;
    say("read", RAW(read, ends[0], &byte, 1));
    action.sa_flags |= SA_RESTART;
    sigaction(SIGALRM, &action, 0);
    fflush(stdout);
    long child = RAW(fork);
    if (child == 0) {
        struct timespec moment = {0, 100000000};
        RAW(nanosleep, &moment, 0);
        RAW(write, ends[1], "x", 1);
        RAW(exit_group, 0);
    }
    setitimer(ITIMER_REAL, &soon, 0);
    say("read", RAW(read, ends[0], &byte, 1));
    say("caught", caught);
    RAW(wait4, child, 0, 0, 0);
    /* One that waits in a mount. */
    action.sa_flags &= ~SA_RESTART;
    sigaction(SIGALRM, &action, 0);
    RAW(mknod, "fifo", S_IFIFO | 0600, 0);
    soon.it_value.tv_usec = 200000;
    setitimer(ITIMER_REAL, &soon, 0);
    say("open", RAW(open, "fifo", O_RDONLY));
    say("caught", caught);
    RAW(close, ends[0]);
    RAW(close, ends[1]);
}

static volatile int sys_caught;
static jmp_buf out;

static void on_sys(int number)
{
    sys_caught++;
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    char text[8];
    long fd = RAW(open, "f", O_RDONLY);
    say("fault", RAW(read, fd, text, 5));
    RAW(close, fd);
    siglongjmp(out, 1);
}

static void own_signals(void)
{
    signal(SIGSYS, on_sys);
    RAW(kill, getpid(), SIGSYS);
    raise(SIGSYS);
    say("SIGSYS", sys_caught);
    struct sigaction old, action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSYS, 0, &old);
    say("its handler", old.sa_handler == on_sys);
    sigaction(SIGSEGV, &action, 0);
    for (int times = 0; times < 3; times++)
        if (!sigsetjmp(out, 1))
            *(volatile int *)16 = 1;
    signal(SIGSYS, SIG_DFL);
    fflush(stdout);
    long child = RAW(fork);
    if (child == 0) {
        RAW(kill, RAW(getpid), SIGSYS);
        RAW(exit_group, 9);
    }
    int status;
    RAW(wait4, child, &status, 0, 0);
    say("ended by", WTERMSIG(status));
}

static void *thread(void *argument)
{
    long number = (long)argument, sum = 0;
    char name[] = {'t', 'a' + number, 0}, text[16];
    for (int times = 0; times < 200; times++) {
        long fd = RAW(open, name, O_CREAT | O_RDWR | O_TRUNC, 0600);
        RAW(write, fd, "thread", 6);
        sum += RAW(pread64, fd, text, 6, 0);
        RAW(close, fd);
        if (times % 50 == 0) {
            long child = times % 100 ? RAW(fork) : fork();
            if (child == 0)
                RAW(exit_group, RAW(access, name, 0) == 0 ? 3 : 4);
            int status;
            RAW(wait4, child, &status, 0, 0);
            sum += WEXITSTATUS(status);
        }
    }
    return (void *)sum;
}

static void threads(void)
{
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    alarm_again = 500;
    set_alarm();
    pthread_t all[8];
    for (long number = 0; number < 8; number++)
        pthread_create(&all[number], 0, thread, (void *)number);
    for (int number = 0; number < 8; number++) {
        void *sum;
        pthread_join(all[number], &sum);
        say("thread", (long)sum);
    }
    /* No thread is left that could be in the handler. A timer outlives execve. */
    alarm_again = 0;
    set_alarm();
}

/* Code that is made while the program runs. */
static void made(void)
{
    unsigned char code[] = {0xb8, SYS_mkdir, 0, 0, 0, 0x0f, 0x05, 0xc3};
    void *at = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(at, code, sizeof code);
    say("made", ((long (*)(const char *, int))at)("made", 0700));
    struct stat st;
    say("stat", stat("made", &st));
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        say("executed", RAW(access, "f", 0));
        return 0;
    }
    files();
    registers();
    processes();
    signals();
    own_signals();
    threads();
    made();
    fflush(stdout);
    extern char **environ;
    char *again[] = {argv[0], "again", 0};
    say("not there", RAW(execve, "./no-such", again, environ));
    RAW(execve, argv[0], again, environ);
    return 1;
}
