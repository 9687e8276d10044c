"""Asks a server the fixed prompts and replays the answers for the debug probe, as `pivot.experiments.ask` decides."""

import urllib.error
from typing import Any

from ansible.plugins.action import ActionBase

from pivot.experiments import ask
from pivot.report import as_result
from pivot.serving import health


class ActionModule(ActionBase):
    """Arguments: url, api_key, prompts (file), prompt_ids, count, replay, sequences, before, out.

    replay: also send every whole sequence through once more, for the probe. sequences: id → token ids, replayed
    besides (or, with count 0, instead of) the prompts. before: what an earlier call gave as `asked`, to compare with.
    out: a file of the controller that receives `asked` as JSON.
    """

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Never changed; failed when a finding is an error. `asked` is what `pivot.experiments.ask.as_dict` gives."""
        super().run(tmp, task_vars)
        given = self._task.args
        subject = (task_vars or {}).get("inventory_hostname", given["url"])
        try:
            prompts = health.read_prompts(given.get("prompts"), ask.PROMPTS)
            count = int(given.get("count", len(prompts["prompts"])))
            chosen = health.select(prompts, list(given.get("prompt_ids") or []), count)
        except health.PromptsError as error:
            return {"failed": True, "msg": f"debug_probes_prompts: {error}"}
        client = health.Client(given["url"], given.get("api_key"))
        longest = int(prompts["max_new_tokens"])
        asked: list[ask.Asked] = []
        settings: dict[str, Any] = {}
        try:
            settings = ask.server(client)
            asked, found = ask.ask_all(client, chosen, longest, replays=bool(given.get("replay", True)))
            for name, ids in (given.get("sequences") or {}).items():
                ask.replay(client, str(name), [int(token) for token in ids])
        except (urllib.error.URLError, OSError) as error:
            found = [health.unreachable(subject, given["url"], error)]
        record = ask.as_dict(asked, longest, settings)
        if given.get("before") and asked:
            found += ask.compare(given["before"], record, subject)
        if given.get("out"):
            ask.save(str(given["out"]), record)
        length = record["accept_length"]
        said = "no speculation" if length is None else f"accept length {length:.2f}"
        return {**as_result(found, f"{len(asked)} prompts, {said}"), "asked": record}
