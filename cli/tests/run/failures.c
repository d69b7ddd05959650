// Failures of children that share the memory of their parent natively: their parents learn of them.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;

static void ended(const char *what, int error, pid_t child) {
    int status = -1;
    if (error == 0) waitpid(child, &status, 0);
    // A child that has failed leaves nothing to be waited for.
    pid_t left = waitpid(-1, NULL, WNOHANG);
    printf("%s: %s, status %d, left %d\n", what, strerror(error), status, left);
}

static void spawns(void) {
    pid_t child = 0;
    char *words[] = {"true", NULL};
    posix_spawn_file_actions_t input, directory, descriptor;
    posix_spawn_file_actions_init(&input);
    posix_spawn_file_actions_addopen(&input, 0, "absent", O_RDONLY, 0);
    ended("missing input", posix_spawnp(&child, "true", &input, NULL, words, environ), child);
    posix_spawn_file_actions_init(&directory);
    posix_spawn_file_actions_addchdir_np(&directory, "text");
    ended("no directory", posix_spawnp(&child, "true", &directory, NULL, words, environ), child);
    posix_spawn_file_actions_init(&descriptor);
    posix_spawn_file_actions_adddup2(&descriptor, 77, 0);
    ended("no descriptor", posix_spawnp(&child, "true", &descriptor, NULL, words, environ), child);
    ended("missing", posix_spawn(&child, "absent", NULL, NULL, words, environ), child);
    ended("missing in PATH", posix_spawnp(&child, "no-such-program", NULL, NULL, words, environ), child);
    ended("not executable", posix_spawn(&child, "text", NULL, NULL, words, environ), child);
    ended("another format", posix_spawn(&child, "format", NULL, NULL, words, environ), child);
    ended("a directory", posix_spawn(&child, ".", NULL, NULL, words, environ), child);
    ended("below a file", posix_spawn(&child, "text/program", NULL, NULL, words, environ), child);
    char *argument = malloc(1 << 20), *many[9] = {"true"};
    memset(argument, 'x', (1 << 20) - 1);
    argument[(1 << 20) - 1] = 0;
    for (int i = 1; i < 8; i++) many[i] = argument;
    many[8] = NULL;
    ended("too long", posix_spawnp(&child, "true", NULL, NULL, many, environ), child);
    ended("fine", posix_spawnp(&child, "true", NULL, NULL, words, environ), child);
    free(argument);
}

// As busybox(1) does it.
static void forks(const char *program) {
    volatile int error = 0;
    char text[64] = "before";
    pid_t child = vfork();
    if (child == 0) {
        strcpy(text, "from the child");
        execl(program, program, (char *)0);
        error = errno;
        _exit(111);
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("%s: %s, %s, status %d\n", program, strerror(error), text, WEXITSTATUS(status));
}

static void *waits(void *gate) {
    pthread_mutex_lock(gate);
    return NULL;
}

int main(void) {
    FILE *text = fopen("text", "w");
    fputs("text\n", text);
    fclose(text);
    FILE *format = fopen("format", "w");
    fputs("no program\n", format);
    fclose(format);
    chmod("format", 0755);
    setvbuf(stdout, NULL, _IONBF, 0);
    for (int threads = 0; threads < 2; threads++) {
        pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
        pthread_t other;
        pthread_mutex_lock(&gate);
        if (threads) pthread_create(&other, NULL, waits, &gate);
        spawns();
        forks("absent");
        forks("format");
        forks("text");
        // The result of the shell alone.
        printf("system %d\n", WEXITSTATUS(system("exit 5")));
        FILE *pipe = popen("./absent 2> /dev/null || echo failed", "r");
        char line[32] = "";
        fgets(line, sizeof line, pipe);
        pclose(pipe);
        printf("popen %s", line);
        pthread_mutex_unlock(&gate);
        if (threads) pthread_join(other, NULL);
    }
}
