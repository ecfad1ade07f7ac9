#!/usr/bin/env bash
# Fuzz a server from its own OpenAPI document: no answer may be a 5xx or contradict the document.
#   scripts/fuzz_openapi.sh [EXAMPLES] [URL]
# Without a URL it starts a server over the tests' fake engine. A real one should have a small --max-model-len,
# so that requests which are valid by chance end soon. Needs schemathesis (pip install schemathesis).
set -euo pipefail
cd "$(dirname "$0")/.."
examples=${1:-20}
url=${2:-}
if [ -z "$url" ]; then
  coproc server { exec "${PYTHON:-python3}" -m tests.server.serve_fake '{}' 2>fuzz-server.log; }
  trap 'kill "$server_PID"; rm -f fuzz-server.log' EXIT
  read -r port <&"${server[0]}"
  url=http://127.0.0.1:$port
fi
"${PYTHON:-python3}" - "$url/health" <<'WAIT'
import sys, time, urllib.request
for _ in range(100):
    try:
        urllib.request.urlopen(sys.argv[1])
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit(f"{sys.argv[1]} does not answer 200")
WAIT
"${ST:-st}" run "$url/openapi.json" --phases examples,coverage,fuzzing --max-examples "$examples" --seed 1 \
  --request-timeout 60 \
  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance
