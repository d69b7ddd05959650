/* A signal may come at each instruction of a call, and its handler may make calls, too. */
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INSTRUCTIONS = 200 };

static int interrupted, other;

/* The C library's own functions, a few instructions before the system call. */
static int (*look)(const char *, int);
static ssize_t (*get)(int, void *, size_t, off_t);

static void handler(int number) {
    char text[8] = "";
    (void)number;
    if (pread(other, text, 4, 0) != 4 || memcmp(text, "else", 4) != 0)
        _exit(3);
}

static int make(const char *name, const char *text) {
    int fd = open(name, O_RDWR | O_CREAT, 0644);
    if (fd < 0 || write(fd, text, 4) != 4)
        exit(1);
    return fd;
}

static void child(void) {
    char text[8];
    if (ptrace(PTRACE_TRACEME, 0, 0, 0) != 0)
        _exit(4);
    for (int i = 0; i < INSTRUCTIONS; i++) {
        memset(text, 0, sizeof text);
        __asm__ volatile("int3");
        /* One call of the kernel, with the arguments that it had, and one that is served. */
        if (look("/", F_OK) != 0)
            _exit(5);
        if (get(interrupted, text, 4, 0) != 4 || memcmp(text, "text", 4) != 0)
            _exit(2);
    }
    _exit(0);
}

/* Waits for the next stop of the child; returns its signal, or ends if the child has ended. */
static int stop(pid_t pid, int at) {
    int status;
    if (waitpid(pid, &status, 0) != pid)
        exit(1);
    if (WIFSTOPPED(status))
        return WSTOPSIG(status);
    if (WIFSIGNALED(status))
        printf("a signal at instruction %d: killed by %d\n", at, WTERMSIG(status));
    else
        printf("ended with %d\n", WEXITSTATUS(status));
    exit(0);
}

int main(void) {
    struct sigaction action = {.sa_handler = handler};
    void *library = dlopen("libc.so.6", RTLD_NOW);
    *(void **)&look = dlsym(library, "access");
    *(void **)&get = dlsym(library, "pread");
    interrupted = make("text", "text");
    other = make("other", "else");
    sigaction(SIGUSR1, &action, 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        child();
    for (int i = 0; i <= INSTRUCTIONS; i++) {
        while (stop(pid, i) != SIGTRAP)
            ptrace(PTRACE_CONT, pid, 0, 0);
        for (int step = 0; step < i; step++) {
            if (ptrace(PTRACE_SINGLESTEP, pid, 0, 0) != 0)
                exit(1);
            stop(pid, i);
        }
        ptrace(PTRACE_CONT, pid, 0, SIGUSR1);
    }
    stop(pid, INSTRUCTIONS);
}
