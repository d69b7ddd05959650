/* Threads at work in a mount, in malloc(3) among it, while others make processes in every way there
 * is: a child finds our locks free, and nobody waits for somebody who waits for him. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static volatile int done;

static void check(int good, const char *what, int status) {
    if (!good) printf("%s: %x\n", what, status);
}

static void *work(void *argument) {
    char name[32];
    sprintf(name, "w%ld", (long)argument);
    while (!done) {
        int fd = open(name, O_RDWR | O_CREAT, 0644);
        char *memory = malloc(200000);
        check(fd >= 0 && pwrite(fd, "x", 1, 0) == 1 && close(fd) == 0, "work", fd);
        free(memory);
    }
    return NULL;
}

static int child(void *unused) {
    struct stat st;
    free(malloc(100000));
    return stat(".", &st) ? 3 : 7;
}

static int ended(pid_t pid) {
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

static void *spawns(void *unused) {
    static __thread char stack[65536];
    char *arguments[] = {"sh", "-c", "test -d . && echo x >> s", NULL};
    for (int i = 0; i < 15; i++) {
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addopen(&actions, 5, "o", O_CREAT | O_WRONLY, 0644);
        pid_t pid;
        int status = posix_spawn(&pid, "/bin/sh", &actions, NULL, arguments, environ);
        posix_spawn_file_actions_destroy(&actions);
        check(status == 0, "posix_spawn", status);
        check((status = ended(pid)) == 0, "posix_spawn's child", status);
        check((status = system("true")) == 0, "system", status);
        if ((pid = fork()) == 0) _exit(child(NULL));
        check((status = ended(pid)) == 0x700, "fork's child", status);
        check((status = ended(clone(child, stack + sizeof stack, SIGCHLD, NULL))) == 0x700, "clone's child", status);
        if ((pid = vfork()) == 0) { execl("/bin/true", "true", NULL); _exit(1); }
        check((status = ended(pid)) == 0, "vfork's child", status);
        char said[9] = "";
        FILE *pipe = popen("echo hi", "r");
        check(fgets(said, sizeof said, pipe) && strcmp(said, "hi\n") == 0, "popen", 0);
        check((status = pclose(pipe)) == 0, "popen's child", status);
    }
    return NULL;
}

int main(void) {
    pthread_t workers[4], spawners[3];
    setvbuf(stdout, NULL, _IONBF, 0);
    for (long i = 0; i < 4; i++) pthread_create(&workers[i], NULL, work, (void *)i);
    for (int i = 0; i < 3; i++) pthread_create(&spawners[i], NULL, spawns, NULL);
    for (int i = 0; i < 3; i++) pthread_join(spawners[i], NULL);
    done = 1;
    for (int i = 0; i < 4; i++) pthread_join(workers[i], NULL);
    struct stat st;
    printf("%ld\n", stat("s", &st) ? -1 : (long)st.st_size);
    return 0;
}
