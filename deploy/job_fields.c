/* Every field a job file may have. */
#include "deploy/job.h"
#include "proto/cleanup.h"

#define TOP(f)     offsetof(Longhaul__Job__V1__Job, f)
#define AT(msg, f) offsetof(Longhaul__Job__V1__##msg, f)
#define NUM(sec, msg, f, type, lo, hi, initial, doc)                                               \
    {                                                                                              \
        sec, #f, type, AT(msg, f), lo, hi, initial, NULL, doc                                      \
    }
#define TEXT(sec, msg, f, type, initial, doc)                                                      \
    {                                                                                              \
        sec, #f, type, AT(msg, f), 0, 4096, initial, NULL, doc                                     \
    }

#define GIB 1073741824.0

const struct job_field job_fields[] = {
    {"", "name", JOB_STRING, TOP(name), 1, 64, NULL, NULL, "of the job, [a-z0-9-]"},
    {"", "seed", JOB_U64, TOP(seed), 0, 9e15, "1", NULL, "of everything random"},
    {"", "backend", JOB_STRING, TOP(backend), 1, 8, "cpu", NULL, "cpu"},
    {"", "control", JOB_CHOICE, TOP(control), 0, 0, "none", "none|shuffle-rewards",
     "shuffle-rewards permutes rewards within each batch: learning must vanish"},

    TEXT("model", Model, path, JOB_PATH, NULL,
         "directory with config.json and, unless it starts from random weights, model.safetensors"),
    NUM("model", Model, init_seed, JOB_U64, 0, 9e15, "1", "of random initial weights"),

    TEXT("tasks", Tasks, train_prefix, JOB_STRING, NULL, "names of tasks to train on begin so"),
    TEXT("tasks", Tasks, eval_prefix, JOB_STRING, "", "names of held-out tasks begin so"),
    TEXT("tasks", Tasks, file, JOB_PATH, "", "file of tasks to register at the start"),
    TEXT("tasks", Tasks, image, JOB_PATH, "", "root file system to import: directory or tar"),
    TEXT("tasks", Tasks, image_name, JOB_STRING, "", "name to import the image under"),

    NUM("rollout", Rollout, workers, JOB_U32, 1, 256, "1", "rollout processes"),
    NUM("rollout", Rollout, max_running, JOB_U32, 1, 4096, "32",
        "trajectories in one engine batch"),
    NUM("rollout", Rollout, kv_budget_bytes, JOB_BYTES, 65536, 1024 * GIB, "64MiB",
        "KV pages and states of one worker, bytes"),
    NUM("rollout", Rollout, page_tokens, JOB_U32, 16, 65536, "32", "tokens of a KV page"),
    NUM("rollout", Rollout, unit_tokens, JOB_U32, 16, 65536, "16", "tokens of a hash unit"),
    NUM("rollout", Rollout, prefill_chunk, JOB_U32, 16, 65536, "256", "tokens of one prefill step"),
    NUM("rollout", Rollout, temperature, JOB_FLOAT, 0.01, 10, "1.0", "of sampling"),
    NUM("rollout", Rollout, context_tokens, JOB_U32, 32, 1 << 20, "4096", "tokens of a trajectory"),
    NUM("rollout", Rollout, turn_tokens, JOB_U32, 1, 1 << 20, "512", "new tokens in one turn"),
    NUM("rollout", Rollout, total_tokens, JOB_U32, 1, 1 << 20, "2048",
        "sampled tokens in all turns"),
    NUM("rollout", Rollout, turns, JOB_U32, 1, 100000, "8", "turns of a trajectory"),
    NUM("rollout", Rollout, carry, JOB_BOOL, 0, 1, "false", "reuse KV of older policy versions"),
    TEXT("rollout", Rollout, hibernate, JOB_STRING, "auto",
         "sandboxes while the model thinks: auto (when the wait is worth it), never or always"),

    NUM("kvstore", KvStore, memory_bytes, JOB_BYTES, 1 << 20, 4096 * GIB, "256MiB",
        "memory tier, bytes"),
    NUM("kvstore", KvStore, max_inflight_bytes, JOB_BYTES, 65536, 64 * GIB, "16MiB",
        "loads and spills of one worker under way, bytes"),
    NUM("kvstore", KvStore, disk_bytes, JOB_BYTES, 0, 65536 * GIB, "0",
        "disk tier's file, bytes; 0 = none, else at least 16MiB"),
    TEXT("kvstore", KvStore, disk_path, JOB_PATH, "",
         "that file; empty = kv.disk in the job directory"),
    NUM("kvstore", KvStore, disk_bytes_per_s, JOB_BYTES, 0, 1024 * GIB, "0",
        "of its device that the disk tier may use; 0 = as fast as it goes, else at least 64KiB"),
    TEXT("kvstore", KvStore, eviction, JOB_STRING, "value", "value, lru or s3-fifo"),
    TEXT("kvstore", KvStore, remote, JOB_STRING, "",
         "remote tier: redis://HOST:PORT[,HOST:PORT...] or s3://BUCKET[/PREFIX]; empty = none"),
    TEXT("kvstore", KvStore, remote_credentials, JOB_PATH, "",
         "file with its user and password or keys, readable by nobody else"),
    NUM("kvstore", KvStore, remote_ttl_s, JOB_U32, 0, 1e9, "86400",
        "seconds after which Redis forgets an object, 0 = never"),
    TEXT("kvstore", KvStore, quotas, JOB_STRING, "",
         "TENANT=MEMORY[+DISK], ... bounds what tenants may hold; * = each other one"),
    TEXT("kvstore", KvStore, tenant, JOB_STRING, "", "whom this job's entries count for"),
    TEXT("kvstore", KvStore, metrics, JOB_STRING, "",
         "IPV4:PORT where kvstored serves Prometheus' metrics; empty = nowhere"),

    NUM("warm_start", WarmStart, steps, JOB_U32, 0, 1e6, "0", "behaviour cloning steps, 0 = none"),
    NUM("warm_start", WarmStart, batch_sequences, JOB_U32, 1, 4096, "64", "demonstrations a step"),
    NUM("warm_start", WarmStart, learning_rate, JOB_FLOAT, 0, 1, "0.003", "of AdamW"),
    NUM("warm_start", WarmStart, demonstrations, JOB_U32, 0, 1e6, "0", "recorded from oracles"),

    NUM("train", Train, steps, JOB_U32, 0, 1e7, NULL, "RL steps"),
    NUM("train", Train, groups, JOB_U32, 1, 4096, "16", "groups a batch"),
    NUM("train", Train, group_size, JOB_U32, 2, 256, "8", "trajectories of one prompt"),
    NUM("train", Train, learning_rate, JOB_FLOAT, 0, 1, "0.0005", "of AdamW"),
    NUM("train", Train, learning_rate_end, JOB_FLOAT, 0, 1, "1.0",
        "share of it left at the last step; linear between"),
    NUM("train", Train, weight_decay, JOB_FLOAT, 0, 1, "0.0", "of matrices"),
    NUM("train", Train, adam_beta1, JOB_FLOAT, 0, 0.9999, "0.9", ""),
    NUM("train", Train, adam_beta2, JOB_FLOAT, 0, 0.99999, "0.95", ""),
    NUM("train", Train, adam_eps, JOB_FLOAT, 1e-12, 1e-2, "1e-8", ""),
    NUM("train", Train, grad_clip, JOB_FLOAT, 0, 1e6, "1.0", "global norm, 0 = off"),
    NUM("train", Train, ratio_log_min, JOB_FLOAT, -10, 0, "-0.2876821",
        "alpha: below it a token has no policy gradient"),
    NUM("train", Train, ratio_log_max, JOB_FLOAT, 0, 10, "0.3001046", "beta: above it likewise"),
    NUM("train", Train, tau, JOB_FLOAT, 0, 100, "0.08", "weight of (log ratio)^2"),
    NUM("train", Train, threads, JOB_U32, 1, 256, "2", "of forward and backward"),
    NUM("train", Train, staleness, JOB_U32, 0, 64, "0",
        "versions a rollout may lag; 0 = synchronous"),
    NUM("train", Train, lambda, JOB_FLOAT, 0.01, 1, "1.0",
        "share of an iteration that must be complete before training"),
    NUM("train", Train, min_groups, JOB_U32, 1, 4096, "1", "complete groups a step needs"),
    NUM("train", Train, checkpoint_every, JOB_U32, 1, 1e6, "10", "steps"),
    NUM("train", Train, checkpoint_keep, JOB_U32, 1, 1000, "2", "newest checkpoints kept"),
    NUM("train", Train, infra_retries, JOB_U32, 0, 100, "3", "attempts after an invalid verdict"),
    NUM("train", Train, target_success, JOB_FLOAT, 0, 1, "0",
        "stop once evaluation reaches it; 0 = never"),

    NUM("eval", Eval, episodes, JOB_U32, 0, 1e6, "0", "greedy episodes over held-out tasks"),
    NUM("eval", Eval, every, JOB_U32, 0, 1e6, "0", "steps; 0 = after warm start and at the end"),
    NUM("eval", Eval, blank_first_observation, JOB_BOOL, 0, 1, "false",
        "an extra run at the end with the first observation blanked"),
};

const size_t job_n_fields = LH_ARRAY_SIZE(job_fields);
