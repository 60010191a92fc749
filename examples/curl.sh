#!/usr/bin/env bash
# The server with nothing but curl:  examples/curl.sh [http://127.0.0.1:30000]
set -euo pipefail
url=${1:-http://127.0.0.1:30000}

post() {
    curl --fail --silent --show-error --no-buffer -H 'Content-Type: application/json' "$url$1" -d "$2"
    echo
}

echo "A chat completion:"
post /v1/chat/completions '{
    "model": "default", "max_tokens": 32, "temperature": 0,
    "messages": [{"role": "user", "content": "Name three colours."}]
}'

echo "The same, streamed:"
post /v1/chat/completions '{
    "model": "default", "max_tokens": 32, "temperature": 0, "stream": true,
    "messages": [{"role": "user", "content": "Name three colours."}]
}'

echo "SGLang's own API; meta_info counts this request's rounds and hits:"
post /generate '{"text": "The sky is", "sampling_params": {"max_new_tokens": 32, "temperature": 0}}'

echo "What speculation is doing:"
curl --fail --silent --show-error "$url/ssd/status"
echo
