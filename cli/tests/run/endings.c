/* Detached threads with large stacks: whoever ends unmaps the stacks of others, after all that a
 * thread does at its end; and a child is made while those stacks are gone. A thread was on our list
 * once more by that munmap(2), and the next fork looked at its memory. */
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static sem_t done;
static pthread_key_t key;

static void again(void *rounds) {
    /* Destructors that come back make the last ones late. */
    close(open("f", O_RDONLY));
    if ((long)rounds > 1)
        pthread_setspecific(key, (void *)((long)rounds - 1));
}

static void *work(void *rounds) {
    close(open("f", O_RDWR | O_CREAT, 0600));
    pthread_setspecific(key, rounds);
    sem_post(&done);
    return 0;
}

int main(void) {
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_attr_setdetachstate(&large, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&large, 48 << 20);
    pthread_key_create(&key, again);
    sem_init(&done, 0, 0);
    int children = 0;
    for (int turn = 0; turn < 40; turn++) {
        pthread_t thread;
        for (long i = 0; i < 4; i++)
            if (pthread_create(&thread, &large, work, (void *)(i + 1)) != 0)
                return 1;
        for (int i = 0; i < 4; i++)
            sem_wait(&done);
        usleep(2000);
        pid_t child = fork();
        if (child == 0)
            _exit(access("f", R_OK) == 0 ? 7 : 1);
        int status;
        waitpid(child, &status, 0);
        children += WIFEXITED(status) && WEXITSTATUS(status) == 7;
    }
    printf("%d children\n", children);
    return 0;
}
