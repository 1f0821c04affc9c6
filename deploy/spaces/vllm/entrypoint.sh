#!/bin/sh
# Starts vLLM as a replica, from the variables and secrets of the Space (README.md).
set -eu

: "${DELTASYNC_CHANNEL:?Set the variable DELTASYNC_CHANNEL to the URL of the channel, such as hf://buckets/user/run/a.}"
: "${MODEL:?Set the variable MODEL to what the trainer starts from, such as Qwen/Qwen3-0.6B.}"
: "${DELTASYNC_HTTP_TOKEN:?Set the secret DELTASYNC_HTTP_TOKEN: without it anyone can use this server.}"
export VLLM_API_KEY="${VLLM_API_KEY:-$DELTASYNC_HTTP_TOKEN}"
# Nothing is answered with the weights that a restarted Space happens to load.
export DELTASYNC_WAIT_READY="${DELTASYNC_WAIT_READY:-1}"
# The name of the Space, so that a restarted one is the same replica. SPACE_ID is set by the Hub.
if [ -n "${SPACE_ID:-}" ]; then
    export DELTASYNC_REPLICA_ID="${DELTASYNC_REPLICA_ID:-$(printf %s "$SPACE_ID" | tr / -)}"
fi

# shellcheck disable=SC2086 # several arguments in one variable
exec deltasync serve "$MODEL" --channel "$DELTASYNC_CHANNEL" --host 0.0.0.0 --port 7860 ${VLLM_ARGUMENTS:-}
