/* Logging: one line a record on stderr, as text for people or as JSON for machines.
 *
 *     LH_LOG_COMPONENT("kvstored");            // once per .c file, names the component
 *     lh_info("evicted", "bytes=%zu reason=%s", n, why);
 *
 * The environment sets it up: LONGHAUL_LOG=info (default), or component levels as in
 * "warn,rollout=debug,kvstored=info"; LONGHAUL_LOG_FORMAT=text|json.  Thread-safe: a record is one
 * write(2).  Never logs secrets or whole payloads. */
#ifndef PROTO_LOG_H
#define PROTO_LOG_H

#include <stdbool.h>

enum lh_level { LH_DEBUG, LH_INFO, LH_WARN, LH_ERROR };

#define LH_LOG_COMPONENT(name) static const char lh_log_component_[] = name

bool lh_log_enabled(const char *component, enum lh_level level);
void lh_log(const char *component, enum lh_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#define lh_log_at_(level, ...)                                                                     \
    do {                                                                                           \
        if (lh_log_enabled(lh_log_component_, level))                                              \
            lh_log(lh_log_component_, level, __VA_ARGS__);                                         \
    } while (0)
#define lh_debug(...) lh_log_at_(LH_DEBUG, __VA_ARGS__)
#define lh_info(...)  lh_log_at_(LH_INFO, __VA_ARGS__)
#define lh_warn(...)  lh_log_at_(LH_WARN, __VA_ARGS__)
#define lh_err(...)   lh_log_at_(LH_ERROR, __VA_ARGS__)

#endif
