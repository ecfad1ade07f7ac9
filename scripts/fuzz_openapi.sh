#!/usr/bin/env bash
# Fuzz a running server from its own OpenAPI document: no answer may be a 5xx or contradict the document.
#   scripts/fuzz_openapi.sh [URL] [EXAMPLES]
# Needs schemathesis (pip install schemathesis). Start the server with a small --max-model-len, so that
# the requests which are valid by chance end soon.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
examples=${2:-100}
st run "$url/openapi.json" --phases examples,coverage,fuzzing --max-examples "$examples" --request-timeout 60 \
  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance --seed 1
