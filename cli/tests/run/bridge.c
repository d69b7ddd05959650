/* A program whose calls all go through two bridges: functions that get the number of a call as an argument, and arguments
   on the stack, as in the C library since glibc 2.41. A signal that interrupts a call must be seen at its instruction. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

/* by_register(flag, number, six arguments): the last two are on the stack. A flag that is not 0 refuses the call. The
   address of the flag is left in the place of the fifth argument.
   by_stack(four arguments, unused, unused, number): the number is on the stack. */
__asm__(".text\n"
        ".globl by_register, register_begin, register_end\n"
        ".type by_register, @function\n"
        "by_register:\n"
        ".cfi_startproc\n"
        "register_begin:\n"
        "    cmpl $0, (%rdi)\n"
        "    jne 1f\n"
        "    mov %rdi, %r11\n"
        "    mov 16(%rsp), %rax\n"
        "    mov %r9, %r10\n"
        "    mov %rax, %r9\n"
        "    mov %rsi, %rax\n"
        "    mov %rdx, %rdi\n"
        "    mov %rcx, %rsi\n"
        "    mov %r8, %rdx\n"
        "    mov 8(%rsp), %r8\n"
        "    mov %r11, 8(%rsp)\n"
        "    syscall\n"
        "register_end:\n"
        "    ret\n"
        "1:  mov $-1000, %rax\n"
        "    ret\n"
        ".cfi_endproc\n"
        ".size by_register, .-by_register\n"
        ".globl by_stack, stack_begin, stack_end\n"
        ".type by_stack, @function\n"
        "by_stack:\n"
        ".cfi_startproc\n"
        "stack_begin:\n"
        "    mov %rcx, %r10\n"
        "    mov 8(%rsp), %rax\n"
        "    syscall\n"
        "stack_end:\n"
        "    ret\n"
        ".cfi_endproc\n"
        ".size by_stack, .-by_stack\n"
        /* through(flag, number, four arguments, fifth, sixth, &left): calls by_register, and notes what it has left. */
        ".globl through\n"
        ".type through, @function\n"
        "through:\n"
        ".cfi_startproc\n"
        "    mov 8(%rsp), %rax\n"
        "    mov 16(%rsp), %r11\n"
        "    push %rbx\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    mov 32(%rsp), %rbx\n"
        "    push %r11\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    push %rax\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    call by_register\n"
        "    pop %rcx\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    mov %rcx, (%rbx)\n"
        "    pop %rcx\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    pop %rbx\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    ret\n"
        ".cfi_endproc\n"
        ".size through, .-through\n");

extern long through(int *, long, long, long, long, long, long, long, long *);
extern long by_stack(long, long, long, long, long, long, long);
extern char register_begin[], register_end[], stack_begin[], stack_end[];

static int flag;
static int on_stack;

static long call(long number, long a, long b, long c, long d, long e, long f) {
    if (on_stack) return by_stack(a, b, c, d, 0, 0, number);
    long left = 0;
    long value = through(&flag, number, a, b, c, d, e, f, &left);
    if (!flag && left != (long)&flag) puts("the stack differs");
    return value;
}

static void files(const char *name) {
    static char bytes[8192];
    char back[16] = "";
    long fd = call(SYS_openat, AT_FDCWD, (long)name, O_CREAT | O_RDWR | O_TRUNC, 0640, 0, 0);
    memset(bytes, 'a', 4096), memset(bytes + 4096, 'b', 4096);
    long wrote = call(SYS_write, fd, (long)bytes, sizeof bytes, 0, 0, 0);
    long at = call(SYS_lseek, fd, 4090, SEEK_SET, 0, 0, 0);
    long got = call(SYS_read, fd, (long)back, 12, 0, 0, 0);
    printf("%s: %d, wrote %ld, at %ld, read %ld %.12s\n", name, fd >= 0, wrote, at, got, back);
    got = call(SYS_pread64, fd, (long)back, 4, 4094, 0, 0);
    printf("pread %ld %.4s, fsync %ld\n", got, back, call(SYS_fsync, fd, 0, 0, 0, 0, 0));
    if (!on_stack) {
        char *map = (char *)call(SYS_mmap, 0, 4096, PROT_READ, MAP_PRIVATE, fd, 4096);
        printf("mapped %d\n", (unsigned long)map < -4096UL ? map[0] : -1);
    }
    long closed = call(SYS_close, fd, 0, 0, 0, 0, 0);
    printf("close %ld, again %ld\n", closed, call(SYS_close, fd, 0, 0, 0, 0, 0));
    struct stat st;
    printf("size %ld\n", stat(name, &st) == 0 ? (long)st.st_size : -1);
    printf("no such file %ld\n", call(SYS_openat, AT_FDCWD, (long)"missing", O_RDONLY, 0, 0, 0));
    flag = 1;
    if (!on_stack) printf("refused %ld\n", call(SYS_openat, AT_FDCWD, (long)"refused", O_CREAT, 0600, 0, 0));
    flag = 0;
}

static void in_child(const char *name) {
    fflush(stdout);
    long child = call(SYS_fork, 0, 0, 0, 0, 0, 0);
    if (child == 0) {
        files(name);
        fflush(stdout);
        call(SYS_exit_group, 3, 0, 0, 0, 0, 0);
    }
    int status = 0;
    long ended = call(SYS_wait4, child, (long)&status, 0, 0, 0, 0);
    printf("child ended %d with %d\n", ended == child, WEXITSTATUS(status));
}

static int ends[2];
static volatile int where;
static volatile pid_t waiter;

/* 1 if the thread is in the bridge, 2 if it is right behind the call, 3 if it is elsewhere. */
static void see(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    char *ip = (char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    char *begin = on_stack ? stack_begin : register_begin, *end = on_stack ? stack_end : register_end;
    where = ip >= begin && ip < end ? 1 : ip == end ? 2 : 3;
}

static void *wait_there(void *unused) {
    (void)unused;
    char byte = 0;
    waiter = syscall(SYS_gettid);
    return (void *)call(SYS_read, ends[0], (long)&byte, 1, 0, 0, 0);
}

/* True if a thread sleeps in the kernel. */
static int sleeps(pid_t thread) {
    char name[64], line[256] = "";
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(name, "r");
    int is = file && fgets(line, sizeof line, file) && strstr(line, ") S ") != NULL;
    if (file) fclose(file);
    return is;
}

static void interrupted(int flags) {
    struct sigaction action = {.sa_sigaction = see, .sa_flags = SA_SIGINFO | flags};
    sigaction(SIGUSR1, &action, NULL);
    if (pipe(ends) != 0) return;
    pthread_t thread;
    waiter = where = 0;
    pthread_create(&thread, NULL, wait_there, NULL);
    for (int asleep = 0; asleep < 3; asleep = waiter && sleeps(waiter) ? asleep + 1 : 0) usleep(2000);
    pthread_kill(thread, SIGUSR1);
    while (!where) usleep(1000);
    if (flags && write(ends[1], "z", 1) != 1) puts("no byte");
    void *value;
    pthread_join(thread, &value);
    printf("interrupted at %d, read %ld\n", where, (long)value);
    close(ends[0]), close(ends[1]);
}

int main(void) {
    for (on_stack = 0; on_stack < 2; on_stack++) {
        files(on_stack ? "stack" : "register");
        in_child(on_stack ? "child-stack" : "child-register");
        interrupted(SA_RESTART);
        interrupted(0);
    }
    return 0;
}
