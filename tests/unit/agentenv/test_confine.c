/* The first seccomp program, interpreted: what it answers to numbers. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "agentenv/sandbox/confine.h"
#include "proto/cleanup.h"

enum { MAX_CODE = 256, NO_CALL = SECCOMP_RET_ERRNO | ENOSYS, MAY_NOT = SECCOMP_RET_ERRNO | EPERM };

static struct sock_filter code[MAX_CODE];
static uint32_t length;

static void load(void)
{
    lh_autoclose int fd = confine_compile(NULL);

    cr_assert(ge(int, fd, 0));
    cr_assert(eq(sz, (size_t)pread(fd, &length, sizeof length, 0), sizeof length));
    cr_assert(le(u32, length, MAX_CODE));
    cr_assert(eq(sz, (size_t)pread(fd, code, length * sizeof *code, sizeof length),
                 length * sizeof *code));
}

static uint32_t answer(uint32_t arch, uint32_t nr)
{
    uint32_t a = 0;

    for (size_t i = 0; i < length; i++) {
        const struct sock_filter *f = &code[i];
        if (BPF_CLASS(f->code) == BPF_RET)
            return f->k;
        if (BPF_CLASS(f->code) == BPF_LD)
            a = f->k == offsetof(struct seccomp_data, nr) ? nr : arch;
        else if (BPF_OP(f->code) == BPF_JEQ)
            i += a == f->k ? f->jt : f->jf;
        else if (BPF_OP(f->code) == BPF_JGE)
            i += a >= f->k ? f->jt : f->jf;
        else
            cr_fatal("instruction %zu has code %x", i, f->code);
    }
    cr_fatal("%x of %x runs off the end", nr, arch);
    return 0;
}

static uint32_t of(const char *name)
{
    int nr = seccomp_syscall_resolve_name(name);

    cr_assert(ge(int, nr, 0), "%s", name);
    return answer(seccomp_arch_native(), (uint32_t)nr);
}

TestSuite(confine, .init = load);

Test(confine, each_call_has_its_answer)
{
    static const char *const may[] = {"read",  "write",  "execve", "exit_group", "clone",
                                      "futex", "openat", "statx",  "prlimit64",  "seccomp"},
                             *const may_not[] = {"mount", "ptrace",      "bpf",    "keyctl",
                                                 "setns", "unshare",     "kcmp",   "reboot",
                                                 "acct",  "userfaultfd", "umount2"},
                             *const no_call[] = {"clone3", "io_uring_setup", "open_tree",
                                                 "fsopen", "move_mount",     "mount_setattr"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(may); i++)
        cr_assert(eq(u32, of(may[i]), SECCOMP_RET_ALLOW), "%s", may[i]);
    for (size_t i = 0; i < LH_ARRAY_SIZE(may_not); i++)
        cr_assert(eq(u32, of(may_not[i]), MAY_NOT), "%s", may_not[i]);
    for (size_t i = 0; i < LH_ARRAY_SIZE(no_call); i++)
        cr_assert(eq(u32, of(no_call[i]), NO_CALL), "%s", no_call[i]);
}

Test(confine, numbers_of_no_call_and_of_other_ways_in)
{
    static const uint32_t beyond[] = {600,        1023,       1024,      0x40000000 /* x32 */,
                                      0x40000001, 0x40000200, UINT32_MAX};
    uint32_t native = seccomp_arch_native();

    for (size_t i = 0; i < LH_ARRAY_SIZE(beyond); i++)
        cr_assert(eq(u32, answer(native, beyond[i]), NO_CALL), "%x", beyond[i]);
    for (uint32_t nr = 0; nr < 500; nr++)
        cr_assert(eq(u32, answer(native ^ 0x80000000u, nr), SECCOMP_RET_KILL_PROCESS), "%u", nr);
}
