"""The records of the real service, held against that service, its HTTP answers, transformers and the evaluator."""

import json
import os
import tarfile
from pathlib import Path

from testinfra.host import Host

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
PYTHON = "/opt/sglang/current/bin/python"
THERE = "/root/live"


def test_records_are_what_the_server_and_transformers_compute(host: Host, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "checks.tar", "w") as archive:
        for name in (
            *(f"lab/models/{name}" for name in ("prompts.json", "recipe.py", "train_target.py", "optim.py")),
            *("probe/tests/live_check.py", "probe/tests/evaluated.py", "roles/debug_probes/files/whatif"),
        ):
            archive.add(PROJECT / name, name)
    host.run_expect([0], f"mkdir -p {THERE}")
    host.ansible("unarchive", f"src={archive.name} dest={THERE}/", check=False)
    host.run_expect([0], f"ln -sfn /srv/llm/target {THERE}/lab/models/target")
    # waiting threads of torch would spin beside the server
    command = f"OMP_WAIT_POLICY=PASSIVE {PYTHON} {THERE}/probe/tests/live_check.py --records /var/log/pivot-probe"
    done = host.run(f"{command} --url http://127.0.0.1:31000 --models {THERE}/lab/models --drafter /srv/llm/drafter")
    assert done.rc == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    # outputs, tokens of the tensors, verifications and prints were compared one by one: live_check.py says what holds
    assert figures["http"] == 0.0
    assert figures["transformers"] < 2e-4
    assert figures["evaluator"] < 2e-4
    assert figures["prompts"] == 3
    assert figures["prints"] == 60
    assert figures["verifications"] > 30
