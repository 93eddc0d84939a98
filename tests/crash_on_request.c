// SPDX-License-Identifier: Apache-2.0

/* A library that crashes a worker when a certain request reaches it, for tests/quarantine.rs. The
 * test preloads it into all processes of a fleet. In a worker, it looks for the text
 * $BALLAST_TEST_CRASH_ON in what the process receives, and ends the process by SIGABRT where it
 * finds the text.
 *
 * If $BALLAST_TEST_CRASH_AFTER is a number, a worker answers the request first: so many writes
 * later, it sends half of a write and aborts, so that the last frame of its streams is torn. If
 * $BALLAST_TEST_CRASH_ONCE names a file, only the worker that can create this file crashes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

typedef ssize_t (*receive_function)(int, void *, size_t, int);
typedef ssize_t (*send_function)(int, const void *, size_t, int);
typedef ssize_t (*vectored_function)(int, const struct iovec *, int);

static receive_function receive;
static send_function send_all;
static vectored_function write_vectored;
static const char *crash_on;
static const char *crash_once;
/* A step of the engine is at least one write. */
static int crash_after;
/* Writes until the crash; 0 while the request has not come. */
static int writes_left;

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
    send_all = (send_function)dlsym(RTLD_NEXT, "send");
    write_vectored = (vectored_function)dlsym(RTLD_NEXT, "writev");
    if (is_worker()) {
        crash_on = getenv("BALLAST_TEST_CRASH_ON");
        crash_once = getenv("BALLAST_TEST_CRASH_ONCE");
        const char *writes = getenv("BALLAST_TEST_CRASH_AFTER");
        crash_after = writes == NULL ? 0 : atoi(writes);
    }
}

/* Whether this write is the one to tear. */
static int is_torn(size_t length) {
    if (length < 2 || __atomic_load_n(&writes_left, __ATOMIC_SEQ_CST) == 0)
        return 0;
    return __atomic_sub_fetch(&writes_left, 1, __ATOMIC_SEQ_CST) == 1;
}

ssize_t send(int socket, const void *buffer, size_t length, int flags) {
    if (is_torn(length)) {
        send_all(socket, buffer, length / 2, flags);
        abort();
    }
    return send_all(socket, buffer, length, flags);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    if (count > 0 && is_torn(parts[0].iov_len)) {
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
        write_vectored(file, &half, 1);
        abort();
    }
    return write_vectored(file, parts, count);
}

ssize_t recv(int socket, void *buffer, size_t length, int flags) {
    ssize_t received = receive(socket, buffer, length, flags);
    if (received > 0 && crash_on != NULL && memmem(buffer, (size_t)received, crash_on, strlen(crash_on)) != NULL) {
        if (crash_once != NULL && open(crash_once, O_CREAT | O_EXCL | O_WRONLY, 0600) < 0)
            return received;
        if (crash_after == 0)
            abort();
        __atomic_store_n(&writes_left, crash_after, __ATOMIC_SEQ_CST);
    }
    return received;
}
