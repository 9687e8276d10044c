"""Asks a server from the controller; decisions are `pivot.serving.health`'s."""

import urllib.error
from typing import Any

from ansible.plugins.action import ActionBase

from pivot.report import as_result
from pivot.serving import health

# without a file of recorded prompts: sanity only
FALLBACK: dict[str, Any] = {
    "max_new_tokens": 48,
    "prompts": [{"id": "default", "text": "def main():\n", "output_ids": None}],
}


class ActionModule(ActionBase):
    """Arguments: url, api_key, prompts (file), prompt_ids, count, drafter, least_accept_length, summary, and answers:
    false for a further machine of a server, which can only be asked whether it is there."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Never changed; failed when a finding is an error. `pivot_summary` is what the callback prints at the end."""
        super().run(tmp, task_vars)
        given = self._task.args
        subject = (task_vars or {}).get("inventory_hostname", given["url"])
        try:
            prompts = health.read_prompts(given.get("prompts"), FALLBACK)
            chosen = health.select(prompts, list(given.get("prompt_ids") or []), int(given.get("count", 3)))
        except health.PromptsError as error:
            return {"failed": True, "msg": f"sglang_server_health_prompts: {error}"}
        client = health.Client(given["url"], given.get("api_key"))
        if not given.get("answers", True):
            return self._beside(client, subject, given)
        try:
            answers = [client.generate(prompt, int(prompts["max_new_tokens"])) for prompt in chosen]
            found = health.judge(
                subject,
                answers,
                chosen,
                drafter=bool(given.get("drafter")),
                least=float(given.get("least_accept_length", 0)),
            )
            found += health.chat(subject, client)
        except (urllib.error.URLError, OSError) as error:
            answers, found = [], [health.unreachable(subject, given["url"], error)]
        length = health.accept_length(answers)
        speed = sum(len(a.output_ids) for a in answers) / max(sum(a.seconds for a in answers), 1e-9)
        summary = dict(given.get("summary") or {})
        if answers:
            summary["accept length"] = (
                "no speculation" if length is None else f"{length:.2f} over {len(answers)} prompts"
            )
            summary["speed"] = f"{speed:.0f} tok/s, one request at a time"
        good = f"{len(answers)} answers as expected, accept length {summary.get('accept length')}"
        return {**as_result(found, good), "accept_length": length, "pivot_summary": summary}

    def _beside(self, client: health.Client, subject: str, given: dict[str, Any]) -> dict[str, Any]:
        """The result of a machine that computes for another one, which answers."""
        found = []
        try:
            client.listens()
        except (urllib.error.URLError, OSError) as error:
            found = [health.unreachable(subject, given["url"], error)]
        summary = {**(given.get("summary") or {}), "endpoint": "none, as the machine of rank 0 answers"}
        return {**as_result(found, "it is there"), "accept_length": None, "pivot_summary": summary}
