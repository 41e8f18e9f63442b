/* A library with NVML's interface that tells what a file says: a stand-in for the driver on machines without one.

   NVML_STAND_IN names the file. Its lines, numbers as NVML counts them, -1 for "not supported":

     gpu UUID NAME UTILIZATION USED_MIB TOTAL_MIB MILLIWATT CELSIUS MHZ REASONS ECC PID
     mig GPU UUID USED_MIB TOTAL_MIB PID
     xid GPU CODE
     hang

   It is read again by every call, so a test may change it. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, MOST = 8 };

typedef struct {
    char uuid[96], name[96];
    long gpu, utilization, used, total, milliwatt, celsius, mhz, reasons, ecc, pid;
} Device;

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;

static Device gpus[MOST], slices[MOST];
static int num_gpus, num_slices, num_events_told;

static void look(void) {
    FILE *file = fopen(getenv("NVML_STAND_IN"), "r");
    char line[512];
    num_gpus = num_slices = 0;
    while (file && fgets(line, sizeof line, file)) {
        Device d = {0};
        if (!strncmp(line, "hang", 4))
            for (;;) pause();
        if (sscanf(line, "gpu %95s %95s %ld %ld %ld %ld %ld %ld %ld %ld %ld", d.uuid, d.name, &d.utilization, &d.used,
                   &d.total, &d.milliwatt, &d.celsius, &d.mhz, &d.reasons, &d.ecc, &d.pid) == 11)
            gpus[num_gpus++] = d;
        else if (sscanf(line, "mig %ld %95s %ld %ld %ld", &d.gpu, d.uuid, &d.used, &d.total, &d.pid) == 5) {
            d.utilization = -1;
            slices[num_slices++] = d;
        }
    }
    if (file) fclose(file);
}

static int told(long value, unsigned *where) {
    if (value < 0) return NOT_SUPPORTED;
    *where = (unsigned)value;
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; look(); return OK; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { look(); *count = (unsigned)num_gpus; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= (unsigned)num_gpus) return INVALID;
    *device = &gpus[index];
    return OK;
}

int nvmlDeviceGetName(Device *d, char *name, unsigned size) { snprintf(name, size, "%s", d->name); return OK; }
int nvmlDeviceGetUUID(Device *d, char *uuid, unsigned size) { snprintf(uuid, size, "%s", d->uuid); return OK; }
int nvmlDeviceGetPowerUsage(Device *d, unsigned *milliwatt) { return told(d->milliwatt, milliwatt); }
int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *celsius) { (void)sensor; return told(d->celsius, celsius); }
int nvmlDeviceGetClockInfo(Device *d, int type, unsigned *mhz) { return type == 1 ? told(d->mhz, mhz) : INVALID; }

int nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *reasons) {
    if (d->reasons < 0) return NOT_SUPPORTED;
    *reasons = (unsigned long long)d->reasons;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(Device *d, int type, int counter, unsigned long long *count) {
    if (d->ecc < 0 || type != 1 || counter != 0) return NOT_SUPPORTED;
    *count = (unsigned long long)d->ecc;
    return OK;
}

int nvmlDeviceGetUtilizationRates(Device *d, unsigned *rates) {
    rates[1] = 0;
    return told(d->utilization, rates);
}

int nvmlDeviceGetMemoryInfo_v2(Device *d, Memory *memory) {
    if (memory->version != (sizeof(Memory) | 2u << 24)) return INVALID;
    memory->used = (unsigned long long)d->used << 20;
    memory->total = (unsigned long long)d->total << 20;
    memory->reserved = 512ull << 20;
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *processes) {
    unsigned found = d->pid > 0, room = *count;
    *count = found;
    if (room < found) return INSUFFICIENT_SIZE;
    if (found) processes[0] = (Process){.pid = (unsigned)d->pid};
    return OK;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    *current = *pending = 0;
    for (int i = 0; i < num_slices; i++) *current |= &gpus[slices[i].gpu] == d;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) { (void)d; *count = MOST; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **slice) {
    if (index >= (unsigned)num_slices || &gpus[slices[index].gpu] != d) return NOT_FOUND;
    *slice = &slices[index];
    return OK;
}

int nvmlEventSetCreate(void **set) { *set = gpus; return OK; }
int nvmlDeviceRegisterEvents(Device *d, unsigned long long types, void *set) { (void)d, (void)set; return types == 8 ? OK : INVALID; }

int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
    FILE *file = fopen(getenv("NVML_STAND_IN"), "r");
    char line[512];
    int number = 0, code = TIMEOUT;
    long gpu, xid;
    (void)set, (void)timeout_ms;
    while (file && code == TIMEOUT && fgets(line, sizeof line, file))
        if (sscanf(line, "xid %ld %ld", &gpu, &xid) == 2 && number++ == num_events_told) {
            *event = (Event){.device = &gpus[gpu], .type = 8, .data = (unsigned long long)xid};
            num_events_told++;
            code = OK;
        }
    if (file) fclose(file);
    return code;
}
