#!/bin/sh
# Runs a command, and drains it when this machine's end is announced: spot and preemptible machines
# give notice some time before they are taken away.
#
#   NOTICE='curl -fs $NOTICE_URL' deploy/drain-on-notice.sh millstream worker
#
#   NOTICE          a shell command that succeeds once the end has been announced
#   NOTICE_EVERY_S  how often to ask (5)
#
# Exits as the command does; SIGTERM and SIGINT are passed on to it.
set -u
: "${NOTICE:?a shell command that succeeds once the end of this machine has been announced}"

"$@" &
child=$!
trap 'kill -TERM "$child"' TERM INT

(
  until sh -c "$NOTICE"; do
    sleep "${NOTICE_EVERY_S:-5}"
    kill -0 "$child" || exit
  done
  kill -TERM "$child"
) </dev/null >/dev/null 2>&1 &

# A trapped signal ends a wait early; the command is still there then.
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || exit "$status"
done
