"""Masking: every expectation is written by hand."""

import base64
import json
import urllib.parse

import pytest
import yaml

from pivot.bundles.redact import MASK, Redactor, secret_values, spellings
from pivot.bundles.secret_names import secret_name

KEY = "S3cr3t/Key+with'q\"x\\y"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # what SGLang logs at start, and what it answers
        (
            "server_args=ServerArgs(model_path='/m', api_key='a\\'b', admin_api_key=\"c'd\", port=30000)",
            f"server_args=ServerArgs(model_path='/m', api_key='{MASK}', admin_api_key=\"{MASK}\", port=30000)",
        ),
        ("ServerArgs(api_key=None, ssl_keyfile_password=None)", "ServerArgs(api_key=None, ssl_keyfile_password=None)"),
        (
            '{"api_key": "a\\"b", "admin_api_key": null, "max_new_tokens": 4}',
            f'{{"api_key": "{MASK}", "admin_api_key": null, "max_new_tokens": 4}}',
        ),
        ('{"launch_command": "python -m x --api-key abc"}', f'{{"launch_command": "python -m x --api-key {MASK}"}}'),
        (
            '{"a": "{\\"api_key\\": \\"x\\\\\\"y\\", \\"b\\": 1}"}',
            f'{{"a": "{{\\"api_key\\": \\"{MASK}\\", \\"b\\": 1}}"}}',
        ),
        # launch.yaml
        ("host: h\napi-key: a b c\nport: 3\n", f"host: h\napi-key: {MASK}\nport: 3\n"),
        ("api-key: 'it''s'\n", f"api-key: '{MASK}'\n"),
        ("password: |\n  one\n  two\nport: 3\n", f"password: |\n  {MASK}\nport: 3\n"),
        # command lines
        ("python -m s --api-key abc --port 3", f"python -m s --api-key {MASK} --port 3"),
        ("python -m s --admin-api-key=abc --port 3", f"python -m s --admin-api-key={MASK} --port 3"),
        ("['--api-key', 'a b', '--port']", f"['--api-key', '{MASK}', '--port']"),
        ("--api-key\0abc\0--port\0", f"--api-key\0{MASK}\0--port\0"),
        # environment
        ("HF_TOKEN=hf_EXAMPLEEXAMPLEEXAMPLE", f"HF_TOKEN={MASK}"),
        ("loading with hf_EXAMPLEEXAMPLEEXAMPLE now", f"loading with {MASK} now"),
        ("export DB_PASSWORD=correct horse", f"export DB_PASSWORD={MASK}"),
        ("Environment=A=b MY_SECRET=xxx C=d", f"Environment=A=b MY_SECRET={MASK} C=d"),
        ('Environment="MY_SECRET=a b" "C=d"', f'Environment="MY_SECRET={MASK}" "C=d"'),
        ("with MYSQL_PWD=abc PWD=/root", f"with MYSQL_PWD={MASK} PWD=/root"),
        # headers and tickets
        ("Authorization: Bearer abc.def", f"Authorization: {MASK}"),
        ("curl -H 'Authorization: Bearer abc' http://x", f"curl -H 'Authorization: {MASK}' http://x"),
        ("(b'authorization', b'Bearer abc')", f"(b'authorization', b'{MASK}')"),
        ("sent PVEAPIToken=root@pam!ci=0000-1111 away", f"sent PVEAPIToken={MASK} away"),
        ("Cookie: PVEAuthCookie=PVE:root@pam:66AABBCC::c2ln", f"Cookie: {MASK}"),
        ("ticket PVE:root@pam:66AABBCC::c2lnbmF0dXJl ok", f"ticket {MASK} ok"),
        ("got Bearer abcdef123 back", f"got Bearer {MASK} back"),
        ("https://user:pw@host/x", f"https://user:{MASK}@host/x"),
        ("password=hunter2", f"password={MASK}"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\nAAAA\n-----END PRIVATE KEY-----\nx", None),
    ],
)
def test_what_stands_where_secrets_stand_is_masked(text: str, expected: str | None) -> None:
    if expected is None:
        expected = f"-----BEGIN PRIVATE KEY-----{MASK}-----END PRIVATE KEY-----\nx"
    masked = Redactor().text(text)
    assert masked == expected
    assert Redactor().text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "Decode batch, #running-req: 1, #token: 812, token usage: 0.00, accept len: 1.03, #new-token: 13, gen: 31.20",
        "speculative_num_draft_tokens=4, tokenizer_path='/m', tool_call_parser=None, max_total_tokens=4096",
        '{"bos_token": "<s>", "eos_token": "[EOS]", "token": 812, "max_new_tokens": 64}',
        "password authentication failed for user root",
        "api_key_file=/etc/key ssl_keyfile=/etc/x SSH_AUTH_SOCK=/run/x",
        "TOKENIZERS_PARALLELISM=false SGLANG_NUM_RESERVED_DECODE_TOKENS=512",
        "key: value",
        "monkey=banana",
    ],
)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert Redactor().text(text) == text


