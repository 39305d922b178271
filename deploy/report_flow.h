/* What the throttle did, from the `flow` lines of metrics.jsonl (docs/THROTTLE.md): how wide the
 * window was, how full the KV memory, how long loads from the store had to wait. */
#ifndef DEPLOY_REPORT_FLOW_H
#define DEPLOY_REPORT_FLOW_H

#include <jansson.h>
#include <stddef.h>

struct report_flow {
    struct flow_sample *samples; /* in the order of the file; a long job's are thinned out */
    size_t n;
};

/* A line of another kind is left out; so is everything once memory is out. */
void report_flow_collect(struct report_flow *f, const json_t *line);
/* Up to three plots over one axis of time; none of what was 0 all the time. */
void report_flow_print(const struct report_flow *f);
void report_flow_finish(struct report_flow *f);

#endif
