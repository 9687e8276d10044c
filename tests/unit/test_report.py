from pivot import report
from pivot.findings import Finding, Severity


def test_durations_read_naturally():
    assert [report.duration(s) for s in (4.23, 75.4, 720)] == ["4.2 s", "75 s", "12 min"]


def test_the_summary_names_each_host_the_time_the_log_and_the_next_commands():
    text = report.summary(
        {"infer1": {"endpoint": "http://192.0.2.1:30000/v1", "layer_ids": [3, 5, 7], "empty": ""}},
        [("Preflight", 0.4), ("Serve", 31.0), ("Skipped", 0.0)],
        "artifacts/ansible.log",
    )
    assert text.splitlines()[:6] == [
        "infer1",
        "  endpoint   http://192.0.2.1:30000/v1",
        "  layer ids  3, 5, 7",
        "",
        "took  31 s: Preflight 0.4 s, Serve 31 s",
        "log   artifacts/ansible.log",
    ]
    assert "--tags debug-on" in text


def test_a_run_that_reported_nothing_has_no_next_commands():
    assert report.summary({}, [], None) == ""


def test_an_error_fails_and_a_warning_is_shown():
    error = Finding("A", Severity.ERROR, "h", "broken", "mend it")
    warning = Finding("B", Severity.WARNING, "h", "odd", "look at it")
    assert report.as_result([], "fine") == {"changed": False, "failed": False, "msg": "fine"}
    failed = report.as_result([warning, error], "fine")
    assert failed["failed"]
    assert failed["msg"].splitlines()[0] == "ERROR   A  h: broken"
    assert "warnings" not in failed
    assert "pivot_said" not in failed
    warned = report.as_result([warning], "fine")
    assert not warned["failed"]
    assert len(warned["warnings"]) == 1
    assert "pivot_said" not in warned


def test_an_info_is_a_plain_line_and_no_warning():
    info = Finding("C", Severity.INFO, "h", "by the way", "")
    told = report.as_result([info], "fine", ["h: 3 layers"])
    assert not told["failed"]
    assert "warnings" not in told
    assert told["pivot_said"] == ["h: 3 layers", "INFO    C  h: by the way"]
    assert told["msg"].splitlines() == told["pivot_said"]
    assert report.as_result([], "fine", ["h: 3 layers"])["msg"] == "h: 3 layers\nfine"


def test_a_difference_shows_what_changes_and_no_secret():
    before = 'NCCL_DEBUG="WARN"\nHF_TOKEN="hf_oldoldoldoldold"\n'
    after = 'NCCL_DEBUG="INFO"\nHF_TOKEN="hf_newnewnewnewnew"\nmax-total-tokens: 4096\n'
    diff = report.masked_diff("/etc/sglang/environment", before, after)
    assert "hf_" not in str(diff)
    assert 'NCCL_DEBUG="WARN"' in diff["before"]
    assert 'NCCL_DEBUG="INFO"' in diff["after"]
    assert "max-total-tokens: 4096" in diff["after"]
    assert diff["after_header"] == "/etc/sglang/environment (as wanted)"


def test_a_difference_that_is_only_a_secrets_is_said():
    diff = report.masked_diff("/x", "API_KEY=one-one-one\n", "API_KEY=two-two-two\n")
    assert diff["before"] == diff["after"]
    assert diff["after_header"] == "/x (as wanted; only what is masked differs)"
