from pivot.logs import starts

START = [
    (100.0, "Started sglang.service"),
    (112.5, "[2026-11-29 10:00:01] Load weight begin. avail mem=94.80 GB"),
    (363.5, "[2026-11-29 10:04:12] Load weight end. elapsed=251.0 s, type=KimiK25ForConditionalGeneration, quant=x"),
    (364.5, "[2026-11-29 10:04:13] Load weight begin. avail mem=24.00 GB"),
    (371.5, "[2026-11-29 10:04:20] Load weight end. elapsed=6.9 s, type=LlamaForCausalLMEagle3, avail mem=22.90 GB"),
    (511.5, "[2026-11-29 10:06:40] The server is fired up and ready to roll!"),
    (900.0, "Decode batch"),
]


def test_phases_of_field_case_b17_add_up_to_the_whole_start():
    assert [(phase.name, phase.seconds) for phase in starts.phases(START)] == [
        ("imports", 12.5),
        ("weights of KimiK25ForConditionalGeneration", 251.0),
        ("memory pools", 1.0),
        ("weights of LlamaForCausalLMEagle3", 7.0),
        ("warm-up", 140.0),
    ]


def test_a_start_without_milestones_has_no_phases():
    assert starts.phases([]) == []
    assert starts.phases([(1.0, "Started")]) == []


def test_the_cause_is_the_first_error_not_its_consequences():
    messages = [
        "Traceback (most recent call last):",
        "[2026-11-29 10:00:01] Received sigquit from a child process. It usually means the child failed.",
        "ValueError: captured 2 of 3 aux hidden states",
        "EOFError: Child process unexpectedly failed",
    ]
    assert starts.cause(messages) == "ValueError: captured 2 of 3 aux hidden states"


def test_argparse_errors_are_causes_too():
    assert starts.cause(["launch_server.py: error: unrecognized arguments: --frob"]).endswith("--frob")


def test_an_uneventful_log_has_no_cause():
    assert starts.cause(["Load weight begin", "errors: none so far, all is well"]) is None
