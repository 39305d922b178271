/* Shared by the files that make up the ledger. */
#ifndef TRAINER_INTAKE_LEDGER_PRIVATE_H
#define TRAINER_INTAKE_LEDGER_PRIVATE_H

#include "trainer/intake/ledger.h"
#include "trainer/intake/segment_file.h"

struct ledger {
    sqlite3 *db;
    struct segment_files files;
    char *segments_dir;
    bool in_transaction;
};

/* A column that may be NULL, as "". */
static inline const char *column_text(sqlite3_stmt *s, int column)
{
    const unsigned char *t = sqlite3_column_text(s, column);

    return t ? (const char *)t : "";
}

#endif