def test_a_known_value_is_found_in_every_spelling() -> None:
    blob = base64.b64encode(f"user:{KEY}:more".encode()).decode()
    texts = [
        KEY,
        urllib.parse.quote(KEY, safe=""),
        urllib.parse.quote_plus(KEY),
        json.dumps({"x": KEY}),
        json.dumps(json.dumps({"x": KEY})),
        repr({"x": KEY}),
        yaml.safe_dump({"x": KEY}),
        base64.b64encode(KEY.encode()).decode(),
        base64.urlsafe_b64encode(KEY.encode()).decode(),
        KEY.encode().hex(),
    ]
    redactor = Redactor([KEY])
    for text in texts:
        masked = redactor.text(f"before {text} after")
        assert MASK in masked, text
        assert not [form for form in spellings(KEY) if len(form) > 7 and form in masked], text
    for shift in range(3):
        inside = base64.b64encode(b"." * shift + KEY.encode() + b"tail").decode()
        assert MASK in redactor.text(inside)
    assert base64.b64encode(KEY.encode()).decode()[8:16] not in redactor.text(blob)
    assert redactor.masked == len(texts) + 4


def test_a_short_known_value_is_masked_only_as_a_word() -> None:
    redactor = Redactor(["abc", "", "x"])
    assert redactor.text("abc abcd x 'abc'") == f"{MASK} abcd x '{MASK}'"


def test_a_secret_that_a_limit_cuts_is_masked() -> None:
    redactor = Redactor()
    assert redactor.text("ServerArgs(api_key='abcde", cut_end=True) == f"ServerArgs(api_key='{MASK}"
    assert redactor.text("the token is hf_EXAM", cut_end=True) == f"the token is {MASK}"
    assert redactor.text("EXAMPLE is the rest", cut_start=True) == f"{MASK} is the rest"


def test_a_known_value_that_a_writer_broke_over_two_lines_is_masked() -> None:
    secret = "abcdefghijklmnop"
    text = "x" * 5000 + secret[:9] + "\n2026-01-01T00:00:00+0000 host sglang[7]: " + secret[9:] + " rest\n"
    masked = Redactor([secret]).text(text)
    assert masked == "x" * 5000 + MASK + "\n2026-01-01T00:00:00+0000 host sglang[7]: " + MASK + " rest\n"
    unrelated = "x" * 5000 + secret[:9] + "\nother line\n"
    assert Redactor([secret]).text(unrelated) == unrelated


def test_a_proxy_without_a_scheme_is_masked_by_the_name_beside_it() -> None:
    given, masked = "user:Zq9-made-up@proxy:3128", f"user:{MASK}@proxy:3128"
    assert Redactor().environment({"http_proxy": given, "x": "u:v@w"}) == {"http_proxy": masked, "x": "u:v@w"}
    assert Redactor().data({"HTTPS_PROXY": given}) == {"HTTPS_PROXY": masked}
    assert Redactor().data([{"name": "http_proxy", "value": given}]) == [{"name": "http_proxy", "value": masked}]
    assert Redactor().arguments(["pip", "--proxy", given]) == ["pip", "--proxy", masked]


def test_environment_b22() -> None:
    environment = {
        "SGLANG_ENABLE_SPEC_V2": "on",
        "SGLANG_SIMULATE_ACC_LEN": "3",
        "NCCL_DEBUG": "TRACE",
        "HF_TOKEN": "hf_EXAMPLEEXAMPLEEXAMPLE",
        "WANDB_API_KEY": "abc",
        "HTTPS_PROXY": "http://u:p@proxy:3128",
        "MY_TOKEN": "",
    }
    assert Redactor().environment(environment) == {
        **environment,
        "HF_TOKEN": MASK,
        "WANDB_API_KEY": MASK,
        "HTTPS_PROXY": f"http://u:{MASK}@proxy:3128",
    }


def test_arguments() -> None:
    argv = ["python", "--api-key", "abc", "--admin-api-key=abc", "--port", "3", "--api-key", "--x", "-m", "sglang"]
    shown = ["python", "--api-key", MASK, f"--admin-api-key={MASK}", "--port", "3", "--api-key", "--x", "-m", "sglang"]
    assert Redactor().arguments(argv) == shown


