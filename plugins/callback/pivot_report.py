"""Progress of long tasks while they run, and a summary at the end."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.errors import AnsibleError
from ansible.parsing.vault import AnsibleVaultError
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader
from ansible.utils import display as ansible_display

from pivot import report
from pivot.findings import render
from pivot.inventory import inventory

DOCUMENTATION = """
name: pivot_report
type: aggregate
short_description: Progress of long tasks, and a summary at the end
description:
  - A task that takes longer than ten seconds says so, with the elapsed time and the log file.
  - Everything that is printed also goes into the log file. Ansible's own I(log_path) would do that too, but also for
    C(ansible-inventory --list), which prints the vault's secrets.
  - A file of the inventory that the vault password does not open, or that is no YAML when it is open, is named.
  - All filters and tests are loaded before a role's first task, which saves each task's worker from doing it itself.
  - What a task returns as C(pivot_said) is printed, line by line.
  - At the end, what the roles reported in C(pivot_summary), the seconds of every play and the next commands.
requirements: [enable in ansible.cfg]
options:
  log:
    description: The log file, readable by its owner alone; empty for none.
    type: path
    default: "{{CWD}}/artifacts/ansible.log"
    env: [{name: PIVOT_LOG}]
    ini: [{section: pivot, key: log}]
"""

FIRST, EVERY = 10.0, 20.0
PARSER_ERROR = 4  # as Ansible ends where a file is no YAML


class CallbackModule(CallbackBase):
    """One timer thread per task that is running; results are merged per host."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "pivot_report"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[str, dict[str, Any]] = {}
        self._phases: list[tuple[str, float]] = []
        self._play: tuple[str, float] | None = None
        self._done = threading.Event()
        self._loaded = False
        self._log: str | None = None

    def set_options(self, task_keys: Any = None, var_options: Any = None, direct: Any = None) -> None:
        """Open the log as soon as its name is known."""
        super().set_options(task_keys=task_keys, var_options=var_options, direct=direct)
        path = self.get_option("log")
        if path and ansible_display.logger is None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            handler = logging.FileHandler(path)
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            logger = logging.getLogger("ansible")
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            ansible_display.logger = logger
            self._log = str(Path(path))

    def _end_play(self) -> None:
        if self._play:
            self._phases.append((self._play[0], time.monotonic() - self._play[1]))
            self._play = None

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """A play is a phase."""
        if self._play is None and not self._phases:
            self._try_vaults(play.get_loader())
        self._end_play()
        self._play = (play.get_name().strip(), time.monotonic())

    def _try_vaults(self, loader: Any) -> None:
        """Name a vault that cannot be read: Ansible ends right after without saying which, or with a secret's words."""
        for source in context.CLIARGS.get("inventory") or ():
            for path in inventory.vaults(Path(source)):
                try:
                    # as Ansible itself will ask for it, so that nothing is decrypted twice
                    loader.load_from_file(str(path), cache="all", unsafe=True, trusted_as_template=True)
                except AnsibleVaultError:
                    self._display.error(render(inventory.unread_vault(path, "closed")), wrap_text=False)
                except AnsibleError:
                    self._display.error(render(inventory.unread_vault(path, "broken")), wrap_text=False)
                    # Ansible would show the text that it cannot read; any other exception would be a warning to it
                    raise SystemExit(PARSER_ERROR) from None

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Start watching a task."""
        if task._role and not self._loaded:
            # workers are forked from this process; each would load all of them, 0.2 s a task
            for plugins in (filter_loader, test_loader):
                list(plugins.all())
            self._loaded = True
        self._watch(task.get_name().strip())

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Start watching a handler."""
        self._watch(task.get_name().strip())

    def _watch(self, name: str) -> None:
        self._done.set()
        self._done = done = threading.Event()

        def tell() -> None:
            begin, pause = time.monotonic(), FIRST
            while not done.wait(pause):
                elapsed = report.duration(time.monotonic() - begin)
                log = f", log: {self._log}" if self._log else ""
                self._display.display(f"  … {name}: {elapsed}{log}", color=constants.COLOR_DEBUG)
                pause = EVERY

        threading.Thread(target=tell, daemon=True).start()

    def v2_runner_on_ok(self, result: Any) -> None:
        """Print what a task has to say, and keep what a role reports."""
        for line in result.result.get("pivot_said") or ():
            self._display.display(f"  {line}")
        reported = result.result.get("pivot_summary") or result.result.get("ansible_facts", {}).get("pivot_summary")
        if reported:
            self._hosts.setdefault(result.host.get_name(), {}).update(reported)
        # a task that runs once for all hosts
        for host, facts in (result.result.get("pivot_summaries") or {}).items():
            self._hosts.setdefault(host, {}).update(facts)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Say how it ended."""
        self._done.set()
        self._end_play()
        text = report.summary(self._hosts, self._phases, self._log)
        if text:
            self._display.display("\n" + text)
