#!/bin/sh
# task_cli.sh AGENTENVD AGENTENV QUICKSTART_TASKS SOURCE: tasks and images through the command line, against
# a real daemon.  The first failure ends it; "Tested:" in the last line says how much was checked.
set -u
agentenvd=$1 agentenv=$2 quickstart_tasks=$3 source=$4
dir=$(mktemp -d /tmp/longhaul-cli-XXXXXX)
checks=0

finish() {
    [ -n "${daemon:-}" ] && kill "$daemon" && wait "$daemon"
    rm -rf "$dir"
}
trap finish EXIT

fail() {
    echo "FAILED: $*"
    cat "$dir/out" "$dir/err" "$dir/log"
    exit 1
}

start() {
    "$agentenvd" --state "$dir/state" --socket "$dir/s" --remove-on-exit 2>> "$dir/log" &
    daemon=$!
    tries=0
    until [ -S "$dir/s" ] && "$agentenv" --socket "$dir/s" image ls > /dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || fail "agentenvd does not answer"
        sleep 0.1
    done
}

# ok COMMAND... / refused STATUS COMMAND...: how it must end.  says TEXT: what the last one printed.
ok() {
    checks=$((checks + 1))
    "$agentenv" --socket "$dir/s" "$@" > "$dir/out" 2> "$dir/err" || fail "agentenv $*: status $?"
}
refused() {
    wanted=$1
    shift
    checks=$((checks + 1))
    "$agentenv" --socket "$dir/s" "$@" > "$dir/out" 2> "$dir/err"
    got=$?
    [ $got = "$wanted" ] || fail "agentenv $*: status $got instead of $wanted"
}
says() {
    grep -qF -- "$1" "$dir/out" "$dir/err" || fail "nothing says '$1'"
}

if ! "$agentenv" doctor > "$dir/doctor" 2>&1; then
    case ,${LONGHAUL_MUST_WORK:-}, in *,1,* | *,sandbox,*) cat "$dir/doctor"; exit 1 ;; esac
    echo "SKIPPED, sandbox is missing:"
    cat "$dir/doctor"
    exit 77
fi
"$source/deploy/jobs/quickstart-image.sh" "$dir/image"
tar -C "$dir/image" -cf "$dir/image.tar" .
start

# Images: a directory and its tar are one; what is used stays.
refused 1 task register "$source/deploy/jobs/examples/hello-task.textproto"
says "no image quickstart; agentenv image import quickstart PATH"
ok image import quickstart "$dir/image"
cp "$dir/out" "$dir/first"
ok image import quickstart "$dir/image.tar"
cmp -s "$dir/out" "$dir/first" || fail "the tar is another image"
[ "$(ls "$dir/state/images" | wc -l)" = 1 ] || fail "the same image is stored twice"
refused 1 image import quickstart /nonexistent
says "/nonexistent"
refused 1 image import Not-A-Name "$dir/image"
says "is not an image name"
refused 1 image import other "$dir"
says "holds the store"

# Tasks: the worked example, again unchanged, shown as what can be registered.
ok task register "$source/deploy/jobs/examples/hello-task.textproto"
says "1 task: 1 registered, 0 unchanged, 0 refused"
ok task show examples/hello
says "verified"
cp "$dir/out" "$dir/hello.textproto"
ok task show --json examples/hello
cp "$dir/out" "$dir/hello.json"
ok task register "$dir/hello.json"
says "1 unchanged"
ok task register "$dir/hello.textproto"
says "1 task: 0 registered, 1 unchanged, 0 refused"
refused 1 image rm quickstart
says "image quickstart is used, task: 1"

# Every family of the quickstart, arguments nobody has seen before.
"$quickstart_tasks" --seed "${LONGHAUL_SEED:-7}" --train 18 --eval 6 > "$dir/tasks.pb"
ok task register "$dir/tasks.pb"
says "24 tasks: 24 registered, 0 unchanged, 0 refused"
ok task ls --split eval quickstart-eval/
[ "$(grep -c '"verified": true' "$dir/out")" = 6 ] || fail "six verified tasks for evaluation"

# What must be refused, with nothing left of it; what it replaced stays.
sed 's/sort guests.txt > /cat guests.txt > /; s/revision: 1/revision: 2/' "$dir/hello.textproto" > "$dir/bad.textproto"
refused 1 task register "$dir/bad.textproto"
says "task examples/hello: the oracle scored 0.5, it must reach 1"
ok task show examples/hello
says "revision: 1"
sed 's/echo $reward/echo 1/; s,examples/hello,examples/yes,' "$dir/hello.textproto" > "$dir/yes.textproto"
refused 1 task register "$dir/yes.textproto"
says "task examples/yes: doing nothing scored 1, it must score 0"
refused 1 task show examples/yes
says "no task examples/yes is registered"
cat "$dir/hello.textproto" "$dir/hello.textproto" > "$dir/twice.textproto"
refused 1 task register "$dir/twice.textproto"
says "task examples/hello is in the set twice"
sed 's/  name:/  nmae:/' "$dir/hello.textproto" > "$dir/typo.textproto"
refused 1 task register "$dir/typo.textproto"
says "typo.textproto:3:"
sed 's,examples/hello,examples/blind,; /oracle {/,/^  }/d' "$dir/hello.textproto" > "$dir/blind.textproto"
refused 1 task register "$dir/blind.textproto"
says "--no-verify"
ok task register --no-verify "$dir/blind.textproto"
ok task show examples/blind
says "not verified"
refused 1 task rm examples/never
says "no task examples/never is registered"

# A task with sandboxes, and an image with them, cannot be removed.
ok task rm examples/blind
ok start --task examples/hello
box=$(cat "$dir/out")
ok exec "$box" sh -c 'pwd; echo $LC_ALL; cat guests.txt'
says "/work"
refused 1 task rm examples/hello
says "task examples/hello has sandboxes: 1"
ok rm "$box"
ok task rm examples/hello

# Killed in the middle of an import and of a registration: nothing is left, and all goes on.
"$quickstart_tasks" --seed "${LONGHAUL_SEED:-7}" --train 300 --eval 0 > "$dir/many.pb"
"$agentenv" --socket "$dir/s" task register "$dir/many.pb" > /dev/null 2>&1 &
client=$!
sleep 1
kill -9 "$daemon"
wait "$daemon" "$client" 2> /dev/null
start
ok audit
says '"problems": []'
ok ls --all
[ "$(cat "$dir/out")" = "[]" ] || fail "sandboxes of the registration are left"
ok task register "$dir/tasks.pb"
says "0 refused"
echo "Tested: $checks | Passing: $checks | Failing: 0 | Crashing: 0"
