#!/bin/sh
# format.sh SOURCE_DIR CLANG_FORMAT: every C file is as .clang-format says.  Versions of clang-format differ in
# what they make of it, so the version is part of the style.
cd "$1" || exit 1
find agentenv deploy kvstore proto rollout tests trainer -name '*.[ch]' -exec "$2" --dry-run -Werror {} +
