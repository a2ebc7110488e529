/* Counts the instructions that the guest of `scripts/vm --count` runs outside its kernel, and keeps the sum in a file
 * that the guest can read. A plugin of QEMU; it knows neither processes nor what they do. */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The part of QEMU's plugin interface, version 1, that is used here: its header is in no package. */
struct qemu_plugin_tb;
typedef void (*translated)(uint64_t plugin, struct qemu_plugin_tb *block);
typedef void (*executed)(unsigned processor, void *data);
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t plugin, translated call);
extern void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *block, executed call, int flags, void *data);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *block);
__attribute__((visibility("default"))) int qemu_plugin_version = 1;

enum { PROCESSORS = 8 };
/* A line of the cache for each processor. */
static struct { volatile uint64_t count; char rest[56]; } counted[PROCESSORS];
static int file;

static void ran(unsigned processor, void *instructions)
{
    counted[processor % PROCESSORS].count += (uintptr_t)instructions;
}

static void block_made(uint64_t plugin, struct qemu_plugin_tb *block)
{
    (void)plugin;
    /* The kernel is in the upper half of the addresses. */
    if (!(qemu_plugin_tb_vaddr(block) >> 63))
        qemu_plugin_register_vcpu_tb_exec_cb(block, ran, 0, (void *)(uintptr_t)qemu_plugin_tb_n_insns(block));
}

static void *tell(void *nothing)
{
    for (;;) {
        uint64_t sum = 0;
        char line[32];
        for (int i = 0; i < PROCESSORS; i++)
            sum += counted[i].count;
        snprintf(line, sizeof line, "%020" PRIu64 "\n", sum);
        if (pwrite(file, line, strlen(line), 0) < 0)
            return nothing;
        usleep(2000);
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t plugin, const void *about, int words, char **word)
{
    pthread_t teller;
    (void)about;
    if (words != 1 || strncmp(word[0], "to=", 3) != 0)
        return 1;
    file = open(word[0] + 3, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0 || pthread_create(&teller, NULL, tell, NULL) != 0)
        return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(plugin, block_made);
    return 0;
}
