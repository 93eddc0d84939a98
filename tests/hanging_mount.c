// SPDX-License-Identifier: Apache-2.0

/* A library for tests/hanging_mount.rs. To open the file $BALLAST_TEST_HANGING_FILE never returns,
 * as on a mount whose server is gone. An empty file with ".opened" behind that name says that a
 * thread waits. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*open_function)(const char *, int, ...);

static int open_or_wait(const char *path, int flags, mode_t mode) {
    open_function open_of_system = (open_function)dlsym(RTLD_NEXT, "open64");
    const char *hanging = getenv("BALLAST_TEST_HANGING_FILE");
    if (hanging != NULL && strcmp(path, hanging) == 0) {
        char opened[PATH_MAX];
        snprintf(opened, sizeof opened, "%s.opened", hanging);
        close(open_of_system(opened, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        for (;;)
            pause();
    }
    return open_of_system(path, flags, mode);
}

#define MODE_OF(flags, mode)                                                                            \
    mode_t mode = 0;                                                                                    \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                              \
        va_list arguments;                                                                              \
        va_start(arguments, flags);                                                                     \
        mode = va_arg(arguments, mode_t);                                                               \
        va_end(arguments);                                                                              \
    }

int open64(const char *path, int flags, ...) {
    MODE_OF(flags, mode)
    return open_or_wait(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    MODE_OF(flags, mode)
    return open_or_wait(path, flags, mode);
}
