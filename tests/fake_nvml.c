// SPDX-License-Identifier: Apache-2.0

// A stand-in for NVIDIA's management library (libnvidia-ml.so.1). The state of the GPU that
// BALLAST_TEST_NVML_UUID names is in the file that BALLAST_TEST_NVML names, a line for each of the
// following. All other GPUs are sound.
//
//     temperature N    degrees Celsius
//     ecc N            uncorrected errors since the driver was loaded
//     action N         the recovery action (field 230)
//     xid N            the number of the next event; the event comes when the number changes
//     lost             every call about the GPU fails with GPU_IS_LOST
//     hangs            every call about the GPU waits until the line is gone
//
// The prototypes are those of nvml.h.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { XID_EVENT = 8 };

typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} event_data;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2;
typedef struct {
    unsigned gpu, memory;
} utilization;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union {
        double real;
        unsigned number;
        unsigned long long long_number;
    } value;
} field_value;

static int gpu, sound_gpu;
static unsigned long long seen_xid;

// Whether the state has this line; its number, if it has one, goes to `number`.
static int has(const char *key, unsigned long long *number) {
    const char *path = getenv("BALLAST_TEST_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[64];
    int found = 0;
    while (file && fgets(line, sizeof line, file)) {
        size_t length = strlen(key);
        if (strncmp(line, key, length) == 0 && (line[length] == ' ' || line[length] == '\n')) {
            found = 1;
            if (number)
                *number = strtoull(line + length, NULL, 10);
        }
    }
    if (file)
        fclose(file);
    return found;
}

static int state(void *device) {
    if (device == &sound_gpu)
        return SUCCESS;
    while (has("hangs", NULL))
        usleep(10000);
    return has("lost", NULL) ? GPU_IS_LOST : SUCCESS;
}

static unsigned long long number(const char *key) {
    unsigned long long found = 0;
    has(key, &found);
    return found;
}

int nvmlInit_v2(void) {
    seen_xid = number("xid");
    return SUCCESS;
}
int nvmlShutdown(void) {
    return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "580.0");
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    const char *own = getenv("BALLAST_TEST_NVML_UUID");
    *device = own && strcmp(uuid, own) == 0 ? &gpu : &sound_gpu;
    return state(*device);
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "%s", getenv("BALLAST_TEST_NVML_UUID"));
    return SUCCESS;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = (unsigned)number("temperature");
    return state(device);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 312500;
    return state(device);
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) {
    *rates = (utilization){.gpu = 42, .memory = 7};
    return state(device);
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    memory->total = 8ull << 30, memory->free = 6ull << 30, memory->used = 1ull << 30;
    memory->reserved = 1ull << 30;
    return state(device);
}
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    (void)counter;
    // kind 0: corrected
    *count = kind == 0 ? 5 : number("ecc");
    return state(device);
}
int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
    for (int i = 0; i < count; i++) {
        values[i].result = values[i].field == 230 ? SUCCESS : NOT_SUPPORTED;
        values[i].type = 1; // unsigned int
        values[i].value.number = (unsigned)number("action");
    }
    return state(device);
}
int nvmlEventSetCreate(void **set) {
    *set = &gpu;
    return SUCCESS;
}
int nvmlEventSetFree(void *set) {
    (void)set;
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, void *set) {
    (void)device, (void)kinds, (void)set;
    return SUCCESS;
}
int nvmlEventSetWait_v2(void *set, event_data *data, unsigned timeout_ms) {
    (void)set;
    for (unsigned waited = 0; waited < timeout_ms; waited += 20) {
        unsigned long long xid = number("xid");
        if (xid != seen_xid) {
            seen_xid = xid;
            *data = (event_data){.device = &gpu, .type = XID_EVENT, .data = xid};
            return SUCCESS;
        }
        usleep(20000);
    }
    return TIMEOUT;
}
