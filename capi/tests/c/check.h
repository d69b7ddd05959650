/* The checks of the test programs: the first failure ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <defuse.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(fact)                                                                                          \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        if (!(fact)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: errno %d (%s), last error: %s\n", __FILE__, __LINE__, #fact, errno,  \
                    strerror(errno), defuse_last_error());                                                   \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* `call` fails with this error number. */
#define FAILS(call, number) CHECK((call) == -1 && errno == (number))

#endif
