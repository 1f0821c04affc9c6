#!/bin/sh
# Starts the Wordle environment, from the variables and secrets of the Space (README.md).
set -eu

: "${DELTASYNC_ENVIRONMENT_TOKEN:?Set the secret DELTASYNC_ENVIRONMENT_TOKEN: without it anyone can use this server.}"

exec python -m wordle --host 0.0.0.0 --port 7860 \
    --words "${WORDS:-reduced}" --sessions "${SESSIONS:-64}" --idle "${IDLE_S:-600}"