def test_values_of_a_configuration_become_known() -> None:
    text = "host: h\napi-key: \"a\\\"bcdefg\"\npassword: 'it''s long'\nport: 30000\nadmin-api-key: short\n"
    assert secret_values(text) == ['a\\"bcdefg', 'a"bcdefg', "it''s long", "it's long"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("apiKey", "sure"),
        ("admin_api_key", "sure"),
        ("AWS_SECRET_ACCESS_KEY", "sure"),
        ("X-Api-Key", "header"),
        ("hf-token", "token"),
        ("FOO_KEY", "sure"),
        ("primary_key", ""),
        ("bos_token", ""),
        ("password_file", ""),
        ("test_secrets.py", ""),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert secret_name(name) == kind


def test_the_report_names_what_was_masked_and_never_a_value() -> None:
    redactor = Redactor([KEY])
    redactor.text(f"api_key='abcdefgh' {KEY} hf_EXAMPLEEXAMPLEEXAMPLE HF_TOKEN=abc")
    redactor.environment({"DB_PASSWORD": "x"})
    redactor.arguments(["--admin-api-key", "abc"])
    assert redactor.report == {
        "known value": 1,
        "api_key": 1,
        "looks like hf_…": 1,
        "HF_TOKEN": 1,
        "DB_PASSWORD": 1,
        "admin-api-key": 1,
    }
    assert sum(redactor.report.values()) == redactor.masked


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "[2026-11-29 10:00:00] Receive: obj=GenerateReqInput(rid='a', text='my private story')",
            "[2026-11-29 10:00:00] Receive: obj=GenerateReqInput",
        ),
        (
            "[2026-11-29 10:00:00] Finish: obj=GenerateReqInput(text='hm'), out={'text': 'my private story'}",
            "[2026-11-29 10:00:00] Finish: obj=GenerateReqInput",
        ),
        (
            "[2026-11-29 10:00:00] Receive OpenAI: obj={'messages': [{'content': 'my private story'}]}",
            "[2026-11-29 10:00:00] Receive OpenAI: obj=",
        ),
        (
            '{"timestamp": "t", "event": "request.received", "rid": "a", "obj": {"text": "my private story"}}',
            '{"timestamp": "t", "event": "request.received",',
        ),
        (
            '{"log": "{\\"event\\": \\"request.received.openai\\", \\"obj\\": \\"my private story\\"}"}',
            '{"log": "{\\"event\\": \\"request.received.openai\\",',
        ),
        (
            'x[1]: {"event": "request.finished", "rid": "a", "out": {"text": "my private story"}}',
            'x[1]: {"event": "request.finished",',
        ),
    ],
)
def test_texts_of_requests_stay_only_when_asked_for(line: str, left: str) -> None:
    assert Redactor().text(f"{line}\nnext\n") == f"{line}\nnext\n"
    masked = Redactor(prompts=False).text(f"{line}\nnext\n")
    assert masked == f"{left}<text of a request left out>\nnext\n"
    assert Redactor(prompts=False).text(masked) == masked


@pytest.mark.parametrize(
    "line",
    [
        "Decode batch, #running-req: 1, #token: 812, token usage: 0.10, gen throughput (token/s): 3.1",
        "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, #pending-token: 0, tokens_per_s: 4",
    ],
)
def test_tokens_of_text_cost_no_time(line: str) -> None:
    assert Redactor().text(line) == line


@pytest.mark.parametrize(
    "line",
    ["hf-token: abc", "a token : abc", "token=abc", "--token abc", "the_token: abc", "x#y token=abc", '"token": "abc"'],
)
def test_tokens_of_trust_are_still_found(line: str) -> None:
    assert "abc" not in Redactor().text(line)


@pytest.mark.parametrize("before", [0, 1, 2000, 4095])
def test_long_lines_are_seen_wherever_they_begin(before: int) -> None:
    secret = "abcdefghijklmnop"
    text = "y" * before + "\n" + "x" * 4096 + secret[:9] + "\n" + secret[9:] + " rest\n"
    assert Redactor([secret]).text(text).endswith("x" + MASK + "\n" + MASK + " rest\n")


def test_data_stays_data() -> None:
    redactor = Redactor([KEY])
    value = {
        "api_key": "x",
        "watermark_key": 15485863,
        "tokens": [1, KEY],
        "hf_token": 5,
        "admin_api_key": None,
        "a": {"Authorization": "b"},
    }
    assert redactor.data(value) == {
        "api_key": MASK,
        "watermark_key": 15485863,
        "tokens": [1, MASK],
        "hf_token": 5,
        "admin_api_key": None,
        "a": {"Authorization": MASK},
    }
    text = json.dumps(redactor.data({"secret": 7, "password": 1.5, "private_key": True}))
    assert json.loads(Redactor().text(text)) == {"secret": MASK, "password": MASK, "private_key": True}
