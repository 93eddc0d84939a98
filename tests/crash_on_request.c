// SPDX-License-Identifier: Apache-2.0

/* A library that crashes a worker when a certain request reaches it, for tests/quarantine.rs. The
 * test preloads it into all processes of a fleet. In a worker, it looks for the text
 * $BALLAST_TEST_CRASH_ON in what the process receives, and ends the process by SIGABRT where it
 * finds the text. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*receive_function)(int, void *, size_t, int);

static receive_function receive;
static const char *crash_on;

/* The second argument of a worker is "worker". */
static int is_worker(void) {
    char arguments[4096];
    int file = open("/proc/self/cmdline", O_RDONLY);
    ssize_t length = file < 0 ? 0 : read(file, arguments, sizeof arguments - 1);
    if (file >= 0)
        close(file);
    if (length <= 0)
        return 0;
    arguments[length] = 0;
    size_t program = strlen(arguments) + 1;
    return program < (size_t)length && strcmp(arguments + program, "worker") == 0;
}

__attribute__((constructor)) static void start(void) {
    receive = (receive_function)dlsym(RTLD_NEXT, "recv");
    if (is_worker())
        crash_on = getenv("BALLAST_TEST_CRASH_ON");
}

ssize_t recv(int socket, void *buffer, size_t length, int flags) {
    ssize_t received = receive(socket, buffer, length, flags);
    if (received > 0 && crash_on != NULL && memmem(buffer, (size_t)received, crash_on, strlen(crash_on)) != NULL)
        abort();
    return received;
}
