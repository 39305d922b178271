#include "agentenv/sandbox/facts.h"

#include "agentenv/sandbox/box.h"

static struct box_facts facts = {.uid_base = BOX_UID_BASE,
                                 .uid_count = BOX_UID_COUNT,
                                 .init_uid = BOX_INIT_UID,
                                 .idmap = true,
                                 .cgroups = true,
                                 .limits = true,
                                 .overlay_xattr = "trusted.overlay."};

const struct box_facts *box_facts(void)
{
    return &facts;
}

struct box_facts *box_facts_set(void)
{
    return &facts;
}

static bool is_root(void)
{
    return !facts.rootless;
}

static bool has_many_ids(void)
{
    return facts.uid_count > 1;
}

static bool has_cgroups(void)
{
    return facts.cgroups;
}

static bool has_limits(void)
{
    return facts.limits;
}

static const struct {
    const char *what;
    bool (*there)(void);
    const char *cost;
} offers[] = {
    {"root", is_root,
     "no checkpoints of processes (engine criu): no hibernate, fork and rollback are of files; "
     "images are copied with shifted owners; run agentenvd as root for them"},
    {"user ids", has_many_ids,
     "only root exists in a sandbox, and images with files of others are refused: apt-get install "
     "uidmap, and give the user a range in /etc/subuid and /etc/subgid (usermod --add-subuids "
     "100000-165535 --add-subgids 100000-165535 USER)"},
    {"cgroup delegation", has_cgroups,
     "no freeze, and snapshots only while no command runs: start agentenvd by systemd-run --user "
     "--scope -p Delegate=yes"},
    {"cgroup limits", has_limits,
     "memory and pids are limited by rlimits: memory (data segments) of each process, pids of each "
     "user id; cpu is not limited"},
};

bool box_offer(size_t i, struct box_offer *out)
{
    if (i >= sizeof offers / sizeof offers[0])
        return false;
    *out = (struct box_offer){offers[i].what, offers[i].there(), offers[i].cost};
    return true;
}
