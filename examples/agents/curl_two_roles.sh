#!/usr/bin/env bash
# A program in bash, which asks with curl: a solver answers, a checker says whether the answer is right.
#
#     marl model smollm2 --out=models/smollm2
#     marl attach --roles=solver=models/smollm2,checker=models/smollm2 --tasks=tasks.jsonl --set=recipe.rewards=mixed \
#         --lora_rank=16 --workdir=runs/curl -- bash examples/agents/curl_two_roles.sh
#
# A line of tasks.jsonl is like {"question": "2 + 2?", "answer": "4"}. Texts of JSON stay as JSON writes them, so that nothing need be escaped.
set -euo pipefail

post() { # URL BODY: what the server answers
    curl --silent --show-error --fail --max-time 100 --header "Authorization: Bearer $OPENAI_API_KEY" \
        --header "Content-Type: application/json" --data @- "$1" <<<"$2"
}

text_of() { # NAME JSON: the first field of this name that is a text
    local pattern="\"$1\": *\"(([^\"\\\\]|\\\\.)*)\""
    [[ $2 =~ $pattern ]] && printf '%s' "${BASH_REMATCH[1]}"
}

ask() { # ROLE TEXT: what the role replies
    local reply
    reply=$(post "$OPENAI_BASE_URL/chat/completions" "{\"model\": \"$1\", \"messages\": [{\"role\": \"user\", \"content\": \"$2\"}]}")
    text_of content "$reply"
}

question=$(text_of question "$MARL_TASK")
answer=$(text_of answer "$MARL_TASK")
draft=$(ask solver "$question Answer with a number.")
verdict=$(ask checker "$question\n$draft\nIs that right? Reply yes or no.")

right=0 agrees=0
[[ $draft == *"$answer"* ]] && right=1
[[ ${verdict,,} == *yes* ]] && agrees=1
post "$MARL_EPISODE_URL/reward" "{\"reward\": $right, \"rewards\": {\"checker\": $((right == agrees))}}" >/dev/null
